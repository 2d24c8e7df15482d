"""The HTTP side of the application: passes requests to replicas, and survives a replica's end."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dflash_jax.ray.calls import Call, Conversations
from dflash_jax.server.protocol import Problem

log = logging.getLogger("dflash_jax.ray")
ATTEMPTS = 3  # replicas that may end before one of them answers
LARGE_BODY = 2**16  # bytes; larger ones are decoded in a thread
RETRY_S = 5  # seconds


class Gateway:
    """Passes every request to a replica, and its response back, piece by piece.

    A request whose replica ends before it answers is passed to another one.

    Args:
      replicas: handle of the replicas.
      max_body: bytes of a body to read; a replica refuses what is longer.
    """

    def __init__(self, replicas: DeploymentHandle, max_body: int):
        self._replicas, self._max_body = replicas.options(stream=True), max_body
        self._conversations = Conversations()

    async def __call__(self, request: Request) -> Response:
        """Answer an HTTP request."""
        call = await self._read(request)
        for _ in range(ATTEMPTS):
            stream = self._replicas.remote(call)
            try:
                start = await anext(messages := aiter(stream))
                return self._relayed(call, start, messages, stream)
            except asyncio.CancelledError:  # the client left
                stream.cancel()
                raise
            except BackPressureError:
                busy = Problem(503, "the queue is full; try again", code="queue_full", retry_s=1)
                return _refusal(busy)
            except (RayActorError, RayServeException, StopAsyncIteration) as error:
                log.warning("a replica ended before it answered: %s", error)
        return _refusal(_ended())

    async def _read(self, request: Request) -> Call:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body:
                break
        arguments = dict(request.scope), bytes(body[: self._max_body + 1])
        if len(body) > LARGE_BODY:
            return await asyncio.to_thread(self._conversations.call, *arguments)
        return self._conversations.call(*arguments)

    def _relayed(
        self, call: Call, start: dict[str, Any], messages: AsyncIterator[Any], stream: Any
    ) -> Response:
        headers = [pair for pair in start["headers"] if pair[0].lower() != b"x-request-id"]
        response = StreamingResponse(
            self._pieces(call, headers, messages, stream), status_code=start["status"]
        )
        response.raw_headers = headers  # Ray adds the id of the request
        return response

    async def _pieces(
        self,
        call: Call,
        headers: list[tuple[bytes, bytes]],
        messages: AsyncIterator[Any],
        stream: Any,
    ) -> AsyncGenerator[bytes]:
        """Yield the body; an event stream ends with an error if its replica does."""
        first = True
        try:
            async for message in messages:
                piece = message.get("body", b"")
                if first:
                    self._conversations.remember(call, piece)
                first = False
                if piece:
                    yield piece
        except (RayActorError, RayServeException) as error:
            log.warning("a replica ended while it answered: %s", error)
            if not any(value.startswith(b"text/event-stream") for _, value in headers):
                raise
            yield error_events(call.scope["path"], _ended())
        finally:
            stream.cancel()


def error_events(path: str, problem: Problem) -> bytes:
    """Return the events that end a stream of this route with an error."""
    data = b"data: " + json.dumps(problem.to_json()).encode() + b"\n\n"
    if path.endswith(("/messages", "/responses")):
        return b"event: error\n" + data
    return data + b"data: [DONE]\n\n"


def _ended() -> Problem:
    return Problem(
        503, "the replica that served the request ended; try again", code="replica_ended",
        retry_s=RETRY_S,
    )  # fmt: skip


def _refusal(problem: Problem) -> Response:
    headers = {"Retry-After": str(problem.retry_s)}
    body = json.dumps(problem.to_json())
    return Response(body, problem.status, headers, "application/json")
