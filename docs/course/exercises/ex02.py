"""Exercises of lesson 2, the cache. `pytest docs/course/exercises/test_02.py` checks them."""

from importlib import import_module

import torch

measure = import_module("measure")  # weight_bytes


def num_tokens_of_equal_bytes(model, batch):
    """Return the smallest number of tokens in each of `batch` texts with which a step reads more cache than weights.

    The weights (`measure.weight_bytes`) are read once for all texts, the cache of each text once. Keys and values are
    floats of 4 bytes; each has n_embd of them for a token, in each of the n_layer layers.
    """
    raise NotImplementedError


def attend_with(cache):
    """Return `attend` of rung 2 for any number of new tokens, also behind tokens that are in the cache.

    In rung 2, `is_causal=True` lets query i see the keys 0 to i, so it holds for an empty cache alone. With S tokens in
    the cache, query i is at position S + i. `F.scaled_dot_product_attention` takes a mask (T, S + T) as `attn_mask`.

    Args:
        cache: list of (k, v) of each layer, (1, H, S, D), or of None; changed.

    Returns:
        attend(layer, q, k, v) -> (1, H, T, D), from three tensors (1, H, T, D) of the new tokens.
    """
    raise NotImplementedError


@torch.inference_mode()
def endings(model, prompt, others, max_new_tokens):
    """Continue one prompt with several endings, greedily, and compute the prompt once.

    Use `attend_with`. `torch.cat` makes new tensors, so a copy of the list of a cache keeps what the cache was.

    Args:
        model: as of `model.load`.
        prompt: list of P token ids.
        others: lists of one or more token ids each. The texts to continue are prompt + other.
        max_new_tokens: of each text.

    Returns:
        List of `max_new_tokens` token ids for each text. In all, the model runs P tokens, and len(other) +
        max_new_tokens - 1 for each text: the last new token is never run.
    """
    raise NotImplementedError
