"""The conversation of instructor, whose structured answers are calls: see common.py.

An answer that its validator refuses goes back as the result of the call.
"""

from __future__ import annotations

from typing import Any

import instructor
import openai
from common import BASE_URL, FINITE, KEY, MODEL, QUESTION, Order, report
from instructor.core.exceptions import InstructorRetryException
from pydantic import model_validator

SERVER: Any = {"base_url": BASE_URL, "max_retries": 0}
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], **FINITE}
client = openai.OpenAI(api_key=KEY, **SERVER)
tools = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
schemas = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
seen: list[Any] = []


class Twice(Order):
    """An order, the first of which is refused."""

    @model_validator(mode="after")
    def second(self) -> Twice:
        seen.append(["Twice", self.model_dump()])
        if len(seen) == 1:
            raise ValueError("try another")
        return self


refused = 0
try:
    wrong = instructor.from_openai(openai.OpenAI(api_key="wrong", **SERVER))
    wrong.create(response_model=Order, max_retries=0, **ASKED)
except InstructorRetryException as e:
    refused = getattr(e.__cause__, "status_code", 0)

structured = [tools.create(response_model=Twice, max_retries=1, **ASKED)]
parts = list(tools.create_partial(response_model=Order, max_retries=0, **ASKED))
structured += [parts[-1], schemas.create(response_model=Order, max_retries=0, **ASKED)]
stream = [part.model_dump_json() for part in parts]
report(refused=refused, calls=seen, answer=stream[-1], stream=stream, structured=structured)
