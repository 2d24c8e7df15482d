"""Answers that are sent while clients may go away."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_jax.server.connection import allow_comments
from dflash_jax.server.generation import Generation
from dflash_jax.server.writer import encode


class Gone(Exception):
    """The client closed the connection."""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def exhaust(events: AsyncIterator[Any]) -> None:
    async for _ in events:
        pass


async def unless_gone(work: Awaitable[Any], receive: Receive) -> Any:
    """The work's result; raises Gone, and ends the work, if the client leaves before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        for future in (task, gone):
            if not future.done():
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await future


class Stream(Response):
    """Server-sent events, watched for a client that goes away even while nothing is sent."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, chunks: AsyncGenerator[bytes]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation, self._chunks = generation, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        allow_comments(scope)
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            with contextlib.suppress(Gone, OSError):
                await unless_gone(self._send(send), receive)
        finally:
            await self._chunks.aclose()
            self._generation.cancel("disconnect")  # should the chunks never have been begun

    async def _send(self, send: Send) -> None:
        async for chunk in self._chunks:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as a JSON response."""
    return Response(encode(value), status, headers, "application/json")
