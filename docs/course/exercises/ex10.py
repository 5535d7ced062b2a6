"""Exercises of lesson 10, launches. `pytest docs/course/exercises/test_10.py` checks them."""

from importlib import import_module

from torch.utils._python_dispatch import TorchDispatchMode

launches = import_module("10_launches")  # Eager and Count
GPT = import_module("model").GPT


def operations(n_layer):
    """Return how many operations PyTorch runs for a decode step of a GPT with this number of layers.

    Count those of a step of `launches.Eager` for a small model of random weights, once with 1 layer and once with 2:
    every further layer runs the same operations. Do not build larger models.
    """
    raise NotImplementedError


def least_batch(num_operations, op_seconds, weight_bytes, flops_per_token, bandwidth, throughput):
    """Return the smallest batch size at which launches no longer limit a step of one token for each sequence.

    That is the smallest B >= 1 for which max(weight_bytes / bandwidth, B * flops_per_token / throughput) is at least
    num_operations * op_seconds. Keys and values are left out.
    """
    raise NotImplementedError


class Graph(TorchDispatchMode):
    """A CUDA graph without a GPU: records the operations that run inside `with Graph() as graph:`, replays them.

    A replay runs the recorded functions with the very arguments of the recording, and writes each result into the
    tensor that the recording returned. Views and results that were written in place have the memory of an argument:
    they need no copy. An operation may return a tensor or a tuple of tensors and other values.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise NotImplementedError

    def replay(self):
        """Compute the results again, from what the arguments hold now."""
        raise NotImplementedError
