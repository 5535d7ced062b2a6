"""checks.py: values of any type are refused in one line.

errors.py: the message of every NanoinferError is one line of printable characters, whatever it quotes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.gguf_files import tiny_gguf
from helpers.models import edit_config, make_folder
from nanoinfer import SamplingParams
from nanoinfer.checkpoints.load import load_model, load_tokenizer
from nanoinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from nanoinfer.errors import NanoinferError, QueueFull, ResultError, show
from nanoinfer.protocols.fields import FieldError
from nanoinfer.training.train_config import TrainConfig
from nanoinfer.utils.checks import require_bool, require_choice, require_float, require_int

PAIR: Any = np.array([1, 2])


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.parametrize(
    "value",
    [PAIR, nested(5000), 10**5000, "a" * 5000, "\x1b[31m\n"],
    ids=["array", "nested", "digits", "long", "escape"],
)
@pytest.mark.parametrize(
    "check",
    [
        lambda value: require_int("x", value, 0, 9),
        lambda value: require_float("x", value, 0.0, 9.0),
        lambda value: require_bool("x", value),
        lambda value: require_choice("x", value, ("a", "b")),
    ],
)
def test_a_value_of_another_type_is_refused_in_one_short_line(check: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(NanoinferError, match=r"^x=") as e:
        check(value)
    assert str(e.value).isprintable()
    assert len(str(e.value)) < 300


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda v: ModelConfig(n_layer=v), "n_layer"),
        (lambda v: EngineConfig(threads=v), "threads"),
        (lambda v: SchedulerConfig(max_num_batched_tokens=v), "max_num_batched_tokens"),
        (lambda v: SamplingParams(temperature=v), "temperature"),
        (lambda v: TrainConfig(data=v, out="o"), "data"),
    ],
)
def test_an_array_is_refused_by_name(make: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(NanoinferError, match=f"^{name}=array"):
        make(PAIR)


def test_show_cuts_what_is_deep_or_long() -> None:
    assert show(nested(5000)) == "[" * 200 + "..."
    assert show(10**5000) == "an integer of 16610 bits"
    assert show("a" * 300) == "'" + "a" * 199 + "..."
    assert show("a\nb") == r"'a\nb'"


EVIL = "\x1b]0;t\x07\n\r\x9b31m\u202e\u2028\x00"


@settings(max_examples=30)
@given(st.text())
def test_a_message_is_one_printable_line(text: str) -> None:
    for error in (NanoinferError(text), ResultError(text), QueueFull(text), FieldError(text, "prompt")):
        assert str(error).isprintable()
        assert str(NanoinferError(str(error))) == str(error)  # one that quotes another
    assert str(NanoinferError(text)) == text or not text.isprintable()
    assert str(pickle.loads(pickle.dumps(NanoinferError(text)))) == str(NanoinferError(text))


def test_control_characters_are_escaped() -> None:
    assert str(NanoinferError("a\x1b[1m\nb é\ud800")) == r"a\x1b[1m\nb é\ud800"
    assert repr(NanoinferError("a\n")) == r"NanoinferError('a\\n')"
    assert str(NanoinferError()) == ""


def gguf(metadata: dict[str, Any] | None = None, tensor: str | None = None) -> Callable[[Path], object]:
    return lambda folder: tiny_gguf(folder / "model.gguf", metadata=metadata, tensor=tensor)


def config(**changes: object) -> Callable[[Path], object]:
    return lambda folder: edit_config(make_folder(folder), **changes)


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        raw = (path := make_folder(folder) / "model.safetensors").read_bytes()
        length = 8 + int.from_bytes(raw[:8], "little")
        change(found := json.loads(raw[8:length]))
        head = json.dumps(found).encode()
        path.write_bytes(len(head).to_bytes(8, "little") + head + raw[length:])

    return write


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (make_folder(folder) / name).write_text(content)


def index(folder: Path) -> None:
    (make_folder(folder) / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": LONG}}))


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
LONG = EVIL + "x" * 60_000
WTE = "transformer.wte.weight"
FILES: dict[str, Callable[[Path], object]] = {
    "an unknown key of the architecture": gguf({f"gpt2.{EVIL}": 1}),
    "the architecture": gguf({"general.architecture": LONG}),
    "a tensor": gguf(tensor=EVIL),
    "the kind of a tokenizer": gguf({"tokenizer.ggml.model": LONG}),
    "the family of a config": config(model_type=LONG),
    "a value of a config": config(n_layer=LONG),
    "a field of a config": config(scale_attn_weights=LONG),
    "an entry of a header": header(lambda h: h.update({EVIL: {EVIL: LONG}})),
    "an index of shards": index,
    "a key of a config twice": text("config.json", "{%s: 1, %s: 1}" % ((json.dumps(LONG),) * 2)),
    "a key of a vocabulary twice": text("vocab.json", "{%s: 1, %s: 1}" % ((json.dumps(LONG),) * 2)),
}


@pytest.mark.parametrize("case", FILES)
def test_what_a_file_contains_is_escaped_in_messages(case: str, tmp_path: Path) -> None:
    """And truncated: a name in a file may have megabytes."""
    folder = tmp_path / "m"
    folder.mkdir()
    FILES[case](folder)
    if (folder / "vocab.json").exists():
        (folder / "tokenizer.json").unlink()
        (folder / "merges.txt").write_text("")
    path = folder / "model.gguf" if (folder / "model.gguf").exists() else folder
    messages = []
    for call in (load_model, load_tokenizer):
        try:
            messages.append(call(str(path)).no_tokenizer_reason)  # type: ignore[union-attr]
        except AttributeError:
            pass
        except NanoinferError as e:
            messages.append(str(e))
    assert any(r"\x1b]0;t\x07" in message for message in messages), messages
    for message in messages:
        assert message.isprintable()
        assert len(message) < 2000
