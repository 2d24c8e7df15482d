"""OpenAI's /v1/responses, the part that agents need."""

import functools
import time
from typing import Any

from dflash_jax.server import statistics
from dflash_jax.server.conversation import check_tools, parse_messages, parse_tools
from dflash_jax.server.fields import CommonFields, common_arguments
from dflash_jax.server.generation import Generation
from dflash_jax.server.logprobs import chat_logprobs
from dflash_jax.server.message_formats import messages_from_responses
from dflash_jax.server.protocol import NO_LIMIT, GenerationRequest, Problem, decode, new_id
from dflash_jax.server.reply import Reply, ReplyPart
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.thinking import reasoning_options
from dflash_jax.server.writer import sse_event
from dflash_jax.tool_parsers.events import (
    Content,
    Event,
    Thinking,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

LOGPROBS = "message.output_text.logprobs"  # of `include`


class ResponsesRequest(CommonFields, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    prompt: Any = None
    conversation: Any = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted, and without effect here.
    max_tool_calls: Any = None
    stream_options: Any = None
    client_metadata: Any = None


def decode_responses(body: bytes, store: ResponseStore | None = None) -> GenerationRequest:
    """The request as an `Ask`.

    Args:
      kept: responses it may refer to, where its own is kept unless it says `store: false`.
    """
    store = store or ResponseStore()
    found, unknown = decode(body, ResponsesRequest)
    for name in ("background", "prompt", "conversation"):
        if getattr(found, name):
            raise Problem(400, f"{name} is not supported here", param=name)
    if not found.input and isinstance(found.input, list):
        raise Problem(400, "input is empty; give at least one item", param="input")
    items = found.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    items = store.resolve_input(found.previous_response_id, items)
    text = found.text or {}
    asked = common_arguments(found, unknown, text.get("format"), "text.format")
    warnings = list(asked["warnings"])
    if found.truncation == "auto":
        warnings.append("truncation was ignored: an input that is too long is refused")
    if text.get("verbosity"):
        warnings.append("text.verbosity was ignored")
    check_tools(found.tools)
    given = []
    places = []
    for at, tool in enumerate(found.tools or []):
        if tool.get("type") != "function":
            warnings.append(f"the tool type {tool.get('type')!r} was ignored")
            continue
        keys = ("name", "description", "parameters", "strict")
        inner = {key: tool[key] for key in keys if tool.get(key) is not None}
        given.append({"type": "function", "function": inner})
        places.append(f"tools[{at}]")
    tools, declared, choice = parse_tools(given, found.tool_choice, places)
    template, more = reasoning_options(found.chat_template_kwargs, reasoning=found.reasoning)
    warnings += more
    likely = found.top_logprobs or LOGPROBS in (found.include or ())
    return GenerationRequest(
        api="responses",
        messages=parse_messages(messages_from_responses(found.instructions, items)),
        tools=tools,
        declared_tools=declared,
        tool_choice=choice,
        parallel_tool_calls=found.parallel_tool_calls is not False,
        template_kwargs=template,
        max_tokens=found.max_output_tokens,
        logprobs=(found.top_logprobs or 0) if likely else None,
        echoed_fields=_echoed(found),
        store=None if found.store is False else functools.partial(store.put, given=items),
        **asked | {"warnings": tuple(warnings)},
    )


def _echoed(found: ResponsesRequest) -> dict[str, Any]:
    """Fields of the request as the answer repeats them, and what stands for those left out."""
    text, reasoning = found.text or {}, found.reasoning or {}
    functions = [tool for tool in found.tools or [] if tool.get("type") == "function"]
    return {
        "background": False,
        "instructions": found.instructions,
        "max_output_tokens": None
        if found.max_output_tokens == NO_LIMIT
        else (found.max_output_tokens),
        "max_tool_calls": found.max_tool_calls,
        "metadata": found.metadata or {},
        "parallel_tool_calls": found.parallel_tool_calls is not False,
        "previous_response_id": found.previous_response_id,
        "prompt_cache_key": found.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": found.safety_identifier,
        "service_tier": "default",
        "store": found.store is not False,
        "text": {"format": {"type": "text"}} | {k: v for k, v in text.items() if v is not None},
        "tool_choice": found.tool_choice or "auto",
        "tools": [{"strict": False} | tool for tool in functions],
        "truncation": "disabled",
        "user": found.user,
    }


class ResponsesWriter:
    """Answers of /v1/responses."""

    def __init__(self, generation: Generation):
        self.generation = generation
        self.id, self._created = new_id("resp_"), int(time.time())
        self._sequence = -1
        self._items: list[dict[str, Any]] = []  # finished ones
        self._item: dict[str, Any] | None = None  # the one being written
        self._text = ""
        self._likely: list[dict[str, Any]] = []  # log probabilities of that text

    def to_json(self) -> dict[str, Any]:
        [reply] = self.generation.replies
        items: list[dict[str, Any]] = []
        for part in reply.parts or [ReplyPart("content")]:
            if part.kind == "reasoning":
                items.append(_reasoning(new_id("rs_"), part.text))
            elif part.call is None:
                items.append(_message(new_id("msg_"), part.text, self._new_logprobs()))
            else:
                call = part.call
                items.append(_call(new_id("fc_"), call.id, call.name, call.arguments))
        if reply.finish_reason == "length" and items[-1]["type"] != "function_call":
            items[-1]["status"] = "incomplete"
        return self._ended(items, reply)

    def start(self) -> bytes:
        response = self._response([], None)
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def events(self, reply: Reply, events: list[Event]) -> bytes:
        out = b""
        for event in events:
            match event:
                case Content(text):
                    out += self._enter("message")
                    likely = self._new_logprobs()
                    self._likely += likely
                    place = {"content_index": 0, "logprobs": likely}
                    out += self._delta("response.output_text.delta", text, **place)
                case Thinking(text):
                    out += self._enter("reasoning")
                    out += self._delta("response.reasoning_text.delta", text, content_index=0)
                case ToolCallStart(index, name):
                    call_id = reply.calls[index].id
                    out += self._leave()
                    out += self._enter("function_call", call_id, name)
                case ToolCallDelta(_, text):
                    out += self._delta("response.function_call_arguments.delta", text)
                case ToolCallEnd():
                    out += self._leave("completed")
        return out

    def close(self) -> bytes:
        [reply] = self.generation.replies
        out = b""
        if not self._items and self._item is None:
            out = self._enter("message")
        open_call = self._item is not None and self._item["type"] == "function_call"
        cut = open_call or reply.finish_reason == "length"
        out += self._leave("incomplete" if cut else "completed")
        response = self._ended(self._items, reply)
        kind = "incomplete" if response["status"] == "incomplete" else "completed"
        return out + self._event(f"response.{kind}", response=response)

    def error(self, problem: Problem) -> bytes:
        response = self._response(self._items, None) | {
            "status": "failed",
            "error": {"code": "server_error", "message": problem.message},
        }
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return sse_event({"type": kind, "sequence_number": self._sequence} | fields)

    def _new_logprobs(self) -> list[dict[str, Any]]:
        """Those of the answer's text that were not given yet; none where nobody asked."""
        [reply] = self.generation.replies
        entries = reply.answer_logprobs[reply.reported :]
        reply.reported = len(reply.answer_logprobs)
        if not entries:
            return []
        return chat_logprobs(entries, self.generation.model.engine.tokenizer)["content"]

    def _enter(self, kind: str, *call: str) -> bytes:
        """Begins an item, unless one of its kind is being written."""
        if self._item is not None and self._item["type"] == kind:
            return b""
        out = self._leave()
        make, prefix, *rest = BEGINNINGS[kind]
        item = make(new_id(prefix), *call, *rest, status="in_progress")
        self._item, self._text, self._likely = item, "", []
        shown = item if item["type"] == "function_call" else item | {"content": []}
        out += self._event("response.output_item.added", output_index=len(self._items), item=shown)
        if parts := item.get("content"):
            out += self._place("response.content_part.added", part=parts[0])
        return out

    def _place(self, kind: str, **fields: Any) -> bytes:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self._items)}
        return self._event(kind, **place, content_index=0, **fields)

    def _delta(self, kind: str, text: str, **fields: Any) -> bytes:
        assert self._item is not None
        self._text += text
        place = {"item_id": self._item["id"], "output_index": len(self._items)}
        return self._event(kind, **place, delta=text, **fields)

    def _leave(self, status: str | None = None) -> bytes:
        """Ends the item that is being written, if one is.

        Args:
          status: None for incomplete if it is a call, which ends by an event of its own, and else
            for completed.
        """
        if self._item is None:
            return b""
        item, text = self._item, self._text
        if status is None:
            status = "incomplete" if item["type"] == "function_call" else "completed"
        if item["type"] == "message":
            likely = self._likely + self._new_logprobs()
            item = _message(item["id"], text, likely, status)
            out = self._place("response.output_text.done", text=text, logprobs=likely)
            out += self._place("response.content_part.done", part=item["content"][0])
        elif item["type"] == "reasoning":
            item = _reasoning(item["id"], text, status)
            out = self._place("response.reasoning_text.done", text=text)
            out += self._place("response.content_part.done", part=item["content"][0])
        else:
            item = _call(item["id"], item["call_id"], item["name"], text or "{}", status)
            place = {"item_id": item["id"], "output_index": len(self._items)}
            kind = "response.function_call_arguments.done"
            out = self._event(kind, **place, name=item["name"], arguments=text or "{}")
        out += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._item = None
        return out

    def _ended(self, items: list[dict[str, Any]], reply: Reply) -> dict[str, Any]:
        """The whole response, which is kept for requests that refer to it."""
        answer = self._response(items, reply)
        if keep := self.generation.request.store:
            keep(answer)
        return answer

    def _response(self, items: list[dict[str, Any]], reply: Reply | None) -> dict[str, Any]:
        request = self.generation.request
        cut = reply is not None and reply.finish_reason == "length"
        status = "incomplete" if cut else "completed" if reply else "in_progress"
        temperature = self.generation.model.defaults.temperature
        found: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.generation.model.name,
            "output": items,
            "temperature": request.options.get("temperature", temperature),
            "top_p": request.options.get("top_p", 1.0),
            "top_logprobs": request.logprobs or 0,
            "usage": self._usage() if reply else None,
        } | request.echoed_fields
        if reply is None:
            return found
        found["finish_details"] = reply.details
        if request.return_token_ids:
            found["token_ids"] = reply.ids
            found["prompt_token_ids"] = self.generation.prompts[0].ids
        return found | statistics.requested_statistics(self.generation, self.id)

    def _usage(self) -> dict[str, Any]:
        found = statistics.usage(self.generation)
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": found["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": found["completion_tokens_details"],
            "total_tokens": found["total_tokens"],
        }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message(
    item_id: str, text: str, logprobs: list[dict[str, Any]], status: str = "completed"
) -> dict[str, Any]:
    head = {"id": item_id, "type": "message", "role": "assistant", "status": status}
    return head | {"content": [_part(text, logprobs)]}


def _reasoning(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def _call(
    item_id: str, call_id: str, name: str, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    head = {"id": item_id, "type": "function_call", "call_id": call_id, "name": name}
    return head | {"arguments": arguments, "status": status}


BEGINNINGS: dict[str, tuple[Any, ...]] = {
    "message": (_message, "msg_", "", []),
    "reasoning": (_reasoning, "rs_", ""),
    "function_call": (_call, "fc_", ""),
}
