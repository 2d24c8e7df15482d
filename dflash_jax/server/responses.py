"""OpenAI's /v1/responses: request decoding, responses and stream events."""

import time
from typing import Any, Literal

from dflash_jax.server.conversation import parse_messages
from dflash_jax.server.fields import CommonFields, common_arguments
from dflash_jax.server.freeform import FreeformInput
from dflash_jax.server.generation import Generation
from dflash_jax.server.logprobs import chat_logprobs
from dflash_jax.server.message_formats import messages_from_responses
from dflash_jax.server.protocol import (
    NO_LIMIT,
    ClientTool,
    GenerationRequest,
    Problem,
    decode,
    new_id,
)
from dflash_jax.server.reasoning import reasoning_options
from dflash_jax.server.reply import Reply, ReplyPart
from dflash_jax.server.response_items import (
    CALL_PREFIXES,
    call_item,
    is_call,
    message_item,
    reasoning_item,
)
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.tools import CLIENT_TYPES, responses_choice, responses_tools, tool_arguments
from dflash_jax.server.writer import ResponseWriter, responses_usage, sse_event
from dflash_jax.tool_parsers.calls import (
    Content,
    Event,
    Thinking,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

# Fields that the response adds to the tools that it repeats, by their type.
ECHOED_DEFAULTS = {"function": {"strict": False}, "namespace": {"description": ""}}
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
      store: responses that the request may refer to. Its own response is added unless the field
        `store` is false.

    Raises:
      Problem: 400, the body is not such a request, or asks for something unsupported; 404, it
        refers to what is not stored.
    """
    store = store or ResponseStore()
    parsed, unread = decode(body, ResponsesRequest)
    for name in ("background", "prompt"):
        if getattr(parsed, name):
            raise Problem(f"{name} is not supported here", param=name)
    if not parsed.input and isinstance(parsed.input, list):
        raise Problem("input is empty; give at least one item", param="input")
    items = parsed.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    conversation = _conversation(parsed)
    keep = parsed.store is not False
    turn = store.begin_turn(
        items, previous=parsed.previous_response_id, conversation=conversation, keep=keep
    )
    text = parsed.text or {}
    arguments = common_arguments(parsed, unread, text.get("format"), "text.format")
    warnings = list(arguments["warnings"])
    if parsed.truncation == "auto":
        warnings.append("truncation was ignored: an input that is too long is refused")
    if text.get("verbosity"):
        warnings.append("text.verbosity was ignored")
    declared = responses_tools(parsed.tools)
    choice = responses_choice(parsed.tool_choice, declared)
    arguments |= tool_arguments(declared, choice)
    warnings += declared.warnings
    messages = messages_from_responses(parsed.instructions, turn.items, warnings)
    messages = parse_messages(messages, warnings)
    variables, reasoning_warnings = reasoning_options(
        parsed.chat_template_kwargs, reasoning=parsed.reasoning
    )
    warnings += reasoning_warnings
    arguments["warnings"] = tuple(warnings)
    logprobs = None
    if parsed.top_logprobs or LOGPROBS in (parsed.include or ()):
        logprobs = parsed.top_logprobs or 0
    return GenerationRequest(
        api="responses",
        messages=messages,
        parallel_tool_calls=parsed.parallel_tool_calls is not False,
        template_kwargs=variables,
        max_tokens=parsed.max_output_tokens,
        logprobs=logprobs,
        echoed_fields=_echoed(parsed),
        store=turn.record if keep or conversation else None,
        **arguments,
    )


def _conversation(parsed: ResponsesRequest) -> str | None:
    """Return the id of the conversation that a request continues, if it names one."""
    conversation = parsed.conversation
    if isinstance(conversation, dict):
        conversation = conversation.get("id", conversation)
    if conversation is None:
        return None
    if not (conversation and isinstance(conversation, str)):
        raise Problem(
            f"conversation is {str(conversation)[:100]!r}; expected an id, or an object with one",
            param="conversation",
        )
    if parsed.previous_response_id:
        raise Problem(
            "conversation and previous_response_id were given; give one of them",
            param="conversation",
        )
    return conversation


def _echoed(parsed: ResponsesRequest) -> dict[str, Any]:
    """Return the request fields that the response repeats, with defaults for missing ones."""
    text = parsed.text or {}
    reasoning = parsed.reasoning or {}
    conversation = _conversation(parsed)
    tools = [tool for tool in parsed.tools or [] if tool.get("type") in CLIENT_TYPES]
    text_options = {key: value for key, value in text.items() if value is not None}
    max_output_tokens = parsed.max_output_tokens
    if max_output_tokens == NO_LIMIT:
        max_output_tokens = None
    return {
        "background": False,
        "conversation": None if conversation is None else {"id": conversation},
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
        "text": {"format": {"type": "text"}} | text_options,
        "tool_choice": parsed.tool_choice or "auto",
        "tools": [ECHOED_DEFAULTS.get(tool["type"], {}) | tool for tool in tools],
        "truncation": "disabled",
        "user": parsed.user,
    }


class ResponsesWriter(ResponseWriter):
    """Writes responses and stream events of /v1/responses."""

    prefix = "resp_"

    def __init__(self, generation: Generation):
        super().__init__(generation)
        self._sequence = -1  # number of the last event
        self._items: list[dict[str, Any]] = []  # finished output items
        # The current item, its text, which is JSON for a call, and the text's log probabilities.
        self._item: dict[str, Any] | None = None
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        # The tool of the current call, and the decoder of its text if it takes text.
        self._tool = ClientTool("function", "")
        self._freeform = FreeformInput()

    def to_json(self) -> dict[str, Any]:
        """Return the response object."""
        [reply] = self.generation.replies
        items: list[dict[str, Any]] = []
        for part in reply.parts or [ReplyPart("content")]:
            call = part.call
            if call is not None:
                tool = self._client_tool(call.name)
                item_id = new_id(CALL_PREFIXES[tool.kind])
                items.append(call_item(item_id, call.id, tool, call.arguments))
            elif part.kind == "reasoning":
                items.append(reasoning_item(new_id("rs_"), part.text))
            else:
                items.append(message_item(new_id("msg_"), part.text, self._new_logprobs()))
        if reply.finish_reason == "length" and not is_call(items[-1]):
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
                    self._text += text
                    logprobs = self._new_logprobs()
                    self._logprobs += logprobs
                    out += self._delta(
                        "response.output_text.delta", text, content_index=0, logprobs=logprobs
                    )
                case Thinking(text):
                    out += self._enter("reasoning")
                    self._text += text
                    out += self._delta("response.reasoning_text.delta", text, content_index=0)
                case ToolCallStart(index, name):
                    out += self._leave()
                    out += self._enter_call(reply.calls[index].id, self._client_tool(name))
                case ToolCallDelta(_, text):
                    out += self._call_delta(text)
                case ToolCallEnd():
                    out += self._leave("completed")
        return out

    def close(self) -> bytes:
        """Return the end of the current item, and response.completed or response.incomplete."""
        [reply] = self.generation.replies
        out = b""
        if not self._items and self._item is None:
            out = self._enter("message")
        ends_in_call = self._item is not None and is_call(self._item)
        is_cut = ends_in_call or reply.finish_reason == "length"
        out += self._leave("incomplete" if is_cut else "completed")
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

    def _client_tool(self, name: str) -> ClientTool:
        """Return a tool as the client declared it; undeclared ones are functions."""
        return self.request.client_tools.get(name, ClientTool("function", name))

    def _enter(self, kind: Literal["message", "reasoning"]) -> bytes:
        """Return the events that start an item, unless one of its kind is open."""
        if self._item is not None and self._item["type"] == kind:
            return b""
        out = self._leave()
        if kind == "message":
            item = message_item(new_id("msg_"), "", [], status="in_progress")
        else:
            item = reasoning_item(new_id("rs_"), "", status="in_progress")
        out += self._added(item, item | {"content": []})
        return out + self._part_event("response.content_part.added", part=item["content"][0])

    def _enter_call(self, call_id: str, tool: ClientTool) -> bytes:
        """Return the event that starts a call."""
        item = call_item(new_id(CALL_PREFIXES[tool.kind]), call_id, tool, "", "in_progress")
        self._tool = tool
        self._freeform = FreeformInput()
        return self._added(item, item)

    def _added(self, item: dict[str, Any], shown: dict[str, Any]) -> bytes:
        """Make an item the current one, and return the event that shows it."""
        self._item = item
        self._text = ""
        self._logprobs = []
        return self._event("response.output_item.added", output_index=len(self._items), item=shown)

    def _call_delta(self, arguments: str) -> bytes:
        """Return the event of more of a call's arguments, if its kind of item has one."""
        self._text += arguments
        match self._tool.kind:
            case "function":
                return self._delta("response.function_call_arguments.delta", arguments)
            case "custom" if text := self._freeform.push(arguments):
                return self._delta("response.custom_tool_call_input.delta", text)
        return b""

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the current item."""
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self._items), **fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the only part of the current item."""
        return self._item_event(kind, content_index=0, **fields)

    def _delta(self, kind: str, text: str, **fields: Any) -> bytes:
        return self._item_event(kind, delta=text, **fields)

    def _leave(self, status: str | None = None) -> bytes:
        """Return the events that end the current item, if one is open.

        Args:
          status: by default "incomplete" for a call, since complete calls end with `ToolCallEnd`,
            and "completed" for other items.
        """
        if self._item is None:
            return b""
        item = self._item
        text = self._text
        if status is None:
            status = "incomplete" if is_call(item) else "completed"
        if item["type"] == "message":
            logprobs = self._logprobs + self._new_logprobs()
            item = message_item(item["id"], text, logprobs, status)
            out = self._part_event("response.output_text.done", text=text, logprobs=logprobs)
            out += self._part_event("response.content_part.done", part=item["content"][0])
        elif item["type"] == "reasoning":
            item = reasoning_item(item["id"], text, status)
            out = self._part_event("response.reasoning_text.done", text=text)
            out += self._part_event("response.content_part.done", part=item["content"][0])
        else:
            out, item = self._call_done(item, text or "{}", status)
        out += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._item = None
        return out

    def _call_done(
        self, item: dict[str, Any], arguments: str, status: str
    ) -> tuple[bytes, dict[str, Any]]:
        """Return the events that end a call's arguments, and the finished item."""
        tool = self._tool
        finished = call_item(item["id"], item["call_id"], tool, arguments, status)
        out = b""
        if tool.kind == "function":
            kind = "response.function_call_arguments.done"
            out = self._item_event(kind, name=tool.name, arguments=arguments)
        elif tool.kind == "custom":
            rest = self._freeform.finish(arguments)
            if rest:
                out = self._delta("response.custom_tool_call_input.delta", rest)
            text = self._freeform.text
            finished["input"] = text
            out += self._item_event("response.custom_tool_call_input.done", input=text)
        return out, finished

    def _ended(self, items: list[dict[str, Any]], reply: Reply) -> dict[str, Any]:
        """Return the finished response, and store it unless the request forbids it."""
        response = self._response(items, reply)
        if self.request.store is not None:
            self.request.store(response)
        return response

    def _response(self, items: list[dict[str, Any]], reply: Reply | None) -> dict[str, Any]:
        """Return the response object; without a reply, that of a response in progress."""
        request = self.request
        is_cut = reply is not None and reply.finish_reason == "length"
        status = "in_progress"
        if reply is not None:
            status = "incomplete" if is_cut else "completed"
        temperature = self.generation.model.defaults.temperature
        response: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._model,
            "output": items,
            "temperature": request.options.get("temperature", temperature),
            "top_p": request.options.get("top_p", 1.0),
            "top_logprobs": request.logprobs or 0,
            "usage": responses_usage(self.generation) if reply else None,
        } | request.echoed_fields
        if reply is None:
            return response
        return response | self._finished_fields(reply)
