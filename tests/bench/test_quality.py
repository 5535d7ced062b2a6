"""benchmarks/quality.py on a tiny model."""

from __future__ import annotations

import hashlib
import importlib
import math
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from helpers.environment import ROOT
from helpers.models import make_limits, make_model
from nanoinfer.engines.recompute import RecomputeEngine
from nanoinfer.engines.registry import ENGINES
from nanoinfer.engines.static import StaticEngine


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("quality")


def test_windows_share_only_their_ends(quality: ModuleType) -> None:
    ids = list(range(100))
    assert quality.windows(ids, 32, None) == [ids[0:33], ids[32:65], ids[64:97]]
    assert quality.windows(ids, 32, 70) == [ids[0:33], ids[32:65]]
    assert quality.windows(ids, 33, 40) == [ids[0:34]]
    assert quality.windows(ids[:20], 32, None) == []


def test_figures_are_those_of_the_definitions(quality: ModuleType) -> None:
    """Two different models: KL, loss and agreement as computed from their logits directly."""
    one, two = make_model(seed=0), make_model(seed=1)
    window = [(7 * i) % one.config.vocab_size for i in range(33)]
    engines = {"reference": RecomputeEngine(one, make_limits()), "same": StaticEngine(one, make_limits())}
    engines |= {"other": StaticEngine(two, make_limits())}
    sources = {name: partial(quality.distributions, engine) for name, engine in engines.items()}
    totals = quality.compare(sources, [window, window[:20]])
    p, q = (torch.cat([m(torch.tensor([w[:-1]]))[0] for w in (window, window[:20])]).double() for m in (one, two))
    targets = torch.tensor(window[1:] + window[1:20])
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    other = totals["other"]
    assert other.num_tokens == 32 + 19
    assert other.loss == pytest.approx(torch.nn.functional.nll_loss(q, targets, reduction="sum").item(), rel=1e-5)
    assert other.divergence == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-5)
    assert other.num_same_top == (p.argmax(-1) == q.argmax(-1)).sum()
    assert sum(other.per_window) == pytest.approx(other.loss - totals["reference"].loss)
    assert totals["same"].divergence == pytest.approx(0, abs=1e-6)
    assert totals["same"].num_same_top == 51


def test_a_table_for_a_model(
    quality: ModuleType,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if (reason := ENGINES["native"].unavailable()) is not None:
        pytest.skip(reason)
    text = tmp_path / "play.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 40)
    monkeypatch.setattr("sys.argv", ["quality.py", str(text), "--model", str(tiny_folder), "--threads", "1"])
    assert quality.main() == 0
    out = capsys.readouterr().out
    rows = {
        r[0]: r
        for r in re.findall(r"^\| (\S.*?) \| (\S+) \| (\S+) \| (\S+)% \(.*?\) \| (\S+) \| (\S+)% \|$", out, re.M)
    }
    assert list(rows) == [*quality.CONFIGURATIONS, *quality.VALUES]
    assert math.isclose(float(rows["float32"][4]), 0, abs_tol=1e-5)
    assert float(rows["float32"][5]) == 100
    assert float(rows["float32"][4]) <= float(rows["int8"][4]) < float(rows["int4"][4])


def test_without_a_text_the_whole_of_a_page_is_used(quality: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    content = quality.DEFAULT_TEXT.read_text()
    assert quality.read(None) == content
    digest = hashlib.sha256(content.encode()).hexdigest()
    assert capsys.readouterr().out == f"Text: docs/inference-math.md, SHA-256 {digest[:16]}...\n\n"


def test_errors_are_one_line_and_a_status(
    quality: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("To be")
    for argv, words in (([str(tmp_path / "no.txt")], "no.txt"), ([str(short)], "shorter than one window")):
        monkeypatch.setattr("sys.argv", ["quality.py", *argv])
        assert quality.main() == 1
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1
