"""The ASGI application, and the routes that generate."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.errors import DFlashError
from dflash_jax.server import anthropic, completions, responses
from dflash_jax.server.access import allowed_hosts
from dflash_jax.server.access_log import AccessLog, AccessRecord
from dflash_jax.server.background import by_size, in_thread, read_body
from dflash_jax.server.engine_options import sampling_params
from dflash_jax.server.generation import Generation, ReplyEvents
from dflash_jax.server.http_responses import (
    ClientDisconnected,
    EventStreamResponse,
    JsonPieces,
    unless_disconnected,
)
from dflash_jax.server.information import InfoRoutes
from dflash_jax.server.key_ring import KeyRing
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.middleware import Handler, Middleware
from dflash_jax.server.output_structure import usable_tools
from dflash_jax.server.prompt import EncodedPrompt, prepare
from dflash_jax.server.protocol import GenerationRequest, Problem
from dflash_jax.server.reply import Reply
from dflash_jax.server.response_store import ResponseStores
from dflash_jax.server.served_models import ServedModel, ServedModels, ServerConfig
from dflash_jax.server.stored_routes import StoredRoutes
from dflash_jax.server.token_routes import Reader, TokenRoutes
from dflash_jax.server.web_page import page_routes
from dflash_jax.server.writer import ResponseWriter, encode, keepalive_event
from dflash_jax.tool_parsers.calls import Content, Event, ToolCallDelta

log = logging.getLogger("dflash_jax.server")
WRITERS: dict[str, Callable[[Generation], ResponseWriter]] = {
    "chat": completions.ChatWriter,
    "completions": completions.CompletionWriter,
    "responses": responses.ResponsesWriter,
    "messages": anthropic.MessagesWriter,
}
BODIES = {
    "/v1/chat/completions": completions.ChatRequest,
    "/v1/completions": completions.CompletionRequest,
    "/v1/responses": responses.ResponsesRequest,
    "/v1/messages": anthropic.MessagesRequest,
}


class Server:
    """Serves models over HTTP.

    Args:
      models: the first is the default.
      bound: the host that the server listens on, and the addresses it resolves to.
      metrics_port: the port that probes and metrics have for themselves, if any.

    Attributes:
      app: the ASGI application.
      routes: the application's routes.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        config: ServerConfig,
        bound: Sequence[str] = ("127.0.0.1",),
        metrics_port: int | None = None,
    ):
        self.models = ServedModels(models, config.aliases, any_name=config.serve_any_name)
        self._config = config
        self._metrics = Metrics()
        self._keys = KeyRing(config.api_keys)
        self._middleware = Middleware(config, self._metrics, self.models, self._keys, metrics_port)
        self._running: set[Generation] = set()
        self._stores = ResponseStores(lambda: self._middleware.max_body)
        self._stores.share(self._keys.owners)
        self.routes = self._new_routes()
        handlers: Any = {404: self._middleware.no_route, 405: self._middleware.no_route}
        hosts = allowed_hosts(bound, config.allowed_host, has_keys=bool(self._keys))
        inner = Starlette(routes=self.routes, exception_handlers=handlers)
        app = self._middleware.wrap_app(inner, hosts)
        if config.cors_origin:
            # The outermost but for the log: errors need its headers, and preflights have no key.
            from starlette.middleware.cors import CORSMiddleware

            app = CORSMiddleware(
                app,
                allow_origins=config.cors_origin,
                allow_methods=["*"],
                allow_headers=["*"],
                allow_private_network=True,
                expose_headers=["request-id", "x-request-id", "retry-after"],
            )
        self.app: ASGIApp = AccessLog(app)

    def _new_routes(self) -> list[Route]:
        config = self._config
        wrap_handler = self._middleware.wrap_handler
        parameters = {path: kind.__struct_fields__ for path, kind in BODIES.items()}
        information = InfoRoutes(self.models, self._middleware, config, self._metrics, parameters)
        tokens = TokenRoutes(self.models, self._middleware)

        def read_responses(raw_request: Request) -> Callable[[bytes], GenerationRequest]:
            store = self._stores.of(raw_request.state.key.owner)
            return functools.partial(responses.decode_responses, store=store)

        posts = tokens.posts | {
            "/v1/chat/completions": self._generation_handler(lambda _: completions.decode_chat),
            "/v1/completions": self._generation_handler(lambda _: completions.decode_completion),
            "/v1/responses": self._generation_handler(read_responses, stored=True),
            "/v1/responses/input_tokens": tokens.token_counter(
                read_responses, stored=True, object="response.input_tokens"
            ),
            "/v1/messages": self._generation_handler(lambda _: anthropic.decode_messages),
        }
        routes = []
        for path, handler in posts.items():
            routes.append(Route(path, wrap_handler(handler), methods=["POST"]))
        for path, handler in information.gets.items():
            routes.append(Route(path, wrap_handler(handler), methods=["GET"]))
        if not config.no_ui:
            for path, handler in page_routes().items():
                routes.append(Route(path, wrap_handler(handler, needs_key=False), methods=["GET"]))
        stored = StoredRoutes(self._stores, self._middleware)
        for path, (handler, methods) in stored.handlers.items():
            routes.append(Route(path, wrap_handler(handler), methods=methods))
        return routes

    def drain(self, seconds: float) -> None:
        """Refuse new requests, and end running ones after this many seconds."""
        if not self._middleware.draining:
            text = "draining: running requests: %d; those not finished in %g s are ended"
            log.info(text, len(self._running), seconds)
        self._middleware.draining = True
        asyncio.get_running_loop().call_later(seconds, self._end_running)

    def reload_keys(self) -> None:
        """Read the API keys again; where that fails, or would leave none, the old ones stay."""
        if self._config.read_keys is None:
            log.warning("there are no keys to read again")
            return
        try:
            keys = self._config.read_keys()
        except (DFlashError, OSError) as error:
            log.error("the keys that were read before stay: %s", error)
            return
        if self._keys and not keys:
            log.error("the keys that were read before stay: there are none to read")
            return
        self._keys.replace(keys)
        self._stores.share(self._keys.owners)
        log.info("keys were read again: %s", ", ".join(self._keys.labels) or "none")

    @property
    def busy(self) -> bool:
        """Whether requests that generate are running."""
        return bool(self._running)

    def _end_running(self) -> None:
        for generation in list(self._running):
            generation.cancel("shutdown")

    def _generation_handler(self, reader: Reader, *, stored: bool = False) -> Handler:
        """Return the handler of a route that generates.

        Args:
          stored: the body may refer to stored items.
        """

        async def handler(raw_request: Request) -> Response:
            self._middleware.check_open()
            self._middleware.begin(raw_request)
            record = AccessRecord.of(raw_request.scope)
            body = await self._middleware.body(raw_request)
            self._middleware.check_open()
            reading = self._parse(reader(raw_request), body, raw_request, stored=stored)
            try:
                parsed = await unless_disconnected(reading, raw_request.receive)
            except ClientDisconnected:
                self._middleware.note_end(record, "disconnect", "tokenisation")
                raise
            self._middleware.check_open()  # again: reading may take seconds
            model, request, prompts, options = parsed
            generation = Generation(
                model,
                request,
                prompts,
                options,
                self._timeout(request),
                compile_wait=self._config.compile_wait,
                request_id=record.id,
                body_size=len(body),
                client=_client(raw_request),
            )
            record.generation = generation
            writer = WRITERS[request.api](generation)
            generation.response_id = writer.id
            events = self._track(generation, record)
            if request.stream:
                while await unless_disconnected(anext(events), raw_request.receive) is None:
                    pass  # errors before the first update are not streamed
                chunks = self._chunks(generation, writer, events, record)
                end = functools.partial(generation.cancel, "disconnect")
                return EventStreamResponse(chunks, end)
            await unless_disconnected(_drained(events), raw_request.receive)
            self._metrics.ended(generation, record.key)
            size = generation.answer_size
            text = await by_size(size, lambda: encode(writer.to_json()))
            return JsonPieces([text])

        return handler

    def _timeout(self, request: GenerationRequest) -> float | None:
        limits = (request.timeout, self._config.time_limit)
        return min((limit for limit in limits if limit is not None), default=None)

    async def _parse(
        self,
        read: Callable[[bytes], GenerationRequest],
        body: bytes,
        raw_request: Request,
        *,
        stored: bool,
    ) -> tuple[ServedModel, GenerationRequest, list[EncodedPrompt], list[SamplingParams]]:
        """Return a body's model and request, and its prompts with the engine's options of each."""
        request = await read_body(read, body, stored=stored)
        if self._config.metrics:
            request = dataclasses.replace(request, timings_per_token=True)
        model = self.models.named(request.model)
        AccessRecord.of(raw_request.scope).model = model.name
        if request.declared_tools:
            grammars = model.engine.core.grammars
            request = await in_thread(usable_tools, request, grammars, long=True, param="tools")
        prompts = await prepare(model, request)
        salt = "" if self._config.share_prefixes else raw_request.state.key.cache_salt

        def options() -> list[SamplingParams]:
            return [sampling_params(model, request, prompt, salt) for prompt in prompts]

        return model, request, prompts, await by_size(len(body), options)

    async def _track(
        self, generation: Generation, record: AccessRecord
    ) -> AsyncGenerator[ReplyEvents]:
        """Yield the generation's events, and keep it in `_running` until they end."""
        self._running.add(generation)
        events = generation.events(self._config.keepalive)
        logged = False  # at most once: it waits for programs
        try:
            async for update in events:
                if generation.waits_for and not logged:
                    logged = True
                    log.info("%s waits: %s", generation.request_id, generation.status)
                yield update
        finally:
            self._running.discard(generation)
            await events.aclose()
            if generation.cancelled:
                self._middleware.note_end(record, *generation.cancelled)

    async def _chunks(
        self,
        generation: Generation,
        writer: ResponseWriter,
        events: AsyncGenerator[ReplyEvents],
        record: AccessRecord,
    ) -> AsyncGenerator[bytes]:
        """Yield the chunks of a stream. Closing the generator cancels the outputs."""
        try:
            yield await by_size(generation.answer_size, writer.start)
            if generation.waits_for:
                yield keepalive_event(generation.request.api, generation.status)
            async for update in events:
                if update is None:
                    yield keepalive_event(generation.request.api, generation.status)
                elif chunk := await by_size(_size(generation, update), writer.events, *update):
                    yield chunk
            yield await by_size(generation.answer_size, writer.close)
            self._metrics.ended(generation, record.key)
        except Problem as problem:
            self._middleware.note_error(record, problem)
            yield writer.error(problem)
        finally:
            await events.aclose()


async def _drained(events: AsyncGenerator[ReplyEvents]) -> None:
    async for _ in events:
        pass


def _size(generation: Generation, update: tuple[Reply, list[Event]]) -> int:
    """Return about how many bytes a writer handles for an update.

    An event that ends a part of the answer may repeat the whole part, with its log probabilities.
    """
    _, events = update
    if all(isinstance(event, Content | ToolCallDelta) for event in events):
        return 0
    return generation.answer_size


def _client(request: Request) -> tuple[str, ...]:
    """Return the names of a client by which clients take turns, the widest first."""
    host, port = request.client or ("", 0)
    key_and_address = f"{request.state.key.owner} {host}"
    connection = f"{host} {port}"
    return key_and_address, connection
