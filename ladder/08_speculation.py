"""Rung 8, speculation: a small model proposes k tokens, the large one verifies them in one step.

A step of the large model takes the time of reading its weights, whether it computes 1 token or k + 1. So a draft
proposes k tokens, one after the other, and the target computes the logits after each of them at once. The proposals
that it would have chosen itself are kept, and one token more: its own choice after the last that is kept.

Proof that the tokens are those of rung 4, by induction: the target's choice is a function of the tokens before it. The
first one is computed from the text as it stands. If proposal i equals the target's choice, then the logits after it are
those of a text that rung 4 would have, so the next choice is right, too. After the first proposal that differs, nothing
is kept. Rung 6's choice is a function of the logits and the position, so the proof holds for sampling, too.

What is rejected stays in the cache behind the text, like padding, and is overwritten. Left out: the bits of rung 7.
"""

import functools

import torch
from measure import main
from model import load
from torch.nn import functional as F

K = 4  # proposals a step
draft_model = functools.cache(lambda path: load(path)[0])


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


def step(model, cache, idx, pos, steps):
    """Return the logits (B, T, V) of new tokens, T of each text."""
    steps.append((*idx.shape, len(idx) * (int(pos.max()) + 1), model))
    return model.lm_head(model(idx, pos, attend_with(*cache, pos)))


def caches(model, B):
    shape = (model.n_layer, B, model.n_head, model.block_size, model.n_embd // model.n_head)
    return torch.zeros(shape), torch.zeros(shape)


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps, draft="shakespeare-draft"):
    draft, B = draft_model(draft), len(prompts)
    longest = max(map(len, prompts))
    assert longest + max_new_tokens + K <= model.block_size, f"more than the context, {model.block_size} tokens"
    cache, draft_cache = caches(model, B), caches(draft, B)
    idx = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    pos = torch.arange(longest).expand(B, -1)
    step(draft, draft_cache, idx, pos, steps)
    logits = step(model, cache, idx, pos, steps)
    first = logits[torch.arange(B), [len(prompt) - 1 for prompt in prompts]].argmax(-1)
    texts = [[*prompt, token] for prompt, token in zip(prompts, first.tolist(), strict=True)]
    num_proposed = num_accepted = 0
    while any(len(text) < len(prompt) + max_new_tokens for text, prompt in zip(texts, prompts, strict=True)):
        texts = [text[: len(prompt) + max_new_tokens] for text, prompt in zip(texts, prompts, strict=True)]
        end = torch.tensor([[len(text)] for text in texts])  # (B, 1)
        # The draft has not computed the last proposal if all were accepted: it begins with two tokens.
        idx, pos = torch.tensor([text[-2:] for text in texts]), torch.cat((end - 2, end - 1), dim=1)
        proposals = []
        for _ in range(K):
            idx = step(draft, draft_cache, idx, pos, steps)[:, -1:].argmax(-1)  # (B, 1)
            proposals.append(idx)
            pos = pos[:, -1:] + 1
        idx = torch.cat((torch.tensor([text[-1:] for text in texts]), *proposals), dim=1)  # (B, K + 1)
        chosen = step(model, cache, idx, end - 1 + torch.arange(K + 1), steps).argmax(-1)  # (B, K + 1)
        same = (chosen[:, :-1] == idx[:, 1:]).int().cumprod(dim=1).sum(dim=1)  # proposals before the first that differs
        for text, row, n in zip(texts, chosen.tolist(), same.tolist(), strict=True):
            text += row[: n + 1]
        num_proposed, num_accepted = num_proposed + B * K, num_accepted + int(same.sum())
    print(f"{num_accepted} of {num_proposed} proposals accepted")
    return [text[len(prompt) :][:max_new_tokens] for text, prompt in zip(texts, prompts, strict=True)]


if __name__ == "__main__":
    main(generate, __file__, option=("draft", "shakespeare-draft", "a model with the same tokens, to propose some"))
