"""OpenAI's /v1/responses, as far as agents use it: request decoding, responses, stream events."""

import time
from typing import Any

from dflash_jax.server import statistics
from dflash_jax.server.conversation import check_tools, parse_messages, parse_tools
from dflash_jax.server.fields import CommonFields, common_arguments
from dflash_jax.server.generation import Generation
from dflash_jax.server.logprobs import chat_logprobs
from dflash_jax.server.message_formats import messages_from_responses
from dflash_jax.server.models import answer_name
from dflash_jax.server.protocol import NO_LIMIT, GenerationRequest, Problem, decode, new_id
from dflash_jax.server.reply import Reply, ReplyPart
from dflash_jax.server.response_items import BEGINNINGS, call_item, message_item, reasoning_item
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

LOGPROBS = "message.output_text.logprobs"  # an entry of `include`


class ResponsesRequest(CommonFields, kw_only=True):
    """Body of POST /v1/responses."""

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
    # Accepted without effect.
    max_tool_calls: Any = None
    stream_options: Any = None
    client_metadata: Any = None


def decode_responses(body: bytes, store: ResponseStore | None = None) -> GenerationRequest:
    """Return the request of a body.

    Args:
      store: responses that the request may refer to. Its own is added unless `store` is false.

    Raises:
      Problem: the body is invalid, or asks for something unsupported.
    """
    store = store or ResponseStore()
    parsed, unknown = decode(body, ResponsesRequest)
    for name in ("background", "prompt"):
        if getattr(parsed, name):
            raise Problem(400, f"{name} is not supported here", param=name)
    if not parsed.input and isinstance(parsed.input, list):
        raise Problem(400, "input is empty; give at least one item", param="input")
    items = parsed.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    conversation, keep = _conversation(parsed), parsed.store is not False
    turn = store.begin_turn(
        items, previous=parsed.previous_response_id, conversation=conversation, keep=keep
    )
    text = parsed.text or {}
    common = common_arguments(parsed, unknown, text.get("format"), "text.format")
    warnings = list(common["warnings"])
    if parsed.truncation == "auto":
        warnings.append("truncation was ignored: an input that is too long is refused")
    if text.get("verbosity"):
        warnings.append("text.verbosity was ignored")
    check_tools(parsed.tools)
    given = []
    places = []
    for at, tool in enumerate(parsed.tools or []):
        if tool.get("type") != "function":
            warnings.append(f"the tool type {tool.get('type')!r} was ignored")
            continue
        keys = ("name", "description", "parameters", "strict")
        inner = {key: tool[key] for key in keys if tool.get(key) is not None}
        given.append({"type": "function", "function": inner})
        places.append(f"tools[{at}]")
    tools, declared, choice = parse_tools(given, parsed.tool_choice, places)
    template, more = reasoning_options(parsed.chat_template_kwargs, reasoning=parsed.reasoning)
    warnings += more
    logprobs = parsed.top_logprobs or LOGPROBS in (parsed.include or ())
    return GenerationRequest(
        api="responses",
        messages=parse_messages(messages_from_responses(parsed.instructions, turn.items)),
        tools=tools,
        declared_tools=declared,
        tool_choice=choice,
        parallel_tool_calls=parsed.parallel_tool_calls is not False,
        template_kwargs=template,
        max_tokens=parsed.max_output_tokens,
        logprobs=(parsed.top_logprobs or 0) if logprobs else None,
        echoed_fields=_echoed(parsed),
        store=turn.record if keep or conversation else None,
        **common | {"warnings": tuple(warnings)},
    )


def _conversation(parsed: ResponsesRequest) -> str | None:
    """Return the id of the conversation that a request continues, if it names one."""
    given = parsed.conversation
    if isinstance(given, dict):
        given = given.get("id", given)
    if given is not None and not (given and isinstance(given, str)):
        raise Problem(
            400, f"conversation is {str(given)[:100]!r}; expected an id, or an object with one",
            param="conversation",
        )  # fmt: skip
    if given and parsed.previous_response_id:
        raise Problem(
            400, "conversation and previous_response_id were given; give one of them",
            param="conversation",
        )  # fmt: skip
    return given


def _echoed(parsed: ResponsesRequest) -> dict[str, Any]:
    """Return the request fields that the response repeats, with defaults for missing ones."""
    text, reasoning = parsed.text or {}, parsed.reasoning or {}
    functions = [tool for tool in parsed.tools or [] if tool.get("type") == "function"]
    max_output_tokens = parsed.max_output_tokens
    if max_output_tokens == NO_LIMIT:
        max_output_tokens = None
    return {
        "background": False,
        "conversation": {"id": id_} if (id_ := _conversation(parsed)) else None,
        "instructions": parsed.instructions,
        "max_output_tokens": max_output_tokens,
        "max_tool_calls": parsed.max_tool_calls,
        "metadata": parsed.metadata or {},
        "parallel_tool_calls": parsed.parallel_tool_calls is not False,
        "previous_response_id": parsed.previous_response_id,
        "prompt_cache_key": parsed.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": parsed.safety_identifier,
        "service_tier": "default",
        "store": parsed.store is not False,
        "text": {"format": {"type": "text"}} | {k: v for k, v in text.items() if v is not None},
        "tool_choice": parsed.tool_choice or "auto",
        "tools": [{"strict": False} | tool for tool in functions],
        "truncation": "disabled",
        "user": parsed.user,
    }


class ResponsesWriter:
    """Writes responses and stream events of /v1/responses."""

    def __init__(self, generation: Generation):
        self.generation = generation
        self.id, self._created = new_id("resp_"), int(time.time())
        self._sequence = -1
        self._items: list[dict[str, Any]] = []  # finished output items
        self._item: dict[str, Any] | None = None  # the current item
        self._text = ""  # of the current item
        self._logprobs: list[dict[str, Any]] = []  # log probabilities of `_text`

    def to_json(self) -> dict[str, Any]:
        """Return the response object."""
        [reply] = self.generation.replies
        items: list[dict[str, Any]] = []
        for part in reply.parts or [ReplyPart("content")]:
            if part.kind == "reasoning":
                items.append(reasoning_item(new_id("rs_"), part.text))
            elif part.call is None:
                items.append(message_item(new_id("msg_"), part.text, self._new_logprobs()))
            else:
                call = part.call
                items.append(call_item(new_id("fc_"), call.id, call.name, call.arguments))
        if reply.finish_reason == "length" and items[-1]["type"] != "function_call":
            items[-1]["status"] = "incomplete"
        return self._ended(items, reply)

    def start(self) -> bytes:
        """Return response.created and response.in_progress."""
        response = self._response([], None)
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def events(self, reply: Reply, events: list[Event]) -> bytes:
        """Return the stream events of new output."""
        out = b""
        for event in events:
            match event:
                case Content(text):
                    out += self._enter("message")
                    logprobs = self._new_logprobs()
                    self._logprobs += logprobs
                    place = {"content_index": 0, "logprobs": logprobs}
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
        """Return the end of the current item, and response.completed or response.incomplete."""
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
        """Return response.failed."""
        response = self._response(self._items, None) | {
            "status": "failed",
            "error": {"code": "server_error", "message": problem.message},
        }
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return sse_event({"type": kind, "sequence_number": self._sequence} | fields)

    def _new_logprobs(self) -> list[dict[str, Any]]:
        """Return the log probabilities of content that were not sent yet, if requested."""
        [reply] = self.generation.replies
        entries = reply.answer_logprobs[reply.reported :]
        reply.reported = len(reply.answer_logprobs)
        if not entries:
            return []
        return chat_logprobs(entries, self.generation.model.engine.tokenizer)["content"]

    def _enter(self, kind: str, *call: str) -> bytes:
        """Return the events that start an item, unless one of its kind is open."""
        if self._item is not None and self._item["type"] == kind:
            return b""
        out = self._leave()
        make, prefix, *rest = BEGINNINGS[kind]
        item = make(new_id(prefix), *call, *rest, status="in_progress")
        self._item, self._text, self._logprobs = item, "", []
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
        """Return the events that end the current item, if one is open.

        Args:
          status: by default "incomplete" for a call, since complete calls end with `ToolCallEnd`,
            and "completed" for other items.
        """
        if self._item is None:
            return b""
        item, text = self._item, self._text
        if status is None:
            status = "incomplete" if item["type"] == "function_call" else "completed"
        if item["type"] == "message":
            logprobs = self._logprobs + self._new_logprobs()
            item = message_item(item["id"], text, logprobs, status)
            out = self._place("response.output_text.done", text=text, logprobs=logprobs)
            out += self._place("response.content_part.done", part=item["content"][0])
        elif item["type"] == "reasoning":
            item = reasoning_item(item["id"], text, status)
            out = self._place("response.reasoning_text.done", text=text)
            out += self._place("response.content_part.done", part=item["content"][0])
        else:
            item = call_item(item["id"], item["call_id"], item["name"], text or "{}", status)
            place = {"item_id": item["id"], "output_index": len(self._items)}
            kind = "response.function_call_arguments.done"
            out = self._event(kind, **place, name=item["name"], arguments=text or "{}")
        out += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._item = None
        return out

    def _ended(self, items: list[dict[str, Any]], reply: Reply) -> dict[str, Any]:
        """Return the finished response, and store it unless the request forbids it."""
        answer = self._response(items, reply)
        if keep := self.generation.request.store:
            keep(answer)
        return answer

    def _response(self, items: list[dict[str, Any]], reply: Reply | None) -> dict[str, Any]:
        request = self.generation.request
        cut = reply is not None and reply.finish_reason == "length"
        status = "incomplete" if cut else "completed" if reply else "in_progress"
        temperature = self.generation.model.defaults.temperature
        response: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": answer_name(self.generation.model.name, request.model),
            "output": items,
            "temperature": request.options.get("temperature", temperature),
            "top_p": request.options.get("top_p", 1.0),
            "top_logprobs": request.logprobs or 0,
            "usage": statistics.responses_usage(self.generation) if reply else None,
        } | request.echoed_fields
        if reply is None:
            return response
        response["finish_details"] = reply.details
        if request.return_token_ids:
            response["token_ids"] = reply.ids
            response["prompt_token_ids"] = self.generation.prompts[0].ids
        return response | statistics.requested_statistics(self.generation, self.id)
