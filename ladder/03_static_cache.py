"""Rung 3, a cache that is allocated once: write keys and values in place.

Appending to the cache of rung 2 copies all of it, in every layer, for every token. Here there is one tensor for the
whole context; a step writes its rows into it and attends to a view of what is filled.

Past the context the window is recomputed, as in rung 2: it overwrites the cache from the beginning.
"""

import torch
from measure import main
from torch.nn import functional as F


def attend_with(k_cache, v_cache, S, T):
    def attend(layer, q, k, v):
        k_cache[layer, :, :, S : S + T] = k
        v_cache[layer, :, :, S : S + T] = v
        k, v = k_cache[layer, :, :, : S + T], v_cache[layer, :, :, : S + T]  # (B, H, S + T, D), no copy
        return F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)  # one query sees all keys

    return attend


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps):
    shape = (model.n_layer, 1, model.n_head, model.block_size, model.n_embd // model.n_head)
    k_cache, v_cache = torch.empty(shape), torch.empty(shape)
    outputs = []
    for prompt in prompts:
        idx = torch.tensor([prompt])
        S = 0  # tokens in the cache
        for _ in range(max_new_tokens):
            if idx.size(1) > model.block_size:
                S = 0
            idx_new = idx[:, -model.block_size :][:, S:]
            T = idx_new.size(1)
            x = model(idx_new, torch.arange(S, S + T), attend_with(k_cache, v_cache, S, T))
            logits = model.lm_head(x[:, -1])  # only the last position predicts something new
            idx = torch.cat((idx, logits.argmax(-1, keepdim=True)), dim=1)
            S += T
            steps.append((1, T, S))
        outputs.append(idx[0, len(prompt) :].tolist())
    return outputs


if __name__ == "__main__":
    main(generate, __file__)
