"""The roofline's limit for a served model: the tokens per second of one sequence that this machine permits.

/info has it, for the page. The machine is measured when /info is asked for the first time and no request runs, in a
thread: for about a second it uses all CPUs and 256 MiB. A request that comes meanwhile is slowed, and so is the result.
"""

from __future__ import annotations

import asyncio
import functools
from itertools import pairwise

from nanoinfer.async_llm import AsyncLLM
from nanoinfer.errors import NanoinferError
from nanoinfer.llm import LLM
from nanoinfer.roofline.arithmetic import decode
from nanoinfer.roofline.ceilings import DEVICES, Ceiling
from nanoinfer.roofline.formats import FORMATS
from nanoinfer.roofline.predict import predict


class SpeedLimit:
    """The limit, once it is known.

    Args:
        llm: the served model.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._measured: asyncio.Future[float | None] | None = None

    def get(self) -> float | None:
        """Return tokens per second; None while they are not known. Call it in the event loop of the server."""
        if self._measured is None and self._llm.num_unfinished_requests == 0:
            self._measured = asyncio.ensure_future(asyncio.to_thread(tokens_per_sec, self._llm.llm))
        return self._measured.result() if self._measured is not None and self._measured.done() else None


def tokens_per_sec(llm: LLM) -> float | None:
    """Return the limit for one sequence that fills half of the context; None if the machine's peaks are not known.

    On a GPU they are the published ones, because a measurement needs memory that the KV cache has.
    """
    fmt = FORMATS[llm._model.quantization or llm.dtype]
    try:
        ceiling = _this_cpu() if llm.device == "cpu" else _published(llm.device)
        if ceiling is None:
            return None
        return 1 / predict(decode(llm.config, fmt), ceiling, fmt, B=1, N=max(1, llm.config.block_size // 2)).seconds
    except (NanoinferError, KeyError):  # memory is insufficient, or there is no peak for the format
        return None


@functools.cache
def _this_cpu() -> Ceiling:
    """Measure the CPUs of this machine with a smaller buffer and fewer rounds than `nanoinfer roofline`."""
    from nanoinfer.roofline.measure import Workload, measure

    return measure(Workload(num_bytes=1 << 28, matrix_size=512, num_rounds=5))


def _published(device: str) -> Ceiling | None:
    """Return the published peaks of a CUDA device: "NVIDIA H100 80GB HBM3" -> those of h100; None: not in the table."""
    import torch

    words = torch.cuda.get_device_name(device).lower().split()
    names = {*words, *("".join(pair) for pair in pairwise(words))}  # rtx 4090 -> rtx4090
    return next((DEVICES[name] for name in sorted(names) if name in DEVICES), None)
