"""Solutions of the exercises of lesson 3."""

import torch
from torch.nn import functional as F


def num_bytes_written(n_layer, n_embd, prompt_len, max_new_tokens):
    bytes_of_token = 2 * n_layer * n_embd * 4
    rung_2 = sum(prompt_len + i for i in range(1, max_new_tokens))
    rung_3 = prompt_len + max_new_tokens - 1
    return rung_2 * bytes_of_token, rung_3 * bytes_of_token


class GrowingCache:
    def __init__(self, first=16):
        self.capacity, self.S, self.kv = first, 0, None

    def append(self, k, v):
        end = self.S + k.size(2)
        if self.kv is None or end > self.capacity:
            while end > self.capacity:
                self.capacity *= 2
            B, H, _, D = k.shape
            larger = torch.empty(B, H, self.capacity, D), torch.empty(B, H, self.capacity, D)
            for new, old in zip(larger, self.kv or (), strict=False):
                new[:, :, : self.S] = old[:, :, : self.S]
            self.kv = larger
        for tensor, new in zip(self.kv, (k, v), strict=True):
            tensor[:, :, self.S : end] = new
        self.S = end
        return tuple(tensor[:, :, :end] for tensor in self.kv)


@torch.inference_mode()
def generate_in_window(model, prompt, max_new_tokens, window):
    shape = (model.n_layer, 1, model.n_head, window, model.n_embd // model.n_head)
    k_cache, v_cache = torch.empty(shape), torch.empty(shape)
    tokens = list(prompt)
    for t in range(len(prompt) + max_new_tokens - 1):

        def attend(layer, q, k, v, t=t):
            k_cache[layer, :, :, t % window], v_cache[layer, :, :, t % window] = k[:, :, 0], v[:, :, 0]
            S = min(t + 1, window)
            return F.scaled_dot_product_attention(q, k_cache[layer, :, :, :S], v_cache[layer, :, :, :S])

        x = model(torch.tensor([tokens[t : t + 1]]), torch.tensor([t]), attend)
        if t + 1 == len(tokens):
            tokens.append(int(model.lm_head(x[0, -1]).argmax()))
    return tokens[len(prompt) :]
