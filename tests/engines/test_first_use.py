"""An engine is compared with `static` before `auto` uses it on a device for the first time."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.environment import TESTS
from helpers.models import TINY
from nanoinfer.config import EngineConfig, LayerKind
from nanoinfer.engines import first_use
from nanoinfer.engines.registry import ENGINES, EngineSpec

REASONS = {
    "Shifted": "logits differ by 1",
    "NotFinite": "its logits are not finite",
    "Aborts": "its process ended with -6: ",
    "Raises": "its process ended with 1: RuntimeError: an illegal memory access was encountered",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def stand_in(name: str) -> EngineSpec:
    return replace(ENGINES["static"], name=name.lower(), target=f"helpers.odd_engines:{name}")


@pytest.mark.slow
def test_an_engine_that_agrees_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_use.difference(ENGINES["dynamic"], TINY, "cpu", "float32") is None
    monkeypatch.setattr("subprocess.run", None)  # from here on, no child is started
    assert first_use.difference(ENGINES["dynamic"], TINY, "cpu", "float32") is None


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.slow_if(lambda name: name != "Shifted")
def test_what_is_wrong_is_one_line_that_is_kept(name: str, tmp_path: Path) -> None:
    reason = first_use.difference(stand_in(name), TINY, "cpu", "float32")
    assert reason is not None
    assert reason.startswith(REASONS[name])
    assert "\n" not in reason
    assert [*json.loads((tmp_path / "cache/nanoinfer/first-use.json").read_text()).values()] == [reason]


def test_an_engine_that_never_ends_is_stopped_and_tried_again(tmp_path: Path) -> None:
    assert first_use.difference(stand_in("Waits"), TINY, "cpu", "float32", 0.5) == "it did not end within 0.5 s"
    assert not (tmp_path / "cache").exists()


def test_auto_falls_back_to_static_and_other_choices_do_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_use, "difference", lambda *args: "it failed")
    spec, auto = ENGINES["cuda_graph"], EngineConfig()
    with caplog.at_level(logging.WARNING):
        assert first_use.checked(spec, TINY, auto, "cuda:0", "float32") is ENGINES["static"]
    assert caplog.messages == [
        "engine=auto: using static, not cuda_graph, which failed its first use on cuda:0: it failed"
    ]
    for config, device in (
        (replace(auto, engine="cuda_graph"), "cuda:0"),
        (replace(auto, quantization="int8"), "cuda:0"),  # `static` has none to compare with
        (auto, "cpu"),
    ):
        assert first_use.checked(spec, TINY, config, device, "float32") is spec


def test_the_compared_model_has_a_layer_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = []
    monkeypatch.setattr(first_use, "difference", lambda spec, model, *args: configs.append(model))
    plain, window = LayerKind(), LayerKind(window=4)
    for layers in ((), (plain, window) * 3, (window, window, window, plain, window, window)):
        first_use.checked(
            ENGINES["cuda_graph"], replace(TINY, n_layer=6, layers=layers), EngineConfig(), "cuda:0", "float32"
        )
    assert [config.n_layer for config in configs] == [2, 2, 4]
    assert all(config.block_size == 27 for config in configs)
