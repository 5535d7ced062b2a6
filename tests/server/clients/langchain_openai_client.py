"""The conversation of langchain-openai: see common.py."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import openai
from common import BASE_URL, FINITE, KEY, MODEL, QUESTION, Order, add, report
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

SERVER: Any = {"base_url": BASE_URL, "model": MODEL, "max_retries": 0, **FINITE}
model = ChatOpenAI(api_key=KEY, **SERVER)
adds = tool(add)
messages: list[Any] = [HumanMessage(QUESTION)]

refused = 0
try:
    ChatOpenAI(api_key="wrong", **SERVER).invoke(messages)
except openai.AuthenticationError as e:
    refused = e.status_code

asked = model.bind_tools([adds], tool_choice="required", parallel_tool_calls=False)
whole = asked.invoke(messages)
streamed = sum(asked.stream(messages), AIMessageChunk(""))
calls = [*whole.tool_calls, *streamed.tool_calls]
messages += [whole, adds.invoke(whole.tool_calls[0])]
answers = model.bind_tools([adds], tool_choice="none")

methods: list[Any] = ["json_schema", "function_calling"]
structured = [model.with_structured_output(Order, method=method).invoke(QUESTION) for method in methods]
report(
    refused=refused,
    calls=[[call["name"], call["args"]] for call in calls],
    answer=answers.invoke(messages).text,
    stream=[*accumulate(chunk.text for chunk in answers.stream(messages))],
    structured=structured,
)
