"""Solutions of the exercises of lesson 9."""

from importlib import import_module
from itertools import pairwise

scheduling = import_module("09_scheduler")


def num_steps(lengths, B, continuous):
    if not continuous:
        return sum(max(lengths[i : i + B]) for i in range(0, len(lengths), B))
    ends = [0] * B  # the step after which each place is free
    for length in lengths:
        first = ends.index(min(ends))
        ends[first] += length
    return max(ends)


class Reserving(scheduling.Scheduler):
    def reserve(self, request, num_new):
        return super().reserve(request, request.end - request.num_computed)


def latencies(lengths, max_new_tokens, seconds, num_blocks=1000):
    requests = [scheduling.Request([0] * n, n + max_new_tokens) for n in lengths]
    scheduler, now = scheduling.Scheduler(requests, num_blocks), 0.0
    times = [[] for _ in requests]  # when each token was there
    while scheduler.waiting or scheduler.running:
        work = scheduler.schedule()
        now += seconds(sum(work.values()))
        before = [len(request.tokens) for request in requests]
        scheduler.postprocess(work, [0] * len(work))
        for request, n, own in zip(requests, before, times, strict=True):
            if len(request.tokens) > n:
                own.append(now)
    return [(own[0], max(b - a for a, b in pairwise(own))) for own in times]
