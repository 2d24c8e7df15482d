"""The routes that generate: from a body to a generation, and back as one answer or a stream."""

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dflash_jax.server.access import allowed_hosts
from dflash_jax.server.anthropic import MessagesRequest, MessagesWriter, decode_messages
from dflash_jax.server.background import read_body
from dflash_jax.server.chat import ChatRequest, ChatWriter, decode_chat
from dflash_jax.server.completions import CompletionRequest, CompletionWriter, decode_completion
from dflash_jax.server.gate import Gate, Handler, Settings, log_refusal
from dflash_jax.server.generation import Generation, Told, prepare
from dflash_jax.server.information import Information
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.models import Model, Models
from dflash_jax.server.prompt import Prompt
from dflash_jax.server.protocol import Ask, Problem
from dflash_jax.server.response_store import Kept
from dflash_jax.server.responses import ResponsesRequest, ResponsesWriter, decode_responses
from dflash_jax.server.streaming import Gone, Stream, exhaust, json_answer, unless_gone
from dflash_jax.server.writer import Writer, alive

log = logging.getLogger("dflash_jax.server")
requests = logging.getLogger("dflash_jax.server.requests")  # one line per output
WRITERS: dict[str, Callable[[Generation], Writer]] = {
    "chat": ChatWriter,
    "completions": CompletionWriter,
    "responses": ResponsesWriter,
    "messages": MessagesWriter,
}
BODIES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}


class Server:
    """Models behind routes. `app` is the ASGI application.

    Args:
      models: the first is the default.
      bound: the name or address it listens on, and the addresses of that name.
    """

    def __init__(
        self, models: Sequence[Model], settings: Settings, bound: Sequence[str] = ("127.0.0.1",)
    ):
        self.models = Models(models)
        self._settings, self._metrics = settings, Metrics()
        self._gate = Gate(settings, self._metrics, self.models)
        self._running: set[Generation] = set()
        self._kept = Kept()
        parameters = {path: kind.__struct_fields__ for path, kind in BODIES.items()}
        shared = self.models, self._gate, settings, self._metrics
        information = Information(*shared, parameters)
        posts = information.posts | {
            "/v1/chat/completions": self._generating(decode_chat),
            "/v1/completions": self._generating(decode_completion),
            "/v1/responses": self._generating(functools.partial(decode_responses, kept=self._kept)),
            "/v1/messages": self._generating(decode_messages),
        }
        guarded = self._gate.guarded
        routes = [Route(path, guarded(f), methods=["POST"]) for path, f in posts.items()]
        routes += [Route(p, guarded(f), methods=["GET"]) for p, f in information.gets.items()]
        kept = guarded(self._kept_response)
        routes.append(Route("/v1/responses/{response_id}", kept, methods=["GET", "DELETE"]))
        handlers: Any = {404: self._gate.no_route, 405: self._gate.no_route}
        keys = bool(settings.api_keys)
        hosts = allowed_hosts(bound, settings.allowed_hosts, has_keys=keys)
        inner = Starlette(routes=routes, exception_handlers=handlers)
        self.app: ASGIApp = self._gate.surrounding(inner, hosts)
        if settings.cors:  # outermost: pages read refusals as well, and preflights have no key
            from starlette.middleware.cors import CORSMiddleware

            self.app = CORSMiddleware(
                self.app,
                allow_origins=settings.cors,
                allow_methods=["*"],
                allow_headers=["*"],
                allow_private_network=True,
                expose_headers=["request-id", "x-request-id", "retry-after"],
            )

    def drain(self, seconds: float) -> None:
        """Takes no more requests, and ends those that still run after so many seconds."""
        if not self._gate.draining:
            log.info(
                "draining: running requests: %d; those not finished in %g s are ended",
                len(self._running), seconds,
            )  # fmt: skip
        self._gate.draining = True
        asyncio.get_running_loop().call_later(seconds, self._cut_short)

    def _cut_short(self) -> None:
        for generation in list(self._running):
            generation.cancel("shutdown")

    def _generating(self, read: Callable[[bytes], Ask]) -> Handler:
        async def handler(request: Request) -> Response:
            body = await self._gate.body(request)
            self._gate.check_open()
            try:
                understood = await unless_gone(self._understood(read, body), request.receive)
            except Gone:
                self._metrics.cancelled("disconnect", "tokenisation")
                raise
            model, ask, prompts = understood
            limits = [t for t in (ask.timeout, self._settings.timeout) if t is not None]
            generation = Generation(
                model, ask, prompts, min(limits, default=None),
                compile_wait=self._settings.compile_wait, request_id=request.state.id,
            )  # fmt: skip
            writer = WRITERS[ask.api](generation)
            events = self._followed(generation)
            if ask.stream:
                while await unless_gone(anext(events), request.receive) is None:
                    pass  # refused requests end here
                chunks = self._chunks(generation, writer, events)
                return Stream(generation, chunks)
            await unless_gone(exhaust(events), request.receive)
            self._book(generation, writer.id)
            return json_answer(writer.whole())

        return handler

    async def _understood(
        self, read: Callable[[bytes], Ask], body: bytes
    ) -> tuple[Model, Ask, list[Prompt]]:
        """What a body asks for, and of which model."""
        ask = await read_body(read, body)
        if self._settings.metrics:
            ask = dataclasses.replace(ask, metrics=True, timings=True)
        model = self.models.named(ask.model)
        return model, ask, await prepare(model, ask)

    async def _followed(self, generation: Generation) -> AsyncGenerator[Told]:
        """The generation's events; it counts as running until they end."""
        self._running.add(generation)
        events = generation.events(self._settings.keepalive)
        logged = False  # that it waits for programs
        try:
            async for news in events:
                if generation.waits_for and not logged:
                    logged = True
                    log.info("%s waits: %s", generation.request_id, generation.status)
                yield news
        finally:
            self._running.discard(generation)
            await events.aclose()
            if generation.cut:
                self._metrics.cancelled(*generation.cut)

    async def _chunks(
        self, generation: Generation, writer: Writer, events: AsyncGenerator[Told]
    ) -> AsyncGenerator[bytes]:
        """A stream's chunks. Closing the iterator cancels the outputs."""
        try:
            yield writer.start()
            if generation.waits_for:
                yield alive(generation.ask.api, generation.status)
            async for news in events:
                if news is None:
                    yield alive(generation.ask.api, generation.status)
                elif chunk := writer.events(*news):
                    yield chunk
            yield writer.close()
            self._book(generation, writer.id)
        except Problem as problem:
            self._metrics.failed(problem.status)
            if problem.status >= 500:
                log_refusal(generation.request_id, problem)
            yield writer.problem(problem)
        finally:
            await events.aclose()

    async def _kept_response(self, request: Request) -> Response:
        """A response given once more, or forgotten."""
        number = request.path_params["response_id"]
        if request.method == "DELETE":
            self._kept.forget(number)
            return json_answer({"id": number, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise Problem(400, "a kept response is not streamed; leave it out", param="stream")
        return json_answer(self._kept.answer(number))

    def _book(self, generation: Generation, answer: str) -> None:
        """Metrics, and one line in the log."""
        self._metrics.ended(generation)
        if not requests.isEnabledFor(logging.INFO):
            return
        seconds = time.perf_counter() - generation.started
        for reply in generation.replies:
            assert reply.result is not None
            stats = reply.result.stats
            tau = f"{stats.acceptance_length:.2f}" if stats.rounds else "-"
            notes = "".join(f", plain: {reason}" for reason in stats.fallbacks)
            notes += "".join(f"; {warning}" for warning in reply.warnings)
            requests.info(
                "%s %s %s: %d prompt tokens (%d cached), %d new, first after %.3f s, %.1f tok/s,"
                " acceptance length %s, %s, %.3f s in all%s",
                generation.request_id, answer, generation.model.name, stats.prompt_tokens,
                stats.cached_tokens, stats.output_tokens, stats.first_token_s,
                stats.tokens_per_s, tau, reply.finish_reason, seconds, notes,
            )  # fmt: skip
