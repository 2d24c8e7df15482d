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
COMMENTS = "dflash_jax.comments"  # in a scope's state: server-sent events are the answer


def allow_comments(scope: Any) -> None:
    """Says that the answer to this ASGI scope may have comments of server-sent events in it."""
    scope.setdefault("state", {})[COMMENTS] = True


class Connection(H11Protocol):
    """Serves such a client to the end, and tells it from one that left.

    Either looks the same until something is sent: the system of a client that left answers with a
    reset, after which writing fails. So what says nothing is sent, now and then.
    """

    _half_closed = False  # the client sends nothing more

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: a whole request is being answered."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        if not cycle.response_started and cycle.scope["http_version"] == "1.0":
            return False  # HTTP/1.0 has no answer that says nothing
        if not self._half_closed:
            self._half_closed = True
            self._probe(FIRST_PAUSE)
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP by an error object as other requests get it, and close."""
        problem = Problem(400, "the request is not valid HTTP", code="invalid_http")
        body = encode(problem.to_json())
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length),
                   (b"connection", b"close")]  # fmt: skip
        answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        events = (answer, h11.Data(data=body), h11.EndOfMessage())
        free = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)  # else an answer has begun
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
        """Nothing else comes from this client, unless it had sent it already."""
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()


class ClientDisconnected(Exception):
    """The client closed the connection."""


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def drain_events(events: AsyncIterator[Any]) -> None:
    async for _ in events:
        pass


async def unless_disconnected(work: Awaitable[Any], receive: Receive) -> Any:
    """The work's result; raises Gone, and ends the work, if the client leaves before."""
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
            with contextlib.suppress(ClientDisconnected, OSError):
                await unless_disconnected(self._send(send), receive)
        finally:
            await self._chunks.aclose()
            self._generation.cancel("disconnect")  # should the chunks never have been begun

    async def _send(self, send: Send) -> None:
        async for chunk in self._chunks:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as a JSON response."""
    return Response(encode(value), status, headers, "application/json")
