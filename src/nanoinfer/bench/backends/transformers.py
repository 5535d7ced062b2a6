"""Hugging Face transformers' `generate`, with its growing cache or with its static one.

Prompts of unequal length are padded on the left, as its documentation says. A batch runs until its longest request has
its tokens, as `generate` does; each sequence is counted with the tokens requested for it and no more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nanoinfer.bench.backends import Recorder, require_case, require_module, require_room
from nanoinfer.bench.case import Case, Requests, RunTimes
from nanoinfer.config import DTYPES
from nanoinfer.engines.devices import resolve_device, resolve_dtype
from nanoinfer.profiling.checks import synchronize


class _Streamer:
    """A streamer in the sense of `generate`: it receives the prompt, then the tokens of each step."""

    def __init__(self, requests: Requests) -> None:
        self.recorder = Recorder(requests)
        self._counts = [-1] * len(requests.prompts)
        self._output_tokens = requests.output_tokens

    def put(self, value: torch.Tensor) -> None:
        """Record the tokens of a step, which `generate` has copied to the CPU, of sequences that lack any."""
        for i, token in enumerate(value.tolist()):
            if 0 <= self._counts[i] < self._output_tokens[i]:
                self.recorder.add(i, [token])
            self._counts[i] += 1

    def end(self) -> None:
        """Do nothing: the last token has been put."""


class Transformers:
    """A model with its default cache, or with its static one (on a GPU it compiles the model)."""

    def __init__(self, case: Case, weights: Path) -> None:
        require_case(case, dtypes=DTYPES)
        transformers = require_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        self._device = resolve_device(case.device)
        dtype = getattr(torch, resolve_dtype(case.dtype, self._device))
        model = transformers.AutoModelForCausalLM.from_pretrained(str(weights), dtype=dtype)
        self._model: Any = model.to(self._device).eval()
        for config in (model.config, model.generation_config):
            config.eos_token_id = None  # nothing ends a sequence early, and min_new_tokens bans no token
        self._name = case.backend
        self._options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
        if case.backend == "transformers-static":
            self._options["cache_implementation"] = "static"

    def run(self, requests: Requests) -> tuple[list[list[int]], RunTimes]:
        """Generate; a token's arrival is the streamer's call with it."""
        lengths = [len(prompt) for prompt in requests.prompts]
        T, num_steps = max(lengths), max(requests.output_tokens)
        require_room(self._name, T + num_steps, self._model.config.max_position_embeddings)
        synchronize(self._device)  # nothing of the previous run is still running
        streamer = _Streamer(requests)
        idx = torch.tensor([[0] * (T - len(p)) + p for p in requests.prompts], device=self._device)  # (B, T)
        mask = torch.tensor([[0] * (T - n) + [1] * n for n in lengths], device=self._device)
        steps = {"max_new_tokens": num_steps, "min_new_tokens": num_steps}
        self._model.generate(idx, attention_mask=mask, streamer=streamer, **steps, **self._options)
        return streamer.recorder.result()
