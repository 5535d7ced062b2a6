"""vLLM on a CPU: its engine in this process, one `step` at a time, compiled as by default.

Weights of 8 and 4 bits are compressed-tensors folders, which vLLM reads and does not make: symmetric int8 for each
output with activations in int8 for each token, and symmetric int4 in groups of 128. `_quantize` writes them with values
rounded to nearest. The head keeps its dtype, as in such folders on the Hub. vLLM's documentation asks to preload
tcmalloc and Intel's OpenMP: the interpreter of `--peer-python vllm=PATH` may be a script that does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer.bench.case import Case, Requests, make_requests
from nanoinfer.bench.peers import FOLDER, export_once, require_case, require_module, require_room
from nanoinfer.bench.stats import RunTimes
from nanoinfer.checkpoints import hf_config
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.environment import num_cpus
from nanoinfer.utils.files import reason

_GROUP = 128  # weights of int4 that share a scale
_MAX_STEP_TOKENS = 2048  # as ours
_PROJECTION = re.compile(r"\.(c_attn|c_proj|c_fc|[qkvo]_proj|gate_proj|up_proj|down_proj)\.weight$")


class VLLM:
    """An LLM whose engine is stepped here."""

    def __init__(self, case: Case, weights: Path) -> None:
        config = hf_config.read(weights / "config.json")
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
        start = time.perf_counter()
        require_room("vllm", requests.longest, self._capacity)
        tokens: list[list[int]] = [[] for _ in requests.prompts]
        arrivals: list[list[float]] = [[] for _ in requests.prompts]
        first, self._count = self._count, self._count + len(tokens)  # a name is used once
        for i, (prompt, n) in enumerate(zip(requests.prompts, requests.output_tokens, strict=True)):
            params = self._params(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            self._engine.add_request(str(first + i), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                i, made = int(output.request_id) - first, list(output.outputs[0].token_ids)
                arrivals[i] += [now] * (len(made) - len(tokens[i]))
                tokens[i] = made
        return tokens, RunTimes(sum(map(len, requests.prompts)), arrivals)


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
