"""What an AsyncLLM holds when all requests have ended."""

from __future__ import annotations

import asyncio
import time

from nanoinfer import AsyncLLM


async def freed(model: AsyncLLM) -> None:
    """Wait until no request is left in core and engine."""
    core = model.llm.core
    until = time.monotonic() + 10
    while model.num_unfinished_requests or core.scheduler.unfinished or model._running().engine._submitted:
        assert time.monotonic() < until
        await asyncio.sleep(0.001)
    assert set(core.engine.handles) == core.scheduler.handles
    assert core.scheduler.running == []
