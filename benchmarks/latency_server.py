"""A process of `benchmarks.latency`: a server that notes when each request passes its stages.

    python -m benchmarks.latency_server served MARKS
    python -m benchmarks.latency_server bare

Both print the line "listening on URL", and end with SIGTERM. The first serves the shipped pair as
`dflash-jax serve` does, and writes the marks of all requests to a file at the end. The second is a
Starlette application whose only route reads JSON and answers with JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Parts of a request's way in order, and the marks they end at.
STAGES = {
    "client to server": "received",
    "HTTP, routing, checks": "routed",
    "reading the request, tokens": "read",
    "to the engine's thread": "prepared",
    "scheduling": "dispatched",
    "the device's step": "computed",
    "state machine, text": "updated",
    "to the event loop": "delivered",
    "writing the response, log line": "encoded",
    "HTTP to the last byte": "sent",
    "server to client": "answered",
}
DEVICE = "the device's step"
ANSWER = {"object": "text_completion", "text": "a" * 600}  # about as long as ours


class Marks:
    """When requests passed marks; the client sends one request after the other."""

    def __init__(self) -> None:
        self.requests: list[dict[str, float]] = []

    def begin(self) -> None:
        """Begin another request."""
        self.requests.append({"received": time.perf_counter()})

    def note(self, name: str) -> None:
        """Note that the request passes a mark, unless it did before."""
        if self.requests:
            self.requests[-1].setdefault(name, time.perf_counter())

    def at(
        self,
        owner: Any,
        method: str,
        name: str,
        *,
        end: bool = False,
        if_any: Callable[..., bool] = lambda *_: True,
    ) -> None:
        """Have calls of a function note a mark.

        Args:
          end: whether calls note it when they end, not when they begin.
          if_any: whether a call with its arguments counts.
        """
        function = getattr(owner, method)

        def noted(*arguments: Any, **more: Any) -> Any:
            counts = if_any(*arguments)
            if counts and not end:
                self.note(name)
            result = function(*arguments, **more)
            if counts and end:
                self.note(name)
            return result

        setattr(owner, method, noted)


def watch(marks: Marks) -> None:
    """Have the server note its marks."""
    from dflash_jax.engine import model_runner
    from dflash_jax.engine.engine import Engine
    from dflash_jax.server import app, generation
    from dflash_jax.server.engine_thread import EngineThread
    from dflash_jax.server.http_connection import Connection
    from dflash_jax.server.middleware import Middleware

    received: Any = Connection.data_received

    def data_received(self: Connection, data: bytes) -> None:
        marks.begin()
        received(self, data)

    def has_output(_: Any, updates: Any) -> bool:
        return any(pieces or end for _, pieces, end in updates)

    Connection.data_received = data_received  # type: ignore[method-assign]
    marks.at(Middleware, "body", "routed")
    marks.at(generation.Generation, "__init__", "read")
    marks.at(Engine, "prepare", "prepared")
    marks.at(model_runner.ModelRunner, "run", "dispatched")
    marks.at(model_runner, "read_output", "computed", end=True)
    marks.at(EngineThread, "_publish", "updated", if_any=has_output)
    marks.at(EngineThread, "_deliver", "delivered", if_any=has_output)
    marks.at(app.JsonPieces, "__init__", "encoded")
    marks.at(Connection, "on_response_complete", "sent")


def served(path: Path) -> None:
    """Serve the shipped pair, and write the marks at the end."""
    from dflash_jax.cli import main

    marks = Marks()
    watch(marks)
    main(["serve", "--port", "0", "--warm", "none", "--drain", "0"])
    path.write_text(json.dumps(marks.requests), encoding="utf-8")


def bare() -> None:
    """Serve a route of Starlette."""
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def answer(request: Request) -> Response:
        json.loads(await request.body() or b"null")
        return JSONResponse(ANSWER)

    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    print(f"listening on http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    config = uvicorn.Config(app, http="h11", loop="asyncio", ws="none", log_level="warning",
                            access_log=False)  # fmt: skip
    uvicorn.Server(config).run([bound])


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if sys.argv[1] == "served":
        served(Path(sys.argv[2]))
    else:
        bare()
