"""Routes that generate nothing: tokenization, models, health, stored items, the web page."""

import datetime
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_jax.server.access_log import AccessRecord
from dflash_jax.server.anthropic import decode_messages
from dflash_jax.server.background import in_thread, read_body
from dflash_jax.server.conversation import parse_messages
from dflash_jax.server.fields import EFFORTS, SERVED, check_unread
from dflash_jax.server.generation import prepare
from dflash_jax.server.http_connection import JsonPieces, json_response
from dflash_jax.server.message_formats import messages_from_responses
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.middleware import Handler, Middleware
from dflash_jax.server.protocol import GenerationRequest, Problem, decode
from dflash_jax.server.response_store import ResponseStore, ResponseStores, StoredItem
from dflash_jax.server.served_models import ServedModel, ServedModels, ServerConfig, answer_name
from dflash_jax.server.tools import chat_tools, tool_arguments
from dflash_jax.server.writer import encode
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.version import __version__

Reader = Callable[[Request], Callable[[bytes], GenerationRequest]]


class TokenizeRequest(msgspec.Struct):
    """Body of POST /tokenize, with the fields of llama.cpp (`content`) and vLLM (`prompt`)."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None  # llama.cpp's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None  # vLLM's
    with_pieces: bool | None = None  # llama.cpp's


class DetokenizeRequest(msgspec.Struct):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class InfoRoutes:
    """Handlers of the routes that generate nothing.

    Args:
      parameters: names of request fields, by path; listed in /props.
    """

    def __init__(
        self,
        models: ServedModels,
        middleware: Middleware,
        config: ServerConfig,
        metrics: Metrics,
        parameters: dict[str, tuple[str, ...]],
    ):
        self._models, self._middleware = models, middleware
        self._config, self._metrics = config, metrics
        self._parameters = parameters

    @property
    def posts(self) -> dict[str, Handler]:
        """Return the handlers of POST by path."""
        return {
            "/v1/messages/count_tokens": self.token_counter(
                lambda _: functools.partial(decode_messages, counting=True)
            ),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    @property
    def gets(self) -> dict[str, Handler]:
        """Return the handlers of GET by path."""
        return {
            "/v1/models": self._list_models,
            "/v1/models/{name:path}": self._one_model,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._show_metrics,
            "/props": self._props,
        }

    def token_counter(self, read: Reader, *, stored: bool = False, **fields: Any) -> Handler:
        """Return a handler that counts the prompt tokens of a request.

        Args:
          read: returns a function that decodes the body.
          stored: the body may refer to stored items.
          fields: what the response has in addition to `input_tokens`.
        """

        async def handler(raw_request: Request) -> Response:
            body = await self._middleware.body(raw_request)
            request = await read_body(read(raw_request), body, stored=stored)
            [prompt] = await prepare(self._model(raw_request, request.model), request)
            return json_response(fields | {"input_tokens": len(prompt.ids)})

        return handler

    def _model(self, raw_request: Request, name: str | None) -> ServedModel:
        """Return the model that a request names, which its log line names, too."""
        model = self._models.named(name)
        AccessRecord.of(raw_request.scope).model = model.name
        return model

    async def _tokenize(self, raw_request: Request) -> Response:
        read = functools.partial(decode, kind=TokenizeRequest)
        parsed, unread = await read_body(read, await self._middleware.body(raw_request))
        warnings = check_unread(unread)
        model = self._model(raw_request, parsed.model)
        tokenizer = model.engine.tokenizer
        if tokenizer is None:
            raise Problem("this model ships no tokenizer")
        most = model.engine.plan.max_length
        if parsed.messages is not None:
            request = await in_thread(_conversation_request, parsed, long=True)
            ids = (await prepare(model, request))[0].ids
        else:
            ids = await in_thread(_text_ids, parsed, tokenizer, most, long=True, param="content")
        more = {"warnings": list(warnings)} if warnings else {}
        return await in_thread(_tokens_answer, parsed, tokenizer, ids, most, more, long=True)

    async def _detokenize(self, raw_request: Request) -> Response:
        read = functools.partial(decode, kind=DetokenizeRequest)
        parsed, _ = await read_body(read, await self._middleware.body(raw_request))
        engine = self._model(raw_request, parsed.model).engine
        if engine.tokenizer is None:
            raise Problem("this model ships no tokenizer")
        known, most = engine.graph.config.vocab_size, engine.plan.max_length
        if len(parsed.tokens) > most:
            raise Problem(
                f"{len(parsed.tokens)} tokens were given; at most {most}, the model's maximum"
                " context length: send them in parts",
                param="tokens",
            )
        if outside := [i for i in parsed.tokens if not 0 <= i < known]:
            raise Problem(f"tokens {outside[:5]} are not from 0 to {known - 1}")
        text = await in_thread(engine.tokenizer.raw, parsed.tokens, long=True)
        return json_response({"content": text, "prompt": text})

    async def _list_models(self, raw_request: Request) -> Response:
        data = [_model_entry(self._models.named(name), name) for name in self._models.names]
        fields: dict[str, Any] = {"object": "list", "data": data}
        if "client_version" in raw_request.query_params:
            fields["models"] = []  # Codex adds its own models to an empty catalogue
        if _is_anthropic(raw_request):
            fields["data"] = [entry | _anthropic_fields(entry) for entry in data]
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
            fields |= {"has_more": False} | ends
        return json_response(fields)

    async def _one_model(self, raw_request: Request) -> Response:
        if not raw_request.path_params["name"]:  # "/v1/models/"
            return await self._list_models(raw_request)
        name = raw_request.path_params["name"]
        fields = _model_entry(self._models.named(name), name)
        return json_response(
            fields | (_anthropic_fields(fields) if _is_anthropic(raw_request) else {})
        )

    async def _health(self, raw_request: Request) -> Response:
        for model in self._models:
            if model.worker.error is not None:
                raise Problem(
                    f"{model.name}: {model.worker.error}", status=500, code="engine_failed"
                )
            model.check_turns()
        return json_response({"status": "ok"})

    async def _ready(self, raw_request: Request) -> Response:
        self._middleware.check_open()
        for model in self._models:
            _ = model.engine
            model.check_turns()
        return json_response({"status": "ready"})

    async def _show_metrics(self, raw_request: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._metrics.text(self._models), media_type=kind)

    async def _props(self, raw_request: Request) -> Response:
        limits = {
            "max_body": self._middleware.max_body,
            "max_bodies": self._middleware.max_bodies,
            "timeout": self._config.timeout,
        }
        endpoints = sorted(route.path for route in raw_request.app.routes)
        fields = {
            "schema": 2,
            "build_info": f"dflash_jax {__version__}",
            "models": [_properties(model) for model in self._models],
            "endpoints": endpoints,
            "api": {"endpoints": endpoints},
            "limits": limits,
            "parameters": self._parameters,
        }
        return json_response(fields | _default_model(self._models[0]))


def _conversation_request(parsed: TokenizeRequest) -> GenerationRequest:
    template = dict(parsed.chat_template_kwargs or {})
    if parsed.add_generation_prompt is not None:
        template["add_generation_prompt"] = parsed.add_generation_prompt
    return GenerationRequest(
        **tool_arguments(chat_tools(parsed.tools), None),
        api="chat",
        model=None,
        messages=parse_messages(parsed.messages or ()),
        parse_special=parsed.parse_special,
        template_kwargs=template,
        continue_final_message=bool(parsed.continue_final_message),
    )


def _text_ids(parsed: TokenizeRequest, tokenizer: Tokenizer, max_length: int) -> list[int]:
    """Return the token ids of a text; refuses one that certainly exceeds the context length."""
    text = parsed.content if parsed.content is not None else parsed.prompt
    if text is None:
        raise Problem("give content, prompt or messages", param="content")
    asked = [s for s in (parsed.add_special, parsed.add_special_tokens) if s is not None]
    if parsed.parse_special is False:
        text = tokenizer.marked(text)
    tokenizer.check_fits(text, max_length)
    return tokenizer.encode(text, specials=asked[0] if asked else parsed.content is None)


def _tokens_answer(
    parsed: TokenizeRequest,
    tokenizer: Tokenizer,
    ids: list[int],
    max_length: int,
    more: dict[str, Any],
) -> Response:
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": max_length}
    if (parsed.with_pieces or parsed.return_token_strs) and len(ids) > max_length:
        raise Problem(
            f"the text has {len(ids)} tokens; pieces are given of at most {max_length}, the"
            " model's maximum context length: leave out with_pieces and return_token_strs",
            param="with_pieces" if parsed.with_pieces else "return_token_strs",
        )
    if parsed.with_pieces:
        answer["tokens"] = [{"id": i, "piece": _token_piece(tokenizer, i)} for i in ids]
    if parsed.return_token_strs:
        answer["token_strs"] = [tokenizer.core.id_to_token(i) for i in ids]
    return json_response(answer | more)


def _token_piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Return a token's text, or its bytes if they are not valid UTF-8."""
    text, known = tokenizer.raw([token]), tokenizer.raw_bytes(token)
    return list(known) if known is not None and "\ufffd" in text else text


def _model_entry(model: ServedModel, name: str | None = None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": answer_name(model.name, name),
        "object": "model",
        "created": model.created,
        "owned_by": "dflash_jax",
        "last_used_ms": model.last_used_ms,
    }
    if (engine := model.worker.engine) is not None:
        fields["max_model_len"] = engine.plan.max_length
    return fields


def _is_anthropic(raw_request: Request) -> bool:
    return "anthropic-version" in raw_request.headers


def _anthropic_fields(model: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model that Anthropic's clients read."""
    created = datetime.datetime.fromtimestamp(model["created"], datetime.UTC)
    fields = {"type": "model", "display_name": model["id"], "lifecycle": "active"}
    most = {"max_input_tokens": model["max_model_len"]} if "max_model_len" in model else {}
    return fields | {"created_at": created.isoformat().replace("+00:00", "Z")} | most


def _properties(model: ServedModel) -> dict[str, Any]:
    fields = _model_entry(model)
    if (engine := model.worker.engine) is None:
        return fields
    syntax = model.syntax
    return fields | {
        "plan": json.loads(engine.plan.to_json()),
        "target": engine.graph.config.model_type,
        "drafter": getattr(engine.graph.drafter_config, "kind", None),
        "speculative_mode": "dflash" if engine.graph.drafter_config else "off",
        "tool_calls": syntax.name if syntax else None,
        "reasoning": bool(syntax and syntax.thought),
        "chat_template": engine.tokenizer.template if engine.tokenizer else None,
        "programs": engine.core.runner.compiled.progress,
    }


def _default_model(model: ServedModel) -> dict[str, Any]:
    """Return the properties of the first model in the format of llama.cpp and lucebox."""
    worker = model.worker
    fields: dict[str, Any] = {"model_alias": model.name, "daemon": {"alive": worker.error is None}}
    if (engine := worker.engine) is None:
        return fields
    plan, defaults, syntax = engine.plan, model.defaults, model.syntax
    drafter, template = (
        engine.graph.drafter_config,
        engine.tokenizer.template if engine.tokenizer else None,
    )
    params = {"temperature": defaults.temperature, "n_predict": defaults.max_tokens or -1}
    thinks = bool(syntax and syntax.thought)
    return fields | {
        "default_generation_settings": {"n_ctx": plan.max_length, "params": params},
        "total_slots": plan.rows,
        "chat_template": template,
        "model_card": None,
        "speculative_mode": "dflash" if drafter else "off",
        "speculative": {"drafter": getattr(drafter, "kind", None), "block_size": plan.block},
        "reasoning": {"supported": thinks, "efforts": list(EFFORTS) if thinks else []},
        "sampling": {"capabilities": [*SERVED, "seed", "logprobs"]},
        "prefix_cache": {"bytes": plan.prefix_cache, "on_disk": bool(plan.prefix_folder)},
        "tool_replay": {"turns": len(model.tool_turns)},
        "capabilities": {"chat": template is not None, "tools": syntax is not None},
    }


# Routes of stored responses and of /v1/conversations. Every API key has stores of its own.

HEAD, TAIL = b'{"object":"list","data":[', b'],"has_more":false,"first_id":%b,"last_id":%b}'


class ConversationBody(msgspec.Struct):
    """Body of POST /v1/conversations and of POST to its items."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None


class StoredRoutes:
    """Handlers of what is stored. What a client can make large is handled in threads."""

    def __init__(self, stores: ResponseStores, middleware: Middleware):
        self._stores, self._middleware = stores, middleware

    @property
    def handlers(self) -> dict[str, tuple[Handler, list[str]]]:
        """Return the handlers by path, each with its methods."""
        one = "/v1/conversations/{conversation_id}"
        return {
            "/v1/responses/{response_id}": (self._response, ["GET", "DELETE"]),
            "/v1/conversations": (self._create, ["POST"]),
            one: (self._conversation, ["GET", "DELETE"]),
            f"{one}/items": (self._items, ["GET", "POST"]),
        }

    def _store(self, raw_request: Request) -> ResponseStore:
        return self._stores.of(raw_request.state.key.owner)

    async def _response(self, raw_request: Request) -> Response:
        response_id, store = raw_request.path_params["response_id"], self._store(raw_request)
        if raw_request.method == "DELETE":
            store.delete(response_id)
            return json_response({"id": response_id, "object": "response", "deleted": True})
        if raw_request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise Problem("a kept response is not streamed; leave it out", param="stream")
        return JsonPieces([store.get(response_id)])

    async def _create(self, raw_request: Request) -> Response:
        body, store = await self._middleware.body(raw_request), self._store(raw_request)

        def create() -> list[bytes]:
            parsed = _parse(body)
            return [encode(store.conversations.create(parsed.items or [], parsed.metadata))]

        return JsonPieces(await in_thread(create, long=True))

    async def _conversation(self, raw_request: Request) -> Response:
        conversation_id = raw_request.path_params["conversation_id"]
        conversations = self._store(raw_request).conversations
        if raw_request.method == "DELETE":
            conversations.delete(conversation_id)
            gone = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
            return json_response(gone)
        return JsonPieces([conversations.get(conversation_id)])

    async def _items(self, raw_request: Request) -> Response:
        conversation_id = raw_request.path_params["conversation_id"]
        conversations = self._store(raw_request).conversations
        if raw_request.method == "POST":
            conversations.get(conversation_id)  # before the body is read
            body = await self._middleware.body(raw_request)

            def extend() -> list[bytes]:
                return _list(conversations.extend(conversation_id, _parse(body).items or []))

            return JsonPieces(await in_thread(extend, long=True))
        newest_first = raw_request.query_params.get("order", "desc") == "desc"

        def show() -> list[bytes]:
            items = conversations.items(conversation_id)
            return _list(items[::-1] if newest_first else items)

        return JsonPieces(await in_thread(show))


def _parse(body: bytes) -> ConversationBody:
    """Return the body of a request; its items are those that a response can have as input."""
    parsed, _ = decode(body, ConversationBody)
    try:
        messages_from_responses(None, parsed.items or [])
    except Problem as problem:
        problem.param = (problem.param or "items").replace("input", "items", 1)
        raise
    return parsed


def _list(items: list[StoredItem]) -> list[bytes]:
    """Return the pieces of the list object of items, without decoding them."""
    first, last = (encode(items[at][0] if items else None) for at in (0, -1))
    data = [piece for _, item in items for piece in (b",", item)]
    return [HEAD, *data[1:], TAIL % (first, last)]


# The web page at `/`: static files of the package, served with a strict content policy.

FOLDER = Path(__file__).parent / "page"
INDEX, PREFIX = "index.html", "/page"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page runs its own scripts only, and sends nothing to other hosts.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers keep files, and ask whether they are current
}


def page_routes() -> dict[str, Handler]:
    """Return the handlers of the page's files by path; they are read once, and there are no others.

    They need no API key: the page has a field for the key.
    """
    files: dict[str, tuple[bytes, str, str]] = {}  # content, media type and quoted digest
    for path in FOLDER.iterdir():
        if kind := CONTENT_TYPES.get(path.suffix):
            content = path.read_bytes()
            files[path.name] = content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    async def show(raw_request: Request) -> Response:
        """Return a file, or 304 if the browser has it."""
        name = raw_request.path_params.get("name", INDEX)
        if name not in files:
            path = raw_request.scope["path"][:200]
            raise Problem(f"the page has no file {path}", status=404, code="unknown_url")
        content, kind, etag = files[name]
        headers = HEADERS | {"ETag": etag}
        known = raw_request.headers.get("if-none-match", "").split(",")
        if etag in (tag.strip().removeprefix("W/") for tag in known):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return {"/": show, f"{PREFIX}/{{name}}": show}
