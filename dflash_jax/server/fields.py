"""Request fields that the APIs share, and their validation."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dflash_jax.engine.sampling_params import KINDS, OPTIONS, SEEDS
from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.errors import ConfigError
from dflash_jax.server.protocol import MOST_CHOICES, Problem
from dflash_jax.server.thinking import positive_budget
from dflash_jax.server.unsupported_fields import check_unknown_fields


class StreamOptions(msgspec.Struct):
    """The `stream_options` object of OpenAI's APIs."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculationFields(msgspec.Struct, forbid_unknown_fields=True):
    """The `speculative` object, an extension. It never changes the output tokens."""

    enabled: bool | None = None
    block_size: int | None = None
    mode: Literal["auto", "dflash", "off"] | None = None


# Options of the engine whose request fields have the same name, with all names of the fields.
SERVED = {name: (name, *info.aliases) for name, info in OPTIONS.items() if info.served}


def _field_type(name: str) -> Any:
    kind = OPTIONS[name].served
    return (KINDS[name] if kind is True else kind) | None


_FIELDS = [(field, _field_type(name), None) for name, fields in SERVED.items() for field in fields]
_OptionFields: Any = msgspec.defstruct("_OptionFields", _FIELDS, kw_only=True)


class CommonFields(_OptionFields, kw_only=True):
    """Fields that every API accepts; most are extensions known from other servers."""

    model: str | None = None
    stream: bool | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    speculative: SpeculationFields | None = None
    recovery: bool | str | dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    timeout: float | None = None
    return_token_ids: bool | None = None
    timings_per_token: bool | None = None
    return_metrics: bool | None = None
    return_meta_info: bool | None = None
    # Accepted without effect.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    cache_prompt: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None  # a guess at the output, which affects speed only
    request_id: Any = None
    priority: Any = None


class OpenAIFields(CommonFields, kw_only=True):
    """Fields of chat completions and completions."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    n: int | None = None
    response_format: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    return_token_sources: bool | None = None
    return_tokens_as_token_ids: bool | None = None


MOST_STOP_IDS = 1024


def common_arguments(
    body: CommonFields,
    unknown: Mapping[str, Any],
    output_format: Any,
    where: str = "response_format",
) -> dict[str, Any]:
    """Return the arguments of `GenerationRequest` that every API sets.

    Args:
      body: the decoded body.
      unknown: fields that the API does not know.
      output_format: requested output format, such as `response_format`.
      where: name of the field that contains `output_format`.

    Raises:
      Problem: a value is out of range or not supported.
    """
    options: dict[str, Any] = {}
    for name, fields in SERVED.items():
        if (value := first_given(body, *fields)) is not None:
            options[name] = value
    if len(body.stop_token_ids or ()) > MOST_STOP_IDS:
        raise Problem(
            400, f"{len(body.stop_token_ids or ())} stop_token_ids; at most {MOST_STOP_IDS}",
            param="stop_token_ids",
        )  # fmt: skip
    if body.seed not in (None, -1):  # vLLM and llama.cpp take -1 for no seed
        options["seed"] = body.seed % SEEDS
    options |= speculation_options(body.speculative)
    if body.timeout is not None and not body.timeout > 0:
        raise Problem(400, f"timeout is {body.timeout}; expected seconds above 0", param="timeout")
    return {
        "model": body.model,
        "options": options,
        **output_grammar(body, output_format, where),
        "stop": stop_strings(body.stop),
        "stream": bool(body.stream),
        "recovery": parse_recovery(body.recovery),
        "thinking_budget": positive_budget(body.thinking_token_budget),
        "timeout": body.timeout,
        "return_token_ids": bool(body.return_token_ids),
        "timings": bool(body.timings_per_token),
        "metrics": bool(body.return_metrics),
        "meta_info": bool(body.return_meta_info),
        "warnings": check_unknown_fields(unknown),
    }


def first_given(body: Any, *names: str) -> Any:
    """Return the first of these fields that is set, or None."""
    values = (getattr(body, name) for name in names)
    return next((value for value in values if value is not None), None)


def openai_arguments(body: OpenAIFields, unknown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `GenerationRequest` that chat completions and completions set.

    Raises:
      Problem: a value is out of range or not supported.
    """
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MOST_CHOICES:
        raise Problem(400, f"n is {n}; expected 1 to {MOST_CHOICES}", param="n")
    if body.stream and body.prompt_logprobs is not None:
        raise Problem(
            400, "no stream has log probabilities of the prompt; drop stream or prompt_logprobs",
            param="prompt_logprobs",
        )  # fmt: skip
    wanted = body.stream_options or StreamOptions()
    common = common_arguments(body, unknown, body.response_format)
    return common | {
        "n": n,
        "max_tokens": first_given(body, "max_tokens", "max_output_tokens"),
        "stop": (*common["stop"], *stop_strings(body.stop_sequences)),
        "prompt_logprobs": body.prompt_logprobs,
        "include_stop_str": bool(body.include_stop_str_in_output),
        "return_token_sources": bool(body.return_token_sources),
        "tokens_as_ids": bool(body.return_tokens_as_token_ids),
        "include_usage": bool(wanted.include_usage),
        "continuous_usage_stats": bool(wanted.include_usage and wanted.continuous_usage_stats),
    }


def speculation_options(speculative: SpeculationFields | None) -> dict[str, Any]:
    """Return `speculative` as arguments of `Engine.submit`."""
    if speculative is None:
        return {}
    if speculative.enabled is False or speculative.mode == "off":
        return {"speculative": False}
    return {} if speculative.block_size is None else {"block_size": speculative.block_size}


RECOVERY_FIELDS = ("floor", "below_floor", "tool_prefix", "call_odds", "call_retry", "skip_phrase",
            "empty_retry", "repeat_limit", "runaway", "loop_tokens", "watchdog", "repeated_calls",
            "max_calls", "answer_reserve", "close_text", "floor_in_thought")  # fmt: skip


def parse_recovery(given: bool | str | Mapping[str, Any] | None) -> Recovery | None:
    """Return the recovery rules of a request, or None for the server's defaults.

    Settings that name files of the server cannot be set by requests.

    Raises:
      Problem: an unknown setting or a wrong value.
    """
    if given is None or isinstance(given, bool):
        return {None: None, True: Recovery(), False: OFF}[given]
    if isinstance(given, str):
        if given not in ("on", "off"):
            raise Problem(
                400, f'recovery is {given!r}; expected true, false, "on", "off" or settings',
                param="recovery",
            )  # fmt: skip
        return Recovery() if given == "on" else OFF
    if unknown := sorted(set(given) - set(RECOVERY_FIELDS)):
        raise Problem(
            400, f"recovery has no {unknown[0]!r}; known are {', '.join(RECOVERY_FIELDS)}",
            param="recovery",
        )  # fmt: skip
    try:
        return Recovery(**given)
    except ConfigError as error:
        raise Problem(400, f"recovery: {error}", param="recovery") from None


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the non-empty stop strings."""
    return tuple(s for s in ([stop] if isinstance(stop, str) else stop or ()) if s)


GRAMMAR_KINDS = ("json", "regex", "choice", "grammar")


def output_grammar(body: CommonFields, output_format: Any, where: str) -> dict[str, Any]:
    """Return the output grammar, one of GRAMMAR_KINDS and its value or None, and its field's name.

    Raises:
      Problem: more than one grammar, or an unknown kind.
    """
    candidates = [(kind, getattr(body, f"guided_{kind}"), f"guided_{kind}")
                  for kind in GRAMMAR_KINDS]  # fmt: skip
    structured = body.structured_outputs or {}
    wanted = {key for key, value in structured.items() if value not in (None, False)}
    if others := sorted(wanted - set(GRAMMAR_KINDS)):
        raise Problem(
            400, f"structured_outputs has no {others[0]!r}; known are {', '.join(GRAMMAR_KINDS)}",
            param=f"structured_outputs.{others[0]}",
        )  # fmt: skip
    candidates += [(key, structured[key], f"structured_outputs.{key}") for key in wanted]
    if output_format is not None:
        candidates.append((*response_format(output_format, where), where))
    given = [candidate for candidate in candidates if candidate[1] is not None]
    if len(given) > 1:
        raise Problem(400, f"{len(given)} output grammars were given; give one of them")
    if not given:
        return {"grammar": None}
    [(kind, value, field)] = given
    return {"grammar": (kind, value), "grammar_field": field}


def response_format(given: Any, where: str) -> tuple[str, Any]:
    """Return the grammar of an output format such as `response_format`.

    Raises:
      Problem: the format is unknown, or its schema is missing.
    """
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return "json", None
    if kind == "json_object":
        name = "value" if "value" in given else "schema"  # Hugging Face's name, and llama.cpp's
        schema = given.get(name)
        if schema is not None and not isinstance(schema, dict):
            raise Problem(400, f"{where}.{name} is no JSON schema", param=f"{where}.{name}")
        return "json", schema or {"type": "object"}
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if isinstance(schema, dict):
            return "json", schema
        raise Problem(400, f"{where} has no JSON schema", param=where)
    known = "text, json_object or json_schema"
    raise Problem(400, f"{where} has the type {kind!r}; expected {known}", param=where)
