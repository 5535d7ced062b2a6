"""An output that is removed, replaced, moved or changed while a batch writes it: an error."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.batch import output as batch_output
from nanoinfer.batch.lines import Line, LineReader
from nanoinfer.batch.output import FileOutput
from nanoinfer.batch.run import BatchOptions, BatchRunner
from nanoinfer.cli import main
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.progress import ProgressBar

NUM_LINES = 40
OUT = Path("a/out.jsonl")
Action = Callable[[], object]
Batch = Callable[..., str]


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), engine="native", max_num_seqs=4)


class ActingReader(LineReader):
    """Calls `action` before the 30th line is read; at most four requests run, so records are written by then."""

    action: Action = staticmethod(lambda: None)

    def __next__(self) -> Line:
        line = super().__next__()
        if line.place.number == 30:
            self.action()
        return line


@pytest.fixture
def batch(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """Run a batch from in.jsonl to `out`; `action` is called in the middle or before the end. Return the error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(batch_output, "CHECKPOINT_SEC", 0.0)
    monkeypatch.setattr(batch_output, "time", SimpleNamespace(monotonic=lambda: 0.0))  # a checkpoint after each step
    Path("a").mkdir()
    Path("in.jsonl").write_text("".join(f'{{"prompt": "To be", "id": {i}}}\n' for i in range(NUM_LINES)))

    def call(action: Action | None = None, when: str = "at a checkpoint", out: Path = OUT) -> str:
        reader, output = ActingReader(["in.jsonl"]), FileOutput(out, {"model": "tiny"}, overwrite=False)
        options, error = BatchOptions(SamplingParams(max_tokens=3, temperature=0.9), seed=7), ""
        try:
            output.skip(reader)
            output.start()
            if action is not None and when == "at a checkpoint":
                reader.action = action
            runner = BatchRunner(llm, options)
            runner.run(reader, output, ProgressBar("batch", False))
            if action is not None and when == "at the end":
                action()
            output.finish(complete=True)
        except NanoinferError as e:
            error = str(e)
        finally:
            output.close()
        assert not llm.core.unfinished
        return error

    return call


@pytest.fixture
def whole(batch: Batch) -> bytes:
    """The output of an undisturbed run."""
    assert batch(out=Path("whole.jsonl")) == ""
    return Path("whole.jsonl").read_bytes()


def replaced(content: str = "mine") -> None:
    Path("other").write_text(content)
    os.replace("other", OUT)


def by_a_folder() -> None:
    OUT.unlink()
    OUT.mkdir()


def by_a_link() -> None:
    Path("other").write_text("mine")
    OUT.unlink()
    OUT.symlink_to(Path("other").absolute())


REMOVED: dict[str, Action] = {
    "removed": OUT.unlink,
    "replaced": replaced,
    "replaced by a folder": by_a_folder,
    "replaced by a link": by_a_link,
    "linked elsewhere": lambda: (os.link(OUT, "hard"), OUT.unlink()),
    "its folder removed": lambda: shutil.rmtree("a"),
}
WHEN = pytest.mark.parametrize("when", ["at a checkpoint", "at the end"])
MESSAGE = f"{OUT} was removed, replaced or moved while it was written: move the file with its "


@WHEN
@pytest.mark.parametrize("case", REMOVED)
def test_a_removed_output_is_an_error(batch: Batch, case: str, when: str) -> None:
    error = batch(REMOVED[case], when)
    assert error.startswith(MESSAGE)
    assert error.endswith(" records back and run the same command again, or run it from the start")
    assert (f"its {NUM_LINES} records" in error) == (when == "at the end")


def test_what_replaced_the_output_is_left_alone(batch: Batch) -> None:
    batch(replaced)
    assert OUT.read_text() == "mine"
    with pytest.raises(NanoinferError, match="was changed by another program"):
        batch()
    assert OUT.read_text() == "mine"


@WHEN
@pytest.mark.parametrize("moved", ["a/new.jsonl", "b"])
def test_a_moved_output_is_continued_when_it_is_back(batch: Batch, whole: bytes, moved: str, when: str) -> None:
    """The file, or its folder."""
    of_move = OUT if moved.endswith("jsonl") else OUT.parent
    assert batch(lambda: os.rename(of_move, moved), when).startswith(MESSAGE)
    os.rename(moved, of_move)
    assert batch() == ""
    assert OUT.read_bytes() == whole


def test_a_link_to_the_moved_output_is_the_output(batch: Batch, whole: bytes) -> None:
    assert batch(lambda: (os.rename(OUT, "b.jsonl"), OUT.symlink_to(Path("b.jsonl").absolute()))) == ""
    assert Path("b.jsonl").read_bytes() == whole


CHANGED: dict[str, Action] = {
    "emptied": lambda: os.truncate(OUT, 0),
    "truncated": lambda: os.truncate(OUT, 100),
    "appended": lambda: OUT.open("a").write("mine\n"),
}


@WHEN
@pytest.mark.parametrize("case", CHANGED)
def test_an_output_that_another_program_writes_is_an_error(batch: Batch, case: str, when: str) -> None:
    """Also where it is as long as it should be, because records are appended to what is left."""
    error = batch(CHANGED[case], when)
    assert error.startswith("a/out.jsonl was changed by another program while it was written: it has ")
    assert error.endswith("run the same command again, which continues if the file is intact up to its last checkpoint")
    assert b"\0" not in OUT.read_bytes()
    assert (b"}\nmine\n" in OUT.read_bytes()) == (case == "appended")
    if OUT.stat().st_size:
        with pytest.raises(NanoinferError, match="was changed by another program"):
            batch()


@WHEN
def test_an_output_that_is_edited_in_place_is_an_error(batch: Batch, when: str) -> None:
    """It is as long as it should be, which no checkpoint shows: its content is compared when the batch is complete."""

    def edit() -> None:
        with OUT.open("r+b") as f:
            f.seek(30)
            f.write(b"mine")

    remedy = "give another output, or replace it by --overwrite"
    assert batch(edit, when) == f"a/out.jsonl was changed by another program while it was written: {remedy}"
    with pytest.raises(NanoinferError, match="was changed by another program: "):
        batch()
    assert OUT.read_bytes()[30:34] == b"mine"


def test_an_output_that_is_truncated_while_the_model_loads_is_an_error(batch: Batch) -> None:
    batch()
    output = FileOutput(OUT, {"model": "tiny"}, overwrite=False)
    os.truncate(OUT, 100)
    with pytest.raises(NanoinferError, match="was changed by another program while it was written: it has 100 instead"):
        output.start()
    output.close()
    assert OUT.stat().st_size == 100


# The command ----------------------------------------------------------------------------------------------


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> Callable[..., tuple[int, str]]:
    """Run `nanoinfer batch in.jsonl OUT` with something that happens at the end of the run."""
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("in.jsonl").write_text('{"prompt": "Go"}\n{"prompt": "Ho"}\n')
    original = BatchRunner.run

    def call(action: Action, out: object = OUT) -> tuple[int, str]:
        def acting(*arguments: Any) -> None:
            original(*arguments)
            action()

        monkeypatch.setattr(BatchRunner, "run", acting)
        monkeypatch.setattr(sys, "argv", ["nanoinfer", "batch", "in.jsonl", str(out), "-m", str(folder)])
        with pytest.raises(SystemExit) as e:
            main()
        return int(e.value.code or 0), capsys.readouterr().err

    return call


def interrupted() -> None:
    OUT.unlink()
    raise KeyboardInterrupt


def failed() -> None:
    OUT.unlink()
    raise NanoinferError("the engine is gone")


def test_the_exit_code_is_2(run: Callable[..., tuple[int, str]]) -> None:
    code, err = run(OUT.unlink)
    assert (code, err.count("\n")) == (2, 1)
    assert f"nanoinfer: error: {MESSAGE}2 records back" in err


def test_an_interrupt_or_another_error_does_not_hide_it(
    run: Callable[..., tuple[int, str]], caplog: pytest.LogCaptureFixture
) -> None:
    assert run(interrupted)[1].count(MESSAGE) == 1
    assert run(failed) == (2, "nanoinfer: error: the engine is gone\n")
    assert caplog.text.count(MESSAGE) == 1


def test_standard_output_is_a_stream(run: Callable[..., tuple[int, str]]) -> None:
    assert run(lambda: None, "-") == (0, "")
