"""An output that is removed, replaced, moved or changed while a batch writes it: an error, and nothing is lost."""

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
from nanoinfer.batch import lost
from nanoinfer.batch import output as batch_output
from nanoinfer.batch.lines import Line, LineReader
from nanoinfer.batch.output import FileOutput
from nanoinfer.batch.run import BatchOptions, BatchRunner
from nanoinfer.cli import main
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.progress import ProgressBar

NUM_LINES = 40
OUT, STATE, SAVED = Path("a/out.jsonl"), Path("a/out.jsonl.state"), Path("a/out.jsonl.saved")
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


REMOVED: dict[str, tuple[Action, str]] = {
    "removed": (OUT.unlink, "a/out.jsonl was removed while it was written"),
    "replaced": (replaced, "a/out.jsonl was replaced by another file while it was written"),
    "replaced by a folder": (by_a_folder, "a/out.jsonl was replaced by a folder while it was written"),
    "replaced by a link": (by_a_link, "a/out.jsonl was replaced by another file while it was written"),
    "linked elsewhere": (lambda: (os.link(OUT, "hard"), OUT.unlink()), "a/out.jsonl was removed while it was written"),
}
WHEN = pytest.mark.parametrize("when", ["at a checkpoint", "at the end"])


@WHEN
@pytest.mark.parametrize("case", REMOVED)
def test_a_removed_output_is_saved_beside_it_and_continued(batch: Batch, whole: bytes, case: str, when: str) -> None:
    action, message = REMOVED[case]
    error = batch(action, when)
    count = SAVED.read_bytes().count(b"\n")
    assert error == f"{message}: its {count} records are in {SAVED}: run the command again with that file as the output"
    assert whole.startswith(SAVED.read_bytes())
    assert (count == NUM_LINES) == (when == "at the end")
    assert count > 0
    assert [p.name for p in Path("a").glob("*.tmp")] == []
    assert batch(out=SAVED) == ""
    assert SAVED.read_bytes() == whole


def test_what_replaced_the_output_is_left_alone(batch: Batch, whole: bytes) -> None:
    batch(replaced)
    assert OUT.read_text() == "mine"
    with pytest.raises(NanoinferError, match="was changed by another program"):
        batch()
    assert OUT.read_text() == "mine"


def test_a_copy_overwrites_nothing(batch: Batch, whole: bytes) -> None:
    SAVED.write_text("mine")
    Path("a/out.jsonl.saved-1.state").write_text("mine, too")
    assert "are in a/out.jsonl.saved-2: run" in batch(OUT.unlink)
    assert (SAVED.read_text(), Path("a/out.jsonl.saved-1.state").read_text()) == ("mine", "mine, too")
    assert not Path("a/out.jsonl.saved-1").exists()
    assert batch(out=Path("a/out.jsonl.saved-2")) == ""
    assert Path("a/out.jsonl.saved-2").read_bytes() == whole


@WHEN
@pytest.mark.parametrize("moved", ["a/new.jsonl", "b"])
def test_a_moved_output_is_found(batch: Batch, whole: bytes, moved: str, when: str) -> None:
    """The file, or its folder."""
    here = Path(moved) if moved.endswith("jsonl") else Path(moved) / "out.jsonl"
    error = batch(lambda: os.rename(OUT if moved.endswith("jsonl") else OUT.parent, moved), when)
    count = here.read_bytes().count(b"\n")
    assert error == (
        f"a/out.jsonl was moved to {here.absolute()} while it was written: it has {count} records: move it back and run"
        " the same command again"
    )
    assert not SAVED.exists()
    os.rename(moved, OUT if moved.endswith("jsonl") else OUT.parent)
    assert batch() == ""
    assert OUT.read_bytes() == whole


def test_a_moved_output_in_whose_place_is_another_file(batch: Batch) -> None:
    """As log rotation does."""
    error = batch(lambda: (os.rename(OUT, "rotated"), OUT.write_text("")))
    assert f"was moved to {Path('rotated').absolute()} while" in error
    assert OUT.read_text() == ""


def test_a_link_to_the_moved_output_is_the_output(batch: Batch, whole: bytes) -> None:
    assert batch(lambda: (os.rename(OUT, "b.jsonl"), OUT.symlink_to(Path("b.jsonl").absolute()))) == ""
    assert Path("b.jsonl").read_bytes() == whole


def test_without_its_folder_the_copy_is_in_the_temporary_folder(
    batch: Batch, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    saved = tmp_path / "temporary/out.jsonl.saved"
    error = batch(lambda: shutil.rmtree("a"))
    assert f"a/out.jsonl was removed while it was written: its {saved.read_bytes().count(10)} records are in" in error
    assert batch(out=saved) == ""
    assert saved.read_bytes() == whole


def test_a_copy_that_cannot_be_written_is_said(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(Path("none").absolute()))
    error = batch(lambda: shutil.rmtree("a"))
    assert "records could not be saved: No such file or directory: run the command again from the start" in error


def test_a_disk_that_is_full_leaves_no_part_of_a_copy(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(Path("a").absolute()))
    monkeypatch.setattr(lost, "copyfileobj", full)
    assert "could not be saved: No space left on device" in batch(OUT.unlink)
    assert [p.name for p in Path("a").iterdir()] == [STATE.name]


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
    where = f"2 records are in {SAVED}: run the command again with that file as the output"
    message = f"nanoinfer: error: {OUT} was removed while it was written: its {where}\n"
    assert run(OUT.unlink) == (2, message)
    code, err = run(lambda: None, SAVED)
    assert (code, err) == (0, f"nanoinfer: {SAVED} is complete after 2 lines\n")


def test_an_interrupt_or_another_error_does_not_hide_it(
    run: Callable[..., tuple[int, str]], caplog: pytest.LogCaptureFixture
) -> None:
    assert run(interrupted)[1].count(f"its 2 records are in {SAVED}: run the command again") == 1
    assert run(failed) == (2, "nanoinfer: error: the engine is gone\n")
    assert caplog.text.count(f"its 2 records are in {SAVED}-1: run the command again") == 1


def test_standard_output_is_a_stream(run: Callable[..., tuple[int, str]]) -> None:
    assert run(lambda: None, "-") == (0, "")
