"""OpenAI's /v1/responses, the part that agents need: nothing is stored between requests."""

import time
from typing import Any

import msgspec

from dflash_jax.server import figures
from dflash_jax.server.conversation import conversation, offered
from dflash_jax.server.fields import effort, response_format
from dflash_jax.server.generation import Generation
from dflash_jax.server.protocol import Ask, Message, Problem, decode, new_id
from dflash_jax.server.reply import Reply
from dflash_jax.server.writer import named
from dflash_jax.tools.events import Arguments, CallBegun, CallDone, Content, Event, Thinking


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted, and without effect here.
    store: Any = None
    include: Any = None
    metadata: Any = None
    user: Any = None
    truncation: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    max_tool_calls: Any = None
    stream_options: Any = None
    client_metadata: Any = None


def decode_responses(body: bytes) -> Ask:
    """The request as an `Ask`."""
    found, unknown = decode(body, ResponsesRequest)
    for name in ("previous_response_id", "background"):
        if getattr(found, name):
            raise Problem(
                400, f"{name} is not supported: nothing is stored here; send the whole input",
                param=name,
            )  # fmt: skip
    warnings = [f"the unknown field {name!r} was ignored" for name in unknown]
    given = []
    for tool in found.tools or []:
        if tool.get("type") != "function":
            warnings.append(f"the tool type {tool.get('type')!r} was ignored")
            continue
        keys = ("name", "description", "parameters", "strict")
        inner = {key: tool[key] for key in keys if tool.get(key) is not None}
        given.append({"type": "function", "function": inner})
    tools, declared, choice = offered(given, found.tool_choice)
    template = dict(found.chat_template_kwargs or {})
    if isinstance(word := (found.reasoning or {}).get("effort"), str):
        template |= effort(word, template)
    options = {name: getattr(found, name) for name in ("temperature", "top_p")}
    form = (found.text or {}).get("format")
    grammar = response_format(form) if isinstance(form, dict) else None
    return Ask(
        api="responses",
        model=found.model,
        messages=conversation(_messages(found)),
        tools=tools,
        declared=declared,
        choice=choice,
        parallel=found.parallel_tool_calls is not False,
        options={name: value for name, value in options.items() if value is not None},
        grammar=grammar if grammar and grammar[1] is not None else None,
        template=template,
        max_tokens=found.max_output_tokens,
        stream=bool(found.stream),
        warnings=tuple(warnings),
    )


def _messages(found: ResponsesRequest) -> list[Message]:
    """The conversation in the chat completions shape; neighbouring calls are one turn."""
    system: list[str] = [found.instructions] if found.instructions else []
    made: list[Message] = []
    items = found.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    thought = ""
    for at, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not (made and made[-1]["role"] == "assistant"):
                made.append({"role": "assistant", "content": None})
            made[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            result = {"role": "tool", "tool_call_id": item.get("call_id")}
            made.append(result | {"content": output if output is not None else ""})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thought = "".join(str(p.get("text", "")) for p in parts if isinstance(p, dict))
            continue
        elif kind == "message" and item.get("role") in ("system", "developer"):
            content = item.get("content")
            if not isinstance(content, str | list):
                raise Problem(400, "content is missing", param=f"input[{at}].content")
            made.append({"role": "system", "content": content})
        elif kind == "message":
            made.append({"role": item.get("role"), "content": item.get("content")})
        else:
            raise Problem(400, f"an item of type {kind!r} is not supported", param=f"input[{at}]")
        if thought and made[-1]["role"] == "assistant":
            made[-1]["reasoning_content"] = thought
        thought = ""
    # One system message leads: many templates accept no other place.
    leading = [{"role": "system", "content": text} for text in system]
    leading += [m for m in made if m["role"] == "system"]
    return [*leading, *(m for m in made if m["role"] != "system")]


class ResponsesWriter:
    """Answers of /v1/responses."""

    def __init__(self, generation: Generation):
        self.generation = generation
        self._id, self._created = new_id("resp_"), int(time.time())
        self._sequence = -1
        self._items: list[dict[str, Any]] = []  # finished ones
        self._item: dict[str, Any] | None = None  # the one being written
        self._text = ""

    def whole(self) -> dict[str, Any]:
        [reply] = self.generation.replies
        items: list[dict[str, Any]] = []
        if reply.thoughts:
            items.append(_reasoning(new_id("rs_"), reply.thoughts))
        if reply.content or not reply.done_calls:
            items.append(_message(new_id("msg_"), reply.content))
        for call in reply.done_calls:
            items.append(_call(new_id("fc_"), call.id, call.name, call.arguments))
        return self._response(items, reply)

    def start(self) -> bytes:
        response = self._response([], None)
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def events(self, reply: Reply, events: list[Event]) -> bytes:
        out = b""
        for event in events:
            match event:
                case Content(text):
                    out += self._enter(_message(new_id("msg_"), "", "in_progress"))
                    out += self._delta("response.output_text.delta", text, content_index=0)
                case Thinking(text):
                    out += self._enter(_reasoning(new_id("rs_"), "", "in_progress"))
                    out += self._delta("response.reasoning_text.delta", text, content_index=0)
                case CallBegun(index, name):
                    call_id = reply.calls[index].id
                    out += self._leave()
                    out += self._enter(_call(new_id("fc_"), call_id, name, "", "in_progress"))
                case Arguments(_, text):
                    out += self._delta("response.function_call_arguments.delta", text)
                case CallDone():
                    out += self._leave()
        return out

    def close(self) -> bytes:
        [reply] = self.generation.replies
        out = b""
        if not self._items and self._item is None:
            out = self._enter(_message(new_id("msg_"), "", "in_progress"))
        out += self._leave()
        response = self._response(self._items, reply)
        kind = "incomplete" if response["status"] == "incomplete" else "completed"
        return out + self._event(f"response.{kind}", response=response)

    def problem(self, problem: Problem) -> bytes:
        response = self._response(self._items, None) | {
            "status": "failed",
            "error": {"code": problem.code or "server_error", "message": problem.message},
        }
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return named({"type": kind, "sequence_number": self._sequence} | fields)

    def _enter(self, item: dict[str, Any]) -> bytes:
        if self._item is not None and self._item["type"] == item["type"]:
            return b""
        out = self._leave()
        self._item, self._text = item, ""
        shown = item if item["type"] == "function_call" else item | {"content": []}
        out += self._event("response.output_item.added", output_index=len(self._items), item=shown)
        if item["type"] == "message":
            out += self._place("response.content_part.added", part=_part(""))
        return out

    def _place(self, kind: str, **fields: Any) -> bytes:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self._items)}
        return self._event(kind, **place, content_index=0, **fields)

    def _delta(self, kind: str, text: str, **fields: Any) -> bytes:
        assert self._item is not None
        self._text += text
        more: dict[str, Any] = {"logprobs": []} if kind == "response.output_text.delta" else {}
        place = {"item_id": self._item["id"], "output_index": len(self._items)}
        return self._event(kind, **place, delta=text, **fields, **more)

    def _leave(self) -> bytes:
        if self._item is None:
            return b""
        item, text = self._item, self._text
        if item["type"] == "message":
            item = _message(item["id"], text)
            out = self._place("response.output_text.done", text=text, logprobs=[])
            out += self._place("response.content_part.done", part=_part(text))
        elif item["type"] == "reasoning":
            item = _reasoning(item["id"], text)
            out = self._place("response.reasoning_text.done", text=text)
        else:
            item = _call(item["id"], item["call_id"], item["name"], text or "{}")
            place = {"item_id": item["id"], "output_index": len(self._items)}
            kind = "response.function_call_arguments.done"
            out = self._event(kind, **place, name=item["name"], arguments=text or "{}")
        out += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._item = None
        return out

    def _response(self, items: list[dict[str, Any]], reply: Reply | None) -> dict[str, Any]:
        ask = self.generation.ask
        cut = reply is not None and reply.finish_reason == "length"
        status = "incomplete" if cut else "completed" if reply else "in_progress"
        choice = {"type": "function", "name": ask.choice.name}
        temperature = self.generation.model.defaults.temperature
        found = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": None,
            "max_output_tokens": ask.max_tokens,
            "model": self.generation.model.name,
            "output": items,
            "parallel_tool_calls": ask.parallel,
            "previous_response_id": None,
            "store": False,
            "temperature": ask.options.get("temperature", temperature),
            "text": {"format": {"type": "text"}},
            "tool_choice": choice if ask.choice.kind == "named" else ask.choice.kind,
            "tools": [{"type": "function", "strict": False} | t["function"] for t in ask.tools],
            "top_p": ask.options.get("top_p", 1.0),
            "metadata": {},
            "usage": self._usage(reply) if reply else None,
        }
        return found | ({"warnings": list(ask.warnings)} if ask.warnings else {})

    def _usage(self, reply: Reply) -> dict[str, Any]:
        stats = [reply.result.stats] if reply.result else []
        prompt_tokens = sum(len(prompt.ids) for prompt in self.generation.prompts)
        found = figures.usage(prompt_tokens, stats, reply.thinking_tokens)
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": found["prompt_tokens_details"],
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": found["completion_tokens_details"],
            "total_tokens": found["total_tokens"],
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    head = {"id": item_id, "type": "message", "role": "assistant", "status": status}
    return head | {"content": [_part(text)]}


def _reasoning(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def _call(
    item_id: str, call_id: str, name: str, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    head = {"id": item_id, "type": "function_call", "call_id": call_id, "name": name}
    return head | {"arguments": arguments, "status": status}
