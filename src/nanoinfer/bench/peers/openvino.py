"""OpenVINO GenAI: its pipeline with continuous batching and paged keys and values, one `step` at a time.

`optimum-intel` converts the folder, and NNCF compresses the weights to 8 bits (for each channel) or 4 (groups of 128,
all layers), the settings of its documentation; embedding and head keep 8 bits. It computes in the case's dtype. In
float32, keys and values are float32 too, so that tokens can be compared. The pipeline takes token ids and needs no
tokenizer.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer.bench.case import Case, Requests, make_requests
from nanoinfer.bench.peers import FOLDER, export_once, require_case, require_module, require_room
from nanoinfer.bench.stats import RunTimes
from nanoinfer.checkpoints import hf_config
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.files import reason

_BITS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8, "sym": True}, "int4": {"bits": 4, "sym": True, "group_size": 128, "ratio": 1.0},
}  # fmt: skip
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_MAX_STEP_TOKENS = 2048  # as ours: a prompt of 1,000 tokens is one step


class OpenVINO:
    """A ContinuousBatchingPipeline whose cache holds all sequences of the case."""

    def __init__(self, case: Case, weights: Path) -> None:
        folder = self.export(case, weights)
        genai, core = require_module("openvino_genai"), require_module("openvino")
        config = hf_config.read(weights / "config.json")
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
        start = time.perf_counter()
        require_room("openvino", requests.longest, self._capacity)
        tokens: list[list[int]] = [[] for _ in requests.prompts]
        arrivals: list[list[float]] = [[] for _ in requests.prompts]
        handles = []
        for i, (prompt, n) in enumerate(zip(requests.prompts, requests.output_tokens, strict=True)):
            ids = self._tensor(np.array([prompt], np.int64))
            handles.append(self._pipeline.add_request(i, ids, self._generation(n)))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - start
            for handle, row, times in zip(handles, tokens, arrivals, strict=True):
                while handle.can_read():
                    new = next(iter(handle.read().values())).generated_ids
                    row += new
                    times += [now] * len(new)
        return tokens, RunTimes(sum(map(len, requests.prompts)), arrivals)

    def _generation(self, num_tokens: int) -> Any:
        """Return the settings of a request: greedy, exactly `num_tokens`."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        config.set_eos_token_id(self._eos)
        return config
