"""The native path from the model to the text, in a process that cannot import PyTorch.

    make test-small     in an environment that has none (.venv-small)
    make test           in a process that finds none: test_without_torch.py

Not a test_*.py: where PyTorch is installed, conftest.py imports it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.environment import HAS_TORCH
from helpers.models import TINY, make_folder
from nanoinfer import LLM, SamplingParams
from nanoinfer.cli import main

FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
DRAFTS = ("shakespeare-draft", "prompt-lookup", "self:int8", "self:1", "auto")
CONTROLS = {
    "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "repetition_penalty": 1.1, "logit_bias": {3: 1.0, 5: -100.0}, "min_tokens": 4, "stop": ("zzz",),
}  # fmt: skip
TEXT = "To be, or not to be: that is the question. "

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process: arguments -> exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nanoinfer", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        with pytest.raises(SystemExit) as e:
            main()
        out, err = capsys.readouterr()
        return int(e.value.code or 0), out, err

    return call


def test_there_is_no_torch() -> None:
    assert not HAS_TORCH
    with pytest.raises(ModuleNotFoundError):
        import torch  # noqa: F401


@pytest.mark.parametrize("name", FORMATS)
def test_formats_generate_and_stream_the_same(folder: Path, name: str) -> None:
    llm = LLM(str(folder), **FORMATS[name])
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=7)
    one, other = llm.generate(["Go", "O Romeo"], params)
    assert llm.engine_name == "native"
    assert (llm.device, llm.dtype) == ("cpu", FORMATS[name].get("dtype", llm.dtype))
    assert len(one.outputs[0].token_ids) == 20
    assert "".join(llm.stream("Go", params)) == one.check().outputs[0].text
    assert "".join(llm.stream("O Romeo", params)) == other.check().outputs[0].text


def test_several_outputs_are_those_of_the_request_alone(folder: Path) -> None:
    llm, params = LLM(str(folder)), SamplingParams(max_tokens=12, seed=3, n=3)
    (output,) = llm.generate("Go", params)
    (alone,) = llm.generate("Go", dataclasses.replace(params, n=1))
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    assert len({tuple(o.token_ids) for o in output.outputs}) == 3


def test_the_samplers_agree_with_all_controls_and_logprobs(folder: Path) -> None:
    params = SamplingParams(max_tokens=20, seed=5, logprobs=4, prompt_logprobs=1, **CONTROLS)
    outputs = [LLM(str(folder), sampler=s).generate("O Romeo", params)[0].check() for s in ("auto", "reference")]
    native, reference = (o.outputs[0] for o in outputs)
    assert native.token_ids == reference.token_ids
    assert native.logprobs is not None
    assert reference.logprobs is not None
    assert [len(found) >= 4 for found in native.logprobs] == [True] * 20
    assert native.cumulative_logprob == pytest.approx(reference.cumulative_logprob)
    assert 5 not in native.token_ids
    prompt = outputs[0].prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    assert all(found is not None and found[token].logprob < 0 for token, found in
               list(zip(outputs[0].prompt_token_ids, prompt, strict=True))[1:])  # fmt: skip


def test_perplexity_is_that_of_the_likelihoods(folder: Path) -> None:
    llm = LLM(str(folder))
    (score,) = llm.perplexity(TEXT[:30])
    (pair,) = llm.loglikelihood(TEXT[0], TEXT[1:30])
    assert score.num_tokens == pair.num_tokens == 29
    assert score.log_likelihood == pytest.approx(pair.log_likelihood, rel=1e-6)
    assert score.perplexity == pytest.approx(math.exp(-pair.log_likelihood / 29))
    (long,) = llm.perplexity(TEXT * 3, stride=8)
    assert long.num_tokens == 3 * len(TEXT) - 1


@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_propose_and_the_output_stays(draft: str) -> None:
    params = SamplingParams(max_tokens=100, temperature=0.8, seed=1, ignore_eos=True)
    plain, k = LLM("shakespeare").generate(TEXT * 2, params)[0].outputs[0].token_ids, 3
    llm = LLM("shakespeare", draft=draft, speculate_k=k)
    (output,) = llm.generate(TEXT * 2, params)
    assert output.check().outputs[0].token_ids == plain
    counts = output.metrics.speculation
    assert counts is not None
    assert counts.num_proposed > 0
    llm.set_draft(draft, speculate_k=k, speculate_rule="reject")
    (output,) = llm.generate(TEXT * 2, params)
    assert len(output.check().outputs[0].token_ids) == 100


def test_a_window_slides(folder: Path) -> None:
    llm = LLM(str(folder))
    for stride in (None, 1):
        params = SamplingParams(max_tokens=80, temperature=0, overflow="slide", slide_stride=stride, ignore_eos=True)
        (output,) = llm.generate("Go", params)
        assert len(output.check().outputs[0].token_ids) == 80 > TINY.block_size


@pytest.mark.parametrize("model", ["shakespeare", "random:gpt2", "wide:shakespeare:gpt2"])
def test_models_without_a_folder(model: str) -> None:
    llm = LLM(model, quantization="int8", max_num_seqs=1)
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert len(output.check().outputs[0].token_ids) == 3


def test_generate_and_eval(run: Run, folder: Path, tmp_path: Path) -> None:
    (expected,) = LLM(str(folder)).generate("Go", SamplingParams(max_tokens=9, seed=1, temperature=0.8, top_k=50))
    code, out, err = run("generate", "Go", "-m", folder, "--max-tokens", 9, "--seed", 1)
    assert (code, out, err) == (0, expected.outputs[0].text + "\n", "")
    (tmp_path / "play.txt").write_text(TEXT)
    code, out, _ = run("eval", tmp_path / "play.txt", "-m", folder, "--json")
    assert code == 0
    assert json.loads(out)["perplexity"] == pytest.approx(LLM(str(folder)).perplexity(TEXT)[0].perplexity)


def test_batch(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Go", "temperature": 0, "max_tokens": 4}\n[]\n')
    assert run("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "-m", folder)[0] == 1
    good, bad = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    (expected,) = LLM(str(folder)).generate("Go", SamplingParams(temperature=0, max_tokens=4))
    assert good["outputs"][0]["text"] == expected.outputs[0].text
    assert bad["error"] == "the line [] is not a JSON object: write {'prompt': ...}"


def test_packed_weights_are_those_of_the_folder(run: Run, folder: Path, tmp_path: Path) -> None:
    code, _, err = run("pack", folder, "--quantization", "int8", "--output", tmp_path / "packed")
    assert code == 0, err
    params = SamplingParams(max_tokens=20, seed=2)
    packed, packs = (
        llm.generate("Go", params)[0].outputs[0]
        for llm in (LLM(str(tmp_path / "packed")), LLM(str(folder), quantization="int8"))
    )
    assert packed.token_ids == packs.token_ids


def test_engines_says_what_the_others_need(run: Run) -> None:
    code, out, _ = run("engines", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert [name for name, row in rows.items() if row["available"]] == ["native"]
    assert "pip install '.[torch]'" in json.dumps(rows["static"])


def test_roofline(run: Run) -> None:
    code, out, _ = run("roofline", "gpt2", "--device", "t4", "--json")
    assert code == 0
    assert json.loads(out)["decode"]["tokens_per_sec"] > 0
    assert run("roofline", "shakespeare", "--device", "t4")[0] == 0


def test_bench(run: Run, folder: Path, tmp_path: Path, quick_ceiling: None) -> None:
    results = tmp_path / "results.json"
    case = ("--batch", 1, "--prompt-tokens", 4, "--output-tokens", 8)
    code, _, err = run("bench", "--engine", "native", "-m", folder, "--quick", *case, "--output", results)
    assert (code, results.is_file()) == (0, True), err
    (row,) = json.loads(results.read_text())["rows"]
    assert "error" not in row
    assert row["figures"]["decode_tokens_per_sec"] > 0


NEEDS_TORCH = {
    "an engine": ("generate", "Go", "-m", "{folder}", "--engine", "static"),
    "the engine of a benchmark": ("profile", "Go", "-m", "{folder}", "--engine", "dynamic"),
    "training": ("train", "--data", "{text}", "--out", "{out}"),
}


@pytest.mark.parametrize("case", NEEDS_TORCH)
def test_what_needs_torch_says_so_in_one_line(run: Run, folder: Path, tmp_path: Path, case: str) -> None:
    (tmp_path / "play.txt").write_text(TEXT * 50)
    names = {"folder": folder, "text": tmp_path / "play.txt", "out": tmp_path / "out"}
    code, out, err = run(*(a.format(**names) for a in NEEDS_TORCH[case]))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "torch is not installed: pip install '.[torch]' in the folder of nanoinfer's source" in err
    assert not (tmp_path / "out").exists()
