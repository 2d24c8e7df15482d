"""Request fields that the APIs share, and those that are refused by name."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dflash_jax.engine.sampling_params import KINDS, OPTIONS, SEEDS
from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.errors import ConfigError
from dflash_jax.server.protocol import MOST_CHOICES, Problem, Unread

# Fields of other servers that would change the output, by the values that have no effect and are
# accepted. APIs that support a field skip this table.
NEUTRAL: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((), "add_special_tokens audio chat_template compaction container ebnf json_schema lora_path"
     " max_completion_tokens max_output_tokens max_tokens prompt_logprobs reasoning_effort regex"
     " structural_tag truncate_prompt_tokens web_search_options"),
    ((0,), "dry_multiplier dynatemp_range mirostat n_probs top_logprobs xtc_probability"),
    ((1,), "best_of length_penalty n typical_p"),
    ((-1,), "n_predict"),
    ((True,), "add_generation_prompt parallel_tool_calls skip_special_tokens"
     " spaces_between_special_tokens"),
    ((False,), "continue_final_message echo include_stop_str_in_output logprobs use_beam_search"),
    (("",), "grammar suffix"),
    (("none", "auto"), "function_call tool_choice"),
    (([],), "allowed_token_ids bad_words documents functions logits_processors lora mcp_servers"
     " messages tools"),
    (({},), "chat_template_kwargs"),
    ((["text"],), "modalities"),
    (({"type": "text"},), "response_format"),
)  # fmt: skip
UNSUPPORTED = {name: values for values, names in NEUTRAL for name in names.split()}
MOST_WARNINGS, LONGEST_NAME = 64, 100  # responses repeat the names of unknown fields
MEDIA_FIELDS = ("audio", "modalities")
MEDIA_PATHS = ("/v1/audio", "/v1/embeddings", "/v1/images", "/v1/realtime", "/v1/videos")
ALTERNATIVES = {
    "ebnf": "guided_grammar, in Lark's notation",
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": "guided_grammar, in Lark's notation",
    "json_schema": "response_format or guided_json",
    "max_tokens": "max_output_tokens",
    "messages": "input, or /v1/chat/completions",
    "n_predict": "max_tokens",
    "n_probs": "logprobs and top_logprobs",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "reasoning.effort or output_config.effort",
    "regex": "guided_regex",
    "response_format": "text.format or output_config.format",
}


def text_only(subject: str, param: str | None = None) -> Problem:
    """Return the error of a request for images, audio, video or embeddings."""
    text = f"{subject} is not supported: this server reads and writes text only"
    return Problem(text, param=param, code="text_only")


def check_path(path: str) -> None:
    """Refuse paths of other servers that take or return something else than text.

    Raises:
      Problem: 400, the path is one of them.
    """
    if any(path == known or path.startswith(f"{known}/") for known in MEDIA_PATHS):
        raise text_only(path)


REPLACED = "half characters (lone surrogates) were replaced by U+FFFD"


def check_unread(unread: Unread) -> tuple[str, ...]:
    """Return a warning for each unknown field, up to MOST_WARNINGS, and for replaced characters.

    Raises:
      Problem: 400, a field is known from other servers and would change the output.
    """
    for name, value in unread.fields.items():
        if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
            if name in MEDIA_FIELDS:
                raise text_only(name, name)
            instead = f"; use {ALTERNATIVES[name]}" if name in ALTERNATIVES else ""
            raise Problem(f"{name} is not supported here{instead}", param=name)
    warnings = [REPLACED] if unread.replaced else []
    named = itertools.islice(unread.fields, MOST_WARNINGS)
    warnings += [f"the unknown field {name[:LONGEST_NAME]!r} was ignored" for name in named]
    if (more := len(unread.fields) - MOST_WARNINGS) > 0:
        warnings.append(f"{more} more unknown fields were ignored")
    return tuple(warnings)


# Reasoning options of requests, and reasoning of past turns.

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def nearest_efforts(effort: Any) -> list[Any]:
    """Return an effort, and then the known ones from the nearest on; unknown ones are near "high".

    Of two that are as near, the stronger one comes first.
    """
    place = EFFORTS.index(effort if effort in EFFORTS else "high")
    others = sorted(
        EFFORTS, key=lambda other: (abs(EFFORTS.index(other) - place), -EFFORTS.index(other))
    )
    return [effort, *(other for other in others if other != effort)]


def reasoning_options(
    given: Mapping[str, Any] | None,
    *,
    effort: Any = None,
    where: str = "reasoning.effort",
    reasoning: Mapping[str, Any] | None = None,
    thinking: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the chat template variables for a request's reasoning options, and warnings.

    `reasoning` without an effort turns reasoning on; `thinking` overrides it. Unknown efforts
    count as "high".

    Args:
      given: template variables set by the client; they take precedence.
      effort: an effort from outside of `reasoning`.
      where: name of the field that `effort` comes from.
      reasoning: OpenRouter's and OpenAI's `reasoning` object.
      thinking: Anthropic's `thinking` object.
    """
    variables: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    if reasoning is not None:
        if reasoning.get("exclude"):
            raise Problem(
                "reasoning.exclude is not supported here; leave out reasoning_content",
                param="reasoning.exclude",
            )
        variables["enable_thinking"] = True
        if reasoning.get("effort") is not None:
            effort, where = reasoning["effort"], "reasoning.effort"
    if effort is not None:
        if not isinstance(effort, str):
            raise Problem(f"{where} is {effort!r}; expected {', '.join(EFFORTS)}", param=where)
        if effort not in EFFORTS:
            warnings = (f"{where} {effort!r} is unknown and counts as high",)
            effort = "high"
        variables |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if reasoning is not None and reasoning.get("enabled") is False:
        variables["enable_thinking"] = False
    if thinking is not None:
        variables["enable_thinking"] = thinking.get("type") != "disabled"
    return variables | dict(given or {}), warnings


def positive_budget(tokens: Any) -> int | None:
    """Return a thinking budget in tokens; None for 0, less, or anything but an integer."""
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def join_reasoning(*parts: str | None) -> str:
    """Return the reasoning texts of one turn as one text."""
    return "\n\n".join(part for part in parts if part)


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
    parse_special: bool | None = None
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
    unread: Unread,
    output_format: Any,
    where: str = "response_format",
) -> dict[str, Any]:
    """Return the arguments of `GenerationRequest` that every API sets.

    Args:
      body: the decoded body.
      unread: what the API does not know.
      output_format: requested output format, such as `response_format`.
      where: name of the field that contains `output_format`.
    """
    options: dict[str, Any] = {}
    for name, fields in SERVED.items():
        if (value := first_given(body, *fields)) is not None:
            options[name] = value
    if len(body.stop_token_ids or ()) > MOST_STOP_IDS:
        raise Problem(
            f"{len(body.stop_token_ids or ())} stop_token_ids; at most {MOST_STOP_IDS}",
            param="stop_token_ids",
        )
    if body.seed not in (None, -1):  # vLLM and llama.cpp take -1 for no seed
        options["seed"] = body.seed % SEEDS
    options |= speculation_options(body.speculative)
    if body.timeout is not None and not body.timeout > 0:
        raise Problem(f"timeout is {body.timeout}; expected seconds above 0", param="timeout")
    return {
        "model": body.model,
        "options": options,
        **output_grammar(body, output_format, where),
        "stop": stop_strings(body.stop),
        "stream": bool(body.stream),
        "recovery": parse_recovery(body.recovery),
        "thinking_budget": positive_budget(body.thinking_token_budget),
        "timeout": body.timeout,
        "parse_special": body.parse_special,
        "return_token_ids": bool(body.return_token_ids),
        "timings": bool(body.timings_per_token),
        "metrics": bool(body.return_metrics),
        "meta_info": bool(body.return_meta_info),
        "warnings": check_unread(unread),
    }


def first_given(body: Any, *names: str) -> Any:
    """Return the first of these fields that is set, or None."""
    values = (getattr(body, name) for name in names)
    return next((value for value in values if value is not None), None)


def openai_arguments(body: OpenAIFields, unread: Unread) -> dict[str, Any]:
    """Return the arguments of `GenerationRequest` that chat completions and completions set."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MOST_CHOICES:
        raise Problem(f"n is {n}; expected 1 to {MOST_CHOICES}", param="n")
    if body.stream and body.prompt_logprobs is not None:
        raise Problem(
            "no stream has log probabilities of the prompt; drop stream or prompt_logprobs",
            param="prompt_logprobs",
        )
    wanted = body.stream_options or StreamOptions()
    common = common_arguments(body, unread, body.response_format)
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
    """
    if given is None or isinstance(given, bool):
        return {None: None, True: Recovery(), False: OFF}[given]
    if isinstance(given, str):
        if given not in ("on", "off"):
            raise Problem(
                f'recovery is {given!r}; expected true, false, "on", "off" or settings',
                param="recovery",
            )
        return Recovery() if given == "on" else OFF
    if unknown := sorted(set(given) - set(RECOVERY_FIELDS)):
        raise Problem(
            f"recovery has no {unknown[0]!r}; known are {', '.join(RECOVERY_FIELDS)}",
            param="recovery",
        )
    try:
        return Recovery(**given)
    except ConfigError as error:
        raise Problem(f"recovery: {error}", param="recovery") from None


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the non-empty stop strings."""
    return tuple(s for s in ([stop] if isinstance(stop, str) else stop or ()) if s)


GRAMMAR_KINDS = ("json", "regex", "choice", "grammar")


def output_grammar(body: CommonFields, output_format: Any, where: str) -> dict[str, Any]:
    """Return the output grammar, a kind and its value, and its field's name; None without one."""
    candidates = [(kind, getattr(body, f"guided_{kind}"), f"guided_{kind}")
                  for kind in GRAMMAR_KINDS]  # fmt: skip
    structured = body.structured_outputs or {}
    wanted = {key for key, value in structured.items() if value not in (None, False)}
    if others := sorted(wanted - set(GRAMMAR_KINDS)):
        raise Problem(
            f"structured_outputs has no {others[0]!r}; known are {', '.join(GRAMMAR_KINDS)}",
            param=f"structured_outputs.{others[0]}",
        )
    candidates += [(key, structured[key], f"structured_outputs.{key}") for key in wanted]
    if output_format is not None:
        candidates.append((*response_format(output_format, where), where))
    given = [candidate for candidate in candidates if candidate[1] is not None]
    if len(given) > 1:
        raise Problem(f"{len(given)} output grammars were given; give one of them")
    if not given:
        return {"grammar": None}
    [(kind, value, field)] = given
    return {"grammar": (kind, value), "grammar_field": field}


def response_format(given: Any, where: str) -> tuple[str, Any]:
    """Return the grammar of an output format such as `response_format`."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return "json", None
    if kind == "json_object":
        name = "value" if "value" in given else "schema"  # Hugging Face's name, and llama.cpp's
        schema = given.get(name)
        if schema is not None and not isinstance(schema, dict):
            raise Problem(f"{where}.{name} is no JSON schema", param=f"{where}.{name}")
        return "json", schema or {"type": "object"}
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if isinstance(schema, dict):
            return "json", schema
        raise Problem(f"{where} has no JSON schema", param=where)
    known = "text, json_object or json_schema"
    raise Problem(f"{where} has the type {kind!r}; expected {known}", param=where)
