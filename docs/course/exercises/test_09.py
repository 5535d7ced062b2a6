"""The scheduler: steps of batches that end together or not, reserved blocks, latencies."""

from importlib import import_module

import pytest


def test_num_steps(exercise):
    assert exercise.num_steps([10, 1, 1, 10], 2, continuous=False) == 20
    assert exercise.num_steps([10, 1, 1, 10], 2, continuous=True) == 12
    assert exercise.num_steps([3, 5, 2, 4, 1], 1, continuous=True) == 15
    assert exercise.num_steps([3, 5, 2, 4, 1], 1, continuous=False) == 15
    assert exercise.num_steps([3, 5, 2, 4, 1], 3, continuous=False) == 9
    assert exercise.num_steps([3, 5, 2, 4, 1], 3, continuous=True) == 6
    assert exercise.num_steps([7], 8, continuous=True) == 7


@pytest.mark.parametrize("blocks, steps_with_preemption, num_preemptions", [(9, 35, 1), (12, 29, 2)])
def test_reserving(exercise, blocks, steps_with_preemption, num_preemptions, monkeypatch, capsys):
    scheduling = import_module("09_scheduler")
    model, encode, _ = import_module("model").load("shakespeare-draft")
    prompts = [encode(text) for text in ["O Romeo, " * 6, "To be", "A" * 30, "First Citizen: " * 8]]
    expected = scheduling.generate(model, prompts, 24, [], blocks)
    steps, preempted = (int(word) for word in capsys.readouterr().out.split()[::2])
    monkeypatch.setattr(scheduling, "Scheduler", exercise.Reserving)
    assert scheduling.generate(model, prompts, 24, [], blocks) == expected
    num_steps, num_preempted = (int(word) for word in capsys.readouterr().out.split()[::2])
    assert (preempted, num_preempted) == (num_preemptions, 0)
    assert (steps, num_steps) == (steps_with_preemption, 48)


def test_latencies(exercise, monkeypatch):
    monkeypatch.setattr(import_module("09_scheduler"), "BUDGET", 48)

    def seconds(N):
        return 1 + N / 16

    # 16 tokens of the first, 32 of the second; then 1 and 47; then 1 and 21, which ends the second prompt.
    (first, gap), (second, other) = exercise.latencies([16, 100], 5, seconds)
    assert (first, gap) == pytest.approx((4, 4))
    assert (second, other) == pytest.approx((4 + 4 + 1 + 22 / 16, 1 + 2 / 16))
    monkeypatch.setattr(import_module("09_scheduler"), "BUDGET", 1000)
    (first, gap), (second, other) = exercise.latencies([16, 100], 5, seconds)
    assert (first, gap) == pytest.approx((1 + 116 / 16, 1 + 2 / 16))
    assert (second, other) == pytest.approx((1 + 116 / 16, 1 + 2 / 16))
