"""Programs with an AsyncLLM, and what it holds when all requests have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from nanoinfer import LLM, AsyncLLM


async def freed(model: AsyncLLM) -> None:
    """Wait until no request is left in core and engine."""
    core = model.llm.core
    until = time.monotonic() + 10
    while model.num_unfinished_requests or core.scheduler.unfinished or model._running().engine._submitted:
        assert time.monotonic() < until
        await asyncio.sleep(0.001)
    assert set(core.engine.handles) == core.scheduler.handles
    assert core.scheduler.running == []


@contextmanager
def running(llm: LLM) -> Iterator[AsyncLLM]:
    """Yield an AsyncLLM; at the end no request is left, and the engine holds what the scheduler knows."""
    model = AsyncLLM.from_llm(llm)
    try:
        yield model
        asyncio.run(freed(model))
    finally:
        asyncio.run(model.close())


def run(main: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], llm: LLM) -> Any:
    """Run a program with an AsyncLLM: see `running`."""
    with running(llm) as model:
        return asyncio.run(asyncio.wait_for(main(model), 60))
