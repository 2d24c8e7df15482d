"""HTTP/1.1 connections: their timeouts, bounds, and clients that closed their sending side."""

import asyncio
import contextlib
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_jax.server.connection_limit import BoundedConnections
from dflash_jax.server.protocol import Problem
from dflash_jax.server.writer import encode

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
                self.problem = Problem(413, message, code="too_many_chunks")
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
        self._enter_phase(begun=False)
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed with an error object."""
        invalid = Problem(400, "the request is not valid HTTP", code="invalid_http")
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
        """Close the connection if a timeout was reached."""
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
            self.refuse(Problem(408, f"no request came within {HEADERS_S:g} s", code="timeout"))
        elif self._phase == "body" and late > BODY_S + self._received / SLOWEST:
            text = f"the body did not come within {BODY_S:g} s and a second per {SLOWEST} bytes"
            self.refuse(Problem(408, f"{text}; send it faster", code="timeout"))

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

    def refuse(self, problem: Problem) -> None:
        """Answer with an error object unless a response has started, and read nothing more."""
        self._refused = True
        self._unparsed.clear()
        if self.cycle is not None:  # its application must not answer, too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
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
