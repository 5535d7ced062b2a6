"""Count the kernels that a decode step runs on a GPU, and the launches by the host (docs/profile.md).

Both come from torch's profiler over some decode steps, outside of any timing. The kernels per layer are the sum over
kernel names of (runs in a step) // (number of layers). Rounding down excludes the kernels of output head and sampler:
25 runs of one name with 12 layers are 2 per layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanoinfer.entrypoints.llm import LLM
from nanoinfer.errors import NanoinferError
from nanoinfer.profiling import spans as sp
from nanoinfer.profiling.recording import new_job, random_prompts
from nanoinfer.sampling_params import SamplingParams

DECODE_STEPS = 16
PREFILL_TOKENS = 2048  # about the prompt tokens per step, while other sequences in the batch decode already

# cudaLaunchKernel, cudaLaunchKernelExC, cudaLaunchCooperativeKernel, cuLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch
_LAUNCH = re.compile(r"cu(da)?(Launch\w*Kernel|GraphLaunch)")
_NO_KERNEL = re.compile(r"(Memcpy|Memset)\b")


@dataclass(frozen=True)
class Launches:
    """Counts of a decode step."""

    kernels_per_step: float
    """Kernels that ran on the device."""
    kernels_per_layer: int
    """Kernels of one layer."""
    launches_per_step: float
    """Launches of kernels and graphs by the host."""


def is_launch(event: Any) -> bool:
    """Return whether a profiler event is the launch of a kernel or a graph by the host."""
    return event.device_type.name == "CPU" and bool(_LAUNCH.match(event.name))


def is_kernel(event: Any) -> bool:
    """Return whether a profiler event is a kernel on the device, not a copy, a fill or an annotation."""
    if event.device_type.name != "CUDA" or event.is_user_annotation or event.name.startswith(sp.PREFIX):
        return False
    return not _NO_KERNEL.match(event.name)


def count(events: Sequence[Any], num_steps: int, n_layer: int) -> Launches | None:
    """Return the counts of a step from the events of `num_steps` steps; None if the profiler recorded no kernel."""
    kernels = Counter(e.name for e in events if is_kernel(e))
    if not kernels or not num_steps:
        return None
    layer = sum(calls // (num_steps * n_layer) for calls in kernels.values())
    return Launches(kernels.total() / num_steps, layer, sum(map(is_launch, events)) / num_steps)


def measure_launches(
    llm: LLM, *, batch: int = 1, prompt_tokens: int = 32, params: SamplingParams | None = None
) -> Launches:
    """Return the counts of a decode step.

    Args:
        llm: on a CUDA device, idle.
        batch: number of sequences; their prompts are random tokens.
        prompt_tokens: tokens per prompt.
        params: sampling parameters, except max_tokens and ignore_eos. None is greedy.

    Raises:
        NanoinferError: the device is a CPU, or the profiler recorded no kernel.
    """
    if llm.device == "cpu":
        raise NanoinferError(f"device={llm.device!r} launches no kernels: count them on a CUDA device")
    # In a large batch, the first sequences decode during the prefill of the last ones: all must generate beyond that.
    tokens = 1 + DECODE_STEPS + batch * prompt_tokens // PREFILL_TOKENS
    sampling = replace(params or SamplingParams(temperature=0), max_tokens=tokens, min_tokens=0, ignore_eos=True)
    job = replace(new_job(llm, random_prompts(llm, batch, prompt_tokens), sampling, decode_only=True), parts=())
    job.warm_up()
    recorder, ranges, _ = job.recorded()
    counts = count(list(recorder.events()), ranges.calls[sp.ENGINE], llm.config.n_layer)
    if counts is None:
        raise NanoinferError(
            f"torch's profiler recorded no kernel on {llm.device}: check that this process may use CUPTI"
        )
    return counts
