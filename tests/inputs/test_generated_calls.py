"""Calls that models generate, over 200 random schemas in all formats: every complete one parses and matches.

With `NANOINFER_TEST_CALLS=10000`, each model generates that many complete calls. They match by the check of these
tests, and by jsonschema where it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra structured is not installed")
pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from helpers.answers import FORMATS, random_object, valid
from helpers.chat import chat_folder
from nanoinfer import LLM, SamplingParams
from nanoinfer.inputs.answers.grammar import to_grammar
from nanoinfer.inputs.answers.parser import AnswerParser
from nanoinfer.inputs.messages import Tool
from nanoinfer.outputs import CompletionOutput

NUM_CALLS = int(os.environ.get("NANOINFER_TEST_CALLS", "30"))
NUM_SCHEMAS = min(200, NUM_CALLS)
AT_ONCE = 64  # outputs of a call of the library
MAX_CUT = 1.0  # answers that the limit of tokens may end, for each complete one
CASES: list[tuple[str, tuple[Tool, ...]]] = []
"""Formats and their tools, each with a random schema."""


def cases() -> list[tuple[str, tuple[Tool, ...]]]:
    names = [*FORMATS]
    while sum(len(tools) for _, tools in CASES) < NUM_SCHEMAS or len(CASES) < len(names):
        chance = random.Random(len(CASES))
        name = names[len(CASES) % len(names)]
        made = [json.dumps(random_object(chance)) for _ in range(chance.randrange(1, 4))]
        made = [text.replace('{"type": "string", "desc', '{"type": "string", "maxLength": 12, "desc') for text in made]
        CASES.append((name, tuple(Tool(f"tool_{i}", "", json.loads(text)) for i, text in enumerate(made))))
    return CASES


def check(case: tuple[str, tuple[Tool, ...]], o: CompletionOutput) -> bool:
    """Check an answer; return whether its call is complete."""
    name, tools = case
    assert o.error is None
    messages = []
    for pieces in ([o.text], [*o.text]):
        parser = AnswerParser(FORMATS[name], tools, constrained=True)
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        messages.append(parser.message())
    found, again = ([(call.name, call.arguments) for call in message.tool_calls] for message in messages)
    assert found == again
    if o.finish_reason != "stop":
        assert len(found) <= 1
        return False
    ((called, arguments),) = found
    assert messages[0].content is None, o.text
    (schema,) = (tool.parameters for tool in tools if tool.name == called)
    value = json.loads(arguments)
    assert valid(value, schema, schema), (o.text, schema)
    if importlib.util.find_spec("jsonschema") is not None:
        importlib.import_module("jsonschema").validate(value, schema)
    return True


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["shakespeare", "random weights"])
def test_every_generated_call_parses_and_matches(model: str, tmp_path: Path) -> None:
    random_folder = chat_folder(tmp_path / "random", max_position_embeddings=512)
    llm = LLM("shakespeare" if model == "shakespeare" else str(random_folder), engine="native", max_num_seqs=AT_ONCE)
    per_case = -(-NUM_CALLS // len(cases()))
    counts: Counter[str] = Counter()
    for i, case in enumerate(cases()):
        grammar = to_grammar(FORMATS[case[0]], case[1], "required", parallel=False)
        complete = 0
        while complete < per_case and counts["cut"] <= MAX_CUT * max(NUM_CALLS, 100):
            n = min(AT_ONCE, per_case - complete)
            seed = 1000 * i + counts["cut"]  # the penalty ends numbers, which are else 3333...
            params = SamplingParams(max_tokens=450, n=n, seed=seed, frequency_penalty=0.3, structured_outputs=grammar)
            outputs: Any = llm.generate("Call:", params)[0].outputs
            complete += (num := sum(check(case, o) for o in outputs))
            counts["complete"] += num
            counts["cut"] += n - num
    num_schemas = sum(len(tools) for _, tools in cases())
    print(f"\n{model}: {counts['complete']} calls, {counts['cut']} cut, {num_schemas} schemas")
    assert counts["complete"] >= NUM_CALLS
