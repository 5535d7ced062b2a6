"""Lines of several calls run together, and each call gets its own records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.batch.files import Line, Place
from nanoinfer.batch.run import BatchOptions, LineService

WAIT_SEC = 60.0
OPTIONS = BatchOptions(SamplingParams(max_tokens=4), seed=5)


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), engine="native", threads=1, max_num_seqs=4)


@pytest.fixture
def service(llm: LLM) -> LineService:
    return LineService(llm, OPTIONS)


def lines(*numbers: int) -> list[Line]:
    return [line(i, {"prompt_token_ids": [1, 2, i]}) for i in numbers]


def line(number: int, fields: object) -> Line:
    content = json.dumps(fields).encode()
    return Line(Place(number, "a", number, 0, ""), content, len(content))


def test_a_record_depends_on_its_line_alone(service: LineService) -> None:
    alone = service.submit(lines(*range(40))).result(WAIT_SEC)
    assert [json.loads(result.record)["line"] for result in alone] == [*range(40)]
    assert len({result.record for result in alone}) == 40
    calls = [service.submit(lines(*range(i, i + 4))) for i in range(0, 40, 4)]
    assert [result for call in calls for result in call.result(WAIT_SEC)] == alone


def test_a_call_whose_last_lines_are_bad_ends(service: LineService) -> None:
    good, bad = service.submit([*lines(1), line(2, {"prompt": 3, "n": "x"})]).result(WAIT_SEC)
    assert good.error == ""
    assert bad.error.startswith("a, line 2: ")
    assert json.loads(bad.record)["outputs"] == []
    (only,) = service.submit([line(3, [])]).result(WAIT_SEC)
    assert "is not a JSON object" in only.error
    assert service.submit([]).result(WAIT_SEC) == []


def test_a_fault_of_the_engine_ends_all_calls(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(llm.core.engine, "extend", fail)
    service = LineService(llm, OPTIONS)
    calls = [service.submit(lines(i)) for i in range(3)]
    calls += [service.submit(lines(4))]
    for call in calls:
        with pytest.raises(RuntimeError, match="no more"):
            call.result(WAIT_SEC)
    with pytest.raises(RuntimeError, match="no more"):
        service.submit(lines(5)).result(WAIT_SEC)
