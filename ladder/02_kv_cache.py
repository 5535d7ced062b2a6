"""Rung 2, a cache that grows: keep the keys and values of all tokens, compute only the new one.

Keys and values of a token depend on the tokens before it alone, so they never change: one token is computed a step, not
T. Each step copies the whole cache to append to it.

Past the context every token moves by one position, so nothing that was kept is right any more: the window is recomputed
for each token, as in rung 1.
"""

import torch
from measure import main
from torch.nn import functional as F


def attend_with(cache):
    def attend(layer, q, k, v):
        if cache[layer] is not None:
            k = torch.cat((cache[layer][0], k), dim=2)  # (B, H, S, D)
            v = torch.cat((cache[layer][1], v), dim=2)
        cache[layer] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.size(2) > 1)  # one query sees all keys

    return attend


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps):
    outputs = []
    for prompt in prompts:
        idx = torch.tensor([prompt])
        S = 0  # tokens in the cache
        for _ in range(max_new_tokens):
            if idx.size(1) > model.block_size or S == 0:
                S, cache = 0, [None] * model.n_layer
            idx_new = idx[:, -model.block_size :][:, S:]
            T = idx_new.size(1)
            x = model(idx_new, torch.arange(S, S + T), attend_with(cache))
            logits = model.lm_head(x[:, -1])  # only the last position predicts something new
            idx = torch.cat((idx, logits.argmax(-1, keepdim=True)), dim=1)
            S += T
            steps.append((1, T, S))
        outputs.append(idx[0, len(prompt) :].tolist())
    return outputs


if __name__ == "__main__":
    main(generate, __file__)
