"""The small routes: tokens of texts, models, health, figures."""

import datetime
import functools
import json
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_jax.server.anthropic import decode_messages
from dflash_jax.server.background import in_thread, read_body
from dflash_jax.server.connection import json_response
from dflash_jax.server.conversation import parse_messages, parse_tools
from dflash_jax.server.fields import ENGINE_OPTIONS
from dflash_jax.server.generation import prepare
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.middleware import Handler, Middleware, Settings
from dflash_jax.server.models import ServedModel, ServedModels
from dflash_jax.server.protocol import GenerationRequest, Problem, decode
from dflash_jax.server.thinking import EFFORTS
from dflash_jax.server.unsupported_fields import check_unknown_fields
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.version import __version__


class TokenizeRequest(msgspec.Struct):
    """POST /tokenize, in the words of llama.cpp (`content`) and of vLLM (`prompt`)."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None  # vLLM's
    with_pieces: bool | None = None  # llama.cpp's


class DetokenizeRequest(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class InfoRoutes:
    """Handlers of the routes that generate nothing.

    Args:
      parameters: what requests may say, by path.
    """

    def __init__(
        self,
        models: ServedModels,
        gate: Middleware,
        settings: Settings,
        metrics: Metrics,
        parameters: dict[str, tuple[str, ...]],
    ):
        self._models, self._gate = models, gate
        self._settings, self._metrics = settings, metrics
        self._parameters = parameters

    @property
    def posts(self) -> dict[str, Handler]:
        """Handlers of POST by path."""
        return {
            "/v1/messages/count_tokens": self._count_tokens,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    @property
    def gets(self) -> dict[str, Handler]:
        """Handlers of GET by path."""
        return {
            "/v1/models": self._list_models,
            "/v1/models/{name:path}": self._one_model,
            "/": self._health,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._show_metrics,
            "/props": self._props,
        }

    async def _count_tokens(self, raw_request: Request) -> Response:
        read = functools.partial(decode_messages, counting=True)
        request = await read_body(read, await self._gate.body(raw_request))
        [prompt] = await prepare(self._models.named(request.model), request)
        return json_response({"input_tokens": len(prompt.ids)})

    async def _tokenize(self, raw_request: Request) -> Response:
        read = functools.partial(decode, kind=TokenizeRequest)
        found, unknown = await read_body(read, await self._gate.body(raw_request))
        warnings = check_unknown_fields(unknown)
        model = self._models.named(found.model)
        tokenizer = model.engine.tokenizer
        if tokenizer is None:
            raise Problem(400, "this model ships no tokenizer")
        most = model.engine.plan.max_length
        if found.messages is not None:
            request = await in_thread(_conversation_request, found, long=True)
            ids = (await prepare(model, request))[0].ids
        else:
            ids = await in_thread(_text_ids, found, tokenizer, most, long=True, param="content")
        more = {"warnings": list(warnings)} if warnings else {}
        return await in_thread(_tokens_answer, found, tokenizer, ids, most, more, long=True)

    async def _detokenize(self, raw_request: Request) -> Response:
        read = functools.partial(decode, kind=DetokenizeRequest)
        found, _ = await read_body(read, await self._gate.body(raw_request))
        engine = self._models.named(found.model).engine
        if engine.tokenizer is None:
            raise Problem(400, "this model ships no tokenizer")
        known, most = engine.target.vocab_size, engine.plan.max_length
        if len(found.tokens) > most:
            raise Problem(
                400, f"{len(found.tokens)} tokens were given; at most {most}, the model's maximum"
                " context length: send them in parts", param="tokens",
            )  # fmt: skip
        if outside := [i for i in found.tokens if not 0 <= i < known]:
            raise Problem(400, f"tokens {outside[:5]} are not from 0 to {known - 1}")
        text = await in_thread(engine.tokenizer.raw, found.tokens, long=True)
        return json_response({"content": text, "prompt": text})

    async def _list_models(self, raw_request: Request) -> Response:
        data = [_model_entry(model) for model in self._models]
        found: dict[str, Any] = {"object": "list", "data": data}
        if "client_version" in raw_request.query_params:
            found["models"] = []  # Codex looks for its catalogue; to an empty one it adds its own
        if _is_anthropic(raw_request):
            found["data"] = [entry | _anthropic_fields(entry) for entry in data]
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
            found |= {"has_more": False} | ends
        return json_response(found)

    async def _one_model(self, raw_request: Request) -> Response:
        if not raw_request.path_params["name"]:  # "/v1/models/"
            return await self._list_models(raw_request)
        found = _model_entry(self._models.named(raw_request.path_params["name"]))
        return json_response(
            found | (_anthropic_fields(found) if _is_anthropic(raw_request) else {})
        )

    async def _health(self, raw_request: Request) -> Response:
        for model in self._models:
            if model.worker.error is not None:
                raise Problem(500, f"{model.name}: {model.worker.error}", code="engine_failed")
        return json_response({"status": "ok"})

    async def _ready(self, raw_request: Request) -> Response:
        self._gate.check_open()
        for model in self._models:
            _ = model.engine
        return json_response({"status": "ready"})

    async def _show_metrics(self, raw_request: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._metrics.text(self._models), media_type=kind)

    async def _props(self, raw_request: Request) -> Response:
        limits = {"max_body": self._gate.max_body, "timeout": self._settings.timeout}
        endpoints = sorted(route.path for route in raw_request.app.routes)
        found = {
            "schema": 2,
            "build_info": f"dflash_jax {__version__}",
            "models": [_properties(model) for model in self._models],
            "endpoints": endpoints,
            "api": {"endpoints": endpoints},
            "limits": limits,
            "parameters": self._parameters,
        }
        return json_response(found | _default_model(self._models[0]))


def _conversation_request(found: TokenizeRequest) -> GenerationRequest:
    """The conversation whose tokens are asked for."""
    tools, declared, choice = parse_tools(found.tools, None)
    template = dict(found.chat_template_kwargs or {})
    if found.add_generation_prompt is not None:
        template["add_generation_prompt"] = found.add_generation_prompt
    return GenerationRequest(
        api="chat",
        model=None,
        messages=parse_messages(found.messages or ()),
        tools=tools,
        declared_tools=declared,
        tool_choice=choice,
        template_kwargs=template,
        continue_final_message=bool(found.continue_final_message),
    )


def _text_ids(found: TokenizeRequest, tokenizer: Tokenizer, max_length: int) -> list[int]:
    """The tokens of a text; refused if they are certainly more than the model holds."""
    text = found.content if found.content is not None else found.prompt
    if text is None:
        raise Problem(400, "give content, prompt or messages", param="content")
    asked = [s for s in (found.add_special, found.add_special_tokens) if s is not None]
    tokenizer.check_fits(text, max_length)
    return tokenizer.encode(text, specials=asked[0] if asked else found.content is None)


def _tokens_answer(
    found: TokenizeRequest,
    tokenizer: Tokenizer,
    ids: list[int],
    max_length: int,
    more: dict[str, Any],
) -> Response:
    """The answer of /tokenize."""
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": max_length}
    if (found.with_pieces or found.return_token_strs) and len(ids) > max_length:
        raise Problem(
            400, f"the text has {len(ids)} tokens; pieces are given of at most {max_length}, the"
            " model's maximum context length: leave out with_pieces and return_token_strs",
            param="with_pieces" if found.with_pieces else "return_token_strs",
        )  # fmt: skip
    if found.with_pieces:
        answer["tokens"] = [{"id": i, "piece": _token_piece(tokenizer, i)} for i in ids]
    if found.return_token_strs:
        answer["token_strs"] = [tokenizer.core.id_to_token(i) for i in ids]
    return json_response(answer | more)


def _token_piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """A token's text, or its bytes where they are no text."""
    text, known = tokenizer.raw([token]), tokenizer.raw_bytes(token)
    return list(known) if known is not None and "\ufffd" in text else text


def _model_entry(model: ServedModel) -> dict[str, Any]:
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


def _is_anthropic(raw_request: Request) -> bool:
    return "anthropic-version" in raw_request.headers


def _anthropic_fields(model: dict[str, Any]) -> dict[str, Any]:
    """What Anthropic's clients read of a model beside its id."""
    made = datetime.datetime.fromtimestamp(model["created"], datetime.UTC)
    found = {"type": "model", "display_name": model["id"], "lifecycle": "active"}
    most = {"max_input_tokens": model["max_model_len"]} if "max_model_len" in model else {}
    return found | {"created_at": made.isoformat().replace("+00:00", "Z")} | most


def _properties(model: ServedModel) -> dict[str, Any]:
    found = _model_entry(model)
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
        "programs": engine.compiled.progress,
    }


def _default_model(model: ServedModel) -> dict[str, Any]:
    """The first model in the words in which llama.cpp's and lucebox's clients look for it."""
    worker = model.worker
    found: dict[str, Any] = {"model_alias": model.name, "daemon": {"alive": worker.error is None}}
    if (engine := worker.engine) is None:
        return found
    plan, defaults, syntax = engine.plan, model.defaults, model.syntax
    drafter, template = engine.drafter, engine.tokenizer.template if engine.tokenizer else None
    params = {"temperature": defaults.temperature, "n_predict": defaults.max_tokens or -1}
    thinks = bool(syntax and syntax.thought)
    return found | {
        "default_generation_settings": {"n_ctx": plan.max_length, "params": params},
        "total_slots": plan.rows,
        "chat_template": template,
        "model_card": None,
        "speculative_mode": "dflash" if drafter else "off",
        "speculative": {"drafter": getattr(drafter, "kind", None), "block_size": plan.block},
        "reasoning": {"supported": thinks, "efforts": list(EFFORTS) if thinks else []},
        "sampling": {"capabilities": [*ENGINE_OPTIONS, "seed", "logit_bias", "logprobs"]},
        "prefix_cache": {"bytes": plan.prefix_cache, "on_disk": bool(plan.prefix_folder)},
        "tool_replay": {"turns": len(model.tool_turns)},
        "capabilities": {"chat": template is not None, "tools": syntax is not None},
    }
