"""How many kernels a decode step runs on a GPU, and how many launches by the host.

At batch 1 a small model is bound by launches: 124M parameters in 16 bits are read in 80 us of an H100's memory, and
200 kernels launched one by one take several times as long. So the two numbers are reported beside the MBU:

    kernels     kernels on the device, those replayed from a graph included; copies and fills are not counted
    launches    calls of the host that start work: one for each kernel, or one for a whole graph

Both come from torch's profiler over some decode steps, outside of any timing. The kernels of a layer: of each kernel,
its calls in a step divided by the layers, rounded down, which excludes those of the head and the sampler (25 of one
name in 12 layers: 2 a layer, and 1 elsewhere).

    from nanoinfer.profiling.launches import measure_launches
    print(measure_launches(LLM("random:gpt2", device="cuda"), params=SamplingParams(temperature=0)))
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.llm import LLM
from nanoinfer.profiling import spans as sp
from nanoinfer.profiling.recording import new_job, random_prompts
from nanoinfer.sampling_params import SamplingParams

DECODE_STEPS = 16
PREFILL_TOKENS = 2048  # about what one step reads of a batch's prompts while the first sequences decode already

# cudaLaunchKernel, cudaLaunchKernelExC, cudaLaunchCooperativeKernel, cuLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch
_LAUNCH = re.compile(r"cu(da)?(Launch\w*Kernel|GraphLaunch)")
_NO_KERNEL = re.compile(r"(Memcpy|Memset)\b")


@dataclass(frozen=True)
class Launches:
    """Counts of a step: one token of every sequence."""

    kernels_per_step: float
    """Kernels that ran on the device."""
    kernels_per_layer: int
    """Of them, those of one layer."""
    launches_per_step: float
    """Launches by the host: of kernels and of graphs."""


def is_launch(event: Any) -> bool:
    """Return whether a profiler event is a call of the host that launches a kernel or a graph."""
    return event.device_type.name == "CPU" and bool(_LAUNCH.match(event.name))


def is_kernel(event: Any) -> bool:
    """Return whether a profiler event is a kernel on the device: no copy, no fill, no span's annotation."""
    if event.device_type.name != "CUDA" or event.is_user_annotation or event.name.startswith(sp.PREFIX):
        return False
    return not _NO_KERNEL.match(event.name)


def count(events: Sequence[Any], num_steps: int, n_layer: int) -> Launches | None:
    """Return the counts of a step; None if the profiler saw no kernel: they are unknown then, not zero.

    Args:
        events: of torch's profiler over `num_steps` steps.
        num_steps: steps of the engine in them.
        n_layer: layers of the model.
    """
    kernels = Counter(e.name for e in events if is_kernel(e))
    if not kernels or not num_steps:
        return None
    layer = sum(calls // (num_steps * n_layer) for calls in kernels.values())
    return Launches(kernels.total() / num_steps, layer, sum(map(is_launch, events)) / num_steps)


def measure_launches(
    llm: LLM, *, batch: int = 1, prompt_tokens: int = 32, params: SamplingParams | None = None
) -> Launches:
    """Return the launches of a decode step.

    Args:
        llm: on a CUDA device, idle.
        batch: sequences, with prompts of random tokens.
        prompt_tokens: tokens of each.
        params: how to sample; its max_tokens and ignore_eos are not used. None: greedy.

    Raises:
        NanoinferError: the device is a CPU, or the profiler sees no kernels here.
    """
    if llm.device.type != "cuda":
        raise NanoinferError(f"device={str(llm.device)!r} launches no kernels: count them on a CUDA device")
    # The first sequences of a large batch decode while the last prompts are read: sequences must last beyond that.
    tokens = 1 + DECODE_STEPS + batch * prompt_tokens // PREFILL_TOKENS
    sampling = replace(params or SamplingParams(temperature=0), max_tokens=tokens, min_tokens=0, ignore_eos=True)
    job = replace(new_job(llm, random_prompts(llm, batch, prompt_tokens), sampling, decode_only=True), parts=())
    job.warm_up()
    recorder, ranges, _ = job.recorded()
    counts = count(list(recorder.events()), ranges.calls[sp.ENGINE], llm.config.n_layer)
    if counts is None:
        raise NanoinferError(f"torch's profiler saw no kernel on {llm.device}: it may lack the right to (CUPTI)")
    return counts
