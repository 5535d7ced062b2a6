"""The process that measures one backend: one JSON request a line on stdin, one JSON answer a line on stdout.

    {"do": "load", "case": {...}, "weights": "folder"}     -> {"ok": true, "load_sec": 1.2}
    {"do": "run", "shape": {"output_tokens": 8}}           -> {"ok": true, "tokens": [[...]], "arrivals": [[...]],
                                                               "num_prompt_tokens": 32, "peak_memory_bytes": ...,
                                                               "reserved_bytes": null, "kv_cache_bytes": ...}
    {"do": "breakdown"}                                    -> {"ok": true, "percent": {"attention": ...}}
    {"do": "launches"}                                     -> {"ok": true, "counts": {"kernels_per_step": ...}}
    {"do": "verify"}                                       -> {"ok": true, "ratio": 1.08}
    anything that goes wrong                               -> {"ok": false, "error": "one line"}

`shape` overrides sizes of the case for one run, `seed` chooses other prompts. The process ends with its stdin, so it
cannot outlive the one that started it. What libraries print goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoinfer.bench import prompts
from nanoinfer.bench.backends import Backend, open_backend
from nanoinfer.bench.case import Case, make_work
from nanoinfer.bench.model_folders import hold
from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints import hf_config


class Worker:
    """Holds the backend between requests."""

    def __init__(self) -> None:
        self._case: Case | None = None
        self._backend: Backend | None = None
        self._passages: prompts.Passages = ()
        self._vocab_size = 0
        self._speculated = False

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what one request asks for; return the answer's fields."""
        if request["do"] == "load":
            return self._load(Case(**request["case"]), Path(request["weights"]))
        assert self._case is not None
        assert self._backend is not None
        if request["do"] == "breakdown":
            return {"percent": self._backend.breakdown()}  # type: ignore[attr-defined]
        if request["do"] == "launches":
            return {"counts": self._backend.launches()}  # type: ignore[attr-defined]
        if request["do"] == "verify":
            return {"ratio": self._backend.verify()}  # type: ignore[attr-defined]
        case = dataclasses.replace(self._case, **request.get("shape", {}))
        work = make_work(case, self._vocab_size, seed=request.get("seed", 0), passages=self._passages)
        if case.draft is not None or self._speculated:  # backends that can are asked to, and to stop it again
            self._backend.speculate(case)  # type: ignore[attr-defined]
            self._speculated = True
        tokens, times = self._backend.run(work)
        if (made := [len(t) for t in tokens]) != work.output_tokens:
            raise NanoinferError(f"it made {sum(made)} tokens, {sum(work.output_tokens)} were asked for")
        speculation = self._backend.speculation() if case.draft is not None else None  # type: ignore[attr-defined]
        return {
            "speculation": speculation,
            "tokens": tokens,
            "arrivals": times.arrivals,
            "num_prompt_tokens": times.num_prompt_tokens,
            "peak_memory_bytes": peak_memory_bytes(case.device),
            "reserved_bytes": reserved_bytes(case.device),
            "kv_cache_bytes": getattr(self._backend, "kv_cache_bytes", None),
        }

    def _load(self, case: Case, weights: Path) -> dict[str, Any]:
        start = time.perf_counter()
        hold(weights)
        self._vocab_size = hf_config.read(weights / "config.json").vocab_size
        self._passages = prompts.read(weights)
        self._case, self._backend = case, open_backend(case, weights)
        return {"load_sec": time.perf_counter() - start}


def peak_memory_bytes(device: str) -> int | None:
    """Return the most memory that this process has held: of a GPU through torch, else resident memory.

    None for a process that holds a GPU's memory past torch (CTranslate2 has an allocator of its own): torch's peak is
    then 0 or nearly so, and no figure of the backend.
    """
    if device.startswith("cuda"):
        import torch

        return _of_torch(torch.cuda.max_memory_allocated, device)
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):  # not getrusage: its peak includes the parent's, from before exec
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reserved_bytes(device: str) -> int | None:
    """Return the most that torch's allocator has taken of a GPU, in use or not (graphs keep pools); else None."""
    if not device.startswith("cuda"):
        return None
    import torch

    return _of_torch(torch.cuda.max_memory_reserved, device)


def _of_torch(peak: Callable[[str], int], device: str) -> int | None:
    """Return a peak of torch's allocator, None where this process has taken no GPU memory through it."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None  # asking would start CUDA in a process that has no use for it
    return peak(device) or None


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        try:
            answer = {"ok": True} | worker.answer(json.loads(line))
        except Exception as e:  # every failure is an answer: the harness makes it a row
            text = " ".join(str(e).split())[:300]
            answer = {
                "ok": False,
                "error": text if type(e).__name__ == "NanoinferError" else f"{type(e).__name__}: {text}",
            }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
