"""Anthropic's /v1/messages: request decoding, responses and stream events."""

import json
import math
from typing import Any

from dflash_jax.server.conversation import parse_messages
from dflash_jax.server.fields import CommonFields, common_arguments, stop_strings
from dflash_jax.server.generation import Generation
from dflash_jax.server.message_formats import continues_assistant, messages_from_anthropic
from dflash_jax.server.protocol import GenerationRequest, Problem, decode
from dflash_jax.server.reasoning import positive_budget, reasoning_options
from dflash_jax.server.reply import Reply, ReplyPart
from dflash_jax.server.tools import DeclaredTools, check_tools, tool_arguments
from dflash_jax.server.writer import ResponseWriter, cached_tokens, sse_event
from dflash_jax.tokenizer import well_formed
from dflash_jax.tool_parsers.calls import (
    Content,
    Event,
    Thinking,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from dflash_jax.tool_parsers.tool_schema import is_deep

SIGNATURE = "unsigned"  # clients drop thinking blocks without a signature


class MessagesRequest(CommonFields, kw_only=True):
    """Body of POST /v1/messages and /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thread: Any = None
    # Accepted without effect.
    context_management: Any = None
    cache_control: Any = None
    betas: Any = None
    inference_geo: Any = None


def decode_messages(body: bytes, *, counting: bool = False) -> GenerationRequest:
    """Return the request of a body.

    Args:
      counting: the request only counts tokens, and needs no max_tokens.

    Raises:
      Problem: 400, the body is not such a request, or asks for something unsupported.
    """
    parsed, unread = decode(body, MessagesRequest)
    if parsed.thread is not None:
        raise _no_threads()
    if parsed.max_tokens is None and not counting:
        raise Problem("max_tokens is missing", param="max_tokens")
    if not parsed.messages:  # there may be a system prompt
        raise Problem("messages is empty; give at least one", param="messages")
    output_config = parsed.output_config or {}
    output_format = output_config.get("format")
    where = "output_config.format"
    if output_format is None:
        output_format = parsed.output_format
        where = "output_format"
    arguments = common_arguments(parsed, unread, output_format, where)
    arguments |= _tool_arguments(parsed)
    variables, reasoning_warnings = reasoning_options(
        parsed.chat_template_kwargs,
        effort=output_config.get("effort"),
        where="output_config.effort",
        thinking=parsed.thinking,
    )
    warnings = [*arguments["warnings"], *reasoning_warnings]
    messages = messages_from_anthropic(parsed.system, parsed.messages, warnings)
    messages = parse_messages(messages, warnings)
    arguments["warnings"] = tuple(warnings)
    arguments["stop"] += stop_strings(parsed.stop_sequences)
    budget = positive_budget((parsed.thinking or {}).get("budget_tokens"))
    if budget is not None:
        arguments["thinking_budget"] = budget
    return GenerationRequest(
        api="messages",
        messages=messages,
        parallel_tool_calls=not (parsed.tool_choice or {}).get("disable_parallel_tool_use"),
        template_kwargs=variables,
        continue_final_message=continues_assistant(parsed.messages),
        max_tokens=parsed.max_tokens,
        clamp_max_tokens=True,
        **arguments,
    )


def _tool_arguments(parsed: MessagesRequest) -> dict[str, Any]:
    """Return the arguments of `GenerationRequest` about tools."""
    check_tools(parsed.tools)
    declared = DeclaredTools()
    for at, tool in enumerate(parsed.tools or []):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise Problem(
                f"the tool {tool.get('name')!r} of type {kind!r} is defined by Anthropic and not"
                " supported here; declare a tool with a name and an input_schema instead",
                param=f"tools[{at}].type",
            )
        function = {"name": tool.get("name"), "description": tool.get("description", "")}
        if tool.get("strict") is True:
            function["strict"] = True
        function["parameters"] = tool.get("input_schema") or {"type": "object", "properties": {}}
        declared.functions.append({"type": "function", "function": function})
        declared.places.append(f"tools[{at}]")
    choice = parsed.tool_choice or {"type": "auto"}
    kind = choice.get("type")
    if kind not in ("auto", "any", "none", "tool"):
        text = f"tool_choice type {kind!r}; expected auto, any, none or tool"
        raise Problem(text, param="tool_choice.type")
    if kind == "tool":
        return tool_arguments(declared, {"function": {"name": choice.get("name")}})
    return tool_arguments(declared, kind)


def _no_threads() -> Problem:
    """Return the error on which Anthropic's clients send the whole conversation instead."""
    return Problem(
        "thread is not supported: nothing is stored here; send the whole conversation",
        param="thread",
        details={"error_code": "thread_unsupported_request"},
    )


class MessagesWriter(ResponseWriter):
    """Writes responses and stream events of /v1/messages.

    A stream has no event before the first token: message_start has figures of usage that are
    known only then.
    """

    prefix = "msg_"

    def __init__(self, generation: Generation):
        super().__init__(generation)
        # Cached prompt tokens that message_start named; None until it was sent.
        self._num_cached: int | None = None
        self._at = -1  # index of the current content block
        self._open = ""  # type of the current block; empty if none is open

    def to_json(self) -> dict[str, Any]:
        """Return the message object."""
        [reply] = self.generation.replies
        content = [_block(part) for part in reply.parts]
        return self._message(content, reply, self._usage()) | self._finished_fields(reply)

    def _begin(self) -> bytes:
        """Return message_start, unless it was sent."""
        if self._num_cached is not None:
            return b""
        self._num_cached = self.generation.cached
        message = self._message([], None, self._usage())
        return sse_event({"type": "message_start", "message": message})

    def events(self, reply: Reply, events: list[Event]) -> bytes:
        """Return the stream events of new output."""
        out = self._begin()
        for event in events:
            match event:
                case Content(text):
                    out += self._enter("text", {"text": ""})
                    out += self._delta({"type": "text_delta", "text": text})
                case Thinking(text):
                    out += self._enter("thinking", {"thinking": "", "signature": ""})
                    out += self._delta({"type": "thinking_delta", "thinking": text})
                case ToolCallStart(index, name):
                    block = {"id": reply.calls[index].id, "name": name, "input": {}}
                    out += self._leave() + self._enter("tool_use", block)
                case ToolCallDelta(_, text):
                    out += self._delta({"type": "input_json_delta", "partial_json": text})
                case ToolCallEnd():
                    out += self._leave()
        return out

    def close(self) -> bytes:
        """Return message_delta with the stop reason, and message_stop."""
        [reply] = self.generation.replies
        end = {"stop_reason": _reason(reply), "stop_sequence": reply.stop_string}
        delta = {"type": "message_delta", "delta": end, "usage": self._usage()}
        delta |= self._finished_fields(reply)
        out = self._begin() + self._leave()
        return out + sse_event(delta) + sse_event({"type": "message_stop"})

    def error(self, problem: Problem) -> bytes:
        """Return the error event."""
        return sse_event(problem.to_json())

    def _enter(self, kind: str, block: dict[str, Any]) -> bytes:
        """Return the events that open a content block, unless one of its type is open."""
        if self._open == kind:
            return b""
        out = self._leave()
        self._at += 1
        self._open = kind
        start = {"type": "content_block_start", "index": self._at}
        return out + sse_event(start | {"content_block": {"type": kind} | block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return sse_event({"type": "content_block_delta", "index": self._at, "delta": delta})

    def _leave(self) -> bytes:
        """Return the events that close the current content block, if one is open."""
        if not self._open:
            return b""
        out = b""
        if self._open == "thinking":
            out = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._open = ""
        return out + sse_event({"type": "content_block_stop", "index": self._at})

    def _usage(self) -> dict[str, Any]:
        stats = [reply.result.stats for reply in self.generation.replies if reply.result]
        prompt_tokens = sum(len(prompt.ids) for prompt in self.generation.prompts)
        num_cached = self._num_cached
        if num_cached is None:
            num_cached = cached_tokens(stats)
        return {
            "input_tokens": prompt_tokens - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": sum(each.output_tokens for each in stats),
        }

    def _message(
        self, content: list[dict[str, Any]], reply: Reply | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": _reason(reply) if reply else None,
            "stop_sequence": reply.stop_string if reply else None,
            "usage": usage,
        }


def _block(part: ReplyPart) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
    if part.call is None:
        return {"type": "text", "text": part.text}
    call = part.call
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; invalid JSON is given as `{"raw": text}`."""
    try:
        value = json.loads(arguments, parse_constant=_refuse, parse_float=_finite)
        if "\\u" in arguments:  # escaped lone surrogates cannot be encoded
            value = json.loads(well_formed(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and not is_deep(value):
        return value
    return {"raw": arguments}


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


def _reason(reply: Reply) -> str:
    """Return Anthropic's stop reason."""
    if reply.stop_string and reply.finish_reason != "tool_calls":
        return "stop_sequence"
    words = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return words[reply.finish_reason]
