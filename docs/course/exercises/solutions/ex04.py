"""Solutions of the exercises of lesson 4."""

from importlib import import_module

import torch
from torch.nn import functional as F

attend_with = import_module("04_batch").attend_with


def num_computed(lengths, batch_size, by_length):
    lengths = sorted(lengths) if by_length else lengths
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    return sum(len(batch) * max(batch) for batch in batches)


@torch.inference_mode()
def generate_left(model, prompts, max_new_tokens):
    B, T = len(prompts), max(map(len, prompts))
    shape = (model.n_layer, B, model.n_head, T + max_new_tokens, model.n_embd // model.n_head)
    k_cache, v_cache = torch.zeros(shape), torch.zeros(shape)
    num_padding = torch.tensor([T - len(prompt) for prompt in prompts])[:, None]  # (B, 1)
    idx = torch.tensor([[0] * (T - len(prompt)) + prompt for prompt in prompts])
    places, outputs = torch.arange(T), []
    while len(outputs) < max_new_tokens:
        S = int(places[-1]) + 1
        keys = torch.arange(S)
        causal = keys <= places[:, None]  # (T, S)
        own = keys >= num_padding  # (B, S)
        alone = keys == places[:, None]  # a query of padding sees itself: no key at all may give NaN
        mask = (causal & own[:, None] | alone)[:, None]  # (B, 1, T, S)

        def attend(layer, q, k, v, places=places, S=S, mask=mask):
            k_cache[layer, :, :, places[0] : S], v_cache[layer, :, :, places[0] : S] = k, v
            return F.scaled_dot_product_attention(q, k_cache[layer, :, :, :S], v_cache[layer, :, :, :S], mask)

        x = model(idx, (places - num_padding).clamp(min=0), attend)
        idx = model.lm_head(x[:, -1]).argmax(-1, keepdim=True)
        outputs.append(idx)
        places = torch.tensor([S])
    return torch.cat(outputs, dim=1).tolist()


@torch.inference_mode()
def generate_until(model, prompts, max_new_tokens, stop):
    B, lengths = len(prompts), torch.tensor([len(prompt) for prompt in prompts])
    shape = (model.n_layer, B, model.n_head, model.block_size, model.n_embd // model.n_head)
    k_cache, v_cache = torch.zeros(shape), torch.zeros(shape)
    idx = torch.zeros(B, int(lengths.max()), dtype=torch.long)
    for row, prompt in zip(idx, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    pos, last = torch.arange(idx.size(1)).expand(B, -1), lengths - 1
    rows = torch.arange(B)  # the texts of the batch
    outputs, num_rows = [[] for _ in prompts], []
    while len(num_rows) < max_new_tokens and len(rows):
        x = model(idx, pos, attend_with(k_cache, v_cache, pos))
        tokens = model.lm_head(x[torch.arange(len(rows)), last]).argmax(-1)
        num_rows.append(len(rows))
        kept = tokens != stop
        for text, token in zip(rows[kept].tolist(), tokens[kept].tolist(), strict=True):
            outputs[text].append(token)
        rows, idx, k_cache, v_cache = rows[kept], tokens[kept, None], k_cache[:, kept], v_cache[:, kept]
        pos, last = lengths[rows, None] + len(num_rows) - 1, 0
    return outputs, num_rows
