"""The conversation of pydantic-ai: see common.py."""

from __future__ import annotations

import asyncio
from typing import Any

from common import BASE_URL, FINITE, KEY, MODEL, QUESTION, Order, add, ran, report
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS: Any = {**FINITE, "parallel_tool_calls": False}


class CallFirst(AbstractCapability[None]):
    """The first step is a call, the second none."""

    def get_model_settings(self) -> Any:
        return lambda context: {"tool_choice": "required" if context.run_step == 1 else "none"}


def model(key: str) -> OpenAIChatModel:
    client = AsyncOpenAI(base_url=BASE_URL, api_key=key, max_retries=0)
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client), settings=SETTINGS)


async def main() -> None:
    refused = 0
    try:
        await Agent(model("wrong")).run(QUESTION)
    except ModelHTTPError as e:
        refused = e.status_code
    agent = Agent(model(KEY), tools=[add], capabilities=[CallFirst()])
    whole = await agent.run(QUESTION)
    async with agent.run_stream(QUESTION) as streamed:
        stream = [text async for text in streamed.stream_text(debounce_by=None)]
    orders = [await Agent(model(KEY), output_type=kind).run(QUESTION) for kind in (Order, NativeOutput(Order))]
    structured = [order.output for order in orders]
    report(refused=refused, calls=ran, answer=whole.output, stream=stream, structured=structured)


asyncio.run(main())
