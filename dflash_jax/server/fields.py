"""Request fields that the APIs share: their types, and the arguments that they become."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from dflash_jax.declared import Field, fields_of, sentences, unknown_names
from dflash_jax.engine.sampling_params import SEEDS, SamplingParams
from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.errors import ConfigError
from dflash_jax.server.protocol import MOST_CHOICES, GenerationRequest, Problem, Unread
from dflash_jax.server.reasoning import positive_budget
from dflash_jax.server.unsupported import check_unread


class StreamOptions(msgspec.Struct):
    """The `stream_options` object of OpenAI's APIs."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculationFields(msgspec.Struct, forbid_unknown_fields=True):
    """The `speculative` object, an extension. It never changes the output tokens."""

    enabled: bool | None = None
    block_size: int | None = None
    mode: Literal["auto", "dflash", "off"] | None = None


def served(declared: Any) -> dict[str, Field]:
    """Return the declared fields that requests have, by their declared names."""
    return {name: field for name, field in fields_of(declared).items() if field.served}


def _field_types(fields: Mapping[str, Field]) -> Iterator[tuple[str, Any, None]]:
    """Yield the name of each field of requests, its type, and its default, for `defstruct`."""
    for name, field in fields.items():
        kind = field.kind if field.served is True else field.served
        for alias in (name, *field.aliases):
            yield alias, kind | None, None


# Options of the engine, each with the names of its fields in requests.
SERVED = {name: (name, *field.aliases) for name, field in served(SamplingParams).items()}
# Options of the response, whose fields in requests have the same names.
COPIED = tuple(served(GenerationRequest))
_DeclaredFields: Any = msgspec.defstruct(
    "_DeclaredFields",
    [*_field_types(served(SamplingParams)), *_field_types(served(GenerationRequest))],
    kw_only=True,
)


class CommonFields(_DeclaredFields, kw_only=True):
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
      unread: parts of the body that the API does not know.
      output_format: requested output format, such as `response_format`.
      where: name of the field that contains `output_format`.

    Raises:
      Problem: 400, a value is out of range, or a field is not supported.
    """
    options: dict[str, Any] = {}
    for name, fields in SERVED.items():
        value = first_given(body, *fields)
        if value is not None:
            options[name] = value
    num_stop_ids = len(body.stop_token_ids or ())
    if num_stop_ids > MOST_STOP_IDS:
        raise Problem(
            f"{num_stop_ids} stop_token_ids; at most {MOST_STOP_IDS}", param="stop_token_ids"
        )
    if body.seed not in (None, -1):  # vLLM and llama.cpp take -1 for no seed
        options["seed"] = body.seed % SEEDS
    options |= speculation_options(body.speculative)
    if body.timeout is not None and not body.timeout > 0:
        raise Problem(f"timeout is {body.timeout}; expected seconds above 0", param="timeout")
    grammar = output_grammar(body, output_format, where)
    arguments = {
        "model": body.model,
        "options": options,
        "grammar": None if grammar is None else (grammar.kind, grammar.value),
        "grammar_field": None if grammar is None else grammar.field,
        "stop": stop_strings(body.stop),
        "stream": bool(body.stream),
        "recovery": parse_recovery(body.recovery),
        "thinking_budget": positive_budget(body.thinking_token_budget),
        "timeout": body.timeout,
        "warnings": check_unread(unread),
    }
    for name in COPIED:
        value = getattr(body, name)
        if value is not None:
            arguments[name] = value
    return arguments


def first_given(body: Any, *names: str) -> Any:
    """Return the first of these fields that is set, or None."""
    values = (getattr(body, name) for name in names)
    return next((value for value in values if value is not None), None)


def openai_arguments(body: OpenAIFields, unread: Unread) -> dict[str, Any]:
    """Return the arguments of `GenerationRequest` that chat completions and completions set.

    Raises:
      Problem: 400, a value is out of range, or a field is not supported.
    """
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MOST_CHOICES:
        raise Problem(f"n is {n}; expected 1 to {MOST_CHOICES}", param="n")
    if body.stream and body.prompt_logprobs is not None:
        raise Problem(
            "no stream has log probabilities of the prompt; drop stream or prompt_logprobs",
            param="prompt_logprobs",
        )
    stream_options = body.stream_options or StreamOptions()
    include_usage = bool(stream_options.include_usage)
    continuous_usage = bool(stream_options.continuous_usage_stats)
    common = common_arguments(body, unread, body.response_format)
    return common | {
        "n": n,
        "max_tokens": first_given(body, "max_tokens", "max_output_tokens"),
        "stop": (*common["stop"], *stop_strings(body.stop_sequences)),
        "prompt_logprobs": body.prompt_logprobs,
        "include_stop_str": bool(body.include_stop_str_in_output),
        "return_token_sources": bool(body.return_token_sources),
        "tokens_as_ids": bool(body.return_tokens_as_token_ids),
        "include_usage": include_usage,
        "continuous_usage_stats": include_usage and continuous_usage,
    }


def speculation_options(speculative: SpeculationFields | None) -> dict[str, Any]:
    """Return `speculative` as arguments of `Engine.submit`."""
    if speculative is None:
        return {}
    if speculative.enabled is False or speculative.mode == "off":
        return {"speculative": False}
    return {} if speculative.block_size is None else {"block_size": speculative.block_size}


# Settings of recovery that requests do not have in `recovery`: they have fields of their own for
# the first two, and may not name files of the server.
NOT_OF_REQUESTS = ("min_tokens", "deadline_s", "log_directory")
RECOVERY_FIELDS = tuple(name for name in Recovery.fields() if name not in NOT_OF_REQUESTS)


def parse_recovery(value: bool | str | Mapping[str, Any] | None) -> Recovery | None:
    """Return the recovery rules of a request, or None for the server's defaults.

    Raises:
      Problem: 400, the value is no rules.
    """
    if value is None:
        return None
    if isinstance(value, bool | str):
        if value not in (True, False, "on", "off"):
            raise Problem(
                f'recovery is {value!r}; expected true, false, "on", "off" or settings',
                param="recovery",
            )
        return Recovery() if value in (True, "on") else OFF
    if problems := unknown_names(value, RECOVERY_FIELDS, "setting of recovery"):
        raise Problem(sentences(problems), param="recovery")
    try:
        return Recovery.parse(value, where="recovery")
    except ConfigError as error:
        raise Problem(str(error), param="recovery") from None


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the non-empty stop strings."""
    strings = [stop] if isinstance(stop, str) else stop or ()
    return tuple(string for string in strings if string)


GRAMMAR_KINDS = ("json", "regex", "choice", "grammar")


class OutputGrammar(NamedTuple):
    """An output grammar of a request: its kind, its value, and the field that it comes from."""

    kind: str
    value: Any
    field: str


def output_grammar(body: CommonFields, output_format: Any, where: str) -> OutputGrammar | None:
    """Return the output grammar of a request, or None if it has none.

    Raises:
      Problem: 400, it has more than one, or one of no known kind.
    """
    candidates = []
    for kind in GRAMMAR_KINDS:
        field = f"guided_{kind}"
        candidates.append(OutputGrammar(kind, getattr(body, field), field))
    structured = body.structured_outputs or {}
    kinds = {kind for kind, value in structured.items() if value not in (None, False)}
    unknown = sorted(kinds - set(GRAMMAR_KINDS))
    if unknown:
        raise Problem(
            f"structured_outputs has no {unknown[0]!r}; known are {', '.join(GRAMMAR_KINDS)}",
            param=f"structured_outputs.{unknown[0]}",
        )
    for kind in kinds:
        candidates.append(OutputGrammar(kind, structured[kind], f"structured_outputs.{kind}"))
    if output_format is not None:
        candidates.append(OutputGrammar("json", _format_schema(output_format, where), where))
    grammars = [candidate for candidate in candidates if candidate.value is not None]
    if len(grammars) > 1:
        raise Problem(f"{len(grammars)} output grammars were given; give one of them")
    return grammars[0] if grammars else None


def _format_schema(output_format: Any, where: str) -> Any:
    """Return the JSON schema of an output format such as `response_format`; None for free text."""
    kind = output_format.get("type") if isinstance(output_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        # Hugging Face's name, and llama.cpp's.
        name = "value" if "value" in output_format else "schema"
        schema = output_format.get(name)
        if schema is not None and not isinstance(schema, dict):
            raise Problem(f"{where}.{name} is no JSON schema", param=f"{where}.{name}")
        return schema or {"type": "object"}
    if kind == "json_schema":
        inner = output_format.get("json_schema", output_format)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if isinstance(schema, dict):
            return schema
        raise Problem(f"{where} has no JSON schema", param=where)
    known = "text, json_object or json_schema"
    raise Problem(f"{where} has the type {kind!r}; expected {known}", param=where)
