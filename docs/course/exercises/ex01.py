"""Exercises of lesson 1, the loop. `pytest docs/course/exercises/test_01.py` checks them."""

from importlib import import_module

import torch

loop = import_module("01_recompute")  # attend of the rung


def num_computed(prompt_len, max_new_tokens, block_size):
    """Return how many tokens `generate` of rung 1 runs through the model in all its steps.

    A step runs the whole text, or its last `block_size` tokens if it is longer. The last new token is never run.
    """
    raise NotImplementedError


@torch.inference_mode()
def score(model, tokens):
    """Return the log-probability of each token but the first, given the tokens before it, from one call of the model.

    Args:
        model: as of `model.load`. `model(idx, pos, loop.attend)` returns hidden states (1, T, C) of idx (1, T), and
            `model.lm_head` makes logits (1, T, V) of them.
        tokens: list of T token ids.

    Returns:
        List of T - 1 floats.
    """
    raise NotImplementedError


@torch.inference_mode()
def generate_until(model, prompt, max_new_tokens, stop):
    """Continue a text as rung 1 does, greedily, but end it at a stop sequence.

    Args:
        model: as of `model.load`.
        prompt: list of token ids.
        max_new_tokens: at most so many are generated. All of them fit the context.
        stop: list of one or more token ids. Only new tokens count: one that the prompt ends with is not a part of it.

    Returns:
        (new token ids up to the first stop sequence, which is left out, number of calls of the model). The model is not
        called after the stop sequence is complete.
    """
    raise NotImplementedError
