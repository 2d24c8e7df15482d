"""Fields that several APIs share, checked and turned into arguments of `Ask`."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dflash_jax.engine.recovery import OFF, Recovery
from dflash_jax.errors import ConfigError
from dflash_jax.server.protocol import MOST_CHOICES, Problem


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class Speculation(msgspec.Struct, forbid_unknown_fields=True):
    """Our `speculative`: decoding without drafts gives the same tokens."""

    enabled: bool = True


class Sampling(msgspec.Struct, kw_only=True):
    """Fields that chat completions and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    speculative: Speculation | None = None
    recovery: bool | dict[str, Any] | None = None
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


PASSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "stop_token_ids",
    "ignore_eos",
)
NEUTRAL = {
    "min_p": (0,),
    "repetition_penalty": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "top_k": (0, -1),
}


def sampling(found: Sampling, unknown: Sequence[str]) -> dict[str, Any]:
    """The shared fields as arguments of `Ask`."""
    options: dict[str, Any] = {}
    for name in PASSED:
        value = getattr(found, name)
        if value is not None and value not in NEUTRAL.get(name, ()):
            options[name] = value
    if found.min_tokens:
        raise Problem(400, "min_tokens is not supported; use ignore_eos", param="min_tokens")
    if found.seed is not None:
        options["seed"] = found.seed % 2**32
    if found.logit_bias:
        options["logit_bias"] = biases(found.logit_bias)
    if found.speculative is not None and not found.speculative.enabled:
        options["speculative"] = False
    n = 1 if found.n is None else found.n
    if not 1 <= n <= MOST_CHOICES:
        raise Problem(400, f"n is {n}; expected 1 to {MOST_CHOICES}", param="n")
    if found.timeout is not None and not found.timeout > 0:
        raise Problem(400, f"timeout is {found.timeout}; expected seconds above 0", param="timeout")
    return {
        "model": found.model,
        "options": options,
        "grammar": grammar(found),
        "stop": texts(found.stop),
        "n": n,
        "max_tokens": found.max_tokens,
        "stream": bool(found.stream),
        "usage_chunk": bool(found.stream_options and found.stream_options.include_usage),
        "recovery": recovery_of(found.recovery),
        "thinking_budget": budget_of(found.thinking_token_budget),
        "timeout": found.timeout,
        "token_ids": bool(found.return_token_ids),
        "timings": bool(found.timings_per_token),
        "metrics": bool(found.return_metrics),
        "meta_info": bool(found.return_meta_info),
        "warnings": tuple(f"the unknown field {name!r} was ignored" for name in unknown),
    }


RECOVERY = ("floor", "below_floor", "tool_prefix", "skip_phrase", "empty_retry", "repeat_limit",
            "runaway", "watchdog", "answer_reserve", "close_text", "floor_in_thought")  # fmt: skip


def recovery_of(given: bool | Mapping[str, Any] | None) -> Recovery | None:
    """Our `recovery`: true and false, or settings; what concerns the server's files is its own."""
    if given is None or isinstance(given, bool):
        return {None: None, True: Recovery(), False: OFF}[given]
    if unknown := sorted(set(given) - set(RECOVERY)):
        raise Problem(
            400, f"recovery has no {unknown[0]!r}; known are {', '.join(RECOVERY)}",
            param="recovery",
        )  # fmt: skip
    try:
        return Recovery(**given)
    except ConfigError as error:
        raise Problem(400, f"recovery: {error}", param="recovery") from None


def budget_of(tokens: Any) -> int | None:
    """A thinking budget; 0 and less is none."""
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def biases(given: Mapping[str, float]) -> dict[int, float]:
    """`logit_bias` with token ids as numbers."""
    try:
        return {int(i): value for i, value in given.items()}
    except ValueError:
        raise Problem(
            400, "logit_bias: the keys have to be token ids", param="logit_bias"
        ) from None


def texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings; empty ones are left out."""
    return tuple(s for s in ([stop] if isinstance(stop, str) else stop or ()) if s)


GRAMMARS = ("json", "regex", "choice", "grammar")


def grammar(found: Sampling) -> tuple[str, Any] | None:
    """What the output has to match: one of GRAMMARS, and its value."""
    asked = [
        ("json", found.guided_json),
        ("regex", found.guided_regex),
        ("choice", found.guided_choice),
        ("grammar", found.guided_grammar),
    ]
    structured = found.structured_outputs or {}
    asked += [(key, value) for key, value in structured.items() if key in GRAMMARS]
    if found.response_format is not None:
        asked.append(response_format(found.response_format))
    given = [(kind, value) for kind, value in asked if value is not None]
    if len(given) > 1:
        raise Problem(400, f"{len(given)} output grammars were given; give one of them")
    return given[0] if given else None


def response_format(given: Mapping[str, Any]) -> tuple[str, Any]:
    """`response_format`, or `text.format` of the Responses API."""
    kind = given.get("type")
    if kind == "text":
        return "json", None
    if kind == "json_object":
        return "json", {"type": "object"}
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if isinstance(schema, dict):
            return "json", schema
        raise Problem(400, "response_format has no json_schema.schema", param="response_format")
    known = "text, json_object or json_schema"
    raise Problem(400, f"response_format type {kind!r}; expected {known}", param="response_format")


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def effort(word: str, template: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables of a reasoning effort; explicit ones win."""
    if word not in EFFORTS:
        raise Problem(
            400, f"reasoning effort {word!r}; expected {', '.join(EFFORTS)}",
            param="reasoning_effort",
        )  # fmt: skip
    return {"reasoning_effort": word, "enable_thinking": word != "none"} | dict(template)
