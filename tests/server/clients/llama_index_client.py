"""The conversation of LlamaIndex's OpenAILike: see common.py."""

from __future__ import annotations

from typing import Any

import openai
from common import BASE_URL, FINITE, KEY, MODEL, QUESTION, Order, add, report
from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

SERVER: Any = {
    "model": MODEL, "api_base": BASE_URL, "is_chat_model": True, "is_function_calling_model": True, "max_retries": 0,
    "max_tokens": FINITE["max_tokens"], "additional_kwargs": {"seed": FINITE["seed"]},
}  # fmt: skip
llm = OpenAILike(api_key=KEY, **SERVER)
tool = FunctionTool.from_defaults(add)

refused = 0
try:
    OpenAILike(api_key="wrong", **SERVER).chat([ChatMessage(QUESTION)])
except openai.AuthenticationError as e:
    refused = e.status_code

whole = llm.chat_with_tools([tool], QUESTION, tool_required=True)
*_, streamed = llm.stream_chat_with_tools([tool], QUESTION, tool_required=True)
calls = [call for response in (whole, streamed) for call in llm.get_tool_calls_from_response(response)]
result = tool.call(**calls[0].tool_kwargs)
history = [
    ChatMessage(QUESTION),
    whole.message,
    ChatMessage(result.content, role="tool", additional_kwargs={"tool_call_id": calls[0].tool_id}),
]
answers: Any = {"tools": [tool], "chat_history": history, "tool_choice": "none"}

template = PromptTemplate(QUESTION)
by_schema = OpenAILike(api_key=KEY, should_use_structured_outputs=True, **SERVER)
structured = [made.structured_predict(Order, template) for made in (llm, by_schema)]
report(
    refused=refused,
    calls=[[call.tool_name, call.tool_kwargs] for call in calls],
    answer=llm.chat_with_tools(**answers).message.content,
    stream=[part.message.content for part in llm.stream_chat_with_tools(**answers)],
    structured=structured,
)
