"""Where the time goes: shares that add up, the same tokens, counts that are known, and nothing left behind."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.environment import ROOT
from helpers.models import TINY, Run, make_folder, refuses
from nanoinfer import LLM, SamplingParams
from nanoinfer.engines.registry import ENGINES
from nanoinfer.errors import NanoinferError
from nanoinfer.profiling import profiler as module
from nanoinfer.profiling.profiler import profile
from nanoinfer.profiling.spans import PARTS, Spans
from nanoinfer.utils.environment import waited_seconds

HERE = [name for name, spec in ENGINES.items() if spec.unavailable() is None and "cpu" in spec.devices]
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, top_k=20, seed=3)


@pytest.fixture
def llm(tiny_folder: Path) -> LLM:
    return LLM(str(tiny_folder), engine="static", device="cpu", max_num_seqs=4)


def marks(llm: LLM) -> list[Any]:
    """What a profile changes while it lasts."""
    modules = [] if llm.engine.model is None else list(llm.engine.model.modules())
    hooks = [h for m in modules for h in (*m._forward_hooks, *m._forward_pre_hooks)]
    own = [m for m in modules if "forward" in m.__dict__]
    return [llm.core.observer.__class__, hooks, own, sorted(vars(llm.engine)), llm.core.unfinished]


# The profile -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", HERE)
@pytest.mark.nightly_if(lambda engine: engine == "compiled")
def test_shares_add_up_and_tokens_are_the_same(tiny_folder: Path, engine: str) -> None:
    llm = LLM(str(tiny_folder), engine=engine, device="cpu", max_num_seqs=4)
    expected = [o.outputs[0].token_ids for o in llm.generate(["Go", "Hi all"], PARAMS)]
    before = marks(llm)
    p = profile(llm, ["Go", "Hi all"], PARAMS)
    assert p.token_ids == expected
    assert (p.engine, p.num_tokens, p.num_steps) == (engine, 12, 6)
    assert [row.name for row in p.parts] == list(PARTS)
    assert sum(row.share_percent for row in p.parts) == pytest.approx(100)
    assert sum(row.self_sec for row in p.parts) == pytest.approx(p.wall_sec)
    assert all(0 <= row.share_percent <= 100 for row in (*p.parts, *p.operators))
    assert sum(row.share_percent for row in p.operators) <= 100
    assert bool(p.operators) == (engine != "native")  # which runs none of PyTorch's
    assert (p.kernel_launches_per_token, p.launches) == (None, None)
    assert p.operator_calls_per_token == sum(row.calls for row in p.operators) / 12
    assert not any(row.name.startswith("nanoinfer") for row in p.operators)
    assert marks(llm) == before
    assert before[1:3] == [[], []]


@pytest.mark.parametrize("engine", ["static", "native"])
@pytest.mark.parametrize("family", ["gpt_neox", "gemma3", "gemma4", "nemotron_h", "falcon_h1"])
@pytest.mark.slow_if(lambda family: family != "gpt_neox")
def test_parts_of_other_families_are_distinguished(tmp_path: Path, family: str, engine: str) -> None:
    if engine not in HERE:
        pytest.skip(f"{engine} is not built here")
    pytest.importorskip("transformers", reason="transformers makes the models")
    from helpers.families import make_folder as make_family

    make_family(family, tmp_path)
    p = profile(LLM(str(tmp_path), engine=engine, device="cpu"), [[3, 1, 4]], PARAMS)
    assert p.tells_apart
    calls = {row.name: row.calls for row in p.parts}
    # of 4 layers; all but the first have a gate, and gemma4 two products more a layer and one for all; of 6 layers, of
    # which 3 have an MLP; of 3 with a state beside attention
    products = {"gpt_neox": 4 * 4, "gemma4": 7 * 4 + 1, "nemotron_h": 6 * 2 + 3 * 2, "falcon_h1": 6 * 3}
    attention = {"nemotron_h": 6, "falcon_h1": 6}.get(family, 4)
    expected = products.get(family, 5 * 4) * p.num_steps, attention * p.num_steps
    assert (calls["matrix products"], calls["attention"]) == expected


def test_calls_are_those_of_the_model(llm: LLM) -> None:
    p = profile(llm, "Go", PARAMS)
    calls = {row.name: row.calls for row in p.parts}
    assert p.num_tokens == p.num_steps == 6
    assert p.tells_apart
    assert calls == {
        "matrix products": 4 * TINY.n_layer * 6,
        "attention": TINY.n_layer * 6,
        "output head": 6,
        "sampling": 6,
        "norms": (2 * TINY.n_layer + 1) * 6,
        "activation and residual": TINY.n_layer * 6,
        "embedding": 2 * 6,
        "rest of the engine": 6,
        "Python and host": 0,
    }
    operators = {row.name: row.calls for row in p.operators}
    assert operators["aten::linear"] == (4 * TINY.n_layer + 1) * 6
    assert operators["aten::gelu"] == TINY.n_layer * 6


def test_decode_only_leaves_the_first_token_out(llm: LLM) -> None:
    whole = profile(llm, ["Go", "Hi"], PARAMS)
    p = profile(llm, ["Go", "Hi"], PARAMS, decode_only=True)
    assert p.token_ids == whole.token_ids
    assert (p.num_tokens, p.num_steps) == (10, 5)
    refuses(lambda: profile(llm, "Go", SamplingParams(max_tokens=1), decode_only=True), "max_tokens=1")
    last = SamplingParams(max_tokens=5, overflow="stop")
    refuses(lambda: profile(llm, "a" * TINY.block_size, last, decode_only=True), "no token was generated")


def test_without_a_seed_every_run_draws_the_same(llm: LLM) -> None:
    p = profile(llm, "Go", SamplingParams(max_tokens=6))
    assert p.token_ids == [llm.generate("Go", SamplingParams(max_tokens=6, seed=0))[0].outputs[0].token_ids]


@pytest.mark.parametrize("failing_call", [1, 5, 16])  # in the warm-up (4 steps), for the clock, profiled
def test_an_error_leaves_nothing_behind(llm: LLM, failing_call: int) -> None:
    sampler, calls = llm.core._steps._sampler, []

    def fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) >= failing_call:
            raise NanoinferError("overflow")
        return sampler(*args)

    llm.core._steps._sampler = fails
    before = marks(llm)
    with pytest.raises(NanoinferError, match="overflow"):
        profile(llm, "Go", SamplingParams(max_tokens=6, seed=0))
    assert marks(llm) == before
    assert before[1:3] == [[], []]
    llm.core._steps._sampler = sampler
    assert profile(llm, "Go", PARAMS).num_tokens == 6


def test_trace_is_json_with_the_spans(llm: LLM, tmp_path: Path) -> None:
    profile(llm, "Go", PARAMS, trace=tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [e.get("name") for e in events if e.get("ph") == "X"]
    assert names.count("nanoinfer: attention") == TINY.n_layer * 6
    assert names.count("nanoinfer: output head") == 6
    assert "aten::addmm" in names


def test_time_belongs_to_the_innermost_span() -> None:
    ticks = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    clock = Spans(lambda: next(ticks))
    clock.enter("a")  # 0 to 1, 3 to 6, 10 to 15
    clock.enter("b")
    clock.leave()
    clock.enter("b")
    clock.leave()
    clock.leave()
    assert clock.seconds == {"a": 1 + 3 + 5, "b": 2 + 4}
    assert clock.calls == {"a": 1, "b": 2}


# A busy machine -----------------------------------------------------------------------------------------------


def test_the_time_that_threads_waited_is_read_from_the_kernel(tmp_path: Path) -> None:
    for name, content in (("1", "900 2000000000 5"), ("2", "0 500000000 1\n"), ("3", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(content)
    (tmp_path / "4").mkdir()  # a thread that has ended, and "3" one that ends
    assert waited_seconds(tmp_path) == 2.5
    assert waited_seconds(tmp_path / "none") is None
    (tmp_path / "5").mkdir()
    assert waited_seconds(tmp_path / "5") is None  # a kernel without these counters
    if (now := waited_seconds()) is not None:
        assert 0 <= now <= (waited_seconds() or 0)


@pytest.mark.parametrize("waited", [1e3, None])
def test_a_profile_says_that_its_threads_waited_for_cores(
    run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, waited: float | None
) -> None:
    times = itertools.cycle([5.0, 5.0 + (waited or 0.0)])  # before and after each run
    monkeypatch.setattr(module, "waited_seconds", lambda: None if waited is None else next(times))
    arguments = ("Go", "-m", tiny_folder, "--engine", "static", "--device", "cpu", "--max-tokens", 6)
    code, out, _ = run("profile", *arguments)
    said = "threads waited 1,000.00 s for a core" in " ".join(out.split())
    assert (code, said) == (0, waited == 1e3)
    assert said == ("--threads" in out)
    assert json.loads(run("profile", *arguments, "--json")[1])["waited_sec"] == waited


# On a GPU: the same arithmetic over what its profiler would report ------------------------------------------


def cpu(name: str, parent: Any = None, micros: tuple[float, ...] = (), called: str = "gemm") -> SimpleNamespace:
    kernels = [SimpleNamespace(name=called, duration=m) for m in micros]
    return SimpleNamespace(
        name=name, cpu_parent=parent, kernels=kernels, device_type=SimpleNamespace(name="CPU"), self_cpu_time_total=1.0
    )


def kernel(name: str, micros: float, is_user_annotation: bool = False) -> SimpleNamespace:
    time_range = SimpleNamespace(elapsed_us=lambda: micros)
    device_type = SimpleNamespace(name="CUDA")
    return SimpleNamespace(
        name=name, device_type=device_type, time_range=time_range, is_user_annotation=is_user_annotation
    )


def gpu_events() -> Iterator[SimpleNamespace]:
    step = cpu("nanoinfer: rest of the engine")
    attention = cpu("nanoinfer: attention", step, micros=(70.0,), called="nanoinfer: attention")  # its annotation
    outer = cpu("aten::sdpa", attention)
    yield from (step, attention, outer, cpu("aten::flash", outer, micros=(20.0, 10.0)))
    yield cpu("aten::add", step, micros=(5.0,))
    yield cpu("cudaLaunchKernel", step)
    yield cpu("aten::slice", micros=(1.0,))
    yield from (kernel("flash", 20.0), kernel("flash2", 10.0), kernel("add", 5.0), kernel("slice", 1.0))
    yield kernel("replayed", 14.0)
    yield kernel("nanoinfer: attention", 70.0, is_user_annotation=True)


def test_kernels_belong_to_the_span_that_launched_them() -> None:
    seconds = module._kernel_seconds(list(gpu_events()), 100e-6)
    micros = {part: round(1e6 * s, 6) for part, s in seconds.items()}
    assert micros == {"attention": 30, "rest of the engine": 5 + 14, "Python and host": 1 + 50}


def test_operators_on_a_gpu_are_their_kernels() -> None:
    rows = module._operators(list(gpu_events()), 100e-6, on_cpu=False)
    assert [(r.name, r.calls, round(r.share_percent, 6)) for r in rows if r.self_sec] == [
        ("aten::flash", 1, 30),
        ("aten::add", 1, 5),
        ("aten::slice", 1, 1),
    ]
    assert "cudaLaunchKernel" not in [r.name for r in rows]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernel_launches_are_counted_on_a_gpu(tiny_folder: Path) -> None:
    p = profile(LLM(str(tiny_folder), engine="static", device="cuda"), "Go", PARAMS)
    assert p.kernel_launches_per_token is not None
    assert p.kernel_launches_per_token >= 4 * TINY.n_layer + 1
    assert p.launches is not None
    assert p.launches.kernels_per_layer >= 4
    assert p.launches.launches_per_step >= p.launches.kernels_per_layer * TINY.n_layer
    assert sum(row.share_percent for row in p.parts) == pytest.approx(100)
    assert {row.name for row in p.parts if row.self_sec} >= {"matrix products", "attention", "output head", "sampling"}


class Opaque:
    """An engine in one call: nothing of the model can be seen from outside."""

    model = None

    def __init__(self, engine: Any) -> None:
        self.inner = [engine]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner[0], name)


def test_an_engine_that_hides_its_parts_says_so(llm: LLM) -> None:
    llm.core.engine = Opaque(llm.engine)  # type: ignore[assignment]
    p = profile(llm, "Go", PARAMS)
    shares = {row.name: row.share_percent for row in p.parts}
    assert not p.tells_apart
    assert shares["matrix products"] == 0
    assert shares["rest of the engine"] > 0
    assert sum(shares.values()) == pytest.approx(100)


# The command line ------------------------------------------------------------------------------------------


def test_tables_fit_80_columns(run: Run, tiny_folder: Path) -> None:
    code, out, err = run("profile", "Go", "-m", tiny_folder, "--engine", "static", "--device", "cpu", "--max-tokens", 6)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    words = [line.split() for line in out.splitlines()]
    (matrix,) = (w for w in words if w[:2] == ["matrix", "products"])
    assert matrix[-1] == f"{4 * TINY.n_layer}.0"
    assert all(any(line.startswith(part) for line in out.splitlines()) for part in PARTS)
    assert "6 tokens in 6 steps" in out
    assert "operator calls a token" in out
    assert "none: Python, the profiler" in out


def test_json_has_every_field(run: Run, tiny_folder: Path) -> None:
    sizes = ("--prompt-tokens", 4, "--max-tokens", 6)
    code, out, _ = run("profile", "-m", tiny_folder, "--engine", "static", *sizes, "--decode-only", "--json")
    result = json.loads(out)
    assert code == 0
    assert (result["num_tokens"], result["decode_only"]) == (5, True)
    assert sum(row["share_percent"] for row in result["parts"]) == pytest.approx(100)
    assert result["operators"][0]["calls"] > 0


@pytest.mark.nightly
def test_the_start_is_four_parts_of_another_process(run: Run, tiny_folder: Path) -> None:
    code, out, _ = run("profile", "Go", "--start", "--json", "--model", str(tiny_folder), "--engine", "static")
    assert (code, [*json.loads(out)]) == (0, ["interpreter", "imports", "load", "first step"])
    assert all(0 < sec < 60 for sec in json.loads(out).values())
    code, _, err = run("profile", "--start", "--model", str(tiny_folder / "none"))
    assert code == 2
    assert err.startswith(f"nanoinfer: error: model '{tiny_folder}/none': there is no such file or folder")


def test_the_page_shows_what_its_command_prints(run: Run) -> None:
    page = (ROOT / "docs" / "profile.md").read_text()
    (line,) = re.findall(r"^    (nanoinfer profile .*)$", page, re.M)
    (shown,) = re.findall(r"```\n(shakespeare on .*?)```", page, re.S)
    code, out, _ = run("profile", *shlex.split(line)[2:])
    assert code == 0
    assert out.splitlines()[0] == shown.splitlines()[0]
    for part in PARTS:
        # the row of the part, not a line of a note that begins with its name
        (row,), (row_shown,) = (re.findall(rf"^{re.escape(part)} +\d.*$", t, re.M) for t in (out, shown))
        row, row_shown = row.split(), row_shown.split()
        assert row[-1] == row_shown[-1] or part == "Python and host"  # calls a token


BAD = {
    "unknown engine": (["Go", "-m", "{tiny}", "--engine", "warp"], "engine='warp' is unknown"),
    "no prompt tokens": (["-m", "{tiny}", "--prompt-tokens", "0"], "prompt_tokens=0 is not an integer in [1,"),
    "empty prompt": (["", "-m", "{nobos}"], "the prompt is empty"),
    "two prompts": (["Go", "-m", "{tiny}", "--prompt-tokens", "3"], "prompt_tokens=3 has no use"),
    "long prompt": (["-m", "{tiny}", "--prompt-tokens", "33"], "the maximum context length is 32"),
    "no tokens": (["Go", "-m", "{tiny}", "--max-tokens", "0"], "max_tokens=0"),
    "the start alone": (["-m", "./never/loaded", "--start", "--decode-only"], "leave out decode_only and trace"),
    "no decoding": (["Go", "-m", "{tiny}", "--max-tokens", "1", "--decode-only"], "max_tokens=1"),
    "folder": (["Go", "-m", "./never/loaded", "--trace", "{tmp}"], "it is a folder"),
    "a file as folder": (["Go", "-m", "./never/loaded", "--trace", "{old}/t.json"], "cannot be written"),
    "bad prompt, good trace": (["Go" * 40, "-m", "{tiny}", "--trace", "{old}"], "the maximum context length is 32"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, tiny_folder: Path, tmp_path: Path, case: str) -> None:
    nobos = make_folder(tmp_path / "nobos", replace(TINY, bos_token_id=None))
    old = tmp_path / "old.json"
    old.write_text("an older trace")
    before = sorted(tmp_path.rglob("*"))
    arguments, message = BAD[case]
    formatted = [a.format(tiny=tiny_folder, nobos=nobos, tmp=tmp_path, old=old) for a in arguments]
    code, out, err = run("profile", *formatted)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("nanoinfer: error: ")
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert old.read_text() == "an older trace"


@pytest.mark.slow
def test_trace_replaces_an_older_one_and_stderr_is_silent(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "t.json").write_text("an older trace")
    arguments = ["profile", "Go", "-m", str(tiny_folder), "--max-tokens", "3", "--trace", str(folder / "t.json")]
    done = subprocess.run(
        [sys.executable, "-c", "from nanoinfer.cli import main; main()", *arguments],
        capture_output=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stderr == b""
    assert json.loads((folder / "t.json").read_text())["traceEvents"]
    assert [p.name for p in folder.iterdir()] == ["t.json"]
