"""CUDA graphs: kernels are recorded once and launched together.

A decode step runs hundreds of kernels. Each takes the host some microseconds to launch; together, the launches take
longer than a fast GPU takes to read the weights. A graph needs one launch (Gray, "Getting Started with CUDA Graphs",
NVIDIA, 2019).

A graph replays kernels with the addresses and the host's values of the recording. A recorded function may therefore
read only tensors at fixed addresses (static_shapes.py). Its results are at fixed addresses too, and the next replay of
any graph overwrites them, because all graphs share one memory pool.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Generic, TypeVar

import torch

log = logging.getLogger("nanoinfer")

T = TypeVar("T")

NO_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""PyTorch's messages when the driver or cuBLAS is out of memory."""


class CudaRecorder:
    """Records CUDA graphs on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Return a function that replays `compute`, and its results: the same tensors after every replay.

        Recording does not run the work, whose memory comes from the shared pool; only a replay does.

        Raises:
            RuntimeError: recording failed. If memory ran out, `out_of_memory` is true for the error.
        """
        graph, mode = torch.cuda.CUDAGraph(), torch.is_inference_mode_enabled()
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(torch.cuda.current_stream()),  # a failed recording does not restore the stream
            torch.inference_mode(False),  # a recording starts with writes to tensors that all recordings share
            torch.cuda.graph(graph, pool=self._pool, stream=_side_stream(self._device)),
            torch.inference_mode(mode),
        ):
            result = compute()
        return graph.replay, result

    def num_bytes(self) -> int:
        """Return the bytes that PyTorch has reserved on the device, without cached blocks that it can release."""
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()  # a recording does this too, which would hide the memory that it takes
        return torch.cuda.memory_reserved(self._device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable cyclic garbage collection: freeing an old graph or event would invalidate a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream to record on. It is kept, because libraries allocate a workspace for each stream.

    PyTorch's default capture stream belongs to one device only.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Graphs(Generic[T]):
    """Recordings by key. A key is recorded when it occurs for the second time, within a memory limit.

    The first time, `compute` runs without a recording. This initializes libraries and compiles kernels, which must not
    happen during a recording, and a shape that occurs only once is not recorded.

    Args:
        recorder: None: nothing is recorded.
        memory_limit: bytes that all recordings may take. Once it is reached, new keys run without a recording.
    """

    def __init__(self, recorder: CudaRecorder | None, memory_limit: int) -> None:
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
        """Run `compute` or replay its recording, and return its results. The next replay overwrites them.

        Args:
            key: equal keys run the same kernels on the same tensors.
            compute: must not wait for the device, nor allocate memory whose size depends on values on the device.
        """
        if key not in self._recorded:
            first = key not in self._seen
            self._seen.add(key)
            if first or self._full or self._recorder is None or not self._record(self._recorder, key, compute):
                return compute()
        replay, result = self._recorded[key]
        replay()
        return result

    def _record(self, recorder: CudaRecorder, key: Hashable, compute: Callable[[], T]) -> bool:
        """Record `compute` if there is memory for it; return whether it was recorded."""
        before = recorder.num_bytes()
        try:
            with _no_garbage_collection():
                self._recorded[key] = recorder.record(compute)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self._stop("the device is out of memory: lower kv_cache_memory or max_num_seqs")
            return False
        self.num_bytes += max(0, recorder.num_bytes() - before)
        if self.num_bytes >= self._limit:
            self._stop(f"the limit is graph_memory={self._limit:,} bytes: raise it if steps of other sizes are slow")
        return True

    def _stop(self, why: str) -> None:
        self._full = True
        log.warning("%d CUDA graphs hold %s bytes, no more are captured; %s", len(self), f"{self.num_bytes:,}", why)


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that memory ran out: for a tensor, a library or the graph itself.

    Libraries and graphs report it in the message only. Leaving a failed recording may raise another error, whose
    context is then the cause.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(message in str(error) for message in NO_MEMORY):
            return True
        error = error.__context__
    return False
