"""Exercises of lesson 3, writing in place. `pytest docs/course/exercises/test_03.py` checks them."""

import torch


def num_bytes_written(n_layer, n_embd, prompt_len, max_new_tokens):
    """Return (bytes that rung 2 writes to its cache, bytes that rung 3 does) for a text that fits the context.

    Keys and values are floats of 4 bytes. The first step of rung 2 keeps the tensors that the layers return: it writes
    nothing. Each other step writes new tensors with all tokens. A step of rung 3 writes its new tokens. The last new
    token is never run.
    """
    raise NotImplementedError


class GrowingCache:
    """Keys and values of one layer in two tensors that are replaced by larger ones when they are full, as a list does.

    Capacities are `first`, 2 * first, 4 * first, ... tokens, the smallest that holds all tokens. So a short text takes
    little memory, unlike in rung 3, and each token is copied about once in the whole run, unlike in rung 2.
    """

    def __init__(self, first=16):
        raise NotImplementedError

    def append(self, k, v):
        """Append new tokens and return the keys and values of all tokens.

        Args:
            k, v: (1, H, T, D)

        Returns:
            Two views (1, H, S + T, D) of the tensors, where S tokens were appended before.
        """
        raise NotImplementedError


@torch.inference_mode()
def generate_in_window(model, prompt, max_new_tokens, window):
    """Continue a text greedily, with attention to the last `window` tokens alone, from a cache of `window` tokens.

    Token t is written at place t % window, over a token that no later one sees. The order of the keys does not matter
    to attention: positions are in the embeddings. Run one token a step, those of the prompt too.

    Args:
        model: as of `model.load`.
        prompt: list of token ids. With the new tokens, it fits model.block_size.
        max_new_tokens: 1 or more.
        window: a query at position t sees the keys at positions t - window + 1 to t.

    Returns:
        List of new token ids.
    """
    raise NotImplementedError
