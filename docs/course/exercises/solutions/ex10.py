"""Solutions of the exercises of lesson 10."""

import math
from importlib import import_module

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

launches = import_module("10_launches")  # Eager and Count
GPT = import_module("model").GPT


@torch.inference_mode()
def count(n_layer):
    model = GPT(n_layer, n_head=2, n_embd=8, block_size=16, vocab_size=8).eval()
    step = launches.Eager(model, 1)
    step([[1, 2, 3]])  # the prompt
    with launches.Count() as counted:
        step([[4]])
    return counted.num_operations


def operations(n_layer):
    one, two = count(1), count(2)
    return one + (n_layer - 1) * (two - one)


def least_batch(num_operations, op_seconds, weight_bytes, flops_per_token, bandwidth, throughput):
    seconds = num_operations * op_seconds
    if weight_bytes / bandwidth >= seconds:
        return 1
    return math.ceil(seconds * throughput / flops_per_token)


class Graph(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            memory = [memory_of(x) for x in tensors((args, kwargs))]
            for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                if memory_of(old) not in memory:
                    old.copy_(new)


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()
