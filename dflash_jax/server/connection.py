"""HTTP connections and responses of clients that may disconnect at any time."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any

import h11
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_jax.server.generation import Generation
from dflash_jax.server.protocol import Problem
from dflash_jax.server.writer import encode

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 5.0  # seconds between two probes
COMMENTS = "dflash_jax.comments"  # in a scope's state: the response is server-sent events


def allow_comments(scope: Any) -> None:
    """Mark the response to this ASGI scope as server-sent events, which may contain comments."""
    scope.setdefault("state", {})[COMMENTS] = True


class Connection(H11Protocol):
    """An HTTP/1.1 connection that serves clients which closed their sending side.

    Such a client cannot be distinguished from one that left until data is sent: the latter's system
    answers with a reset, after which writing fails. So the server periodically sends data without
    meaning: an informational response, or a comment.
    """

    _half_closed = False  # the client has closed its sending side

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection open: a complete request is being answered."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        if not cycle.response_started and cycle.scope["http_version"] == "1.0":
            return False  # HTTP/1.0 has no informational responses
        if not self._half_closed:
            self._half_closed = True
            self._probe(FIRST_PAUSE)
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error object, and close the connection."""
        problem = Problem(400, "the request is not valid HTTP", code="invalid_http")
        body = encode(problem.to_json())
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length),
                   (b"connection", b"close")]  # fmt: skip
        answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        events = (answer, h11.Data(data=body), h11.EndOfMessage())
        free = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)  # else a response has started
        for event in events if free else ():
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _probe(self, pause: float) -> None:
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_complete:
            return
        nothing: h11.Event | None = None
        if not cycle.response_started:
            nothing = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        elif COMMENTS in cycle.scope["state"]:
            nothing = h11.Data(data=b":\n\n")
        if nothing is not None:
            self.transport.write(self.conn.send(nothing) or b"")
        self.loop.call_later(pause, self._probe, min(2 * pause, LONGEST_PAUSE))

    def on_response_complete(self) -> None:
        """Close the connection of a client that sends nothing more."""
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()


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
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(encode(value), status, headers, "application/json")
