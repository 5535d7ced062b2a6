"""ik_llama.cpp, a fork of llama.cpp with CPU kernels of its own, on the same GGUF files as llama.cpp.

Its interface in C is an older one of llama.cpp's: this module gives it the names that `LlamaCpp` calls. Settings are
those that its documentation recommends for CPUs: tensors repacked at loading (`-rtr`), flash attention. The wheel of
ik-llama-cpp-python uses AVX2; a build from source with `CMAKE_ARGS=-DGGML_NATIVE=ON` uses what the CPU has.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanoinfer.bench.case import Case
from nanoinfer.bench.peers import require_module
from nanoinfer.bench.peers.llamacpp import LlamaCpp, file_type
from nanoinfer.checkpoints import hf_config
from nanoinfer.errors import NanoinferError

_SAME = (
    "llama_backend_init", "llama_model_default_params", "llama_context_default_params", "llama_model_load_from_file",
    "llama_init_from_model", "llama_batch_init", "llama_decode",
)  # fmt: skip
_GGML_TYPE_F32 = 0


class IkLlamaCpp(LlamaCpp):
    """A model of ik_llama.cpp."""

    name = "ik_llama.cpp"

    @staticmethod
    def export(case: Case, weights: Path) -> Path:
        """Return the GGUF file for a case, the same as llama.cpp's."""
        if file_type(case) == "F32":
            raise NanoinferError("ik_llama.cpp has no float32 cache, so its tokens cannot be compared: use bfloat16")
        if hf_config.read(weights / "config.json").is_gpt2:
            raise NanoinferError("ik_llama.cpp cannot run GPT-2: it expects an untied head and reads no epsilon")
        return LlamaCpp.export(case, weights)

    @staticmethod
    def _open() -> Any:
        return _library()

    @staticmethod
    def _tune(model: Any, context: Any) -> None:
        model.repack_tensors, model.use_mmap = True, False
        context.flash_attn = True


@functools.cache
def _library() -> SimpleNamespace:
    """Return the library with llama.cpp's names."""
    api = require_module("ik_llama_cpp._ctypes_api")
    lib = require_module("ik_llama_cpp._lib_loader").load_shared_library()
    lib.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
    lib.llama_n_batch.restype = ctypes.c_uint32
    lib.llama_kv_cache_seq_rm.restype = ctypes.c_bool
    lib.llama_kv_cache_seq_rm.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
    for name in ("llama_get_logits", "llama_n_batch"):
        getattr(lib, name).argtypes = [ctypes.c_void_p]
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)
    lib.llama_log_set(callback, None)
    return SimpleNamespace(
        **{name: getattr(api, name) for name in _SAME},
        GGML_TYPE_F32=_GGML_TYPE_F32,
        llama_get_logits=lib.llama_get_logits, llama_n_batch=lib.llama_n_batch,
        llama_max_parallel_sequences=lambda: 1 << 16,  # it has no limit of its own
        llama_get_memory=lambda context: context,
        llama_memory_clear=lambda context, data: api.llama_kv_cache_clear(context),
        llama_memory_seq_rm=lib.llama_kv_cache_seq_rm,
        log_callback=callback,  # the library keeps a pointer to it
    )  # fmt: skip
