"""Launches: operations of a step, when they limit it, and a graph that is replayed."""

from importlib import import_module

import torch


def test_operations(exercise):
    launches, GPT = import_module("10_launches"), import_module("model").GPT
    for n_layer in (1, 4):
        step = launches.Eager(GPT(n_layer, n_head=2, n_embd=16, block_size=32, vocab_size=8).eval(), 1)
        with torch.inference_mode():
            step([[1, 2]])
            with launches.Count() as count:
                step([[3]])
        assert exercise.operations(n_layer) == count.num_operations


def test_least_batch(exercise):
    # 500 operations of 2 us: 1 ms. 248 MB at 1 TB/s: 0.248 ms.
    assert exercise.least_batch(500, 2e-6, 248e6, 250e6, 1e12, 100e12) == 400
    assert exercise.least_batch(500, 2e-6, 248e6, 251e6, 1e12, 100e12) == 399  # 398.4
    assert exercise.least_batch(500, 2e-6, 3e9, 3e9, 1e12, 100e12) == 1  # reading takes 3 ms
    assert exercise.least_batch(500, 2e-6, 1e9, 1e9, 1e12, 100e12) == 1


@torch.inference_mode()
def test_a_graph_computes_again(exercise):
    x, total = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2)
    with exercise.Graph() as graph:
        total += x.t().sum(-1)  # a view, a reduction, and a sum in place
        values, indices = (x * 2).max(dim=0)  # a tuple
    total.zero_()
    x.copy_(torch.tensor([[9.0, 2.0], [3.0, 8.0]]))
    graph.replay()
    assert total.tolist() == [12, 10]
    assert values.tolist() == [18, 16]
    assert indices.tolist() == [0, 1]


@torch.inference_mode()
def test_a_graph_generates(exercise):
    launches = import_module("10_launches")
    model, encode, _ = import_module("model").load("shakespeare-draft")
    prompts = [encode("O Romeo,"), encode("To be, or not")]
    expected = launches.generate(model, prompts, 16, [], "eager")
    step = launches.Eager(model, 2)
    outputs = [step(prompts)]
    idx, pos = torch.tensor(outputs[-1])[:, None], step.lengths.clone()
    with exercise.Graph() as graph:
        tokens = step.step(idx, pos)
    outputs.append(tokens.tolist())
    while len(outputs) < 16:
        idx.copy_(tokens[:, None])
        pos += 1
        graph.replay()
        outputs.append(tokens.tolist())
    assert [list(row) for row in zip(*outputs, strict=True)] == expected


@torch.inference_mode()
def test_a_number_of_the_host_is_a_constant_of_the_graph(exercise):
    x, position = torch.arange(4.0), 1
    with exercise.Graph() as graph:
        y = x[position] + position
    position = 3
    graph.replay()
    assert float(y) == 2
    x[1] = 7
    graph.replay()
    assert float(y) == 8
