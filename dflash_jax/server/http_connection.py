"""HTTP/1.1 connections: timeouts, bounds on requests, refusals, and half-closed connections."""

import asyncio
import contextlib
import socket
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_jax.server.access_log import AccessRecord
from dflash_jax.server.http_responses import COMMENTS
from dflash_jax.server.open_connections import BoundedConnections, Group
from dflash_jax.server.protocol import Problem
from dflash_jax.server.writer import encode

Phase = Literal["request", "headers", "body", "response"]
CHECK_S = 1.0  # seconds between two checks of a connection's timeouts
HEADERS_S = 20.0  # seconds in which the headers of a request have to arrive
BODY_S = 30.0  # seconds in which its body has to arrive
SLOWEST_BODY = 4096  # bytes of a body that add one second to `BODY_S`
UNREAD_S = 60.0  # seconds in which a client has to read something of its response
LINGER_S = 2.0  # seconds in which a client may read why its request was refused
MOST_CHUNKS = 2**15  # chunks of a body
PARSED_AT_ONCE = 2**18  # bytes of a body of known length that are parsed in one turn
PARSED_AT_ONCE_IN_CHUNKS = 2**11  # bytes of anything else: short chunks take long
# Seconds between two probes of a half-closed connection, which double from the first to the last.
FIRST_PROBE_S = 0.02
LONGEST_PROBE_S = 5.0


class BoundedParser(h11.Connection):
    """A parser of requests, whose bodies may have at most `MOST_CHUNKS` chunks.

    Attributes:
      problem: why the last request was refused, if it was valid HTTP.
    """

    _chunks = 0  # finished chunks of the current body
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

    A client that closed its sending side looks like a client that left until data is sent: only the
    system of a client that left answers with a reset, after which writing fails. So the server
    periodically sends data without meaning: an informational response, or a comment.
    """

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        largest = self.config.h11_max_incomplete_event_size or 2**16
        self._parser = BoundedParser(h11.SERVER, largest)
        vars(self)["conn"] = self._parser  # uvicorn parses by this attribute
        if isinstance(self.server_state, BoundedConnections):
            self._connections = self.server_state
        else:
            self._connections = BoundedConnections()
        self._unparsed = bytearray()
        self._parsing = False  # `_parse` is called in the next turn of the event loop
        self._refused = False  # nothing more is read
        self._half_closed = False  # the client has closed its sending side
        self._phase: Phase | None = None  # what the connection waits for, see `_enter_phase`
        self._phase_began = 0.0  # time of the event loop
        self._received = 0  # bytes that came in this phase
        self._unread = 0  # bytes that wait for the client to read
        self._unread_since = 0.0  # time of the event loop at which it last read some
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection if there is room."""
        super().connection_made(transport)
        _send_at_once(transport)
        self._enter_phase(begun=True)
        self._timer = self.loop.call_later(CHECK_S, self._check)
        self._connections.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from its group, and end its checks."""
        self._connections.move(self)
        if self._timer is not None:
            self._timer.cancel()
        self._unparsed.clear()
        super().connection_lost(exc)

    # -- requests -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse data, a part in each turn of the event loop: other connections have turns, too."""
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
        in_body = self.conn.their_state is h11.SEND_BODY
        size = PARSED_AT_ONCE if in_body and self._has_length() else PARSED_AT_ONCE_IN_CHUNKS
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
        """Note what the connection waits for, and since when.

        Args:
          begun: parts of the next request may have arrived.
        """
        phase = self._current_phase(begun)
        if phase == self._phase:
            return
        self._phase = phase
        self._phase_began = self.loop.time()
        self._received = 0
        self._connections.move(self, self._group(phase))

    def _current_phase(self, begun: bool) -> Phase:
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        if self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
            return "response"
        return "headers" if begun else "request"

    def _group(self, phase: Phase) -> Group | None:
        """Return the group of connections in a phase; None while a request is being answered."""
        if phase == "response":
            return None
        if phase == "body":
            return "receiving"
        return "unused" if self.cycle is None else "idle"

    def _check(self) -> None:
        """End the connection if its client sends or reads too slowly; called every `CHECK_S`."""
        self._timer = self.loop.call_later(CHECK_S, self._check)
        if self.transport.is_closing() or self.flow.write_paused:
            self._check_reader()
        else:
            self._unread = 0
            self._check_sender()

    def _check_reader(self) -> None:
        now = self.loop.time()
        unread = self.transport.get_write_buffer_size()
        if not self._unread or unread < self._unread:
            self._unread_since = now
        self._unread = unread
        if now - self._unread_since > UNREAD_S:
            self.transport.abort()

    def _check_sender(self) -> None:
        waited = self.loop.time() - self._phase_began
        if self._phase == "headers" and waited > HEADERS_S:
            if self.cycle is None and not self._received:  # nobody asked anything
                self.transport.abort()
                return
            text = f"no request came within {HEADERS_S:g} s"
            self.refuse(Problem(text, status=408, code="timeout"))
        elif self._phase == "body" and waited > BODY_S + self._received / SLOWEST_BODY:
            text = (
                f"the body did not come within {BODY_S:g} s and a second per {SLOWEST_BODY} bytes;"
                " send it faster"
            )
            self.refuse(Problem(text, status=408, code="timeout"))

    def pause_writing(self) -> None:
        """Note that the client does not read its response."""
        super().pause_writing()
        if self._phase == "response":
            self._connections.move(self, "unread")

    def resume_writing(self) -> None:
        """Note that the client reads its response again."""
        super().resume_writing()
        if self._phase == "response":
            self._connections.move(self)

    def evict(self) -> None:
        """Close the connection at once, as another one needs its place."""
        self._connections.move(self)
        self.transport.abort()

    def refuse(self, problem: Problem, *, logged: bool = True) -> None:
        """Answer with an error object unless a response has started, and read nothing more.

        Args:
          logged: write a line into the access log if no request is in progress, whose line would
            have the refusal.
        """
        self._refused = True
        self._unparsed.clear()
        if self.cycle is not None and not self.cycle.response_complete:
            AccessRecord.of(self.cycle.scope).refuse(problem)  # the application logs it
            self.cycle.disconnected = True  # so that the application does not answer, too
            self.cycle.message_event.set()
        elif logged:
            record = AccessRecord(client=str(self.client[0]) if self.client else "")
            record.refuse(problem)
            record.end()
        body = encode(problem.to_json())
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        if problem.retry_s:
            headers.append(("retry-after", str(problem.retry_s)))
        response = h11.Response(status_code=problem.status, headers=headers)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else a response has started
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
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
            self._probe(FIRST_PROBE_S)
        return True

    def _probe(self, pause: float) -> None:
        """Send data without meaning, and again after a pause, until the response is complete."""
        cycle = self.cycle
        if self.transport.is_closing() or self._refused or cycle.response_complete:
            return
        probe: h11.Event | None = None
        if not cycle.response_started:
            probe = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        elif COMMENTS in cycle.scope["state"]:
            probe = h11.Data(data=b":\n\n")
        if probe is not None:
            self.transport.write(self.conn.send(probe) or b"")
        self.loop.call_later(pause, self._probe, min(2 * pause, LONGEST_PROBE_S))


def _send_at_once(transport: asyncio.Transport) -> None:
    """Have the system send small writes at once (TCP_NODELAY).

    Otherwise a response's body waits until the client has acknowledged its headers, which clients
    delay by 40 ms. asyncio does this only for sockets that were made with a protocol number.
    """
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # the client has closed the connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
