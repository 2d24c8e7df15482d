"""Routes about the server and its models: their list, health, metrics and properties."""

import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_jax.server.fields import SERVED
from dflash_jax.server.http_responses import json_response
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.middleware import Handler, Middleware
from dflash_jax.server.protocol import Problem
from dflash_jax.server.reasoning import EFFORTS
from dflash_jax.server.served_models import ServedModel, ServedModels, ServerConfig, answer_name
from dflash_jax.version import __version__


class InfoRoutes:
    """Handlers of the routes about the server and its models.

    Args:
      parameters: names of request fields, by path; /props lists them.
    """

    def __init__(
        self,
        models: ServedModels,
        middleware: Middleware,
        config: ServerConfig,
        metrics: Metrics,
        parameters: dict[str, tuple[str, ...]],
    ):
        self._models = models
        self._middleware = middleware
        self._config = config
        self._metrics = metrics
        self._parameters = parameters

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

    async def _list_models(self, raw_request: Request) -> Response:
        data = [_model_entry(self._models.named(name), name) for name in self._models.names]
        fields: dict[str, Any] = {"object": "list", "data": data}
        if "client_version" in raw_request.query_params:
            fields["models"] = []  # Codex adds its own models to an empty catalogue
        if _is_anthropic(raw_request):
            fields["data"] = [entry | _anthropic_fields(entry) for entry in data]
            fields["has_more"] = False
            fields["first_id"] = data[0]["id"]
            fields["last_id"] = data[-1]["id"]
        return json_response(fields)

    async def _one_model(self, raw_request: Request) -> Response:
        name = raw_request.path_params["name"]
        if not name:  # "/v1/models/"
            return await self._list_models(raw_request)
        fields = _model_entry(self._models.named(name), name)
        if _is_anthropic(raw_request):
            fields |= _anthropic_fields(fields)
        return json_response(fields)

    async def _health(self, raw_request: Request) -> Response:
        for model in self._models:
            error = model.engine_thread.error
            if error is not None:
                raise Problem(f"{model.name}: {error}", status=500, code="engine_failed")
            model.check_turns()
        return json_response({"status": "ok"})

    async def _ready(self, raw_request: Request) -> Response:
        self._middleware.check_open()
        for model in self._models:
            _ = model.engine  # raises unless the engine is ready
            model.check_turns()
        return json_response({"status": "ready"})

    async def _show_metrics(self, raw_request: Request) -> Response:
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._metrics.text(self._models), media_type=media_type)

    async def _props(self, raw_request: Request) -> Response:
        endpoints = sorted(route.path for route in raw_request.app.routes)
        fields = {
            "schema": 2,
            "build_info": f"dflash_jax {__version__}",
            "models": [_properties(model) for model in self._models],
            "endpoints": endpoints,
            "api": {"endpoints": endpoints},
            "limits": {
                "max_body": self._middleware.max_body,
                "max_bodies": self._middleware.max_bodies,
                "timeout": self._config.time_limit,
            },
            "parameters": self._parameters,
        }
        return json_response(fields | _default_model(self._models[0]))


def _model_entry(model: ServedModel, name: str | None = None) -> dict[str, Any]:
    """Return a model as OpenAI's API lists it, under the name that was asked for."""
    fields: dict[str, Any] = {
        "id": answer_name(model.name, name),
        "object": "model",
        "created": model.created,
        "owned_by": "dflash_jax",
        "last_used_ms": model.last_used_ms,
    }
    engine = model.engine_thread.engine
    if engine is not None:
        fields["max_model_len"] = engine.plan.max_length
    return fields


def _is_anthropic(raw_request: Request) -> bool:
    return "anthropic-version" in raw_request.headers


def _anthropic_fields(model: dict[str, Any]) -> dict[str, Any]:
    """Return further fields of a model's entry, which Anthropic's clients read."""
    created = datetime.datetime.fromtimestamp(model["created"], datetime.UTC)
    fields: dict[str, Any] = {
        "type": "model",
        "display_name": model["id"],
        "lifecycle": "active",
        "created_at": created.isoformat().replace("+00:00", "Z"),
    }
    if "max_model_len" in model:
        fields["max_input_tokens"] = model["max_model_len"]
    return fields


def _properties(model: ServedModel) -> dict[str, Any]:
    """Return the properties of a model, only those of its entry before its engine is loaded."""
    fields = _model_entry(model)
    engine = model.engine_thread.engine
    if engine is None:
        return fields
    syntax = model.syntax
    drafter = engine.graph.drafter_config
    return fields | {
        "plan": engine.plan.to_json(),
        "target": engine.graph.config.model_type,
        "drafter": getattr(drafter, "kind", None),
        "speculative_mode": "dflash" if drafter else "off",
        "tool_calls": syntax.name if syntax else None,
        "reasoning": bool(syntax and syntax.thought),
        "chat_template": engine.tokenizer.template if engine.tokenizer else None,
        "programs": engine.core.runner.compiled.progress,
    }


def _default_model(model: ServedModel) -> dict[str, Any]:
    """Return the properties of the first model in the format of llama.cpp and lucebox."""
    engine = model.engine_thread.engine
    fields: dict[str, Any] = {
        "model_alias": model.name,
        "daemon": {"alive": model.engine_thread.error is None},
    }
    if engine is None:
        return fields
    plan = engine.plan
    defaults = model.defaults
    syntax = model.syntax
    drafter = engine.graph.drafter_config
    template = engine.tokenizer.template if engine.tokenizer else None
    thinks = bool(syntax and syntax.thought)
    return fields | {
        "default_generation_settings": {
            "n_ctx": plan.max_length,
            "params": {
                "temperature": defaults.temperature,
                "n_predict": defaults.max_tokens or -1,
            },
        },
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
