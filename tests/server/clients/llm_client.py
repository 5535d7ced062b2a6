"""The conversation of Simon Willison's llm, which has no tool_choice: see common.py."""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import llm
import openai
from common import BASE_URL, FINITE, KEY, MODEL, QUESTION, Order, add, ran, report

MODELS = f"""\
- model_id: mine
  model_name: {MODEL}
  api_base: {BASE_URL}
  api_key_name: mine
  supports_tools: true
  supports_schema: true
"""
CALL: Any = {"logit_bias": {"0": 100}, "stop": "</tool_call>"}  # the token that begins a call, and its end
Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(MODELS)
model = llm.get_model("mine")

refused = 0
try:
    model.prompt(QUESTION, key="wrong", **FINITE).text()
except openai.AuthenticationError as e:
    refused = e.status_code

pieces = {}
for stream in (False, True):
    conversation = model.conversation(tools=[add])
    asked = conversation.prompt(QUESTION, key=KEY, stream=stream, **FINITE, **CALL)
    pieces[stream] = [*conversation.prompt(tool_results=asked.execute_tool_calls(), key=KEY, stream=stream, **FINITE)]

order = model.prompt(QUESTION, key=KEY, schema=Order, **FINITE)
report(
    refused=refused,
    calls=ran,
    answer="".join(pieces[False]),
    stream=[*accumulate(pieces[True])],
    structured=[Order.model_validate_json(order.text())],
)
