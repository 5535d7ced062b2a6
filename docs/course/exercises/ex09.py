"""Exercises of lesson 9, the scheduler. `pytest docs/course/exercises/test_09.py` checks them."""

from importlib import import_module

scheduling = import_module("09_scheduler")


def num_steps(lengths, B, continuous):
    """Return the decode steps for outputs of these lengths, when at most B texts run at the same time.

    A step is one token of each running text; prompts are not counted. Texts are taken in their order.

    Args:
        lengths: tokens of each output, 1 or more.
        continuous: False: the next B texts begin when all B before them have ended (rung 4). True: the next text begins
            in the step after one has ended (rung 9).
    """
    raise NotImplementedError


class Reserving(scheduling.Scheduler):
    """A scheduler without preemption: a request runs only when blocks for its whole output are free.

    At its admission a request takes the blocks of `request.end` tokens, and needs no others later.
    """

    def reserve(self, request, num_new):
        raise NotImplementedError


def latencies(lengths, max_new_tokens, seconds, num_blocks=1000):
    """Return (seconds to its first token, longest time between two of its tokens) of each request.

    All requests arrive at time 0. Run `scheduling.Scheduler` without a model: the tokens that it appends may be
    anything. A step with N new tokens takes seconds(N).

    Args:
        lengths: tokens of each prompt.
        max_new_tokens: tokens of each output, 2 or more.
    """
    raise NotImplementedError
