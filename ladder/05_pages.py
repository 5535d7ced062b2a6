"""Rung 5, pages: keys and values in blocks of one pool; texts that begin alike share them until one of them writes.

The cache of rung 4 reserves the whole context for each text. Here a text has a table of the blocks that hold its
tokens, in any order, and takes one from the pool when it needs one (PagedAttention, Kwon et al. 2023). A block counts
the tables that it is in. Two prompts with the same beginning have the same keys and values there: the second takes the
first one's blocks. When it writes into a block that is not its own alone, it copies that block first.

Prompts are computed one after the other, so nothing is padded but tables.
"""

import torch
from measure import main
from torch.nn import functional as F

BLOCK = 16  # tokens


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


def prefill(model, pool, prompts, steps):
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
        tokens.append(int(model.lm_head(x[:, -1]).argmax()))
        tables.append(table)
        steps.append((1, len(prompt) - start, len(prompt)))
    return tables, tokens


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps):
    num_tokens = [len(prompt) + max_new_tokens for prompt in prompts]
    assert max(num_tokens) <= model.block_size, f"more than the context, {model.block_size} tokens"
    pool = Pool(model, sum(-(-n // BLOCK) + 1 for n in num_tokens))
    tables, tokens = prefill(model, pool, prompts, steps)
    outputs = [[token] for token in tokens]
    for _ in range(max_new_tokens - 1):
        pos = torch.tensor([[len(p) + len(out) - 1] for p, out in zip(prompts, outputs, strict=True)])  # (B, 1)
        for table, start in zip(tables, pos[:, 0].tolist(), strict=True):
            pool.reserve(table, start, 1)
        x = model(torch.tensor([out[-1:] for out in outputs]), pos, attend_with(pool, tables, pos))
        for out, token in zip(outputs, model.lm_head(x[:, -1]).argmax(-1).tolist(), strict=True):
            out.append(token)
        steps.append((len(prompts), 1, int(pos.sum()) + len(prompts)))
    print(f"{len(pool.num_tables) - len(pool.free)} blocks hold {sum(map(len, tables))} blocks of tables")
    return outputs


if __name__ == "__main__":
    main(generate, __file__)
