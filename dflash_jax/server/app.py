"""The routes: authorisation, limits, streams, and clients that go away."""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_jax.server.anthropic import MessagesWriter, decode_messages
from dflash_jax.server.chat import ChatWriter, CompletionWriter, Writer, encode
from dflash_jax.server.generation import Generation, Model, prepare
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.protocol import (
    Ask,
    DetokenizeRequest,
    Problem,
    TokenizeRequest,
    conversation,
    decode,
    decode_chat,
    decode_completion,
    offered,
)
from dflash_jax.server.responses import ResponsesWriter, decode_responses
from dflash_jax.version import __version__

log = logging.getLogger("dflash_jax.server")
WRITERS: dict[str, Callable[[Generation], Writer]] = {
    "chat": ChatWriter,
    "completions": CompletionWriter,
    "responses": ResponsesWriter,
    "messages": MessagesWriter,
}
OPEN_PATHS = ("/health", "/ready")
ANY = "any"
MOST_HEADERS = 64 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a server behaves.

    Attributes:
      api_keys: accepted keys; none lets everyone in.
      max_body: most bytes of a request body.
      timeout: seconds after which a request is ended with what it has; a request may ask for less.
      keepalive: seconds of silence after which a stream gets a comment.
      metrics: answer every request with the figures of `return_metrics` and `timings_per_token`.
      cors: origins whose scripts may use the server; none by default.
    """

    api_keys: tuple[str, ...] = ()
    max_body: int = 32 * 2**20
    timeout: float | None = 600.0
    keepalive: float = 15.0
    metrics: bool = False
    cors: tuple[str, ...] = ()


class Server:
    """Models behind routes. `app` is the ASGI application.

    Args:
      models: the first is the default.
    """

    def __init__(self, models: Sequence[Model], settings: Settings):
        self.models, self.settings = list(models), settings
        self.metrics = Metrics()
        self.draining = False
        self._running: set[Generation] = set()
        post = {
            "/v1/chat/completions": self._generating(decode_chat),
            "/v1/completions": self._generating(decode_completion),
            "/v1/responses": self._generating(decode_responses),
            "/v1/messages": self._generating(decode_messages),
            "/v1/messages/count_tokens": self._count_tokens,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        get = {
            "/v1/models": self._list_models,
            "/v1/models/{name:path}": self._one_model,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/props": self._props,
        }
        routes = [Route(path, self._guarded(f), methods=["POST"]) for path, f in post.items()]
        routes += [Route(path, self._guarded(f), methods=["GET"]) for path, f in get.items()]
        handlers: Any = {404: self._no_route, 405: self._no_route}
        self._starlette = Starlette(routes=routes, exception_handlers=handlers)
        self.app: ASGIApp = self._starlette
        if settings.cors:
            from starlette.middleware.cors import CORSMiddleware

            self.app = CORSMiddleware(
                self._starlette,
                allow_origins=settings.cors,
                allow_methods=["*"],
                allow_headers=["*"],
            )

    def drain(self, seconds: float) -> None:
        """Takes no more requests, and ends those that still run after so many seconds."""
        self.draining = True
        asyncio.get_running_loop().call_later(seconds, self._cut_short)

    def _cut_short(self) -> None:
        for generation in list(self._running):
            generation.cancel("shutdown")

    # -- around every route -------------------------------------------------------------------

    def _guarded(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                if (
                    sum(len(name) + len(value) for name, value in request.headers.raw)
                    > MOST_HEADERS
                ):
                    raise Problem(431, f"the headers are larger than {MOST_HEADERS} bytes")
                self._authorise(request)
                return await handler(request)
            except Problem as problem:
                return self._refuse(problem)
            except _Gone:
                self.metrics.cancelled("disconnect")
                return Response(status_code=499)
            except Exception as error:
                log.exception("a request failed")
                return self._refuse(Problem(500, f"internal error: {type(error).__name__}"))

        return guarded

    def _refuse(self, problem: Problem) -> Response:
        self.metrics.failed(problem.status)
        headers = {"Retry-After": str(problem.retry_s)} if problem.retry_s else {}
        if problem.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return _json(problem.to_json(), problem.status, headers)

    async def _no_route(self, request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path} does not exist"
        return self._refuse(Problem(error.status_code, message, code="unknown_url"))

    def _authorise(self, request: Request) -> None:
        if not self.settings.api_keys or request.url.path in OPEN_PATHS:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        given = (given or request.headers.get("x-api-key", "")).encode()
        good = [hmac.compare_digest(given, key.encode()) for key in self.settings.api_keys]
        if not any(good):
            raise Problem(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        most = self.settings.max_body
        too_large = Problem(413, f"the body is larger than {most} bytes", code="body_too_large")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > most:
            raise too_large
        body = bytearray()
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            body += message.get("body", b"")
            if len(body) > most:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)

    def _model(self, name: str | None) -> Model:
        """The model of this name; "any" and none: the one used last, else the first."""
        for model in self.models:
            if name == model.name:
                return model
        if name in (None, "", ANY):
            return max(self.models, key=lambda m: m.last_used_ms)
        known = ", ".join(model.name for model in self.models)
        raise Problem(
            404, f"there is no model {name!r}; loaded are {known}, and {ANY!r} takes the last used",
            param="model", code="model_not_found",
        )  # fmt: skip

    # -- generation ---------------------------------------------------------------------------

    def _generating(self, read: Callable[[bytes], Ask]) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            body = await self._body(request)
            if self.draining:
                raise Problem(503, "the server is shutting down", code="draining", retry_s=5)
            large = len(body) > 100_000
            ask = await asyncio.to_thread(read, body) if large else read(body)
            if self.settings.metrics:
                ask = dataclasses.replace(ask, metrics=True, timings=True)
            model = self._model(ask.model)
            prompts = await prepare(model, ask)
            limits = [t for t in (ask.timeout, self.settings.timeout) if t is not None]
            generation = Generation(model, ask, prompts, min(limits, default=None))
            writer = WRITERS[ask.api](generation)
            events = self._followed(generation)
            if ask.stream:
                await _unless_gone(anext(events), request.receive)  # refused requests end here
                chunks = self._chunks(generation, writer, events)
                return _Stream(generation, chunks, self.metrics)
            await _unless_gone(_exhaust(events), request.receive)
            self._book(generation)
            return _json(writer.whole())

        return handler

    async def _followed(self, generation: Generation) -> AsyncGenerator[Any]:
        """The generation's events; it counts as running until they end."""
        self._running.add(generation)
        events = generation.events()
        try:
            async for news in events:
                yield news
        finally:
            self._running.discard(generation)
            await events.aclose()

    async def _chunks(
        self, generation: Generation, writer: Writer, events: AsyncGenerator[Any]
    ) -> AsyncGenerator[bytes]:
        """A stream's chunks. Closing the iterator cancels the outputs."""
        coming: asyncio.Future[Any] | None = None
        try:
            yield writer.start()
            while True:
                coming = coming or asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait([coming], timeout=self.settings.keepalive)
                if not done:
                    yield b": keepalive\n\n"
                    continue
                try:
                    reply, new = coming.result()
                except StopAsyncIteration:
                    break
                coming = None
                if chunk := writer.events(reply, new):
                    yield chunk
            yield writer.close()
            self._book(generation)
        except Problem as problem:
            self.metrics.failed(problem.status)
            yield writer.problem(problem)
        finally:
            if coming is not None and not coming.done():
                coming.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await coming
            await events.aclose()

    def _book(self, generation: Generation) -> None:
        """Metrics, and one line in the log."""
        self.metrics.ended(generation)
        if not log.isEnabledFor(logging.INFO):
            return
        seconds = time.perf_counter() - generation.started
        for reply in generation.replies:
            assert reply.result is not None
            stats = reply.result.stats
            tau = f"{stats.acceptance_length:.2f}" if stats.rounds else "-"
            log.info(
                "%s %s: %d prompt tokens (%d cached), %d new, first after %.3f s, %.1f tok/s,"
                " acceptance length %s, %s, %.3f s in all",
                generation.ask.api, generation.model.name, stats.prompt_tokens,
                stats.cached_tokens, stats.output_tokens, stats.first_token_s,
                stats.tokens_per_s, tau, reply.finish_reason, seconds,
            )  # fmt: skip

    # -- the small routes ---------------------------------------------------------------------

    async def _count_tokens(self, request: Request) -> Response:
        ask = decode_messages(await self._body(request), counting=True)
        [prompt] = await prepare(self._model(ask.model), ask)
        return _json({"input_tokens": len(prompt.ids)})

    async def _tokenize(self, request: Request) -> Response:
        found, _ = decode(await self._body(request), TokenizeRequest)
        model = self._model(found.model)
        tokenizer = model.engine.tokenizer
        if tokenizer is None:
            raise Problem(400, "this model ships no tokenizer")
        if found.messages is not None:
            tools, declared, choice = offered(found.tools, None)
            template = dict(found.chat_template_kwargs or {})
            if found.add_generation_prompt is not None:
                template["add_generation_prompt"] = found.add_generation_prompt
            ask = Ask(
                api="chat",
                model=None,
                messages=conversation(found.messages),
                tools=tools,
                declared=declared,
                choice=choice,
                template=template,
            )
            ids = (await prepare(model, ask))[0].ids
        else:
            text = found.content if found.content is not None else found.prompt
            if text is None:
                raise Problem(400, "give content, prompt or messages", param="content")
            asked = [s for s in (found.add_special, found.add_special_tokens) if s is not None]
            specials = asked[0] if asked else found.content is None
            ids = await asyncio.to_thread(tokenizer.encode, text, specials=specials)
        most = model.engine.plan.max_length
        return _json({"tokens": ids, "count": len(ids), "max_model_len": most})

    async def _detokenize(self, request: Request) -> Response:
        found, _ = decode(await self._body(request), DetokenizeRequest)
        engine = self._model(found.model).engine
        if engine.tokenizer is None:
            raise Problem(400, "this model ships no tokenizer")
        known = engine.target.vocab_size
        if outside := [i for i in found.tokens if not 0 <= i < known]:
            raise Problem(400, f"tokens {outside[:5]} are not from 0 to {known - 1}")
        text = engine.tokenizer.raw(found.tokens)
        return _json({"content": text, "prompt": text})

    async def _list_models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._described(m) for m in self.models]})

    async def _one_model(self, request: Request) -> Response:
        return _json(self._described(self._model(request.path_params["name"])))

    def _described(self, model: Model) -> dict[str, Any]:
        found: dict[str, Any] = {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "dflash_jax",
            "last_used_ms": model.last_used_ms,
        }
        if (engine := model.worker.engine) is not None:
            found["max_model_len"] = engine.plan.max_length
        return found

    async def _health(self, request: Request) -> Response:
        for model in self.models:
            if model.worker.error is not None:
                raise Problem(500, f"{model.name}: {model.worker.error}", code="engine_failed")
        return _json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if self.draining:
            raise Problem(503, "the server is shutting down", code="draining", retry_s=5)
        for model in self.models:
            _ = model.engine
        return _json({"status": "ready"})

    async def _metrics(self, request: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.metrics.text(self.models), media_type=kind)

    async def _props(self, request: Request) -> Response:
        return _json(
            {
                "schema": 1,
                "build_info": f"dflash_jax {__version__}",
                "models": [self._properties(model) for model in self.models],
                "endpoints": sorted(r.path for r in self._starlette.routes if isinstance(r, Route)),
                "limits": {"max_body": self.settings.max_body, "timeout": self.settings.timeout},
            }
        )

    def _properties(self, model: Model) -> dict[str, Any]:
        found = self._described(model)
        if (engine := model.worker.engine) is None:
            return found
        syntax = model.syntax
        return found | {
            "plan": json.loads(engine.plan.to_json()),
            "target": engine.target.model_type,
            "drafter": getattr(engine.drafter, "kind", None),
            "speculative_mode": "dflash" if engine.drafter else "off",
            "tool_calls": syntax.name if syntax else None,
            "reasoning": bool(syntax and syntax.thought),
            "chat_template": engine.tokenizer.template if engine.tokenizer else None,
        }


class _Gone(Exception):
    """The client closed the connection."""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _exhaust(events: AsyncIterator[Any]) -> None:
    async for _ in events:
        pass


async def _unless_gone(work: Awaitable[Any], receive: Receive) -> Any:
    """The work's result; raises _Gone, and ends the work, if the client leaves before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _Gone
    finally:
        for future in (task, gone):
            if not future.done():
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await future


class _Stream(Response):
    """Server-sent events, watched for a client that goes away even while nothing is sent."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, chunks: AsyncGenerator[bytes], metrics: Metrics):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation, self._chunks, self._metrics = generation, chunks, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            await _unless_gone(self._send(send), receive)
        except (_Gone, OSError):
            self._metrics.cancelled("disconnect")
        finally:
            await self._chunks.aclose()
            self._generation.cancel("disconnect")  # should the chunks never have been begun

    async def _send(self, send: Send) -> None:
        async for chunk in self._chunks:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, "application/json")
