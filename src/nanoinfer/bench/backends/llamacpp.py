"""llama.cpp through its C interface, one llama_decode a step for all sequences; export to GGUF.

All prompts are read first, in batches of n_batch tokens; then every step holds one token of each sequence that lacks
any. Each sequence has its own part of the KV cache (`kv_unified` off, the default), as long as the case's longest.
Keys and values are float32 in a float32 case, so that its tokens can be compared; elsewhere they are float16,
llama.cpp's default. Greedy is numpy's argmax over the logits: llama.cpp's own sampler first builds a list of all
candidates, which takes longer. `gguf/export.py` writes the float32 file; llama.cpp's own quantizer makes the other
types from it, so that they are what its users get (Q4_0 keeps a tied embedding in 8 or 6 bits).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer.bench.backends import FOLDER, Recorder, export_once, require_case, require_module, require_room
from nanoinfer.bench.case import Case, Requests, RunTimes, make_requests
from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.gguf import export as gguf_export
from nanoinfer.checkpoints.gguf.tokenizer import write_no_tokenizer
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.environment import num_cpus

_TYPES = {"float32": "F32", "bfloat16": "BF16"}
QUANT_BLOCK = 32  # weights of Q8_0 and Q4_0 that share a scale
_FILE = "model.gguf"
_FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")  # which are exported

_Entry = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are needed


def file_type(case: Case) -> str:
    """Return llama.cpp's name for a case's weights, F32, BF16 or a quantization; raise NanoinferError for others."""
    require_case(case, dtypes=tuple(_TYPES), quantizations=("Q8_0", "Q4_0"), devices=("cpu",))
    return case.quantization or _TYPES[case.dtype]


class LlamaCpp:
    """A llama.cpp model, a context sized to the case, and one batch that every step fills."""

    def __init__(self, case: Case, weights: Path) -> None:
        kind = file_type(case)
        _silence()
        self._lib = lib = require_module("llama_cpp")
        config = huggingface.read_config(weights / "config.json")
        self._capacity = min(make_requests(case, 1).longest, config.block_size)
        if case.batch > (limit := lib.llama_max_parallel_sequences()):
            raise NanoinferError(f"llama.cpp: batch={case.batch} is more than the {limit} sequences of one context")
        path = self.export(case, weights)
        lib.llama_backend_init()
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        params = lib.llama_context_default_params()
        if not (model := lib.llama_model_load_from_file(bytes(path), options)):
            raise NanoinferError(f"llama.cpp cannot load {path}")
        params.n_seq_max = case.batch
        params.n_ctx = case.batch * self._capacity
        params.n_threads = params.n_threads_batch = num_cpus()
        if kind == "F32":
            params.type_k = params.type_v = lib.GGML_TYPE_F32
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise NanoinferError(f"llama.cpp has no memory for {case.batch} sequences of {self._capacity} tokens")
        self._memory = lib.llama_get_memory(self._context)
        self._n_batch = int(lib.llama_n_batch(self._context))
        self._n_vocab = config.vocab_size
        self._batch = lib.llama_batch_init(self._n_batch, 0, 1)

    @staticmethod
    def export(case: Case, weights: Path) -> Path:
        """Return the GGUF file for a case, made from `weights` if it does not exist."""
        return export_gguf(weights, weights / FOLDER, file_type(case))

    def run(self, requests: Requests) -> tuple[list[list[int]], RunTimes]:
        """Generate; a token's arrival is when it has been sampled from its step's logits."""
        recorder = Recorder(requests)
        require_room("llama.cpp", requests.longest, self._capacity)
        self._lib.llama_memory_clear(self._memory, False)
        entries = [
            (token, pos, i, pos == len(prompt) - 1)
            for i, prompt in enumerate(requests.prompts)
            for pos, token in enumerate(prompt)
        ]
        while entries:
            sampled: list[tuple[int, int, int]] = []  # sequence, its token, how many it has
            for first in range(0, len(entries), self._n_batch):
                new = self._step(entries[first : first + self._n_batch])
                sampled += [(i, token, recorder.add(i, [token])) for i, token in new]
            entries = []
            for i, token, count in sampled:
                if count < requests.output_tokens[i]:
                    entries.append((token, len(requests.prompts[i]) + count - 1, i, True))
                else:
                    self._lib.llama_memory_seq_rm(self._memory, i, -1, -1)
        return recorder.result()

    def _step(self, entries: list[_Entry]) -> list[tuple[int, int]]:
        """Decode one batch; return (sequence, token) for each entry whose logits are needed, in their order."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for j, (token, pos, seq, needed) in enumerate(entries):
            batch.token[j], batch.pos[j] = token, pos
            batch.n_seq_id[j], batch.seq_id[j][0] = 1, seq
            batch.logits[j] = needed
        if code := self._lib.llama_decode(self._context, batch):
            raise NanoinferError(f"llama.cpp: llama_decode of {len(entries)} tokens returned {code}")
        outputs = [seq for _, _, seq, needed in entries if needed]
        if not outputs:
            return []
        shape = (len(outputs), self._n_vocab)
        logits = np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), shape)  # a view: in batch order
        return list(zip(outputs, logits.argmax(1).tolist(), strict=True))


@functools.cache  # llama.cpp keeps the pointer: the callback must live as long as the process
def _silence() -> Any:
    """Drop llama.cpp's log, which goes to stderr otherwise; return the callback. Errors are also return codes."""
    llama_cpp = require_module("llama_cpp")
    callback = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    return callback


def export_gguf(weights: Path, folder: Path, kind: str) -> Path:
    """Return a GGUF file, written if it does not exist: folder/gguf-<kind>; all but F32 need and keep the F32 one."""
    config = huggingface.read_config(weights / "config.json")
    odd = [w for w in (config.n_embd, config.mlp_dim) if w % QUANT_BLOCK] if kind.startswith("Q") else []
    if config.family not in _FAMILIES:
        raise NanoinferError(f"llama.cpp: {config.family} is not exported here: only {', '.join(_FAMILIES)} are")
    if any(k.window or (k.rotary and k.rotary.scaling != "none") for k in config.layers):
        raise NanoinferError(f"llama.cpp: {weights} has windows or scaled rotation, which are not exported here")
    if config.is_gpt2 and config.activation != "gelu_new":
        raise NanoinferError(f"llama.cpp's GPT-2 has gelu_new only, and {weights} activation={config.activation!r}")
    if odd:
        raise NanoinferError(f"llama.cpp cannot hold a width of {odd[0]} in {kind}: it is no multiple of {QUANT_BLOCK}")

    def write(partial: Path) -> None:
        if kind == "F32":
            opened = open_folder(weights)
            text = write_no_tokenizer(opened.config)
            gguf_export.write_file(opened, partial / _FILE, kind, text, weights.name)
        else:
            _quantize(export_gguf(weights, folder, "F32"), partial / _FILE, kind)

    return export_once(folder / f"gguf-{kind}", write) / _FILE


def _quantize(source: Path, path: Path, kind: str) -> None:
    llama_cpp = require_module("llama_cpp")
    _silence()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = num_cpus()
    if code := llama_cpp.llama_model_quantize(bytes(source), bytes(path), ctypes.byref(params)):
        raise NanoinferError(f"{source} cannot be quantized to {kind}: llama.cpp's quantizer returned {code}")
