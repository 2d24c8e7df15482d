"""Fields that several APIs share, checked and turned into arguments of `Ask`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dflash_jax.engine.recovery import OFF, Recovery
from dflash_jax.errors import ConfigError
from dflash_jax.server.protocol import MOST_CHOICES, Problem
from dflash_jax.server.thinking import positive_budget
from dflash_jax.server.unsupported_fields import check_unknown_fields


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculationFields(msgspec.Struct, forbid_unknown_fields=True):
    """Our `speculative`: without drafts, or with fewer of them, the tokens are the same."""

    enabled: bool | None = None
    block_size: int | None = None
    mode: Literal["auto", "dflash", "off"] | None = None


class CommonFields(msgspec.Struct, kw_only=True):
    """Fields of every API; most are extensions of one server or another."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # llama.cpp's name for it
    rep_pen: float | None = None  # KoboldAI's
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
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
    # Accepted, and without effect here.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    cache_prompt: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None  # a guess at the answer, for speed alone
    request_id: Any = None
    priority: Any = None


class OpenAIFields(CommonFields, kw_only=True):
    """Fields that chat completions and completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    n: int | None = None
    response_format: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None


ENGINE_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
)
MOST_STOP_IDS = 1024
ALIASES = {"repetition_penalty": ("repeat_penalty", "rep_pen")}
NEUTRAL = {
    "min_p": (0,),
    "repetition_penalty": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "top_k": (0, -1),
    "min_tokens": (0,),
}


def common_arguments(
    found: CommonFields, unknown: Mapping[str, Any], form: Any, where: str = "response_format"
) -> dict[str, Any]:
    """What every API's request says, as arguments of `Ask`.

    Args:
      unknown: fields that the API does not know.
      form: the format of the output that is asked for; `where` is its place in the request.
    """
    options: dict[str, Any] = {}
    for name in ENGINE_OPTIONS:
        value = first_given(found, name, *ALIASES.get(name, ()))
        if value is not None and value not in NEUTRAL.get(name, ()):
            options[name] = value
    if len(found.stop_token_ids or ()) > MOST_STOP_IDS:
        raise Problem(
            400, f"{len(found.stop_token_ids or ())} stop_token_ids; at most {MOST_STOP_IDS}",
            param="stop_token_ids",
        )  # fmt: skip
    if found.seed not in (None, -1):  # -1 is no seed to vLLM and llama.cpp
        options["seed"] = found.seed % 2**32
    if found.logit_bias:
        options["logit_bias"] = logit_biases(found.logit_bias)
    options |= speculation_options(found.speculative)
    if found.timeout is not None and not found.timeout > 0:
        raise Problem(400, f"timeout is {found.timeout}; expected seconds above 0", param="timeout")
    return {
        "model": found.model,
        "options": options,
        "grammar": output_grammar(found, form, where),
        "stop": stop_strings(found.stop),
        "stream": bool(found.stream),
        "recovery": parse_recovery(found.recovery),
        "thinking_budget": positive_budget(found.thinking_token_budget),
        "timeout": found.timeout,
        "return_token_ids": bool(found.return_token_ids),
        "timings": bool(found.timings_per_token),
        "metrics": bool(found.return_metrics),
        "meta_info": bool(found.return_meta_info),
        "warnings": check_unknown_fields(unknown),
    }


def first_given(found: Any, *names: str) -> Any:
    """The first of these fields that was given."""
    values = (getattr(found, name) for name in names)
    return next((value for value in values if value is not None), None)


def openai_arguments(found: OpenAIFields, unknown: Mapping[str, Any]) -> dict[str, Any]:
    """What a request to chat completions or completions says, as arguments of `Ask`."""
    n = 1 if found.n is None else found.n
    if not 1 <= n <= MOST_CHOICES:
        raise Problem(400, f"n is {n}; expected 1 to {MOST_CHOICES}", param="n")
    if found.stream and found.prompt_logprobs is not None:
        raise Problem(
            400, "no stream has log probabilities of the prompt; drop stream or prompt_logprobs",
            param="prompt_logprobs",
        )  # fmt: skip
    wanted = found.stream_options or StreamOptions()
    asked = common_arguments(found, unknown, found.response_format)
    return asked | {
        "n": n,
        "max_tokens": first_given(found, "max_tokens", "max_output_tokens"),
        "stop": (*asked["stop"], *stop_strings(found.stop_sequences)),
        "prompt_logprobs": found.prompt_logprobs,
        "include_stop_str": bool(found.include_stop_str_in_output),
        "include_usage": bool(wanted.include_usage),
        "continuous_usage_stats": bool(wanted.include_usage and wanted.continuous_usage_stats),
    }


def speculation_options(asked: SpeculationFields | None) -> dict[str, Any]:
    """Our `speculative` as arguments of `Engine.submit`."""
    if asked is None:
        return {}
    if asked.enabled is False or asked.mode == "off":
        return {"speculative": False}
    return {} if asked.block_size is None else {"block_size": asked.block_size}


RECOVERY_FIELDS = ("floor", "below_floor", "tool_prefix", "call_odds", "call_retry", "skip_phrase",
            "empty_retry", "repeat_limit", "runaway", "loop_tokens", "watchdog", "repeated_calls",
            "answer_reserve", "close_text", "floor_in_thought")  # fmt: skip


def parse_recovery(given: bool | str | Mapping[str, Any] | None) -> Recovery | None:
    """Our `recovery`: on, off or settings; what concerns the server's files is its own."""
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


def logit_biases(given: Mapping[str, float]) -> dict[int, float]:
    """`logit_bias` with token ids as numbers."""
    try:
        return {int(i): value for i, value in given.items()}
    except ValueError:
        raise Problem(
            400, "logit_bias: the keys have to be token ids", param="logit_bias"
        ) from None


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings; empty ones are left out."""
    return tuple(s for s in ([stop] if isinstance(stop, str) else stop or ()) if s)


GRAMMAR_KINDS = ("json", "regex", "choice", "grammar")


def output_grammar(found: CommonFields, form: Any, where: str) -> tuple[str, Any] | None:
    """What the output has to match: one of GRAMMARS, and its value."""
    asked = [
        ("json", found.guided_json),
        ("regex", found.guided_regex),
        ("choice", found.guided_choice),
        ("grammar", found.guided_grammar),
    ]
    structured = found.structured_outputs or {}
    wanted = {key for key, value in structured.items() if value not in (None, False)}
    if others := sorted(wanted - set(GRAMMAR_KINDS)):
        raise Problem(
            400, f"structured_outputs has no {others[0]!r}; known are {', '.join(GRAMMAR_KINDS)}",
            param=f"structured_outputs.{others[0]}",
        )  # fmt: skip
    asked += [(key, structured[key]) for key in wanted]
    if form is not None:
        asked.append(response_format(form, where))
    given = [(kind, value) for kind, value in asked if value is not None]
    if len(given) > 1:
        raise Problem(400, f"{len(given)} output grammars were given; give one of them")
    return given[0] if given else None


def response_format(given: Any, where: str) -> tuple[str, Any]:
    """The grammar of a format such as chat completions' `response_format`."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return "json", None
    if kind == "json_object":
        name = "value" if "value" in given else "schema"  # as Hugging Face has it, and llama.cpp
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
