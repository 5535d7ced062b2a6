"""Exercises of lesson 8, speculation. `pytest docs/course/exercises/test_08.py` checks them."""

from importlib import import_module

import torch

speculation = import_module("08_speculation")  # step and caches of the rung


@torch.inference_mode()
def generate(model, prompt, max_new_tokens, propose):
    """Continue one text greedily, verifying proposals of any length from any source.

    Each step of the model has the newest token and the proposals, and yields the accepted proposals and one token more.
    The last step may propose more tokens than are left: at most `max_new_tokens` are returned.

    Args:
        model: as of `model.load`.
        prompt: list of token ids.
        propose: tokens of the text so far -> list of proposed token ids, which may be empty.

    Returns:
        (new token ids, number of steps of the model, the prompt's included).
    """
    raise NotImplementedError


def speed_up(rate, k, cost):
    """Return tokens per second with k proposals a step, relative to plain decoding.

    Args:
        rate: probability, below 1, that a proposal is accepted if those before it were, independent of the others.
        k: proposals a step, 0 or more.
        cost: seconds of a step of the draft, divided by those of a step of the target. A step of the target takes
            equally long with 1 and with k + 1 tokens.
    """
    raise NotImplementedError


def verify_sampled(p, q, proposal, u, v):
    """Return the token that the rule of Leviathan et al. 2023 keeps at one position. Its distribution is p.

    The proposal x is accepted with probability min(1, p(x) / q(x)). Otherwise a token is sampled from max(p - q, 0),
    normalized.

    Args:
        p, q: (V) probabilities of target and draft.
        proposal: the token that was sampled from q.
        u, v: two numbers in [0, 1): u decides whether the proposal is accepted, v which token replaces it, the first
            at which the running sum of the probabilities exceeds v.
    """
    raise NotImplementedError
