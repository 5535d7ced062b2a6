"""Stands for a CUDA device in every Python process that finds this file as sitecustomize.py (test_gpu_procedure.py).

Only what computes is replaced: the cases of kernels and samplers, the backends of the suite, the ceiling; models have
one small layer. Each case takes a moment, and writes a line to the file $STAND_IN_LOG before. Of the packages, only
NumPy, PyTorch, Triton and pytest are found.
"""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

ABSENT = (
    "nanoinfer._native", "tokenizers", "huggingface_hub", "safetensors", "click", "rich", "jinja2", "transformers",
    "hypothesis", "scipy", "llguidance", "vl_convert", "xdist",
)  # fmt: skip


def work(name: str) -> None:
    """Note that a case begins, and take a moment."""
    with open(os.environ["STAND_IN_LOG"], "a") as log:
        log.write(f"{name}\n")
    time.sleep(random.random() / 20)


def patch_torch(torch: ModuleType) -> None:
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        name="NVIDIA H200", total_memory=141 * 10**9, multi_processor_count=132, major=9, minor=0
    )


def patch_devices(devices: ModuleType) -> None:
    devices.num_cuda_devices = lambda: 1
    devices.free_memory = lambda device: 100 * 10**9


def patch_rows(rows: ModuleType) -> None:
    measure = rows.measure

    def measure_nothing(cases: Any, args: Any) -> int:
        def case(name: str) -> dict[str, float]:
            work(f"{args.by} {name}")
            if name == "qkv gpt2 bfloat16 1 rows":
                raise RuntimeError("Triton Error [CUDA]: misaligned address")
            return {"usec": 300.0} | ({"predicted_usec": 200.0} if args.by == "steps" else {})

        return int(measure({name: lambda name=name: case(name) for name in cases}, args))

    rows.measure = measure_nothing


class Backend:
    """A backend whose tokens are all 1, at 1,000 tokens/s and sequence."""

    def __init__(self, case: Any, weights: Any) -> None:
        self.case = case
        self.runs = 0

    def run(self, requests: Any) -> tuple[list[list[int]], Any]:
        from nanoinfer.bench.case import RunTimes

        self.runs += 1
        arrivals = [[0.001 * (i + 1) for i in range(n)] for n in requests.output_tokens]
        return [[1] * n for n in requests.output_tokens], RunTimes(sum(map(len, requests.prompts)), arrivals)

    def launches(self) -> dict[str, float]:
        case = self.case
        work(f"bench {case.label} {case.model} {case.batch}")  # of an engine it is measured last but one
        return {"kernels_per_step": 60.0, "kernels_per_layer": 5, "launches_per_step": 1.0}

    def verify(self) -> float:
        return 1.1

    def logits(self, path: str) -> None:
        import numpy as np

        np.save(path, np.zeros((2, 4, 8)))


def patch_backends(backends: ModuleType) -> None:
    backends.open_backend = Backend
    backends.prepare = lambda case, weights: None


def patch_measure(measuring: ModuleType) -> None:
    from nanoinfer.roofline.ceilings import DEVICES

    measuring.measure = lambda **given: DEVICES["h200"]


def patch_load(load: ModuleType) -> None:
    load.PRESETS = {n: replace(load.PRESETS[n], n_layer=1, n_embd=load.PRESETS[n].n_head) for n in ("gpt2", "gpt2-xl")}


PATCHES = {
    "torch": patch_torch,
    "gpu_rows": patch_rows,
    "nanoinfer.engines.devices": patch_devices,
    "nanoinfer.bench.backends": patch_backends,
    "nanoinfer.roofline.ceilings": patch_measure,
    "nanoinfer.checkpoints.load": patch_load,
}


class Finder:
    """Finds modules as another finder does, but for those that are absent, and patches some after they have run."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = None if name.startswith(ABSENT) else self.finder.find_spec(name, path, target)
        if spec is not None and name in PATCHES:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), PATCHES[name](module))
        return spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


sys.meta_path[:] = map(Finder, sys.meta_path)
