"""CUDA graphs: kernels recorded once, launched together.

A decode step is hundreds of kernels, and each costs the host some microseconds to launch: together longer than the
memory of a fast GPU needs to deliver the weights. A graph is one launch (Gray, "Getting Started with CUDA Graphs",
NVIDIA, 2019).

A graph replays kernels with the addresses and the host's numbers of the recording. So what is recorded here is a
function of tensors that stay where they are (slots.py), and its results stay where they are, too: they are overwritten
by the next replay of any graph, for all graphs take their memory from one pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import cache
from typing import Generic, Protocol, TypeVar

import torch

log = logging.getLogger("nanoinfer")

T = TypeVar("T")

NO_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch says when the driver or cuBLAS had no memory."""


class Recorder(Protocol):
    """Records what a function does on the device, for replaying it."""

    def record(self, compute: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Return what replays `compute`, and its results: the same tensors after every replay.

        Recording does not do the work, only a replay does.

        Raises:
            RuntimeError: memory ran out, or did so in the error's context: see `_out_of_memory`.
        """
        ...

    def num_bytes(self) -> int:
        """Return the device memory that this process holds now."""
        ...


class CudaRecorder:
    """Records CUDA graphs on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Record a graph: kernels are not run, memory is taken from the shared pool."""
        graph, mode = torch.cuda.CUDAGraph(), torch.is_inference_mode_enabled()
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(torch.cuda.current_stream()),  # where a recording that fails would not come back to
            torch.inference_mode(False),  # a recording begins by writing to tensors that it shares with all others
            torch.cuda.graph(graph, pool=self._pool, stream=_side_stream(self._device)),
            torch.inference_mode(mode),
        ):
            result = compute()
        return graph.replay, result

    def num_bytes(self) -> int:
        """Return the bytes that torch has reserved on the device, less those that it would give back."""
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()  # a recording begins with that, too: what it takes would be set off against it
        return torch.cuda.memory_reserved(self._device)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream to record on: libraries keep workspaces by stream, and torch's own is on one device only."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Graphs(Generic[T]):
    """Recordings by key, made when a key comes for the second time, within a limit of memory.

    The first time, `compute` simply runs: that prepares what must not happen inside a recording (libraries start,
    kernels are compiled), and a shape that never comes again costs nothing.

    Args:
        recorder: of the device.
        memory_limit: bytes that all recordings may take; what comes after that runs without one.
    """

    def __init__(self, recorder: Recorder, memory_limit: int) -> None:
        self._recorder = recorder
        self._limit = memory_limit
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, tuple[Callable[[], object], T]] = {}
        self._full = False
        self.num_bytes = 0
        """Device memory that the recordings took."""

    def __len__(self) -> int:
        """Return the number of recordings."""
        return len(self._recorded)

    def run(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Do what `compute` does, and return what it returns; a replay's results are overwritten by the next.

        Args:
            key: equal keys mean: the same kernels on the same tensors.
            compute: must not wait for the device, nor take memory of a size that depends on values.
        """
        if key not in self._recorded:
            first = key not in self._seen
            self._seen.add(key)
            if first or self._full or not self._record(key, compute):
                return compute()
        replay, result = self._recorded[key]
        replay()
        return result

    def _record(self, key: Hashable, compute: Callable[[], T]) -> bool:
        """Record `compute` where there is memory for it; return whether it is recorded."""
        before = self._recorder.num_bytes()
        try:
            self._recorded[key] = self._recorder.record(compute)
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            self._stop("the device has no memory for another: lower kv_cache_memory or max_num_seqs")
            return False
        self.num_bytes += max(0, self._recorder.num_bytes() - before)
        if self.num_bytes >= self._limit:
            self._stop(f"the limit is graph_memory={self._limit:,}: raise it if steps of other sizes are slow")
        return True

    def _stop(self, why: str) -> None:
        self._full = True
        log.warning("%d CUDA graphs hold %s bytes and no more are made; %s", len(self), f"{self.num_bytes:,}", why)


def _out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out: for a tensor, a library or the graph itself, which only says so in words.

    Leaving a recording that failed may raise an error of its own; the cause is then its context.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY):
            return True
        error = error.__context__
    return False
