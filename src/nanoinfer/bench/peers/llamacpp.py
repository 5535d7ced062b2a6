"""llama.cpp through its C interface: one llama_decode a step for all sequences, as its server does.

All prompts are read first, in batches of n_batch tokens; then every step holds one token of each sequence. A
sequence that has its tokens is removed, and the steps after it are smaller. Each sequence has its own part of the
KV cache (`kv_unified` off, the default), as many tokens long as the case's longest.

Keys and values are float32 in a float32 case, so that its tokens can be compared; elsewhere they are float16,
llama.cpp's default. Greedy is numpy's argmax over the logits: llama.cpp's own sampler first builds a list of all
candidates, which takes longer. Every other sampler is a chain of llama.cpp's own, in its command line's order.

Covered: weights F32, BF16, Q8_0, Q4_0; greedy and every sampler of the benchmark; CPUs. Not covered: GPUs, and
more sequences than one context takes (256).
"""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer.bench.backends.capabilities import longest, require_case, require_module, require_room, silence_llama_cpp
from nanoinfer.bench.case import Case, Work, make_work
from nanoinfer.bench.peers import FOLDER
from nanoinfer.bench.peers.export_gguf import export_gguf
from nanoinfer.bench.stats import RunTimes
from nanoinfer.environment import num_cpus
from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints import hf_config

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_FILE_TYPES = {"float32": "F32", "bfloat16": "BF16"}
_Entry = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


def file_type(case: Case) -> str:
    """Return llama.cpp's name for a case's weights: its quantization, or F32 or BF16 for its dtype.

    Raises:
        NanoinferError: llama.cpp cannot do what the case asks for.
    """
    require_case(case, sampling=_SAMPLING, dtypes=tuple(_FILE_TYPES), quantizations=("Q8_0", "Q4_0"), devices=("cpu",))
    return case.quantization or _FILE_TYPES[case.dtype]


def export(case: Case, weights: Path) -> Path:
    """Return the GGUF file for a case, made from `weights` unless it is there."""
    return export_gguf(weights, weights / FOLDER, file_type(case))


class LlamaCpp:
    """A llama.cpp model, a context sized to the case, and one batch that every step fills."""

    def __init__(self, case: Case, weights: Path) -> None:
        kind = file_type(case)
        self._lib = lib = require_module("llama_cpp")
        silence_llama_cpp()
        self._params = case.params(1)
        config = hf_config.read(weights / "config.json")
        self._capacity = min(longest(make_work(case, 1)), config.block_size)
        if case.batch > (most := lib.llama_max_parallel_sequences()):
            raise NanoinferError(f"llama.cpp: batch={case.batch} is more than the {most} sequences of one context")
        path = export(case, weights)
        lib.llama_backend_init()
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(bytes(path or weights), options)
        if not self._model:
            raise NanoinferError(f"llama.cpp cannot load {path}")
        self._context = lib.llama_init_from_model(self._model, self._context_params(case, kind))
        if not self._context:
            raise NanoinferError(f"llama.cpp has no memory for {case.batch} sequences of {self._capacity} tokens")
        self._memory = lib.llama_get_memory(self._context)
        self._n_batch = int(lib.llama_n_batch(self._context))
        self._n_vocab = config.vocab_size
        self._batch = lib.llama_batch_init(self._n_batch, 0, 1)
        weakref.finalize(self, _free, lib, self._model, self._context, self._batch)

    def _context_params(self, case: Case, kind: str) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_seq_max = case.batch
        params.n_ctx = case.batch * self._capacity
        params.n_threads = params.n_threads_batch = num_cpus()
        if kind == "F32":
            params.type_k = params.type_v = self._lib.GGML_TYPE_F32
        return params

    def run(self, work: Work) -> tuple[list[list[int]], RunTimes]:
        """Generate; a token's arrival is when it has been drawn from its step's logits."""
        start = time.perf_counter()
        require_room("llama.cpp", longest(work), self._capacity)
        lib = self._lib
        lib.llama_memory_clear(self._memory, False)
        chains = [] if self._params.greedy else [self._chain(prompt) for prompt in work.prompts]
        tokens: list[list[int]] = [[] for _ in work.prompts]
        arrivals: list[list[float]] = [[] for _ in work.prompts]
        entries = [
            (token, pos, i, pos == len(prompt) - 1)
            for i, prompt in enumerate(work.prompts)
            for pos, token in enumerate(prompt)
        ]
        while entries:
            drawn: list[tuple[int, int]] = []
            for first in range(0, len(entries), self._n_batch):
                drawn += (new := self._step(entries[first : first + self._n_batch], chains))
                now = time.perf_counter() - start
                for i, token in new:
                    tokens[i].append(token)
                    arrivals[i].append(now)
            entries = []
            for i, token in drawn:
                if len(tokens[i]) < work.output_tokens[i]:
                    entries.append((token, len(work.prompts[i]) + len(tokens[i]) - 1, i, True))
                else:
                    lib.llama_memory_seq_rm(self._memory, i, -1, -1)
        for chain in chains:
            lib.llama_sampler_free(chain)
        return tokens, RunTimes(sum(map(len, work.prompts)), arrivals)

    def _step(self, entries: list[_Entry], chains: list[Any]) -> list[tuple[int, int]]:
        """Decode one batch; return (sequence, token) for each entry whose logits are wanted, in their order."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for j, (token, pos, seq, wanted) in enumerate(entries):
            batch.token[j], batch.pos[j] = token, pos
            batch.n_seq_id[j], batch.seq_id[j][0] = 1, seq
            batch.logits[j] = wanted
        if code := self._lib.llama_decode(self._context, batch):
            raise NanoinferError(f"llama.cpp: llama_decode of {len(entries)} tokens returned {code}")
        wanting = [(j, seq) for j, (_, _, seq, wanted) in enumerate(entries) if wanted]
        if not wanting:
            return []
        if chains:
            sample = self._lib.llama_sampler_sample
            return [(seq, int(sample(chains[seq], self._context, j))) for j, seq in wanting]
        shape = (len(wanting), self._n_vocab)
        logits = np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), shape)  # a view: in batch order
        return [(seq, int(token)) for (_, seq), token in zip(wanting, logits.argmax(1), strict=True)]

    def _chain(self, prompt: list[int]) -> Any:
        """Return a chain of llama.cpp's samplers for one sequence, which has seen the prompt."""
        lib, params = self._lib, self._params
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        if penalties != (1.0, 0.0, 0.0):
            last_n = self._capacity  # 0 and less would switch the penalties off
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_penalties(self._n_vocab, last_n, *penalties))
        if params.top_k:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_k(params.top_k))
        if params.top_p < 1:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_min_p(params.min_p, 1))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(params.temperature))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(params.seed or 0))
        for token in prompt:
            lib.llama_sampler_accept(chain, token)
        return chain


def _free(lib: Any, model: Any, context: Any, batch: Any) -> None:
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)


def open_llamacpp(case: Case, weights: Path) -> LlamaCpp:
    """Load llama.cpp. Raises NanoinferError for a dtype, quantization or device that it does not have."""
    return LlamaCpp(case, weights)
