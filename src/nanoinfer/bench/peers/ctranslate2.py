"""CTranslate2: its Generator, with a callback for each token.

Requests of unequal length run in one batch. The callback ends each request at its own number of tokens, and
CTranslate2 takes it out of the batch then. Of unequal prompts it reads the shortest one's length at once and the
rest a token at a time, which costs the longer ones time to first token.

Covered: greedy, temperature, top_k, top_p, repetition_penalty. Not covered: min_p, presence and frequency
penalties.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nanoinfer.bench.backends.capabilities import longest, require_case, require_module, require_room
from nanoinfer.bench.case import SAMPLERS, Case, Work
from nanoinfer.bench.peers import FOLDER
from nanoinfer.bench.peers.export_ctranslate2 import export_ctranslate2, token
from nanoinfer.bench.stats import RunTimes
from nanoinfer.config import DTYPES
from nanoinfer.environment import num_cpus
from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints import hf_config

_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")
_NAMES = {"top_k": "sampling_topk", "top_p": "sampling_topp", "temperature": "sampling_temperature"}


def compute_type(case: Case) -> str:
    """Return CTranslate2's name for a case's weights and arithmetic: int8 with bfloat16 -> int8_bfloat16.

    Raises:
        NanoinferError: it has no such type, or not on this device.
    """
    require_case(case, sampling=_SAMPLING, dtypes=DTYPES, quantizations=("int8",))
    name = case.dtype
    if case.quantization is not None:
        name = "int8" if case.dtype == "float32" else f"int8_{case.dtype}"
    device, _, index = case.device.partition(":")
    try:
        have = require_module("ctranslate2").get_supported_compute_types(device, int(index or 0))
    except (ValueError, RuntimeError) as e:  # no such device, or built without CUDA
        raise NanoinferError(f"ctranslate2 on device={case.device!r}: {' '.join(str(e).split())[:160]}") from None
    if name not in have:
        raise NanoinferError(f"ctranslate2 has no {name} on this {device}: it has {', '.join(sorted(have))}")
    return name


def export(case: Case, weights: Path) -> Path:
    """Return the model folder for a case, made from `weights` unless it is there."""
    return export_ctranslate2(weights, weights / FOLDER, compute_type(case))


class CTranslate2:
    """A Generator on all cores."""

    def __init__(self, case: Case, weights: Path) -> None:
        ctranslate2 = require_module("ctranslate2")
        device, _, index = case.device.partition(":")
        self._block_size = hf_config.read(weights / "config.json").block_size
        self._generator: Any = ctranslate2.Generator(
            str(export(case, weights)),
            device=device,
            device_index=int(index or 0),
            compute_type=compute_type(case),
            inter_threads=1,
            intra_threads=num_cpus(),
        )
        self._seed, self._set_seed = case.params(1).seed or 0, ctranslate2.set_random_seed
        self._options: dict[str, Any] = {"sampling_topk": 1}
        if case.sampler != "greedy":
            self._options = {_NAMES.get(name, name): value for name, value in SAMPLERS[case.sampler].items()}

    def run(self, work: Work) -> tuple[list[list[int]], RunTimes]:
        """Generate; a token's arrival is the callback with it."""
        start = time.perf_counter()
        require_room("ctranslate2", longest(work), self._block_size)
        self._set_seed(self._seed)
        tokens: list[list[int]] = [[] for _ in work.prompts]
        arrivals: list[list[float]] = [[] for _ in work.prompts]

        def note(step: Any) -> bool:
            i = step.batch_id
            tokens[i].append(step.token_id)
            arrivals[i].append(time.perf_counter() - start)
            return bool(len(tokens[i]) >= work.output_tokens[i])

        self._generator.generate_batch(
            [[token(i) for i in prompt] for prompt in work.prompts],
            max_length=max(work.output_tokens),
            min_length=max(work.output_tokens),
            end_token=[],  # no token ends a text, and min_length bans none
            include_prompt_in_result=False,
            beam_size=1,
            callback=note,
            **self._options,
        )
        return tokens, RunTimes(sum(map(len, work.prompts)), arrivals)


def open_ctranslate2(case: Case, weights: Path) -> CTranslate2:
    """Load CTranslate2. Raises NanoinferError for a dtype, quantization, sampler or device that it does not have."""
    return CTranslate2(case, weights)
