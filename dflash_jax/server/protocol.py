"""Request types that all APIs share: `GenerationRequest` and `Problem`. No arrays, sockets, clocks.

`fields` reads what more than one API has, `conversation` messages and tools, and each API's module
its other fields.
"""

import codecs
import dataclasses
import functools
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from dflash_jax.declared import declare
from dflash_jax.engine.state_machine import Recovery
from dflash_jax.tokenizer import well_formed
from dflash_jax.tool_parsers.tool_schema import MOST_DEPTH, Tool, ToolChoice, is_deep

Message = dict[str, Any]
MOST_CHOICES = 64
MOST_ENTRIES = 500_000  # objects, arrays and keys of a body; decoding more takes over half a second
MOST_VALUES = 2_000_000  # commas; decoding this many numbers takes 0.2 s
SLICE = 2**16  # bytes scanned per step: the interpreter lock is held during a step
NO_LIMIT = -1  # value of max_tokens, as in vLLM and llama.cpp
MOST_MESSAGE = 1500  # characters of an error, which may quote what the client sent


class Problem(Exception):
    """An error response: an HTTP status and an error object.

    Args:
      param: name of the offending request field.
      code: machine-readable code.
      retry_s: seconds for the Retry-After header.
      details: Anthropic's `details` object.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
        details: dict[str, Any] | None = None,
    ):
        message = message[:MOST_MESSAGE]
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_s = retry_s
        self.details = details

    @property
    def kind(self) -> str:
        """Return OpenAI's error `type`."""
        kinds = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
            503: "overloaded_error",
        }
        default = "invalid_request_error" if self.status < 500 else "api_error"
        return kinds.get(self.status, default)

    def to_json(self) -> dict[str, Any]:
        """Return the body: OpenAI's error object, with Anthropic's `type` and `details`."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        if self.details:
            error["details"] = self.details
        return {"type": "error", "error": error}


AUTO = ToolChoice("auto")


@dataclasses.dataclass(frozen=True)
class ClientTool:
    """A tool that the model calls as a function, as the client declared it.

    Attributes:
      kind: kind of its calls in the response; "custom" is a freeform tool, whose calls are text.
      namespace: namespace of the tool in the Responses API.
    """

    kind: Literal["function", "custom", "local_shell", "shell", "apply_patch"]
    name: str
    namespace: str | None = None


Api = Literal["chat", "completions", "responses", "messages"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A validated generation request, independent of the API it came through.

    Attributes:
      messages: the conversation as chat completions messages; None if there are `prompts`.
      prompts: texts or lists of token ids; each gets `n` outputs.
      suffix: text after the outputs of `prompts`, for models that fill in the middle.
      tools: tool definitions as the chat template receives them.
      declared_tools: the same tools in the form against which calls are checked.
      client_tools: tools that are no plain functions for the client, by the name that is called.
      options: arguments of `Engine.submit` that the client set.
      grammar: structured output: a kind ("json", "regex", "choice" or "grammar") and its value.
      grammar_field: name of the request field that the grammar comes from.
      template_kwargs: variables of the chat template.
      recovery: recovery rules of this request; None takes the server's.
      thinking_budget: most tokens of reasoning before it is closed.
      max_tokens: None takes the server's default, `NO_LIMIT` all that fits; 0, valid with `echo`
        only, generates nothing.
      clamp_max_tokens: reduce max_tokens to what fits instead of refusing the request.
      include_usage: send `usage` in a stream's last chunk.
      continuous_usage_stats: send `usage` in every chunk.
      logprobs: number of alternatives per output token; None for no log probabilities.
      prompt_logprobs: the same for prompt tokens (vLLM's field).
      include_stop_str: keep the stop string that ended the output in the text.
      tokens_as_ids: write the tokens of log probabilities as vLLM's "token_id:NUMBER".
      echo: put the prompt in front of the output.
      echoed_fields: request fields that the response repeats.
      store: called with the finished response; None if it is not stored.
      timeout: seconds after which the tokens generated so far are the response.
      warnings: parts of the request that were ignored or changed, as sentences.
    """

    api: Api
    model: str | None
    messages: list[Message] | None = None
    prompts: list[str | list[int]] = dataclasses.field(default_factory=list)
    suffix: str = ""
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    declared_tools: tuple[Tool, ...] = ()
    client_tools: Mapping[str, ClientTool] = dataclasses.field(default_factory=dict)
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    grammar: tuple[str, Any] | None = None
    grammar_field: str | None = None
    template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    continue_final_message: bool = False
    recovery: Recovery | None = None
    thinking_budget: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    clamp_max_tokens: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str: bool = False
    echo: bool = False
    echoed_fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    store: Callable[..., None] | None = None
    timeout: float | None = None
    return_token_sources: bool = False
    tokens_as_ids: bool = False
    warnings: tuple[str, ...] = ()

    # Fields that requests of all APIs have by the same names.
    parse_special: bool | None = declare(
        None,
        "what texts spell like special tokens is taken for them; None if it is in `prompts` only,"
        " not in `messages` and `tools`",
        served=True,
    )
    return_token_ids: bool = declare(False, "the response has token ids", served=True)
    timings_per_token: bool = declare(False, "the response has llama.cpp's timings", served=True)

    @property
    def requires_call(self) -> bool:
        """Whether the output has to be a tool call."""
        return self.tool_choice.kind in ("required", "named")

    @property
    def takes_one_call(self) -> bool:
        """Whether the output ends with its first tool call."""
        return not self.parallel_tool_calls or self.tool_choice.kind == "named"

    @property
    def source(self) -> str:
        """Name of the request field that the prompt comes from."""
        return {"responses": "input", "completions": "prompt"}.get(self.api, "messages")


Body = TypeVar("Body", bound=msgspec.Struct)


@dataclasses.dataclass(frozen=True)
class Unread:
    """Parts of a body that the API does not read.

    Attributes:
      fields: fields that the API does not know, with their values.
      replaced: half characters were replaced by U+FFFD.
    """

    fields: dict[str, Any]
    replaced: bool = False


def decode(body: bytes, kind: type[Body]) -> tuple[Body, Unread]:
    """Return the decoded request body, and what was not read of it.

    Raises:
      Problem: the body is not JSON or too deeply nested, or a field is missing or has a wrong type.
    """
    check_entries(body)
    values, replaced = _decode_object(body.removeprefix(codecs.BOM_UTF8))  # Windows editors add it
    if is_deep(values):
        name = next((name for name, value in values.items() if is_deep([value])), None)
        raise _too_deep(name or "the body", name)
    for name in _integer_fields(kind) & values.keys():
        value = values[name]
        if isinstance(value, float) and value.is_integer():
            values[name] = int(value)  # some clients send 8 as 8.0
    try:
        decoded = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _validation_problem(error) from None
    known = kind.__struct_fields__
    fields = {name: value for name, value in values.items() if name not in known}
    return decoded, Unread(fields, replaced)


def _decode_object(body: bytes) -> tuple[dict[str, Any], bool]:
    """Return the JSON object of a body, and whether half characters in it were replaced."""
    replaced = False
    try:
        try:
            values = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            whole = _without_half_characters(body)
            replaced = whole != body
            values = msgspec.json.decode(whole)
    except RecursionError:
        raise _too_deep("the body") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise Problem("the body is not a JSON object", code="invalid_json")
    return values, replaced


def _validation_problem(error: msgspec.ValidationError) -> Problem:
    """Return the response to a field that is missing or has a wrong type."""
    text, _, path = str(error).partition(" - at `$.")
    param = path.removesuffix("`") or None
    where = f" in {param}" if param else ""
    missing = re.fullmatch("Object missing required field `(.*)`", text)
    if missing:
        param = missing[1]
    return Problem(f"{text}{where}", param=param)


# A backslash that is escaped, a pair of surrogates, or one alone, which is the group.
_ESCAPES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


def _without_half_characters(body: bytes) -> bytes:
    """Return JSON with lone surrogates replaced by U+FFFD, as escapes or as bytes.

    Clients that cut texts by UTF-16 units send them, and again with every turn that follows.
    """
    try:
        text = body.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:  # other bytes are no text of any kind
        return body
    return _ESCAPES.sub(_whole, well_formed(text).encode())


def _whole(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if escape[1] else escape[0]


def _too_deep(where: str, param: str | None = None) -> Problem:
    return Problem(
        f"{where} is nested more than {MOST_DEPTH} levels deep; send objects and arrays of fewer"
        " levels",
        param=param,
        code="nested_too_deeply",
    )


def check_entries(
    text: bytes,
    subject: str = "the body",
    param: str | None = None,
    *,
    most_values: int | None = None,
) -> None:
    """Refuse JSON with too many entries.

    Decoding holds the interpreter lock, so no other request is served during it.

    Args:
      subject: name of the text, for the error message.
      param: request field that contains the text.
      most_values: limit of commas; `MOST_VALUES` by default.

    Raises:
      Problem: there are more entries than allowed.
    """
    if most_values is None:
        most_values = MOST_VALUES
    if _count_entries(text) <= MOST_ENTRIES and text.count(b",") <= most_values:
        return
    entries = 0
    values = 0
    for part in _outside_strings(text):
        entries += _count_entries(part)
        values += part.count(b",")
        exceeded = None
        if entries > MOST_ENTRIES:
            exceeded = f"{MOST_ENTRIES} objects, arrays and keys"
        elif values > most_values:
            exceeded = f"{most_values} values"
        if exceeded is not None:
            raise Problem(
                f"{subject} has more than {exceeded}; send fewer",
                param=param,
                code="too_many_entries",
            )


def _count_entries(part: bytes) -> int:
    return sum(map(part.count, (b"[", b"{", b":")))


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """Yield the text outside of JSON strings, slice by slice."""
    inside = False  # a string has begun
    escaped = False  # the last character was a backslash that escapes the next one
    for start in range(0, len(body), SLICE):
        first = start + 1 if escaped else start
        part = body[first : start + SLICE].replace(rb"\\", b"")
        escaped = part.endswith(b"\\")
        pieces = part.replace(rb"\"", b"").split(b'"')
        outside = pieces[1::2] if inside else pieces[::2]
        yield b"".join(outside)
        if len(pieces) % 2 == 0:  # an odd number of quotes
            inside = not inside


@functools.cache
def _integer_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    fields = msgspec.structs.fields(kind)
    return frozenset(field.encode_name for field in fields if field.type == int | None)


def new_id(prefix: str) -> str:
    """Return a new id: the prefix and 24 random hexadecimal digits."""
    return f"{prefix}{secrets.token_hex(12)}"
