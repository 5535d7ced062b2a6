"""CUDA graphs for tests on a CPU: what a recording is, without the device.

Like a graph, a recording keeps operations with the very tensors and the very numbers of the time it was made: Python
does not run again, so a position or a length that the host passed in is the old one at every replay. Recording has no
effect, and a replay overwrites the results and everything that was computed on the way.

Covered: operations of torch. Not covered: Triton's kernels under its interpreter, which torch does not see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default: "the host reads a value",
    aten.nonzero.default: "a shape depends on values",
    aten.masked_select.default: "a shape depends on values",
    aten.where.Scalar: "numbers are copied to the device",
    aten.where.ScalarOther: "a number is copied to the device",
    aten.where.ScalarSelf: "a number is copied to the device",
}
"""What makes the host wait on a real device, and so cannot stand in a graph."""


class _Tape(TorchDispatchMode):
    """Notes every operation, and what it would overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.overwritten: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func not in WAITS, f"{func} in a recording: {WAITS[func]}"
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.overwritten.append((value, value.clone()))
        out = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, out))
        return out


class FakeRecorder:
    """Stands in for graphs.CudaRecorder. Each recording takes `bytes_each`; `fail_at` is one that finds no memory."""

    def __init__(self, bytes_each: int = 1, fail_at: int | None = None) -> None:
        self.num_recordings = self.num_replays = 0
        self.kernels: list[str] = []
        """The operations of the last recording that compute or copy; PyTorch has one kernel on a GPU for each."""
        self._bytes_each, self._fail_at = bytes_each, fail_at

    def record(self, compute: Callable[[], T]) -> tuple[Callable[[], object], T]:
        if self.num_recordings == self._fail_at:
            raise torch.OutOfMemoryError("no memory")
        with _Tape() as tape:
            result = compute()
        for tensor, value in reversed(tape.overwritten):
            tensor.copy_(value)
        self.num_recordings += 1
        self.kernels = [func.__name__ for func, *rest in tape.operations if _writes(func, *rest)]

        def replay() -> None:
            self.num_replays += 1
            for func, args, kwargs, out in tape.operations:
                again = func(*args, **kwargs)
                given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and _memory(old) not in given:  # neither a view nor written in place
                        old.copy_(new)

        return replay, result

    def num_bytes(self) -> int:
        return self.num_recordings * self._bytes_each


def _writes(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Return whether an operation writes: in place, or to memory of its own, which it does not only allocate."""
    if func._schema.is_mutable:
        return True
    given, made = ({_memory(x) for x in tree_leaves(tree) if isinstance(x, Tensor)} for tree in ((args, kwargs), out))
    return "empty" not in func.__name__ and not made <= given


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
