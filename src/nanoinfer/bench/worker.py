"""The process that measures one backend: one JSON request a line on stdin, one JSON answer a line on stdout.

    {"do": "export", "case": {...}, "weights": "folder"}   -> {"answer": null}
    {"do": "load", "case": {...}, "weights": "folder"}     -> {"answer": null}
    {"do": "run", "case": {...}, "seed": 0}                -> {"answer": {"tokens": [[...]], "times": {...},
                                                               "peak_memory_bytes": ..., "speculation": null}}
    {"do": "breakdown"}  launches, logits, verify: engines -> {"answer": {"attention": ...}}
    any failure                                            -> {"error": "one line"}

A run's case may differ from the loaded one in its sizes and its draft; `seed` chooses other prompts. The process ends
with its stdin, and on Linux with the process that started it, also while it computes. What libraries print goes to
stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from nanoinfer.bench.backends import open_backend, prepare
from nanoinfer.bench.case import Case, make_requests
from nanoinfer.bench.model_folders import read_passages
from nanoinfer.checkpoints import hf_config
from nanoinfer.errors import NanoinferError, one_line
from nanoinfer.utils.environment import waited_seconds
from nanoinfer.utils.processes import end_with_parent


class Worker:
    """Holds the backend between requests."""

    def __init__(self) -> None:
        self._backend: Any = None
        self._speculated = False

    def answer(self, do: str, **fields: Any) -> Any:
        """Perform one request; return its answer."""
        if "case" in fields:
            fields["case"] = Case(**fields["case"])
        method = getattr(self, f"_{do}") if do in ("export", "load", "run") else getattr(self._backend, do)
        return method(**fields)

    def _export(self, case: Case, weights: str) -> None:
        prepare(case, Path(weights))

    def _load(self, case: Case, weights: str) -> None:
        folder = Path(weights)
        self._vocab_size = hf_config.read(folder / "config.json").vocab_size
        self._passages = read_passages(folder)
        self._backend = open_backend(case, folder)

    def _run(self, case: Case, seed: int) -> dict[str, Any]:
        requests = make_requests(case, self._vocab_size, seed=seed, passages=self._passages)
        if case.draft is not None or self._speculated:  # a draft is set, and removed again
            self._backend.speculate(case)
            self._speculated = True
        before = waited_seconds()
        tokens, times = self._backend.run(requests)
        after = waited_seconds()
        if (counts := [len(t) for t in tokens]) != requests.output_tokens:
            raise NanoinferError(f"it generated {sum(counts)} tokens instead of {sum(requests.output_tokens)}")
        return {
            "tokens": tokens,
            "times": dataclasses.asdict(times) | {"waited_sec": after and after - (before or 0.0)},
            "peak_memory_bytes": peak_memory(case.device),
            "speculation": self._backend.speculation() if case.draft is not None else None,
        }


def peak_memory(device: str) -> int | None:
    """Return the peak memory of this process in bytes: on a GPU torch's (None without it), else resident memory."""
    if device.startswith("cuda"):
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():  # reading a peak would start CUDA
            return None
        return torch.cuda.max_memory_allocated(device) or None
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):  # not getrusage: its peak includes the parent's, from before exec
                return int(line.split()[1]) * 1024
    return None


def main() -> None:
    """Answer requests until stdin ends."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        try:
            answer = {"answer": worker.answer(**json.loads(line))}
        except Exception as e:  # every failure is an answer: the harness makes it a row
            answer = {"error": one_line(e)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
