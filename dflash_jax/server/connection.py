"""Connections of clients that may close their sending side and go on reading."""

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

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

    _heard_all = False  # the client sends nothing more

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: a whole request is being answered."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        if not cycle.response_started and cycle.scope["http_version"] == "1.0":
            return False  # HTTP/1.0 has no answer that says nothing
        if not self._heard_all:
            self._heard_all = True
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
        if self._heard_all and self.cycle.response_complete:
            self.transport.close()
