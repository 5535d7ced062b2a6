"""The ladder in small files: each has the tokens of the file before it and of the engine, and stays small."""

from __future__ import annotations

import copy
import importlib
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

import nanoinfer

LADDER = Path(__file__).parent
RUNGS = sorted(path.stem for path in LADDER.glob("[0-9]*.py"))


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LADDER))


class Reference(nanoinfer.LLM):
    """Generates what the rungs are compared with: most ask for the same tokens."""

    outputs: ClassVar[dict[str, list[nanoinfer.RequestOutput]]] = {}

    def generate(self, *args: Any, **kwargs: Any) -> list[nanoinfer.RequestOutput]:
        key = repr((self.model_name, args, kwargs))
        if key not in self.outputs:
            self.outputs[key] = super().generate(*args, **kwargs)
        return self.outputs[key]


def rung(number: int) -> ModuleType:
    return importlib.import_module(RUNGS[number - 1])


def test_eleven_files_that_can_be_read_in_an_afternoon() -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in LADDER.glob("*.py") if path != Path(__file__)}
    assert len(RUNGS) == 11
    assert sizes["model.py"] <= 120
    assert max(sizes.values()) <= 150
    assert sum(sizes.values()) <= 1270


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.slow_if(lambda name: name not in ("04_batch", "05_pages", "09_scheduler", "11_recurrent_state"))
def test_a_rung_has_the_tokens_of_the_rung_before_and_of_the_engine(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--check"])
    monkeypatch.setattr(nanoinfer, "LLM", Reference)
    runpy.run_path(str(LADDER / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1].endswith("LLM(engine=recompute)")


@pytest.mark.slow
def test_a_rung_prints_its_text_its_speed_and_the_limit() -> None:
    command = [sys.executable, str(LADDER / "03_static_cache.py"), "--prompt", "O Romeo,", "--max-new-tokens", "9"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith("O Romeo,")
    assert [line.partition(" ")[0] for line in lines[-3:]] == ["9", "limit:", "reached:"]


def test_filters_with_and_without_a_sort_keep_the_same_tokens() -> None:
    sampling = rung(6)
    logits = torch.randn(50, 512, generator=torch.Generator().manual_seed(0)).double() * 3
    for row in logits:
        for top_k, top_p in ((50, 0.95), (0, 0.9), (5, 1.0), (1, 0.5), (0, 1e-9)):
            expected = sampling.kept_by_sort(row, top_k, top_p)
            assert torch.equal(sampling.kept_without_sort(row, top_k, top_p), expected), (top_k, top_p)


@pytest.mark.parametrize("blocks", [7, 9, 12])
def test_preempted_requests_have_the_tokens_of_the_loop(blocks: int, capsys: pytest.CaptureFixture[str]) -> None:
    model, encode, _ = importlib.import_module("model").load("shakespeare-draft")
    texts = ["O Romeo, " * 6, "To be", "A" * 30, "First Citizen: " * 8, "x", "What say you, my lord? " * 3]
    prompts = [encode(text) for text in texts]
    expected = rung(1).generate(model, prompts, 24, [])
    assert rung(9).generate(model, prompts, 24, [], blocks) == expected
    assert int(capsys.readouterr().out.split()[2]) > 0  # were preempted


def test_a_text_cut_anywhere_has_the_logits_of_a_new_one() -> None:
    state, load = rung(11), importlib.import_module("model").tokenizer
    model, (encode, _) = state.Toy(LADDER / "toy"), load(LADDER / "toy")
    tokens, other, text = encode(state.PROMPTS[0]), encode("?A"), state.Text(model)
    with torch.inference_mode():
        for start in range(0, len(tokens), 16):
            text.extend(tokens[start : start + 16], [])
        for length in range(len(tokens), -1, -5):
            cut, new, steps = copy.copy(text), state.Text(model), []
            cut.truncate(length)
            found, expected = cut.extend(other, steps), new.extend(tokens[:length] + other, [])[-2:]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert steps[0][1] == 2 + (0 if length >= 32 else length % 16)  # the last step began at 32


def test_a_checkpoint_of_nanogpt(tmp_path: Path) -> None:
    import pickle

    load = importlib.import_module("model").load
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 16, "vocab_size": 3, "bias": False}
    model = importlib.import_module("model").GPT(**shape, gelu="none")
    torch.save(
        {"model_args": {**shape, "dropout": 0.0}, "model": model.state_dict(prefix="_orig_mod.")}, tmp_path / "ckpt.pt"
    )
    (tmp_path / "meta.pkl").write_bytes(
        pickle.dumps({"stoi": {"a": 0, "b": 1, "c": 2}, "itos": dict(enumerate("abc"))})
    )
    loaded, encode, decode = load(tmp_path / "ckpt.pt")
    assert decode(encode("abca")) == "abca"
    assert rung(2).generate(loaded, [[0, 1]], 5, []) == rung(1).generate(model.eval(), [[0, 1]], 5, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a CUDA device")
def test_a_graph_without_a_cuda_device_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["10_launches.py", "--by", "graph"])
    with pytest.raises(SystemExit, match=r"^--by graph: no CUDA device here; use --by native or --by eager$"):
        runpy.run_path(str(LADDER / "10_launches.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("01_recompute", ["--model", "nothing"], "--model nothing cannot be read: "),
        (
            "04_batch",
            ["--max-new-tokens", "999"],
            "a prompt and its new tokens are at least 1 each and at most 512 together",
        ),
        ("02_kv_cache", ["--prompt", ""], "a prompt and its new tokens are at least 1 each"),
    ],
)
def test_an_error_is_one_line(
    file: str, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{file}.py", *options])
    with pytest.raises(SystemExit):
        runpy.run_path(str(LADDER / f"{file}.py"), run_name="__main__")
    assert f"error: {message}" in capsys.readouterr().err.splitlines()[-1]
