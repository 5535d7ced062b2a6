"""What the targets of GGUF files do with a model: read it, run it, export it, and compare what is read again."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf_format import PARTS
from seeds import TINY, trained

from nanoinfer import NanoinferError
from nanoinfer.checkpoints import huggingface, packed
from nanoinfer.checkpoints.gguf import export as gguf_export
from nanoinfer.checkpoints.load import LoadedModel, load_model
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import EngineConfig, EngineLimits, LayerKind, Rotary
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.native import NativeEngine
from nanoinfer.models.parameters import initialize
from nanoinfer.tokenizers import tokenizer as tokenizers

TEXT = "a bad cab\n fed 12 \u00e9 \U0001f600 x"
LLAMA = replace(
    TINY, family="llama", n_embd=64, n_inner=96, norm="rms", gated_mlp=True, learned_positions=False, bias=False, activation="silu",
    layers=(LayerKind(rotary=Rotary(32)),),
)  # fmt: skip


@cache
def export_folder() -> dict[str, bytes]:
    """Return the files of a Llama with a tokenizer and a chat template: name -> content."""
    from tempfile import TemporaryDirectory

    tokenizer = tokenizers.from_json(trained()["bpe"], "bpe")
    config = replace(LLAMA, vocab_size=tokenizer.vocab_size + 30, eos_token_ids=(1, 2))
    with TemporaryDirectory() as folder:
        weights = Weights(config, "float32", partial(initialize, config, 0))
        huggingface.save(weights, Path(folder), trained()["bpe"])
        files = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
    settings = {"bos_token": "<|endoftext|>", "eos_token": "a", "chat_template": "{{ messages }}"}
    return files | {"tokenizer_config.json": json.dumps(settings).encode()}


def export_configs() -> list[bytes]:
    """Return configs for the same weights: as they were saved, with scaled frequencies, and with a window."""
    plain: dict[str, Any] = json.loads(export_folder()["config.json"])
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    changes: list[dict[str, Any]] = [
        {},
        {"rope_scaling": llama3, "rope_parameters": {**llama3, "rope_theta": 1e4}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": 4,
            "num_key_value_heads": 2,
        },
    ]
    return [json.dumps({**plain, **change}).encode() for change in changes]


def open_part(path: Path) -> LoadedModel:
    """Load the model that has a file as one of its parts, by its first part."""
    return load_model(str(path.with_name(PARTS[0])))


def use_export(loaded: LoadedModel, path: Path) -> None:
    """Write a model as GGUF files; compare config, values, special ids and tokens with what is read from them.

    Raises:
        NanoinferError: the tokenizer or the model cannot be written; the model without the tokenizer is compared, too.
    """
    again, refused = path.with_name("again.gguf"), None
    try:
        text = gguf_export.describe_text(loaded)
    except NanoinferError as e:
        text, refused = gguf_export.describe_text(loaded, with_tokenizer=False), e
    gguf_export.write_file(loaded.weights, again, "F32", text, "again")
    found = load_model(str(again))
    for (name, a), (_, b) in zip(loaded.weights.read(), found.weights.read(), strict=False):
        assert np.array_equal(a.float32(), b.float32(), equal_nan=True), f"{name} differs in the new file"
    if refused is None and loaded.tokenizer is not None:
        assert found.tokenizer is not None, "the new file has no tokenizer"
        same = loaded.tokenizer.encode(TEXT) == found.tokenizer.encode(TEXT)
        assert same, "the new file's tokenizer gives other tokens"
        assert found.chat_template == loaded.chat_template, "the new file has another chat template"
    before, after = loaded.config, found.config
    assert before.bos_token_id in (None, after.bos_token_id), "the new file has another start token"
    assert len(before.eos_token_ids) > 3 or {*before.eos_token_ids} <= {*after.eos_token_ids}, "an end token is lost"
    gguf_export.write_file(loaded.weights, again, "Q8_0", text, "again")
    load_model(str(again)).weights.block_formats.keys()
    if refused is not None:
        raise refused


def use_native(loaded: LoadedModel, path: Path) -> None:
    """Run a step with the file's own formats; pack the model, and compare the logits of the packed folder, bit by bit.

    The weights are arbitrary, so that the values of the logits are not compared with those of other formats.
    """
    logits = _step(loaded.weights)
    folder = path.with_name("packed")
    packed.write_folder(loaded.weights, folder, "float32", None, threads=1)
    again = load_model(str(folder)).weights
    same = np.array_equal(logits.view(np.uint32), _step(again).view(np.uint32))
    assert same, "the packed folder gives other logits"


def _step(weights: Weights) -> Any:
    """Return the logits of a step of three tokens."""
    engine = NativeEngine(weights, EngineLimits(1, 8, 8), EngineConfig(threads=1))
    tokens = [i % weights.config.vocab_size for i in (1, 2, 3)]
    return engine.extend(StepBatch([engine.open()], tokens, [3], [3])).copy()
