"""Responses of clients that may disconnect at any time."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Iterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_jax.server.generation import Generation
from dflash_jax.server.http_connection import allow_comments
from dflash_jax.server.writer import encode

BLOCK = 2**16  # bytes of a large response that are sent at once


class ClientDisconnected(Exception):
    """The client closed the connection."""


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def drain_events(events: AsyncIterator[Any]) -> None:
    """Iterate to the end, discarding the items."""
    async for _ in events:
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


class EventStreamResponse(Response):
    """A stream of server-sent events that ends when the client disconnects, even while idle."""

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
            with contextlib.suppress(ClientDisconnected, OSError):
                await unless_disconnected(self._send(send), receive)
        finally:
            await self._chunks.aclose()
            self._generation.cancel("disconnect")  # in case iteration never started

    async def _send(self, send: Send) -> None:
        async for chunk in self._chunks:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await asyncio.sleep(0)  # `send` returns at once while the client reads fast
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(encode(value), status, headers, "application/json")


class JsonPieces(Response):
    """JSON that is sent block by block, so that a slow client holds one block in memory.

    Args:
      pieces: the parts of the text.
    """

    def __init__(self, pieces: list[bytes]):
        self._pieces, self._length = pieces, sum(map(len, pieces))
        headers = {"content-length": str(self._length)}
        super().__init__(headers=headers, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        left = self._length
        for block in _blocks(self._pieces):
            left -= len(block)
            await send({"type": "http.response.body", "body": block, "more_body": left > 0})
            if left:
                await asyncio.sleep(0)  # as in `EventStreamResponse`


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces in blocks of about `BLOCK` bytes."""
    block = bytearray()
    for piece in pieces:
        for at in range(0, len(piece), BLOCK):
            block += piece[at : at + BLOCK]
            if len(block) >= BLOCK:
                yield bytes(block)
                block.clear()
    if block:
        yield bytes(block)
