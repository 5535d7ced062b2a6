"""llama.cpp's converter and patterns (source package of llama-cpp-python), and programs of its fork ik_llama.cpp.

llama.cpp's own logits are compared where its library is installed (`pip install '.[peers]'` builds it). The wheel of
ik_llama.cpp has one, of which the tokens are compared.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from published.vocabularies import PUBLISHED

LLAMA_CPP, IK = PUBLISHED / "llama.cpp", PUBLISHED / "ik"

SPLIT_BY_CODE = ("kimi-k2",)
"""The pattern in llama-vocab.cpp stands for code."""


def convert(folder: Path, file: Path, pre: str | None, stored: dict[str, Any]) -> None:
    """Convert a folder by convert_hf_to_gguf.py.

    Args:
        folder: a model that transformers saved.
        file: the GGUF file to write.
        pre: how the published tokenizer is split: the converter knows published tokenizers by their hash.
        stored: fields of the published config.json that transformers 5 takes out when it reads them; None removes one.

    Raises:
        Exception: whatever the converter raises.
    """
    for path in (LLAMA_CPP / "gguf-py", LLAMA_CPP):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    script = importlib.import_module("convert_hf_to_gguf")
    base = importlib.import_module("conversion.base")
    arguments = ["convert", str(folder), "--outfile", str(file), "--outtype", "f32"]
    load = base.ModelBase.load_hparams
    given = lambda fields: {k: v for k, v in (fields | stored).items() if v is not None or k not in stored}  # noqa: E731
    logging.disable(logging.WARNING)
    try:
        with (
            mock.patch.object(sys, "argv", arguments),
            mock.patch.object(base.TextModel, "get_vocab_base_pre", return_value=pre),
            mock.patch.object(base.ModelBase, "load_hparams", lambda *place, **options: given(load(*place, **options))),
        ):
            script.main()
    finally:
        logging.disable(logging.NOTSET)


@cache
def patterns() -> dict[str, list[str]]:
    """Return the patterns of each `tokenizer.ggml.pre` in src/llama-vocab.cpp, one applied after the other."""
    source = (LLAMA_CPP / "src" / "llama-vocab.cpp").read_text(encoding="utf-8")
    types: dict[str, list[str]] = {}
    pending: list[str] = []
    table = source[
        source.index("llm_tokenizer_bpe(const llama_vocab") : source.index("std::vector<std::string> regex_exprs;")
    ]
    for part in re.split(r"(?=case LLAMA_VOCAB_PRE_TYPE_|default:)", table)[1:]:
        pending += re.findall(r"^case LLAMA_VOCAB_PRE_TYPE_(\w+)", part)
        if "regex_exprs = {" in part:
            (block,) = re.findall(r"regex_exprs = \{(.*?)\};", part, re.S)
            literals = re.findall(r'"((?:[^"\\]|\\.)*)"', re.sub(r"^\s*//.*", "", block, flags=re.M))
            found = [literal.encode().decode("unicode_escape").encode("latin-1").decode() for literal in literals]
            types |= dict.fromkeys(pending, found)
            pending = []
    names = source[source.index('tokenizer_pre == "default"') : source.index("unknown pre-tokenizer type")]
    rows: dict[str, list[str]] = {}
    for part in re.split(r"else if \(|if \(", names):
        for kind in re.findall(r"pre_type = LLAMA_VOCAB_PRE_TYPE_(\w+)", part)[:1]:
            rows |= dict.fromkeys(re.findall(r'tokenizer_pre == "([^"]+)"', part), types.get(kind, []))
    return rows


def pieces(text: str, pre: str) -> list[str]:
    """Return the pieces of a text by llama.cpp's patterns."""
    import regex

    parts = [text]
    for pattern in patterns()[pre]:
        # After the last look-ahead, llama.cpp takes what is left as a piece.
        whole = regex.compile(pattern + r"|\s+" if pattern.endswith(r"\s+(?!\S)") else pattern)
        new: list[str] = []
        for part in parts:
            end = 0
            for match in whole.finditer(part):
                new += [part[end : match.start()], match.group()]
                end = match.end()
            new.append(part[end:])
        parts = [part for part in new if part]
    return parts


def quantize(file: Path, result: Path, format: str) -> bool:
    """Quantize a file by the program llama-quantize of ik_llama.cpp, a fork whose wheel has it built.

    Returns:
        whether there is a file: the fork does not know each architecture, and has formats of its own. Then llama.cpp's
        library does it, where it is installed.
    """
    command = [
        IK / "ik_llama_cpp" / "bin" / "llama-quantize",
        "--custom-q",
        r"shortconv\.conv=f32",
        file,
        result,
        format,
        "2",
    ]
    done = subprocess.run(command, check=False, capture_output=True, timeout=120)
    formats = re.findall(rb"converting to (q6_0|\w+_r\d)", done.stdout + done.stderr)
    if done.returncode == 0 and not formats:
        return True
    code = (
        "import sys, llama_cpp; p = llama_cpp.llama_model_quantize_default_params(); p.nthread = 2\n"
        f"p.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_{format}\n"
        "sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
    )
    done = subprocess.run([sys.executable, "-c", code, file, result], check=False, capture_output=True, timeout=120)
    return done.returncode == 0


def logits(file: Path, prompt: list[int]) -> np.ndarray | None:
    """Return llama.cpp's logits after each token, (T, V) float32; None where its library is missing or fails."""
    result = file.with_suffix(".npy")
    code = (
        "import sys, numpy, llama_cpp; ids = [int(i) for i in sys.argv[3:]]\n"
        "llm = llama_cpp.Llama(sys.argv[1], n_ctx=256, logits_all=True, verbose=False, type_k=0, type_v=0)\n"
        "llm.eval(ids); numpy.save(sys.argv[2], llm.scores[: len(ids)])"
    )
    command = [sys.executable, "-c", code, str(file), str(result), *map(str, prompt)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    return np.load(result) if done.returncode == 0 else None


def greedy(file: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the tokens that ik_llama.cpp generates after a prompt, until one ends; none if it cannot load the file."""
    code = (
        "import json, sys; from ik_llama_cpp.llama import IkLlama\n"
        "llm = IkLlama(sys.argv[1], n_ctx=256, n_threads=2, flash_attn=False)\n"
        "print(json.dumps(llm.generate(json.loads(sys.argv[2]), max_tokens=int(sys.argv[3]))))"
    )
    command = [sys.executable, "-c", code, str(file), json.dumps(prompt), str(num_tokens)]
    environment = os.environ | {"PYTHONPATH": str(IK)}
    done = subprocess.run(command, capture_output=True, timeout=120, check=False, env=environment)
    lines = done.stdout.splitlines()
    return [int(i) for i in json.loads(lines[-1])] if done.returncode == 0 and lines else []
