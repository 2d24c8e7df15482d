"""A replica: the server's ASGI application over engines of its own, in an actor of Ray Serve."""

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

from dflash_jax.errors import ComputeError
from dflash_jax.ray.calls import Call
from dflash_jax.serve_options import ServeOptions
from dflash_jax.server.protocol import Problem

LEAVE_S = 10.0  # seconds in which the application ends a request whose client left


class Replica:
    """Answers calls of the gateway by the server's application.

    Args:
      options: those of `dflash-jax serve`.
    """

    async def __init__(self, options: ServeOptions):
        from dflash_jax.graph.build import BackgroundCompiler
        from dflash_jax.server.configuration import configuration, normalized
        from dflash_jax.server.run import log_to_stderr, new_server

        options = normalized(options)
        log_to_stderr(quiet=options.quiet)
        engines, config = await asyncio.to_thread(configuration, options)
        self._server = new_server(engines, config, [config.host], BackgroundCompiler())
        workers = [model.worker for model in self._server.models]
        ready = asyncio.gather(*(worker.ready.wait() for worker in workers))
        ends = [asyncio.ensure_future(worker.ended.wait()) for worker in workers]
        await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
        for future in (ready, *ends):
            future.cancel()
        self.check_health()

    def check_health(self) -> None:
        """Check that the replica can answer, as /ready does; Ray Serve replaces it otherwise.

        Raises:
          ComputeError: an engine could not be loaded, or failed.
        """
        for model in self._server.models:
            try:
                _ = model.engine
                model.check_turns()
            except Problem as problem:  # which cannot be sent to another process
                raise ComputeError(f"{model.name}: {problem.message}") from None

    async def __call__(self, call: Call) -> AsyncGenerator[dict[str, Any]]:
        """Yield the messages of the ASGI response; the request ends when the generator closes."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        bodies = [call.body]
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            messages.put_nowait(dict(message))

        answer = asyncio.ensure_future(self._server.app(dict(call.scope), receive, send))
        answer.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            answer.result()
        finally:
            left.set()
            await asyncio.wait([answer], timeout=LEAVE_S)
            answer.cancel()

    async def __del__(self) -> None:
        """Close the engines, called by Ray Serve once no request runs."""
        if hasattr(self, "_server"):
            await asyncio.gather(*(model.worker.stop() for model in self._server.models))
