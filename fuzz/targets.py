"""Targets of the fuzzers: one for each kind of untrusted file or value.

A target's `run` takes the input and an empty folder. It returns or raises NanoinferError. Another exception is a finding,
and so are the faults that case.py detects: signals, time, memory, and messages that are not printable. An AssertionError
means that the input was accepted but misread.
"""

from __future__ import annotations

import dataclasses
import io
import os
import socket
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from choices import ANY, Choices
from exports import export_configs, export_folder, open_part, use_export, use_native
from gguf_format import PARTS, make_gguf, make_part, mutate_gguf, other_parts
from mutate import (
    Mutator,
    make_random,
    mutate_bytes,
    mutate_json,
    mutate_name,
    mutate_packed,
    mutate_pickle,
    mutate_safetensors,
)
from quantized import METHODS, quantized_folder
from seeds import (
    CHARS,
    exported,
    make_index,
    make_meta,
    make_results,
    make_tekken,
    make_tiktoken,
    make_tokenizers,
    make_vocab,
    model_folder,
    packed_folder,
    run_folder,
    train_config,
    trained,
    without,
)

from nanoinfer import LLM, NanoinferError, SamplingParams, config
from nanoinfer.bench import results, table
from nanoinfer.bench.case import Case
from nanoinfer.checkpoints import packed
from nanoinfer.checkpoints.load import LoadedModel, load_model, load_tokenizer
from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.native import NativeEngine
from nanoinfer.tokenizers import tokenizer as tokenizers
from nanoinfer.tokenizers.tokenizer import fingerprint
from nanoinfer.training import loop
from nanoinfer.training.loop import STATE, TrainRun
from nanoinfer.training.train_config import TrainConfig


@dataclass(frozen=True)
class Target:
    """A reader of untrusted input."""

    seeds: Callable[[], list[bytes]]
    """Valid inputs from which fuzzing starts."""
    run: Callable[[bytes, Path], object]
    mutate: Mutator = make_random
    sanitized: bool = False
    """Whether it uses the sanitized extension, if there is one."""


# Files: the other files in the folder are valid --------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A kind of file."""

    name: str
    seeds: Callable[[], list[bytes]]
    mutate: Mutator
    open: Callable[[Path], Any]
    use: Callable[[Any, Path], None] = lambda opened, path: None
    others: Callable[[], dict[str, bytes]] = field(default=dict)

    def place(self, folder: Path) -> Path:
        """Write the other files; return the path of this one."""
        for name, content in self.others().items():
            (folder / name).write_bytes(content)
        return folder / self.name

    def run(self, data: bytes, folder: Path) -> None:
        """Read `data` as a file of this kind and use the result."""
        path = self.place(folder)
        path.write_bytes(data)
        self.use(self.open(path), path)


def use_model(loaded: LoadedModel, path: Path) -> None:
    """Read all weights, as an engine with its own weight format does."""
    for _, tensor in loaded.weights.read():
        tensor.float32().sum()


def quantized_file(method: str, name: str) -> list[bytes]:
    """Return one file of a quantized folder."""
    return [quantized_folder(method)[name]]


def use_packed(loaded: LoadedModel, path: Path) -> None:
    """Start an engine on the mapped weights and run a step."""
    weights = loaded.weights
    assert isinstance(weights, packed.PackedWeights)
    del loaded
    engine = NativeEngine(weights, EngineLimits(1, 8, 8), EngineConfig(threads=1))
    engine.extend(StepBatch(handles=[engine.open()], token_ids=[1, 2, 3], num_new=[3], num_logits=[3]))


def use_tokenizer(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    """Encode and decode; check that texts are neither truncated nor padded."""
    vocab_size = tokenizer.vocab_size
    assert 0 < vocab_size < 2**31, f"vocab_size is {vocab_size}"
    once, twice = (tokenizer.encode(c * 200) for c in ("a", "aa")) if "a" in CHARS else ([], [])
    assert all(0 <= i < vocab_size for i in once), "an id is not in the vocabulary"
    if once and len(once) >= 200 and path.name != "merges.txt":
        assert len(twice) > len(once), f"a text of 400 characters has {len(twice)} tokens, as one of 200: truncated"
    text = tokenizers.decode(tokenizer, [*once[:20], *range(min(vocab_size, 20)), vocab_size - 1])
    text.encode()
    fingerprint(tokenizer) if vocab_size < 10_000 else None
    core = getattr(tokenizer, "core", None)
    assert core is None or (core.truncation is None and core.padding is None), "truncation or padding is on"


def use_gguf(loaded: LoadedModel, path: Path) -> None:
    """Read all weights; use the tokenizer; write the model as a new file, and compare what is read from it."""
    use_model(loaded, path)
    if loaded.tokenizer is not None:
        use_tokenizer(loaded.tokenizer, path)
    use_export(loaded, path)


def resume(path: Path) -> TrainRun:
    """Resume the training run in a folder."""
    return loop.prepare(train_config(path.parent), resume=True)


def use_results(found: results.Results, path: Path) -> None:
    """Print and convert benchmark results."""
    from rich.console import Console

    table.show(found, Console(file=io.StringIO(), width=140))
    results.to_json(found).encode()


def load_folder(path: Path) -> LoadedModel:
    """Load the model in the folder of this file."""
    return load_model(str(path.parent))


def finish(run: TrainRun, path: Path) -> None:
    """Run the remaining training steps."""
    loop.train(run, lambda progress: None)


FILES = {
    "safetensors": File("model.safetensors", lambda: [model_folder()["model.safetensors"]], mutate_safetensors, load_folder,
                        use_model, lambda: without(model_folder(), "model.safetensors")),
    "packed": File(packed.FILE, lambda: [packed_folder(w)[packed.FILE] for w in packed.FORMATS], mutate_packed,
                   load_folder, use_packed, lambda: without(packed_folder(), packed.FILE)),
    "config": File("config.json", lambda: [model_folder()["config.json"]], mutate_json, load_folder, use_model, model_folder),
    **{f"quantized-{m}": File("model.safetensors", partial(quantized_file, m, "model.safetensors"), mutate_safetensors,
                              load_folder, use_model, partial(quantized_folder, m)) for m in METHODS},
    **{f"quantized-{m}-config": File("config.json", partial(quantized_file, m, "config.json"), mutate_json, load_folder,
                                     use_model, partial(quantized_folder, m)) for m in METHODS},
    "index": File("model.safetensors.index.json", make_index, mutate_json, load_folder, use_model,
                  lambda: model_folder(shards=True)),
    "generation": File(
        "generation_config.json",
        lambda: [b'{"eos_token_id": [5, 6], "bos_token_id": 0, "do_sample": true}', b'{"eos_token_id": 5}'],
        mutate_json, load_folder, use_model, model_folder,
    ),
    "gguf": File("model.gguf", lambda: make_gguf() + exported(), mutate_gguf, lambda p: load_model(str(p)), use_gguf),
    "gguf-native": File("model.gguf", make_gguf, mutate_gguf, lambda p: load_model(str(p)), use_native),
    **{f"gguf-part-{i}": File(name, partial(make_part, name), mutate_gguf, open_part, use_gguf, partial(other_parts, name))
       for i, name in enumerate(PARTS, 1)},
    "export-config": File("config.json", export_configs, mutate_json, load_folder, use_export, export_folder),
    "export-tokenizer": File("tokenizer.json", make_tokenizers, mutate_json, load_folder, use_export, export_folder),
    "meta": File("meta.pkl", make_meta, mutate_pickle, lambda p: load_tokenizer(str(p)), use_tokenizer),
    "tiktoken": File("tokenizer.pkl", make_tiktoken, mutate_pickle, lambda p: load_tokenizer(str(p)), use_tokenizer),
    "tokenizer": File("tokenizer.json", make_tokenizers, mutate_json, lambda p: load_tokenizer(str(p)), use_tokenizer),
    "vocab": File("vocab.json", make_vocab, mutate_json, lambda p: load_tokenizer(str(p.parent)), use_tokenizer,
                  lambda: {"merges.txt": b"#version: 0.2\nb a\n"}),
    "merges": File("merges.txt", lambda: [b"#version: 0.2\nb a\n"], mutate_bytes, lambda p: load_tokenizer(str(p.parent)),
                   use_tokenizer, lambda: {"vocab.json": b'{"a": 0, "b": 1, "ba": 2}'}),
    "added-tokens": File("added_tokens.json", lambda: [b'{"c": 3, "ab": 4}'], mutate_json,
                         lambda p: load_tokenizer(str(p.parent)), use_tokenizer,
                         lambda: {"vocab.json": b'{"a": 0, "b": 1, "ba": 2}', "merges.txt": b"#version: 0.2\nb a\n"}),
    "tekken": File("tekken.json", make_tekken, mutate_json, lambda p: load_tokenizer(str(p)), use_tokenizer),
    "tokenizer-config": File(
        "tokenizer_config.json", lambda: [b'{"add_bos_token": true, "bos_token": "a"}', b'{"bos_token": {"content": "b"}}'],
        mutate_json, lambda p: load_tokenizer(str(p.parent)), use_tokenizer,
        lambda: {"vocab.json": b'{"a": 0, "b": 1, "ba": 2}', "merges.txt": b"#version: 0.2\nb a\n"},
    ),
    "state": File(STATE, lambda: [run_folder()[STATE]], mutate_safetensors, resume, finish, run_folder),
    "results": File("results.json", make_results, mutate_json, results.read, use_results),
}  # fmt: skip


SANITIZED_FILES = ("packed", "gguf-native")
KINDS = ("fifo", "folder", "dangling", "loop", "endless", "socket", "huge", "truncated")


def run_kind(data: bytes, folder: Path) -> None:
    """Read a path that is not a regular file, or a file that changes during the read: b"gguf fifo"."""
    name, _, kind = data.decode(errors="replace").partition(" ")
    if name not in FILES or kind not in KINDS or (name, kind) == ("packed", "truncated"):
        return  # a mapped file must not be truncated
    file = FILES[name]
    path, seed = file.place(folder), file.seeds()[0]
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("dangling", "loop", "endless"):
        path.symlink_to({"dangling": "/nowhere", "loop": path.name, "endless": "/dev/zero"}[kind])
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path.name)  # relative to the working directory, because a socket's path has a length limit
    else:
        path.write_bytes(seed)
    if kind == "huge":
        os.truncate(path, 3 << 30)
    opened = file.open(path)
    if kind == "truncated":
        os.truncate(path, len(seed) // 3)
    file.use(opened, path)


# Values ----------------------------------------------------------------------------------------------------


def run_name(data: bytes, folder: Path) -> None:
    """Load a model and a tokenizer by a random name."""
    name = data.decode(errors="surrogateescape")
    for load in (load_tokenizer, load_model):
        try:
            load(name)
        except NanoinferError as e:
            error = e
        else:
            return
    raise error


CONFIGS = (SamplingParams, SamplingParams, SamplingParams, ModelConfig, config.EngineConfig, config.SpeculationConfig,
           config.SchedulerConfig, TrainConfig, Case)  # fmt: skip


@cache
def tiny_llm() -> LLM:
    """Return an LLM with the tiny model."""
    from tempfile import mkdtemp

    folder = Path(mkdtemp())
    for name, content in model_folder().items():
        (folder / name).write_bytes(content)
    return LLM(str(folder), engine="static", max_num_seqs=2)


def run_params(data: bytes, folder: Path) -> None:
    """Create a configuration of random values; generate if it is an accepted SamplingParams."""
    choices = Choices(data)
    kind: Any = choices.pick(CONFIGS)
    fields = dataclasses.fields(kind)
    required = [f for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    given: dict[str, Any] = {f.name: "a" if "str" in str(typing.get_type_hints(kind)[f.name]) else 1 for f in required}
    for _ in range(1 + choices.number(3)):
        given[choices.pick(fields).name] = choices.pick(ANY)
    made = kind(**given)
    if kind is SamplingParams:
        limits = {
            "max_tokens": min(made.max_tokens or 12, 12),
            "min_tokens": min(made.min_tokens, 2),
            "n": min(made.n, 2),
        }
        tiny_llm().generate("a bad", replace(made, **limits))


def run_stream(data: bytes, folder: Path) -> None:
    """Decode random ids one by one; compare with the text of all ids together."""
    choices = Choices(data)
    name = choices.pick(list(trained()))
    tokenizer = cached_tokenizer(name)
    ids: list[int] = []
    while choices and len(ids) < 60:
        ids.append(
            -1 + choices.number(tokenizer.vocab_size + 2) if choices.odd(50) else choices.number(tokenizer.vocab_size)
        )
    text = tokenizers.decode(tokenizer, ids)
    text.encode()
    if name != "char" and "\ufffd" not in text:
        whole = getattr(tokenizer, "core").decode(ids, skip_special_tokens=False)  # noqa: B009
        assert text == whole, f"{name}: the stream gives {text!r:.80}, the whole {whole!r:.80}"


@cache
def cached_tokenizer(name: str) -> tokenizers.Tokenizer:
    """Return one of the trained tokenizers."""
    return tokenizers.from_json(trained()[name], name)


def load_targets() -> dict[str, Target]:
    """Return all targets by name."""
    import boundary
    import chat_seeds
    import chats
    import requests_over_http

    targets = {
        name: Target(file.seeds, file.run, file.mutate, sanitized=name in SANITIZED_FILES)
        for name, file in FILES.items()
    }
    random_bytes = [bytes(range(i, 256, 7)) for i in range(7)]
    every = [f"{name} {kind}".encode() for name in FILES for kind in KINDS]
    targets["kinds"] = Target(lambda: every, run_kind, lambda rng, data, others: rng.choice(every))
    names = [b"shakespeare", b"random:gpt2", b"wide:shakespeare:gpt2", b"a/b", b"./x", b"openai-community/gpt2"]
    targets["names"] = Target(lambda: names, run_name, mutate_name)
    targets["params"] = Target(lambda: random_bytes, run_params)
    targets["streams"] = Target(lambda: random_bytes, run_stream)
    targets["answers"] = Target(lambda: random_bytes, chats.run_answer)
    templates = [text.encode() for text in (chat_seeds.HERMES, chat_seeds.TAGGED, chat_seeds.NAMED)]
    targets["chat-templates"] = Target(lambda: templates, chats.run_template, chats.mutate_template)
    responses = chat_seeds.RESPONSES
    targets["response-templates"] = Target(lambda: responses, chats.run_response_template, chats.mutate_text_in)
    targets["tools"] = Target(lambda: chat_seeds.TOOLS, chats.run_tools, mutate_json)
    targets["requests"] = Target(lambda: chat_seeds.REQUESTS, requests_over_http.run_request, mutate_json)
    targets["lines"] = Target(lambda: chat_seeds.LINES, requests_over_http.run_lines, mutate_json)
    targets["decoder"] = Target(lambda: random_bytes, boundary.run_decoder, sanitized=True)
    targets["sampler"] = Target(lambda: random_bytes, boundary.run_sampler, sanitized=True)
    targets["kernels"] = Target(lambda: random_bytes, boundary.run_kernels, sanitized=True)
    return targets
