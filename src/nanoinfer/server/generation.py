"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time

from nanoinfer.async_streams import MergedStreams
from nanoinfer.openai_protocol import GenerationRequest, json_bytes, response_body
from nanoinfer.outputs import RequestOutput
from nanoinfer.server.http import DisconnectWatch, Receive, Scope, Send, read_object, respond
from nanoinfer.server.service import Service, new_id


async def generate(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request to generate."""
    request = service.parse(scope["path"], await read_object(receive))
    request_id = new_id()
    merged = MergedStreams(service.start(request, request_id))
    try:
        async with DisconnectWatch(receive, merged.close):
            await _answer(service, request, request_id, merged, send)
    finally:
        merged.close()


async def _answer(
    service: Service, request: GenerationRequest, request_id: str, merged: MergedStreams, send: Send
) -> None:
    """Send all outputs in one response."""
    outputs: dict[int, RequestOutput] = {}
    async for found in merged:
        outputs.update(found)
    if merged.closed:
        return
    created = int(time.time())

    def build() -> bytes:
        every = [outputs[i] for i in range(len(outputs))]
        return json_bytes(
            response_body(
                request,
                every,
                request_id=request_id,
                model=service.names[0],
                created=created,
                decode=service.decode,
            )
        )

    large = request.params.logprobs is not None or request.prompt_logprobs
    await respond(send, await asyncio.to_thread(build) if large else build())
