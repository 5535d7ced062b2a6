"""`nanoinfer roofline` as a user meets it, and every number of docs/inference-math.md.

benchmarks/model_tables.py, and the pages that show its tables."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.environment import ROOT
from helpers.models import TINY, Run, edit_config, make_model
from nanoinfer.cli.measure import si
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.presets import PRESETS
from nanoinfer.roofline.arithmetic import decode
from nanoinfer.roofline.ceilings import DEVICES, Ceiling
from nanoinfer.roofline.formats import FORMATS
from nanoinfer.roofline.report import Question, answer

PAGE = (ROOT / "docs" / "inference-math.md").read_text()


BAD = {
    "unknown model": (["gpt5", "--device", "t4"], "model 'gpt5' is unknown: use one of gpt2"),
    "missing preset": (["random:gpt5"], "model 'random:gpt5' is unknown"),
    "missing folder": (["./no/such"], "./no/such"),
    "missing user": (["~no-such-user/model.gguf"], "model '~no-such-user/model.gguf' is unknown"),
    "long name": (["a" * 5000 + ".gguf"], "is unknown: use one of gpt2"),
    "null byte": (["a\0b.gguf"], "is unknown"),
    "broken config": (["{broken}"], "n_embd=16 is not a multiple of n_head=3"),
    "unknown device": (["gpt2", "--device", "t5"], "device='t5' is unknown: use one of t4, l40s"),
    "batch 0": (["gpt2", "--batch", 0], "batch=0 is not an integer in [1,"),
    "no number": (["gpt2", "--batch", "nan"], "--batch"),
    "context 0": (["gpt2", "--context", 0], "context=0 is not an integer >= 1"),
    "long context": (["gpt2", "--context", 1025], "block_size=1024: use at most 1024"),
    "unknown dtype": (["gpt2", "--dtype", "int3"], "dtype='int3' is unknown"),
    "no bfloat16": (["gpt2", "--device", "t4", "--dtype", "bfloat16"], "no throughput on t4: use float32, float16"),
    "many new tokens": (["gpt2", "--context", 9, "--new-tokens", 10], "new_tokens=10 is more than context=9"),
    "no new tokens": (["gpt2", "--new-tokens", 0], "new_tokens=0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, tiny_folder: Path, tmp_path: Path, case: str) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((tiny_folder / "config.json").read_text())
    edit_config(broken, n_head=3)
    arguments, message = BAD[case]
    code, out, err = run("roofline", *[str(a).format(tiny=tiny_folder, broken=broken) for a in arguments])
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("nanoinfer: error: ")
    assert err.count("\n") == 1


def test_tables_fit_80_columns_and_the_json_says_the_same(run: Run) -> None:
    flags = ("gpt2-xl", "--device", "H100", "--batch", 64)
    code, text, err = run("roofline", *flags)
    assert (code, err) == (0, "")
    assert max(map(len, text.splitlines())) <= 80
    code, out, err = run("roofline", *flags, "--json")
    r = json.loads(out)
    assert (code, err) == (0, "")
    assert (r["batch"], r["context_tokens"], r["dtype"]) == (64, 1024, "bfloat16")
    for step in ("prefill", "decode"):
        assert f"{r[step]['bound']}-bound, {r[step]['bound_ratio']:,.2f} times" in text
        assert f"{si(r[step]['step_sec'], 's')} a step, {r[step]['tokens_per_sec']:,.0f} tokens/s" in text
        assert r[step]["layer"]["flops_formula"] in text


def test_a_step_that_the_caches_hold_has_their_speed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    by_bytes = {1 << 27: 60e9, 1 << 30: 30e9}
    ceiling = Ceiling("here", 30e9, {"float32": 3e11, "int8": 6e12}, "test", bandwidth_by_bytes=by_bytes)
    monkeypatch.setattr("nanoinfer.roofline.report.find_device", lambda *args: ceiling)
    arguments = ("gpt2", "--dtype", "int8", "--context", 32)
    decoding = json.loads(run("roofline", *arguments, "--json")[1])["decode"]
    assert decoding["bandwidth_bytes_per_sec"] == 60e9
    assert decoding["ridge_flops_per_byte"] == 6e12 / 60e9
    assert decoding["memory_sec"] == decoding["model"]["bytes"] / 60e9
    assert decoding["tokens_per_sec"] == pytest.approx(60e9 / decoding["model"]["bytes"], rel=1e-12)
    text = run("roofline", *arguments)[1]
    assert "on here: 30 GB/s, 6 TFLOP/s in int8, ridge at 200.0 FLOP/B" in text
    assert text.count("the caches hold some of the bytes: 60 GB/s, ridge at 100.0 FLOP/B") == 2
    assert max(map(len, text.splitlines())) <= 80


def test_models_are_shapes_without_weights(run: Run, tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()  # only config.json is read
    r = json.loads(run("roofline", tiny_folder, "--device", "t4", "--dtype", "float32", "--json")[1])
    assert r["shape"]["n_embd"] == TINY.n_embd
    assert r["decode"]["model"]["flops"] == decode(TINY, FORMATS["float32"]).model.flops(1, TINY.block_size)
    assert json.loads(run("roofline", "random:gpt2", "--device", "t4", "--json")[1])["shape"]["n_layer"] == 12


def test_a_nanogpt_checkpoint_has_its_shape_inside(run: Run, tmp_path: Path) -> None:
    config = replace(TINY, bias=False, activation="gelu")
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")
    arguments = {n: getattr(config, n) for n in names} | {"dropout": 0.0}
    torch.save({"model": make_model(config).state_dict(), "model_args": arguments}, tmp_path / "ckpt.pt")
    r = json.loads(run("roofline", tmp_path / "ckpt.pt", "--device", "a100", "--json")[1])
    assert r["decode"]["model"]["bytes"] == decode(config, FORMATS["bfloat16"]).model.bytes(1, 32)


def test_a_pipe_without_unicode_gets_plain_characters() -> None:
    command = [sys.executable, "-c", "from nanoinfer.cli import main; main()", "roofline", "gpt2", "--device", "t4"]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "COLUMNS": "40"}
    done = subprocess.run(command, capture_output=True, env=env, check=True)
    assert done.stdout.isascii()
    assert b"memory-bound" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_si() -> None:
    assert [si(v, "s") for v in (0.00093, 999.96e-6, 1.5, 0)] == ["930 us", "1 ms", "1.5 s", "0 us"]
    assert [si(v, "B") for v in (3115000000, 999, 12e18)] == ["3.115 GB", "999 B", "12,000 PB"]


WORKED = re.findall(r"^\| [^|]+ \| `(\.[\w.\[\]]+)` \|(.+)\|$", PAGE, re.M)
COLUMNS = [(1, 32), (1, 1024), (64, 32), (64, 1024)]


@pytest.mark.slow
def test_the_worked_numbers_of_the_page_are_what_the_code_computes() -> None:
    question = Question(device="h100")
    answers = [answer("gpt2-xl", replace(question, batch=B, context=N)) for B, N in COLUMNS]
    assert len(WORKED) >= 20
    prefixes = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "m": 1e-3, "u": 1e-6}
    for path, cells in WORKED:
        for cell, r in zip(cells.split("|"), answers, strict=True):
            value: Any = r
            for key in path[1:].split("."):
                value = value[key]
            if isinstance(value, str):
                assert cell.strip() == value, path
                continue
            match = re.fullmatch(r"([\d,.]+)(?: ([kMGTmu]?)(?:B|s|FLOP)?)?", cell.strip())
            assert match, f"{path}: {cell}"
            shown = float(match[1].replace(",", "")) * prefixes[match[2] or ""]
            assert shown == pytest.approx(value, rel=6e-4, abs=0), f"{path}: {cell} is {value}"


def test_the_pages_devices_are_the_table_in_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([\d.]+|-) \| ([\d.]+|-) \| ([\d.]+|-) \|", PAGE, re.M)
    assert [row[0] for row in rows] == list(DEVICES)
    for name, bandwidth, *rates in rows:
        device = DEVICES[name]
        assert float(bandwidth.replace(",", "")) * 1e9 == device.bandwidth_bytes_per_sec
        for dtype, rate in zip(("float32", "bfloat16", "float16"), rates, strict=True):
            assert device.flops_per_sec.get(dtype) == (None if rate == "-" else pytest.approx(float(rate) * 1e12))


DOCS = ROOT / "docs"


@pytest.mark.parametrize("table, page", [("models", "models.md"), ("presets", "inference-math-families.md")])
def test_a_page_shows_what_the_command_prints(table: str, page: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "model_tables.py"), table]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"\n\n{printed}\n" in (DOCS / page).read_text()
    assert f"python benchmarks/model_tables.py {table}" in (DOCS / page).read_text()


def test_the_pages_show_what_was_found_about_files_of_others() -> None:
    """docs/results/published.json is written by tests/published."""
    tables = runpy.run_path(str(ROOT / "benchmarks" / "model_tables.py"))
    assert f"\n{tables['exceptions']()}\n" in (DOCS / "models.md").read_text()
    page = (DOCS / "gguf.md").read_text()
    assert tables["architectures"](page) == page


def test_the_table_lists_exactly_the_families() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "models.md").read_text(), re.M)
    assert rows == ["model_type", *FAMILIES]
    shown = re.findall(r"^\| `([\w.-]+)` \| [\d,]+ M \|", (DOCS / "inference-math-families.md").read_text(), re.M)
    assert shown == list(PRESETS)


def test_the_worked_example_is_the_file() -> None:
    page = (DOCS / "adding-a-family.md").read_text()
    source = (ROOT / "src" / "nanoinfer" / "models" / "families" / "mistral.py").read_text()
    (shown,) = re.findall(r"```python\n(STARCODER2 = .*?)```", page, re.S)
    without = re.sub(r" +#.*", "", shown)
    assert "".join(without.split()) in "".join(source.split())
    (lines,) = re.findall(r"in (\d+) lines", page)
    assert int(lines) == len(shown.splitlines())
    cases = re.findall(r"```text\n(\"starcoder2\".*?)```", page, re.S)[0].splitlines()
    assert all(line in (ROOT / "tests" / "helpers" / "families.py").read_text() for line in cases)
