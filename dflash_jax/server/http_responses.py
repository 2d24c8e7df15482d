"""Responses to clients that may disconnect at any time, or read slowly."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dflash_jax.server.writer import encode

COMMENTS = "dflash_jax.comments"  # in a scope's state: the response is server-sent events
BLOCK = 2**16  # bytes of a large response that are sent at once


def allow_comments(scope: Any) -> None:
    """Mark the response to this ASGI scope as server-sent events, which may contain comments."""
    scope.setdefault("state", {})[COMMENTS] = True


class ClientDisconnected(Exception):
    """The client closed the connection."""


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(work: Awaitable[Any], receive: Receive) -> Any:
    """Return the result of `work`, cancelling it if the client disconnects.

    Raises:
      ClientDisconnected: the client left before the work was done.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for future in (task, gone):
            if not future.done():
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await future


class EventStreamResponse(StreamingResponse):
    """A stream of server-sent events that ends when the client disconnects, even while idle.

    Args:
      end: called at the end, also if iteration never started.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes], end: Callable[[], None]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._filled(), headers=headers)
        self._chunks = chunks
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        allow_comments(scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()
            self._end()

    async def _filled(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            if chunk:
                yield chunk
                await asyncio.sleep(0)  # sending returns at once while the client reads fast


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(encode(value), status, headers, "application/json")


class JsonPieces(StreamingResponse):
    """JSON that is sent block by block, so that a slow client holds one block in memory.

    Args:
      pieces: the parts of the text.
    """

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes]):
        self._size = sum(map(len, pieces))
        super().__init__(_blocks(pieces), headers={"content-length": str(self._size)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the text; only for a long one, watch at the same time whether the client leaves."""
        if self._size <= BLOCK:
            await self.stream_response(send)
        else:
            await super().__call__(scope, receive, send)


async def _blocks(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    block = bytearray()
    for piece in pieces:
        for at in range(0, len(piece), BLOCK):
            block += piece[at : at + BLOCK]
            if len(block) >= BLOCK:
                yield bytes(block)
                block.clear()
                await asyncio.sleep(0)  # as in `EventStreamResponse`
    yield bytes(block)
