"""Rung 4, a batch: one step for many texts, so the weights are read once for all of them.

At batch 1 a step waits for the weights; a step with B texts reads them once, too. The texts differ in length, but the
rows of a tensor cannot: prompts are padded on the right to the longest, and what is computed for padding is dropped.

No mask for padding is needed: a query sees the positions up to its own, and a token of padding lies behind all tokens
of its text, until the next one overwrites it.

Left out from here on: texts past the context, which the engines slide one by one.
"""

import torch
from measure import main
from torch.nn import functional as F


def attend_with(k_cache, v_cache, pos):
    S = int(pos.max()) + 1
    rows = torch.arange(len(pos))[:, None]  # (B, 1)
    mask = torch.arange(S) <= pos[:, None, :, None]  # (B, 1, T, S): a query sees the positions up to its own

    def attend(layer, q, k, v):
        k_cache[layer, rows, :, pos] = k.transpose(1, 2)  # (B, T, H, D)
        v_cache[layer, rows, :, pos] = v.transpose(1, 2)
        k, v = k_cache[layer, :, :, :S], v_cache[layer, :, :, :S]  # (B, H, S, D), no copy
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps):
    B, lengths = len(prompts), torch.tensor([len(prompt) for prompt in prompts])
    assert lengths.max() + max_new_tokens <= model.block_size, f"more than the context, {model.block_size} tokens"
    shape = (model.n_layer, B, model.n_head, model.block_size, model.n_embd // model.n_head)
    k_cache, v_cache = torch.zeros(shape), torch.zeros(shape)
    idx = torch.zeros(B, int(lengths.max()), dtype=torch.long)
    for row, prompt in zip(idx, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    pos = torch.arange(idx.size(1)).expand(B, -1)
    last = lengths - 1  # the last token of each text among the new ones
    outputs = []
    for _ in range(max_new_tokens):
        x = model(idx, pos, attend_with(k_cache, v_cache, pos))
        logits = model.lm_head(x[torch.arange(B), last])
        idx = logits.argmax(-1, keepdim=True)  # (B, 1): from now on no padding is computed, but it is read
        outputs.append(idx)
        steps.append((B, pos.size(1), B * (int(pos.max()) + 1)))
        pos, last = lengths[:, None] + len(outputs) - 1, 0
    if steps and steps[0][1] > 1:
        print(f"padding: {1 - float(lengths.sum()) / (B * int(lengths.max())):.0%} of the tokens of the prompts' step")
    return torch.cat(outputs, dim=1).tolist()


if __name__ == "__main__":
    main(generate, __file__)
