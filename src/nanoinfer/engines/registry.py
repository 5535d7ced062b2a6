"""The table of engines, what each supports, and how `auto` chooses one.

A new engine is one entry in `ENGINES`. PyTorch is imported when an engine in PyTorch is built, or to count the devices
of a machine with a CUDA driver.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanoinfer.config import DTYPES, EngineConfig, EngineLimits
from nanoinfer.engines.base import Engine
from nanoinfer.engines.devices import free_memory, num_cuda_devices
from nanoinfer.errors import NanoinferError, missing_extra, show
from nanoinfer.kv.plan import BYTES, plan_limits
from nanoinfer.models.parameters import OF_ASSISTANT
from nanoinfer.utils import processes
from nanoinfer.utils.progress import ProgressBar

if TYPE_CHECKING:
    from nanoinfer.checkpoints.weights import Weights

log = logging.getLogger("nanoinfer")


@dataclass(frozen=True)
class EngineSpec:
    """One engine (a rung of the ladder) and its capabilities."""

    name: str
    idea: str
    """The one idea, in README's table and in `nanoinfer engines`."""
    target: str
    """The engine's class as "module:Class"; imported when the engine is chosen."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = DTYPES
    quantizations: tuple[str, ...] = ()
    memory: str = "tokens"
    """Layout of the KV cache: one of kv.plan.LAYOUTS."""
    options: tuple[str, ...] = ()
    """Fields of EngineConfig that the engine supports beside those that set its limits. Setting others is an error."""
    module: str | None = None
    """Optional dependency (import name)."""
    native: bool = False
    """Whether the engine needs the native extension. Such an engine loads weights one at a time, not a model."""
    preferred: bool = True
    """Whether `auto` may choose it when another engine supports the configuration too."""

    def unavailable(self) -> str | None:
        """Return why this engine cannot run on this machine, or None."""
        if self.native and importlib.util.find_spec("nanoinfer._native") is None:
            return "nanoinfer was built without the native extension: install a C++ compiler, then reinstall nanoinfer"
        if not self.native and importlib.util.find_spec("torch") is None:
            return missing_extra("torch", "torch")
        if self.module is not None and importlib.util.find_spec(self.module) is None:
            return missing_extra(self.module, "gpu")
        if "cpu" not in self.devices and not num_cuda_devices():
            return "no CUDA device"
        return None


IN_PYTORCH = ("kv_cache_dtype", "enable_lora")
ENGINES: dict[str, EngineSpec] = {
    spec.name: spec
    for spec in (  # the ladder: `auto` chooses the last one that fits
        EngineSpec(
            "recompute", "run the whole prefix for every token; the reference of all others",
            "nanoinfer.engines.recompute:RecomputeEngine", memory="none", options=IN_PYTORCH,
        ),
        EngineSpec(
            "dynamic", "keep keys and values, append to them by concatenation",
            "nanoinfer.engines.dynamic:DynamicEngine", options=IN_PYTORCH,
        ),
        EngineSpec(
            "static", "allocate keys and values once, write in place",
            "nanoinfer.engines.static:StaticEngine", memory="slots", options=IN_PYTORCH,
        ),
        EngineSpec(  # not preferred: it gathers keys and values, which `static` reads in place
            "paged", "keys and values in blocks of one pool; prefixes shared by reference",
            "nanoinfer.engines.paged:PagedEngine", memory="blocks", options=IN_PYTORCH, preferred=False,
        ),
        EngineSpec(  # not preferred: the first step of each shape takes seconds to compile
            "compiled", "torch.compile over static shapes", "nanoinfer.engines.compiled:CompiledEngine",
            memory="padded slots", options=("graph_memory", *IN_PYTORCH), preferred=False,
        ),
        EngineSpec(
            "cuda_graph", "capture the step once, replay it; its inputs stay on the GPU",
            "nanoinfer.engines.cuda_graph:CudaGraphEngine", devices=("cuda",), memory="padded slots",
            options=("graph_memory", *IN_PYTORCH),
        ),
        EngineSpec(
            "native", "a C++ decoder that streams packed weights: 32, 16, 8 or 4 bits",
            "nanoinfer.engines.native:NativeEngine", devices=("cpu",), quantizations=("int8", "int4"),
            memory="padded blocks", options=("quantization", "kv_cache_dtype", "threads", "enable_lora"), native=True,
        ),
        EngineSpec(  # not preferred: not measured yet
            "triton", "few fused GPU kernels a layer; weights in 32, 16, 8 or 4 bits",
            "nanoinfer.engines.triton_engine:TritonEngine", devices=("cuda",), quantizations=("int8", "int4"),
            memory="padded slots", options=("quantization", "graph_memory"), module="triton", preferred=False,
        ),
    )
}  # fmt: skip


def resolve(config: EngineConfig, device: str, dtype: str) -> EngineSpec:
    """Return the engine to use: the requested one, or for `auto` the fastest that supports the configuration.

    Raises:
        NanoinferError: there is no such engine, or it does not support the configuration; the message has the reason.
    """
    known = dict.fromkeys(name for spec in ENGINES.values() for name in spec.quantizations)
    if config.quantization not in (None, *known):
        raise NanoinferError(
            f"quantization={show(config.quantization)} is unknown: use {' or '.join(known)}, or leave it out and give a"
            " file or folder in another format, which is read as it is"
        )
    if config.engine == "auto":
        reasons = {s: _why_not(s, config, device, dtype) for s in ENGINES.values()}
        fitting = sorted((s for s, reason in reasons.items() if reason is None), key=lambda s: s.preferred)
        if not fitting:
            raise NanoinferError(
                f"no engine supports quantization={config.quantization!r} with dtype={dtype} on {device}:"
                " run `nanoinfer engines` to see what each supports"
            )
        chosen = fitting[-1]
        log.info("engine=auto: using %s, the fastest for %s and %s", chosen.name, device, dtype)
        faster = list(ENGINES.values())[list(ENGINES).index(chosen.name) + 1 :]
        for s in faster:  # engines that support this device but cannot run on this machine
            if device.split(":")[0] in s.devices and s.preferred and (why := s.unavailable()) is not None:
                log.warning("engine=auto: skipped %s: %s", s.name, why)
        return chosen
    if config.engine not in ENGINES:
        raise NanoinferError(f"engine={config.engine!r} is unknown: use auto or one of {', '.join(ENGINES)}")
    spec = ENGINES[config.engine]
    if (reason := _why_not(spec, config, device, dtype)) is not None:
        raise NanoinferError(f"engine={spec.name!r} cannot run: {reason}")
    return spec


def _why_not(spec: EngineSpec, config: EngineConfig, device: str, dtype: str) -> str | None:
    """Return why an engine does not support the configuration, or None."""
    if (reason := spec.unavailable()) is not None:
        return reason
    for name, value, have in (
        ("device", device.split(":")[0], spec.devices),
        ("dtype", dtype, spec.dtypes),
        ("quantization", config.quantization, (None, *spec.quantizations)),
    ):
        if value not in have:
            return f"{name}={value!r} is not supported: use one of {', '.join(map(str, have))}"
    if not spec.native and "kv_cache_dtype" in spec.options and (cache := config.kv_cache_dtype) in BYTES:
        return f"kv_cache_dtype={cache!r} is not supported: use auto (the type of the weights), int8 or int4"
    neutral_values = {"kv_cache_dtype": "auto", "threads": None, "graph_memory": None, "enable_lora": False}
    for name, neutral in neutral_values.items():
        has = name in spec.options and not (name == "graph_memory" and device == "cpu")  # no graphs there
        if not has and (value := getattr(config, name)) != neutral:
            return f"{name}={value!r} is not supported: leave it out"
    return None


def build(
    spec: EngineSpec,
    weights: Weights,
    config: EngineConfig,
    device: str,
    limits: EngineLimits | None = None,
    owner: Engine | None = None,
) -> Engine:
    """Return a running engine.

    Args:
        spec: from `resolve`.
        weights: in the dtype to compute in.
        config: the configuration that `resolve` accepted; fields that the engine does not support have their defaults.
        limits: the capacity of the engine; None: computed by `plan_limits`.
        owner: engine with the tensors SHARED (models/parameters.py) if the weights lack them; `native` if this one is.
            Of an assistant, the engine of its model, which `spec` is, too.

    Raises:
        NanoinferError: the engine does not support the model, or the KV cache does not fit in memory.
    """
    if processes.generation() and not spec.native and device == "cpu":
        log.warning(
            "engine=%s: PyTorch computes with one thread, because a forked process does not inherit its thread pool:"
            " start the process with multiprocessing's method spawn, or use engine=native",
            spec.name,
        )
    costly = weights.config.latent is not None if config.quantization else weights.block_formats
    if spec.native and costly and config.kv_cache_dtype == "auto":
        config = replace(config, kv_cache_dtype="bfloat16")  # 8 bits cost quality (docs/quality.md)
    module, _, name = spec.target.partition(":")
    if assists := weights.config.backbone is not None:
        if owner is None:
            raise NanoinferError("the model is an assistant, whose keys are another model's: load that one, with draft")
        whole = weights.read
        weights = replace(weights, read=lambda: (pair for pair in whole() if not pair[0].startswith(OF_ASSISTANT)))
    if limits is None:
        limits = plan_limits(weights.config, config, spec.memory, weights.dtype, free_memory(device))
    with ProgressBar("load") as bar:
        weights = weights.watched(bar.update)
        engine_class: Any = getattr(importlib.import_module(module), name)
        if spec.native:
            return engine_class(weights, limits, config, owner)  # type: ignore[no-any-return]
        from nanoinfer.checkpoints.gpt_loading import load_gpt

        engine_class.check(weights.config)
        if assists:
            from nanoinfer.engines.torch_engine import AssistantEngine

            return AssistantEngine(load_gpt(weights, device), owner)  # type: ignore[arg-type]
        gpt = load_gpt(weights, device, None if owner is None else owner.model)
        return engine_class(gpt, limits, config)  # type: ignore[no-any-return]
