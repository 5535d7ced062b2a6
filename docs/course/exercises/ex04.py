"""Exercises of lesson 4, batches. `pytest docs/course/exercises/test_04.py` checks them."""

import torch


def num_computed(lengths, batch_size, by_length):
    """Return how many tokens the first steps of rung 4 compute, padding included, if texts run in several batches.

    Args:
        lengths: number of tokens of each prompt.
        batch_size: texts that run together; the last batch may have fewer.
        by_length: whether the texts are sorted by their lengths first, or batched in their order.
    """
    raise NotImplementedError


@torch.inference_mode()
def generate_left(model, prompts, max_new_tokens):
    """Continue prompts greedily, as one batch that is padded on the left, as the library transformers does.

    All texts then end in the same column, so a step writes one column of the cache for all of them, by a slice instead
    of by index, and the last row of hidden states is that of the newest token. In return, the place of a token in the
    cache is not its position, and the padding stands before the text, where a causal mask does not hide it.

    Args:
        model: as of `model.load`. `model(idx, pos, attend)` takes idx and pos, (B, T); positions begin at 0 with the
            first token of each text. Those of padding may be any that exist.
        prompts: list of B lists of token ids.
        max_new_tokens: of each text. All of them fit the context.

    Returns:
        List of `max_new_tokens` token ids for each text.
    """
    raise NotImplementedError


@torch.inference_mode()
def generate_until(model, prompts, max_new_tokens, stop):
    """Continue prompts as rung 4 does, but take a text out of the batch when it generates the token `stop`.

    The rows of the others become the new batch: of the cache, of the positions, and of what else has a row for a text.

    Args:
        model: as of `model.load`.
        prompts: list of B lists of token ids.
        max_new_tokens: at most so many are generated for each text.
        stop: a token id.

    Returns:
        (list of new token ids for each text, without `stop`; list with the number of rows of each step).
    """
    raise NotImplementedError
