"""The conversation of litellm: see common.py."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

import litellm
from common import BASE_URL, FINITE, KEY, MODEL, QUESTION, Order, add, report
from pydantic import TypeAdapter

SERVER: Any = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY, "max_retries": 0, **FINITE}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": TypeAdapter(add).json_schema()}}]
litellm.telemetry = False
messages: list[Any] = [{"role": "user", "content": QUESTION}]

refused = 0
try:
    litellm.completion(**{**SERVER, "api_key": "wrong"}, messages=messages)
except litellm.AuthenticationError as e:
    refused = e.status_code

asked = {**SERVER, "messages": messages, "tools": TOOLS, "parallel_tool_calls": False, "tool_choice": "required"}
whole = litellm.completion(**asked).choices[0].message
streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True))).choices[0].message
calls = [c.function for message in (whole, streamed) for c in message.tool_calls]
(call,) = whole.tool_calls
result = add(**json.loads(call.function.arguments))
messages += [whole, {"role": "tool", "tool_call_id": call.id, "content": result}]
asked |= {"messages": messages, "tool_choice": "none"}
answer = litellm.completion(**asked).choices[0].message.content
pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]

structured = litellm.completion(**SERVER, messages=messages[:1], response_format=Order)
report(
    refused=refused,
    calls=[[c.name, json.loads(c.arguments)] for c in calls],
    answer=answer,
    stream=[*accumulate(pieces)],
    structured=[Order.model_validate_json(structured.choices[0].message.content)],
)
