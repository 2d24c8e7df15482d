"""HTTP/1.1 connections: their number, timeouts, bounds, half-closed ones, and disconnections."""

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import h11
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from dflash_jax.server.access_log import AccessRecord
from dflash_jax.server.errors import too_busy
from dflash_jax.server.protocol import Problem
from dflash_jax.server.writer import encode

# The bound on open connections, below the limit of file descriptors.

log = logging.getLogger("dflash_jax.server")
MOST_CONNECTIONS = 2048
LEAST_CONNECTIONS = 16
RESERVE = 64  # descriptors for files, processes and connections that are being accepted
ACCEPTED_AT_ONCE = 16  # connections that are accepted before the first of them counts
QUEUED = 1024  # connections that the system queues before they are accepted
GROUPS = ("unused", "idle", "receiving", "unread")  # in the order in which they make room
UNKNOWN_USE = 64  # descriptors in use, where the system does not list them


class BoundedConnections(ServerState):
    """The connections of a server. A new one that exceeds the bound replaces the oldest idle one.

    Args:
      most: bound on open connections.

    Attributes:
      unused: connections that sent no request yet, the oldest first.
      idle: those that wait for another request.
      receiving: those in the middle of a request body.
      unread: those whose client does not read the response.
    """

    def __init__(self, most: int = MOST_CONNECTIONS):
        super().__init__()
        self.most = most
        self.unused: dict[Connection, None] = {}
        self.idle: dict[Connection, None] = {}
        self.receiving: dict[Connection, None] = {}
        self.unread: dict[Connection, None] = {}

    def admit(self, new: "Connection") -> None:
        """Make room for a new connection, or refuse it if every other one is being answered."""
        if len(self.connections) <= self.most:
            return
        log.warning(
            "more than %d connections are open: new ones replace those that are idle", self.most
        )
        for name in GROUPS:
            for oldest in getattr(self, name):
                if oldest is not new:
                    oldest.evict()
                    return
        new.refuse(too_busy(), logged=False)  # a flood of them has the warnings above

    def move(self, connection: "Connection", to: str = "") -> None:
        """Put a connection into the group of this name, as its newest one, and out of others."""
        for name in GROUPS:
            group = getattr(self, name)
            group.pop(connection, None)
            if name == to:
                group[connection] = None

    def evict_unread(self) -> None:
        """Close the connections of clients that do not read their responses."""
        for connection in list(self.unread):
            connection.evict()


def most_connections() -> int:
    """Return how many connections may be open with the process's limit of file descriptors."""
    try:
        import resource
    except ImportError:  # not on Windows
        return MOST_CONNECTIONS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    try:
        used = sum(1 for _ in Path(folder).iterdir())
    except OSError:
        used = UNKNOWN_USE
    free = limit - used - RESERVE - ACCEPTED_AT_ONCE
    return min(max(free, LEAST_CONNECTIONS), MOST_CONNECTIONS)


# Log lines that clients cause, at a limited rate.

WINDOW_S = 10.0  # seconds
MOST_LINES = 20  # of one message in a window


class RateLimit(logging.Filter):
    """Drops warnings of one kind beyond a rate, and adds their number to the next one that passes.

    A kind is a logger with a message before its arguments are inserted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}  # start, and lines since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        if record.levelno < logging.WARNING:
            return True
        now, kind = time.monotonic(), (record.name, str(record.msg)[:100])
        start, count = self._windows.get(kind, (now, 0))
        if now - start > WINDOW_S:
            if (dropped := count - MOST_LINES) > 0:
                record.msg = f"{record.getMessage()} ({dropped} more such lines were left out)"
                record.args = ()
            start, count = now, 0
        if len(self._windows) > 1000:  # messages that were formatted before
            self._windows.clear()
        self._windows[kind] = (start, count + 1)
        return count < MOST_LINES


LIMIT = RateLimit()  # one for all loggers, which counts each of them separately
LOGGERS = ("dflash_jax.server", "dflash_jax.hosts", "uvicorn.error", "asyncio")


def limit_logs() -> None:
    """Limit the rate of warnings of the server, of uvicorn and of asyncio; may be repeated."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(LIMIT)


def report_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop, in one line if the system refused something.

    asyncio repeats the traceback of an accept that failed as often as it may accept at once.
    """
    if isinstance(error := context.get("exception"), OSError):
        log.warning("%s: %s", context.get("message", "the event loop failed"), error)
    else:
        loop.default_exception_handler(context)


FIRST_PAUSE, LONGEST_PAUSE = 0.02, 5.0  # seconds between two probes
COMMENTS = "dflash_jax.comments"  # in a scope's state: the response is server-sent events
CHECK_S = 1.0  # seconds between two checks of a connection's timeouts
HEADERS_S = 20.0  # seconds in which the headers of a request have to arrive
BODY_S = 30.0  # seconds in which its body has to arrive, and
SLOWEST = 4096  # bytes for which it has another second
UNREAD_S = 60.0  # seconds in which a client has to read something of its response
LINGER_S = 2.0  # seconds in which a client may read why its request was refused
MOST_CHUNKS = 2**15  # of a body
WHOLE, SLICE = 2**18, 2**11  # bytes that are parsed at once, in bodies of known length and others


def allow_comments(scope: Any) -> None:
    """Mark the response to this ASGI scope as server-sent events, which may contain comments."""
    scope.setdefault("state", {})[COMMENTS] = True


class BoundedParser(h11.Connection):
    """Parses requests, whose bodies may have at most `MOST_CHUNKS` chunks.

    Attributes:
      problem: why the last request was refused, if it was valid HTTP.
    """

    _chunks = 0
    problem: Problem | None = None

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
          RemoteProtocolError: the client sent invalid HTTP, or too many chunks.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_end:
            self._chunks += 1
            if self._chunks > MOST_CHUNKS:
                message = f"the body has more than {MOST_CHUNKS} chunks; send larger ones"
                self.problem = Problem(message, status=413, code="too_many_chunks")
                raise h11.RemoteProtocolError(message)
        return event


class Connection(H11Protocol):
    """A connection that serves one request after the other.

    A client that closed its sending side cannot be distinguished from one that left until data is
    sent: the latter's system answers with a reset, after which writing fails. So the server
    periodically sends data without meaning: an informational response, or a comment.
    """

    _half_closed = False  # the client has closed its sending side
    _refused = False  # nothing more is read
    _parsing = False  # the rest of `_unparsed` is parsed in the next turn of the event loop

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        largest = self.config.h11_max_incomplete_event_size or 2**16
        self._parser = BoundedParser(h11.SERVER, largest)
        vars(self)["conn"] = self._parser  # which uvicorn uses
        state = self.server_state
        self._all = state if isinstance(state, BoundedConnections) else BoundedConnections()
        self._unparsed = bytearray()
        self._phase, self._since = "", 0.0  # see `_enter_phase`, and the time of its beginning
        self._received = 0  # bytes of the body
        self._unread, self._unread_since = 0, 0.0  # bytes that wait to be sent, and since when
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection if there is room."""
        super().connection_made(transport)
        _send_at_once(transport)
        self._enter_phase(begun=True)
        self._timer = self.loop.call_later(CHECK_S, self._check)
        self._all.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._all.move(self)
        if self._timer is not None:
            self._timer.cancel()
        self._unparsed.clear()
        super().connection_lost(exc)

    # -- requests -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse data, a slice in each turn of the event loop: short chunks take long."""
        if self._refused:
            return
        self._unparsed += data
        if self._parsing:  # uvicorn resumed reading
            self.transport.pause_reading()
        else:
            self._parse()

    def _parse(self) -> None:
        self._parsing = False
        if self.transport.is_closing() or self._refused:
            return
        known = self.conn.their_state is h11.SEND_BODY and self._has_length()
        size = WHOLE if known else SLICE
        data = bytes(self._unparsed[:size])
        del self._unparsed[:size]
        self._received += len(data)
        super().data_received(data)
        self._enter_phase(begun=True)
        if self._unparsed:
            self._parsing = True
            self.transport.pause_reading()
            self.loop.call_soon(self._parse)
        elif not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _has_length(self) -> bool:
        return any(name == b"content-length" for name, _ in self.headers or ())

    def on_response_complete(self) -> None:
        """Wait for the next request, or close the connection of a client that sends nothing."""
        super().on_response_complete()
        rest, _ = self.conn.trailing_data  # the beginning of a pipelined request
        self._enter_phase(begun=bool(rest or self._unparsed))
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed with an error object."""
        invalid = Problem("the request is not valid HTTP", code="invalid_http")
        self.refuse(self._parser.problem or invalid)

    # -- timeouts and bounds ------------------------------------------------------------------

    def _enter_phase(self, *, begun: bool) -> None:
        """Note what the connection waits for: a request, its headers, its body or the response.

        Args:
          begun: parts of a request may have arrived.
        """
        if self.conn.their_state is h11.SEND_BODY:
            phase = "body"
        elif self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
            phase = "response"
        else:
            phase = "headers" if begun else "request"
        if phase == self._phase:
            return
        self._phase, self._since, self._received = phase, self.loop.time(), 0
        waiting = "unused" if self.cycle is None else "idle"
        group = {"headers": waiting, "request": waiting, "body": "receiving"}.get(phase, "")
        self._all.move(self, group)

    def _check(self) -> None:
        self._timer = self.loop.call_later(CHECK_S, self._check)
        now, waits = self.loop.time(), self.transport.get_write_buffer_size()
        if self.transport.is_closing() or self.flow.write_paused:
            if not self._unread or waits < self._unread:
                self._unread_since = now
            self._unread = waits
            if now - self._unread_since > UNREAD_S:
                self.transport.abort()
            return
        self._unread = 0
        late = now - self._since
        if self._phase == "headers" and late > HEADERS_S:
            if self.cycle is None and not self._received:
                self.transport.abort()
                return
            self.refuse(
                Problem(f"no request came within {HEADERS_S:g} s", status=408, code="timeout")
            )
        elif self._phase == "body" and late > BODY_S + self._received / SLOWEST:
            text = f"the body did not come within {BODY_S:g} s and a second per {SLOWEST} bytes"
            self.refuse(Problem(f"{text}; send it faster", status=408, code="timeout"))

    def pause_writing(self) -> None:
        """Note that the client does not read its response."""
        super().pause_writing()
        if self._phase == "response":
            self._all.move(self, "unread")

    def resume_writing(self) -> None:
        """Note that it reads again."""
        super().resume_writing()
        if self._phase == "response":
            self._all.move(self)

    def evict(self) -> None:
        """Close the connection for a new one."""
        self._all.move(self)
        self.transport.abort()

    def refuse(self, problem: Problem, *, logged: bool = True) -> None:
        """Answer with an error object unless a response has started, and read nothing more.

        Args:
          logged: whether what was refused has a line in the log, as requests do.
        """
        self._refused = True
        self._unparsed.clear()
        if self.cycle is not None and not self.cycle.response_complete:
            AccessRecord.of(self.cycle.scope).refuse(problem)  # which its application logs
            self.cycle.disconnected = True  # so that it does not answer, too
            self.cycle.message_event.set()
        elif logged:
            record = AccessRecord(client=str(self.client[0]) if self.client else "")
            record.refuse(problem)
            record.end()
        body = encode(problem.to_json())
        headers = [("content-type", "application/json"), ("content-length", str(len(body))),
                   ("connection", "close")]  # fmt: skip
        if problem.retry_s:
            headers.append(("retry-after", str(problem.retry_s)))
        answer = h11.Response(status_code=problem.status, headers=headers)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else a response has started
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        with contextlib.suppress(OSError):  # the client has closed the connection
            self.transport.write_eof()  # closing would discard what the client did not read
        self.loop.call_later(LINGER_S, self.transport.abort)

    # -- clients that closed their sending side -------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection open: a complete request is being answered."""
        cycle = self.cycle
        if self._refused or cycle is None or cycle.more_body or cycle.response_complete:
            return False
        if not cycle.response_started and cycle.scope["http_version"] == "1.0":
            return False  # HTTP/1.0 has no informational responses
        if not self._half_closed:
            self._half_closed = True
            self._probe(FIRST_PAUSE)
        return True

    def _probe(self, pause: float) -> None:
        cycle = self.cycle
        if self.transport.is_closing() or self._refused or cycle.response_complete:
            return
        nothing: h11.Event | None = None
        if not cycle.response_started:
            nothing = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        elif COMMENTS in cycle.scope["state"]:
            nothing = h11.Data(data=b":\n\n")
        if nothing is not None:
            self.transport.write(self.conn.send(nothing) or b"")
        self.loop.call_later(pause, self._probe, min(2 * pause, LONGEST_PAUSE))


def _send_at_once(transport: asyncio.Transport) -> None:
    """Have the system send small writes at once (TCP_NODELAY).

    Otherwise a response's body waits until the client has acknowledged its headers, which clients
    delay by 40 ms. asyncio does this only for sockets that were made with a protocol number.
    """
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # the client has closed the connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# Requests and responses of clients that may disconnect at any time.

BLOCK = 2**16  # bytes of a large response that are sent at once


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
        self._chunks, self._end = chunks, end

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
