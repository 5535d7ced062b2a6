"""Rung 1, the loop: run the whole text through the model again for each token.

This is nanoGPT's `generate`, greedy. It needs no state, and it is the definition of correct for all other files. A
token after T others costs as much as all T: the work of a text grows with the square of its length.
"""

import torch
from measure import main
from torch.nn import functional as F


def attend(layer, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps):
    outputs = []
    for prompt in prompts:
        idx = torch.tensor([prompt])
        for _ in range(max_new_tokens):
            idx_cond = idx[:, -model.block_size :]  # past the context, the oldest token is dropped
            T = idx_cond.size(1)
            x = model(idx_cond, torch.arange(T), attend)
            logits = model.lm_head(x[:, -1])  # only the last position predicts something new
            idx = torch.cat((idx, logits.argmax(-1, keepdim=True)), dim=1)
            steps.append((1, T, T))
        outputs.append(idx[0, len(prompt) :].tolist())
    return outputs


if __name__ == "__main__":
    main(generate, __file__)
