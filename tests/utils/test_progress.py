"""The progress bar: after two seconds, on a terminal, unless asked for or switched off."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from helpers.models import Terminal, refuses
from nanoinfer import LLM, SamplingParams
from nanoinfer.utils.progress import ProgressBar


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "stream, show, lines, at",
    [
        (Terminal, None, True, 102.0),
        (Terminal, True, False, 100.0),
        (Terminal, False, False, None),
        (io.StringIO, None, False, None),
        (io.StringIO, None, True, 130.0),
        (io.StringIO, True, True, 100.0),
        (io.StringIO, False, True, None),
    ],
)
def test_when_the_first_drawing_is_due(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], show: bool | None, lines: bool, at: float | None
) -> None:
    monkeypatch.setattr("sys.stderr", stderr := stream())
    clock = Clock()
    with ProgressBar("generate", show, clock, lines=lines) as bar:
        for now in (100.0, 101.9, 102.0, 129.9, 1e6):
            clock.now = now
            assert bar.due() == (at is not None and now >= at)
        assert not stderr.getvalue()


def test_it_shows_what_is_done_and_draws_five_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stderr := Terminal())
    clock = Clock()
    with ProgressBar("generate", True, clock) as bar:
        bar.update(1, 4)
        shown = len(stderr.getvalue())
        assert "generate" in stderr.getvalue()
        assert "1 of 4" in stderr.getvalue()
        clock.now += 0.1
        bar.update(2, 4)
        assert len(stderr.getvalue()) == shown
        clock.now += 0.2
        bar.update(3, 4)
        assert "3 of 4" in stderr.getvalue()
    assert stderr.getvalue().endswith("\x1b[K\n")


def test_it_shows_the_time_left_and_a_note_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stderr", stderr := Terminal())
    clock = Clock()
    with ProgressBar("train", None, clock) as bar:
        for step, now in ((10, 102.0), (20, 112.0), (30, 122.0)):  # a step a second
            clock.now = now
            bar.update(step, 100, "a note" + "x" * (100 if step == 20 else 0))
        assert "0:01:10 left" in stderr.getvalue()
        assert all(len(line) < 80 + len("\x1b[K") for line in stderr.getvalue().split("\r"))
        bar.print("a line [blue]")
        assert stderr.getvalue().endswith("\r\x1b[Ka line [blue]\n")


def test_a_command_prints_a_line_each_30_seconds_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    with ProgressBar("batch", clock=clock, lines=True) as bar:
        for now, done, total in ((129.9, 1, 3000), (130.0, 1200, 3000), (159.9, 1201, 3000), (160.0, 1300, None)):
            clock.now = now
            bar.update(done, total, "5 tokens/s")
    lines = ("nanoinfer: batch: 1,200 of 3,000, 5 tokens/s, 0:00:00 left", "nanoinfer: batch: 1,300, 5 tokens/s")
    assert capsys.readouterr() == ("", "".join(f"{line}\n" for line in lines))


def test_lines_are_printed_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("train") as bar:
        bar.update(1, 2)
        bar.print("step 1/2 [x]")
    assert capsys.readouterr() == ("", "step 1/2 [x]\n")


def test_loading_moves_a_bar_by_layers(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(ProgressBar, "update", lambda self, done, total: seen.append((done, total)))
    for engine in ("native", "static"):
        seen.clear()
        LLM(str(tiny_folder), engine=engine)
        assert seen == [(0, 2)] * 12 + [(1, 2)] * 12


def test_generate_shows_a_bar_where_it_is_asked_for(tiny_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    llm, params = LLM(str(tiny_folder)), SamplingParams(max_tokens=4, temperature=0)
    plain = llm.generate(["a", "b", "c"], params)
    llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    shown = llm.generate(["a", "b", "c"], sampling_params=params, use_tqdm=True)
    out, err = capfd.readouterr()
    assert (out, "generate" in err, "of 3" in err) == ("", True, True)
    assert [o.outputs for o in shown] == [o.outputs for o in plain]
    refuses(lambda: llm.generate("a", params, use_tqdm=1), "use_tqdm=1 is not a bool")  # type: ignore[arg-type]
