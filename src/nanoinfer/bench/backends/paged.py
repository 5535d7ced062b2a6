"""OpenVINO GenAI and vLLM on a CPU: continuous batching and paged keys and values, one `step` at a time.

OpenVINO: `optimum-intel` converts the folder, and NNCF compresses the weights to 8 bits (for each channel) or 4 (groups
of 128, all layers), the settings of its documentation; embedding and head keep 8 bits. It computes in the case's dtype.
In float32, keys and values are float32 too, so that tokens can be compared. The pipeline takes token ids and needs no
tokenizer.

vLLM: its engine in this process, compiled as by default. Weights of 8 and 4 bits are compressed-tensors folders, which
vLLM reads and does not make: symmetric int8 for each output with activations in int8 for each token, and symmetric int4
in groups of 128. `_quantize` writes them with values rounded to nearest. The head keeps its dtype, as in such folders
on the Hub. vLLM's documentation asks to preload tcmalloc and Intel's OpenMP: the interpreter of
`--peer-python vllm=PATH` may be a script that does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer.bench.backends import FOLDER, Recorder, export_once, require_case, require_module, require_room
from nanoinfer.bench.case import Case, Requests, RunTimes, make_requests
from nanoinfer.checkpoints import huggingface
from nanoinfer.errors import NanoinferError, reason
from nanoinfer.utils.environment import num_cpus

_BITS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8, "sym": True}, "int4": {"bits": 4, "sym": True, "group_size": 128, "ratio": 1.0},
}  # fmt: skip
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_MAX_STEP_TOKENS = 2048  # as ours: a prompt of 1,000 tokens is one step
_GROUP = 128  # weights of int4 that share a scale
_PROJECTION = re.compile(r"\.(c_attn|c_proj|c_fc|[qkvo]_proj|gate_proj|up_proj|down_proj)\.weight$")


class OpenVINO:
    """A ContinuousBatchingPipeline whose cache holds all sequences of the case."""

    def __init__(self, case: Case, weights: Path) -> None:
        folder = self.export(case, weights)
        genai, core = require_module("openvino_genai"), require_module("openvino")
        config = huggingface.read_config(weights / "config.json")
        self._capacity = min(make_requests(case, 1).longest, config.block_size)
        self._eos = next(iter(config.eos_token_ids), 0)  # a request must have one; it is ignored
        self._genai, self._tensor = genai, core.Tensor
        scheduler = genai.SchedulerConfig()
        need = case.batch * (self._capacity + 64) * config.kv_bytes_per_token(4)
        scheduler.cache_size = 1 + (need >> 30)  # GiB
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = case.batch, max(_MAX_STEP_TOKENS, case.batch)
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_PRECISION_HINT": _PRECISIONS[case.dtype]}
        if case.format == "float32":
            properties["KV_CACHE_PRECISION"] = "f32"
        try:
            self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        except RuntimeError as e:
            raise NanoinferError(f"openvino cannot load {folder}: {reason(e)}") from None

    @staticmethod
    def export(case: Case, weights: Path) -> Path:
        """Return the model folder for a case, made from `weights` if it does not exist."""
        require_case(case, dtypes=tuple(_PRECISIONS), quantizations=tuple(_BITS), devices=("cpu",))
        kind = case.quantization or "float32"  # bfloat16 is converted when it is loaded

        def write(partial: Path) -> None:
            optimum = require_module("optimum.intel")
            compress: dict[str, Any] = {"load_in_8bit": False}  # large models are compressed otherwise
            if kind in _BITS:
                compress = {"quantization_config": optimum.OVWeightQuantizationConfig(**_BITS[kind])}
            model = optimum.OVModelForCausalLM.from_pretrained(str(weights), export=True, compile=False, **compress)
            model.save_pretrained(str(partial))

        return export_once(weights / FOLDER / f"openvino-{kind}", write)

    def run(self, requests: Requests) -> tuple[list[list[int]], RunTimes]:
        """Generate; a token's arrival is the return of the step that sampled it."""
        recorder = Recorder(requests)
        require_room("openvino", requests.longest, self._capacity)
        handles = []
        for i, (prompt, n) in enumerate(zip(requests.prompts, requests.output_tokens, strict=True)):
            config = self._genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = n, True, False
            config.set_eos_token_id(self._eos)
            handles.append(self._pipeline.add_request(i, self._tensor(np.array([prompt], np.int64)), config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    recorder.add(i, next(iter(handle.read().values())).generated_ids)
        return recorder.result()


class VLLM:
    """An LLM whose engine is stepped here."""

    def __init__(self, case: Case, weights: Path) -> None:
        config = huggingface.read_config(weights / "config.json")
        self._capacity = config.block_size
        folder = self.export(case, weights) or weights
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(num_cpus()),  # it takes one core less by default
        }  # fmt: skip
        vllm = require_module("vllm")
        need = case.batch * (min(make_requests(case, 1).longest, self._capacity) + 256) * config.kv_bytes_per_token(4)
        try:
            llm = vllm.LLM(
                str(folder), dtype=case.dtype, skip_tokenizer_init=True, max_num_seqs=max(case.batch, 16), seed=0,
                max_num_batched_tokens=max(_MAX_STEP_TOKENS, case.batch), max_model_len=self._capacity,
                enable_prefix_caching=False, kv_cache_memory_bytes=need + (64 << 20),
            )  # fmt: skip
        except (RuntimeError, ValueError) as e:
            raise NanoinferError(f"vllm cannot load {folder}: {reason(e)}") from None
        self._engine, self._params, self._count = llm.llm_engine, vllm.SamplingParams, 0

    @staticmethod
    def export(case: Case, weights: Path) -> Path | None:
        """Return the quantized folder for a case, made from `weights` if it does not exist; None without bits."""
        dtypes = ("bfloat16",) if case.quantization == "int4" else ("float32", "bfloat16")
        require_case(case, dtypes=dtypes, quantizations=("int8", "int4"), devices=("cpu",))
        if case.quantization is None:
            return None
        kind = case.quantization
        return export_once(weights / FOLDER / f"vllm-{kind}", lambda partial: _quantize(weights, partial, kind))

    def run(self, requests: Requests) -> tuple[list[list[int]], RunTimes]:
        """Generate; a token's arrival is the return of the step that sampled it."""
        recorder, counts = Recorder(requests), [0] * len(requests.prompts)
        require_room("vllm", requests.longest, self._capacity)
        first, self._count = self._count, self._count + len(counts)  # a name is used once
        for i, (prompt, n) in enumerate(zip(requests.prompts, requests.output_tokens, strict=True)):
            params = self._params(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            self._engine.add_request(str(first + i), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                i = int(output.request_id) - first
                counts[i] = recorder.add(i, output.outputs[0].token_ids[counts[i] :])
        return recorder.result()


def _quantize(weights: Path, folder: Path, kind: str) -> None:
    """Write a compressed-tensors folder. GPT-2's matrices are stored (in, out), all others (out, in)."""
    safetensors = require_module("safetensors.numpy")
    config: dict[str, Any] = json.loads((weights / "config.json").read_text())
    transposed = config["model_type"] == "gpt2"
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in safetensors.load_file(weights / "model.safetensors").items():
        if not _PROJECTION.search(name):
            tensors[name] = tensor
            continue
        stem, matrix = name.removesuffix(".weight"), tensor.T if transposed else tensor
        if kind == "int8":
            rounded, scale = _round(matrix, 127)  # (out, in), (out, 1)
            tensors[name] = np.ascontiguousarray(rounded.T if transposed else rounded)
        else:
            grouped, scale = _round(matrix.reshape(len(matrix), -1, _GROUP), 7)
            digits = (grouped.reshape(len(matrix), -1, 8) + 8).astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)
            tensors[f"{stem}.weight_packed"] = np.bitwise_or.reduce(digits, axis=-1).view(np.int32)
            tensors[f"{stem}.weight_shape"] = np.array(matrix.shape, np.int64)
            scale = scale[..., 0]  # (out, groups)
        tensors[f"{stem}.weight_scale"] = np.ascontiguousarray(scale)
    form = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": form}
    if kind == "int8":
        group["input_activations"] = form | {"dynamic": True, "strategy": "token"}
    else:
        group["weights"] = form | {"num_bits": 4, "strategy": "group", "group_size": _GROUP}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized" if kind == "int8" else "pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for extra in weights.glob("tokenizer*.json"):
        shutil.copy(extra, folder)


def _round(values: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Return whole numbers of -top to top, and the scales of the last axis, float32: largest magnitude / top."""
    scale = np.maximum(np.abs(values).max(-1, keepdims=True), 1e-12).astype(np.float32) / top
    return np.rint(values / scale).astype(np.int8), scale
