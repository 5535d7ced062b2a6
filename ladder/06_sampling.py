"""Rung 6, sampling: temperature, top-k and top-p, by sorting and without a sort, and a random number for each token.

The random number of a token is a function of the seed and of its position alone, so a text is the same alone or in a
batch, and after an interruption. The token is the first at which the running sum of the probabilities, in the order of
the vocabulary, exceeds that number: equal logits give equal tokens, whoever computes them.

A filter needs no order, only its threshold: the largest logit at which enough tokens are kept. It is found in 32 steps,
a bit each, by counting (top-k) or adding (top-p), which suits a GPU better than a sort of the vocabulary.
"""

import torch
from measure import main
from torch.nn import functional as F

BLOCK = 16  # tokens
SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 1}


def uniform(seed, position):
    """Return a number in [0, 1): ten rounds of Philox (Salmon et al. 2011), a counter-based random number generator."""
    c, k0, k1 = [position, 0, 0, 0], seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return ((c[0] >> 5 << 26) | (c[1] >> 6)) * 2.0**-53


def kept_by_sort(logits, top_k, top_p):
    """Return which of the logits (V) are kept: the k largest, of these the fewest whose probabilities reach p."""
    if top_k:
        logits = logits.masked_fill(logits < logits.sort(descending=True).values[top_k - 1], -torch.inf)
    descending = logits.sort(descending=True).values
    probs = descending.softmax(-1)
    before = probs.cumsum(-1) - probs  # of the more likely tokens
    return (logits > -torch.inf) & (logits >= descending[max(1, int((before < top_p).sum())) - 1])


def kept_without_sort(logits, top_k, top_p):
    """Return the same: the keys of floats, as integers, have the floats' order."""
    keys = logits.float().view(torch.int32).long()
    keys = torch.where(keys < 0, -(2**31) - keys, keys)

    def threshold(enough):
        low, high = -(2**31), 2**31
        while high - low > 1:  # enough tokens have at least the key `low`, too few `high`
            middle = (low + high) // 2
            low, high = (middle, high) if enough(keys >= middle) else (low, middle)
        return low

    kept = keys >= threshold(lambda above: above.sum() >= top_k) if top_k else torch.ones_like(keys, dtype=torch.bool)
    probs = logits.masked_fill(~kept, -torch.inf).softmax(-1)
    return kept & (keys >= threshold(lambda above: probs[above].sum() >= top_p)) if top_p < 1 else kept


def sample(logits, position, temperature=0.0, top_k=0, top_p=1.0, seed=0, kept=kept_without_sort):
    """Return the token at a position of the output, for logits (V)."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits.double() - logits.max()) / temperature
    running = scaled.masked_fill(~kept(scaled, top_k, top_p), -torch.inf).exp().cumsum(-1)
    return int((running > uniform(seed, position) * running[-1]).int().argmax())


class Pool:
    def __init__(self, model, num_blocks):
        shape = (model.n_layer, num_blocks, BLOCK, model.n_head, model.n_embd // model.n_head)
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)
        self.num_tables = [0] * num_blocks  # that a block is in
        self.free = list(range(num_blocks))

    def take(self):
        block = self.free.pop()
        self.num_tables[block] = 1
        return block

    def share(self, blocks):
        for block in blocks:
            self.num_tables[block] += 1
        return list(blocks)

    def reserve(self, table, start, T):
        """Make room in a table for T tokens from position `start`: copy a shared block, take new ones."""
        if start < len(table) * BLOCK and self.num_tables[shared := table[start // BLOCK]] > 1:
            table[start // BLOCK] = own = self.take()
            self.k[:, own], self.v[:, own] = self.k[:, shared], self.v[:, shared]
            self.num_tables[shared] -= 1
        while len(table) * BLOCK < start + T:
            table.append(self.take())


def attend_with(pool, tables, pos):
    S = int(pos.max()) + 1
    table = torch.tensor([t + [0] * (max(map(len, tables)) - len(t)) for t in tables])  # (B, blocks)
    blocks, offsets = table.gather(1, pos // BLOCK), pos % BLOCK  # (B, T), of the new tokens
    mask = torch.arange(table.size(1) * BLOCK)[:S] <= pos[:, None, :, None]  # (B, 1, T, S)

    def attend(layer, q, k, v):
        pool.k[layer, blocks, offsets] = k.transpose(1, 2)  # (B, T, H, D)
        pool.v[layer, blocks, offsets] = v.transpose(1, 2)
        k = pool.k[layer, table].flatten(1, 2)[:, :S].transpose(1, 2)  # (B, H, S, D), a copy: PyTorch reads no tables
        v = pool.v[layer, table].flatten(1, 2)[:, :S].transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def prefill(model, pool, prompts, steps, sampling):
    """Return the tables of the prompts, and the first new token of each."""
    tables, tokens = [], []
    for i, prompt in enumerate(prompts):
        table, start = [], 0
        for other, other_table in zip(prompts[:i], tables, strict=True):
            same = [a == b for a, b in zip(prompt[:-1], other, strict=False)] + [False]  # the last token is computed
            if same.index(False) > start:
                start = same.index(False)
                table = other_table[: -(-start // BLOCK)]
        table = pool.share(table)
        pool.reserve(table, start, len(prompt) - start)
        pos = torch.arange(start, len(prompt))[None]
        x = model(torch.tensor([prompt[start:]]), pos, attend_with(pool, [table], pos))
        tokens.append(sample(model.lm_head(x[0, -1]), 0, **sampling))
        tables.append(table)
        steps.append((1, len(prompt) - start, len(prompt)))
    return tables, tokens


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps, **sampling):
    num_tokens = [len(prompt) + max_new_tokens for prompt in prompts]
    assert max(num_tokens) <= model.block_size, f"more than the context, {model.block_size} tokens"
    pool = Pool(model, sum(-(-n // BLOCK) + 1 for n in num_tokens))
    tables, tokens = prefill(model, pool, prompts, steps, sampling)
    outputs = [[token] for token in tokens]
    for _ in range(max_new_tokens - 1):
        pos = torch.tensor([[len(p) + len(out) - 1] for p, out in zip(prompts, outputs, strict=True)])  # (B, 1)
        for table, start in zip(tables, pos[:, 0].tolist(), strict=True):
            pool.reserve(table, start, 1)
        x = model(torch.tensor([out[-1:] for out in outputs]), pos, attend_with(pool, tables, pos))
        for out, logits in zip(outputs, model.lm_head(x[:, -1]), strict=True):
            out.append(sample(logits, len(out), **sampling))
        steps.append((len(prompts), 1, int(pos.sum()) + len(prompts)))
    print(f"{len(pool.num_tables) - len(pool.free)} blocks hold {sum(map(len, tables))} blocks of tables")
    return outputs


if __name__ == "__main__":
    main(generate, __file__, SAMPLING)
