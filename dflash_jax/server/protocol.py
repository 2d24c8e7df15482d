"""What clients send, decoded and checked; knows no arrays, no sockets and no clock.

Four APIs are read into one `Ask`: OpenAI chat completions and completions here, Responses and
Anthropic's messages in their own files.
"""

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from dflash_jax.engine.recovery import OFF, Recovery
from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.tools.declared import SAFE, Choice, Tool, choice_of, tools_of

Message = dict[str, Any]
MOST_TOOLS = 1024
MOST_CHOICES = 64


class Problem(Exception):
    """A request that ends in an error object. `retry_s` becomes a Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_s = retry_s

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error."""
        named = {
            401: "authentication_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
            503: "overloaded_error",
        }
        return named.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")

    def to_json(self) -> dict[str, Any]:
        """The body; the outer `type` is for Anthropic's clients, the rest is OpenAI's."""
        inner = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"type": "error", "error": inner}


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


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None


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


class DetokenizeRequest(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


AUTO = Choice("auto")
Api = Literal["chat", "completions", "responses", "messages"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """What is to be generated, whichever API asked.

    Attributes:
      messages: a conversation in the chat completions shape, else `prompts` is given.
      prompts: texts or token ids, one output each (times n).
      tools: as they are shown to the model; `declared` is what calls are checked against.
      options: arguments of `Engine.submit` that were given.
      grammar: what the output has to match: a pair of kind and value.
      template: variables for the chat template.
      recovery: rules for this request; None leaves them to the server.
      thinking_budget: tokens after which an open thought is closed.
      echo: what to put before the output: nothing, or the prompt.
      clamp: shorten max_tokens to what fits, instead of refusing.
      warnings: what was ignored.
    """

    api: Api
    model: str | None
    messages: list[Message] | None = None
    prompts: list[str | list[int]] = dataclasses.field(default_factory=list)
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    declared: tuple[Tool, ...] = ()
    choice: Choice = AUTO
    parallel: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    grammar: tuple[str, Any] | None = None
    template: dict[str, Any] = dataclasses.field(default_factory=dict)
    continue_final: bool = False
    recovery: Recovery | None = None
    thinking_budget: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    clamp: bool = False
    stream: bool = False
    usage_chunk: bool = False
    logprobs: int | None = None  # alternatives asked for; None for no log probabilities
    echo: bool = False
    timeout: float | None = None
    token_ids: bool = False
    timings: bool = False
    metrics: bool = False
    meta_info: bool = False
    warnings: tuple[str, ...] = ()


Body = TypeVar("Body", bound=msgspec.Struct)


def decode(body: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """A request body, and its fields that the API does not know.

    Raises:
      Problem: it is no JSON, or a field is missing or of the wrong type.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise Problem(400, "the body is not a JSON object", code="invalid_json")
    try:
        found = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        param = path.removesuffix("`") or None
        raise Problem(400, f"{text}{f' in {param}' if param else ''}", param=param) from None
    except RecursionError:
        raise Problem(400, "the body is nested too deeply", code="invalid_json") from None
    return found, [name for name in raw if name not in kind.__struct_fields__]


def decode_chat(body: bytes) -> Ask:
    """POST /v1/chat/completions."""
    found, unknown = decode(body, ChatRequest)
    template = dict(found.chat_template_kwargs or {})
    if found.reasoning_effort is not None:
        template |= effort(found.reasoning_effort, template)
    if found.add_generation_prompt is not None:
        template["add_generation_prompt"] = found.add_generation_prompt
    tools, declared, choice = offered(found.tools, found.tool_choice)
    if found.top_logprobs is not None and not found.logprobs:
        raise Problem(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    common = sampling(found, unknown)
    if found.max_completion_tokens is not None:
        common["max_tokens"] = found.max_completion_tokens
    return Ask(
        api="chat",
        messages=conversation(found.messages),
        tools=tools,
        declared=declared,
        choice=choice,
        parallel=found.parallel_tool_calls is not False,
        template=template,
        continue_final=bool(found.continue_final_message),
        logprobs=(found.top_logprobs or 0) if found.logprobs else None,
        **common,
    )


def decode_completion(body: bytes) -> Ask:
    """POST /v1/completions."""
    found, unknown = decode(body, CompletionRequest)
    prompts: list[Any] = [found.prompt]
    if isinstance(found.prompt, list) and not all(isinstance(p, int) for p in found.prompt):
        prompts = list(found.prompt)
        if any(isinstance(p, int) for p in prompts):
            raise Problem(400, "prompt mixes token ids with prompts", param="prompt")
    if found.suffix:
        raise Problem(400, "suffix is not supported; put it into the prompt", param="suffix")
    if found.best_of not in (None, 1, found.n):
        raise Problem(400, "best_of is not supported; use n", param="best_of")
    if len(prompts) > MOST_CHOICES:
        raise Problem(400, f"{len(prompts)} prompts; at most {MOST_CHOICES}", param="prompt")
    return Ask(
        api="completions",
        prompts=prompts,
        echo=bool(found.echo),
        logprobs=found.logprobs,
        **sampling(found, unknown),
    )


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


def offered(
    tools: list[dict[str, Any]] | None, choice: Any
) -> tuple[list[dict[str, Any]], tuple[Tool, ...], Choice]:
    """Tools as the model is shown them, as calls are checked against them, and the choice."""
    given = tools or []
    if len(given) > MOST_TOOLS:
        raise Problem(400, f"{len(given)} tools were given; at most {MOST_TOOLS}", param="tools")
    for at, tool in enumerate(given):
        inner = tool.get("function")
        name = inner.get("name") if isinstance(inner, dict) else None
        if tool.get("type", "function") != "function" or not isinstance(name, str):
            raise Problem(400, f"tools[{at}] is no function with a name", param=f"tools[{at}]")
        if not SAFE.fullmatch(name):
            raise Problem(
                400,
                f"the tool name {name[:80]!r}: expected 1 to 64 letters, digits, '_', '.', '-'",
                param=f"tools[{at}].function.name",
            )
    if isinstance(choice, str) and choice not in ("none", "auto", "required", "any"):
        raise Problem(
            400, f"tool_choice is {choice!r}; expected none, auto, required or a function",
            param="tool_choice",
        )  # fmt: skip
    declared = tools_of(given)
    try:
        chosen = choice_of(choice or "auto", declared)
    except RequestError as error:
        raise Problem(400, str(error), param="tool_choice") from None
    if chosen.kind in ("required", "named") and not declared:
        raise Problem(
            400, "tool_choice demands a call, but no tools were given", param="tool_choice"
        )
    if chosen.kind == "none":
        return [], (), chosen
    return given, declared, chosen


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def effort(word: str, template: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables of a reasoning effort; explicit ones win."""
    if word not in EFFORTS:
        raise Problem(
            400, f"reasoning effort {word!r}; expected {', '.join(EFFORTS)}",
            param="reasoning_effort",
        )  # fmt: skip
    return {"reasoning_effort": word, "enable_thinking": word != "none"} | dict(template)


ROLES = ("system", "user", "assistant", "tool")


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages as chat templates want them.

    Contents are texts, `developer` is `system`, neighbouring system messages are one, and the
    arguments of calls are objects.
    """
    if not messages:
        raise Problem(400, "messages is empty; give at least one", param="messages")
    made: list[Message] = []
    for at, given in enumerate(messages):
        where = f"messages[{at}]"
        message = dict(given)
        role = message.get("role")
        message["role"] = role = "system" if role == "developer" else role
        if role not in ROLES:
            known = ", ".join(ROLES)
            raise Problem(400, f"role {role!r}; expected {known}", param=f"{where}.role")
        message["content"] = text_of(message.get("content"), where)
        if role == "assistant":
            if message["content"] is None and not message.get("tool_calls"):
                message["content"] = ""
            message["tool_calls"] = past_calls(message.get("tool_calls"), where)
            if not message["tool_calls"]:
                del message["tool_calls"]
        elif message["content"] is None:
            raise Problem(400, f"a {role} message needs content", param=f"{where}.content")
        if role == "system" and made and made[-1]["role"] == "system":
            made[-1]["content"] += f"\n\n{message['content']}"
        else:
            made.append(message)
    return made


def text_of(content: Any, where: str) -> str | None:
    """The text of a message's content; parts of type text are joined."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Problem(400, "content is neither a text nor a list", param=f"{where}.content")
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if kind not in ("text", "input_text", "output_text", "refusal", None) or not isinstance(
            text, str
        ):
            raise Problem(
                400, f"a content part of type {kind!r}; this server reads text only",
                param=f"{where}.content",
            )  # fmt: skip
        found.append(text)
    return "".join(found)


def past_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """`tool_calls` of an assistant's message, arguments parsed where they are JSON objects."""
    if calls is None:
        return []
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Problem(400, "a tool call has no function name", param=f"{where}.tool_calls")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else arguments
        made.append(call | {"function": function | {"arguments": arguments}})
    return made


def new_id(prefix: str) -> str:
    """A fresh id such as chatcmpl-9f...; 24 hexadecimal digits."""
    return f"{prefix}{secrets.token_hex(12)}"
