"""Answers of /v1/chat/completions and /v1/completions: whole objects and stream chunks."""

import abc
import time
from typing import Any, Protocol

import msgspec

from dflash_jax.engine.result import TokenLogprob
from dflash_jax.server import figures
from dflash_jax.server.generation import Generation
from dflash_jax.server.logprobs import chat_logprobs, completion_logprobs
from dflash_jax.server.protocol import Problem, new_id
from dflash_jax.server.reply import Reply
from dflash_jax.tools.events import Arguments, CallBegun, Content, Event, Thinking

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class Writer(Protocol):
    """One API's way to answer. The stream methods give server-sent events."""

    def start(self) -> bytes:
        """Before any output."""
        ...

    def events(self, reply: Reply, events: list[Event]) -> bytes:
        """New output; the last of a reply comes with `reply.result` set."""
        ...

    def close(self) -> bytes:
        """After the last output."""
        ...

    def problem(self, problem: Problem) -> bytes:
        """Instead of the rest."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        ...


def data(value: Any) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def named(value: dict[str, Any]) -> bytes:
    """A server-sent event whose name is the value's type."""
    return b"event: " + value["type"].encode() + b"\n" + data(value)


class OpenAI(abc.ABC):
    """What chat completions and completions have in common."""

    prefix = kind = ""

    def __init__(self, generation: Generation):
        self.generation, self.ask = generation, generation.ask
        self._head = {
            "id": new_id(self.prefix),
            "created": int(time.time()),
            "model": generation.model.name,
            "system_fingerprint": generation.model.fingerprint,
        }

    def start(self) -> bytes:
        return b""

    def problem(self, problem: Problem) -> bytes:
        return data(problem.to_json()) + DONE

    def close(self) -> bytes:
        tail = data(self._object([], **self._usage())) if self.ask.usage_chunk else b""
        return tail + DONE

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(reply) for reply in self.generation.replies]
        return self._object(choices, **self._usage())

    @abc.abstractmethod
    def _choice(self, reply: Reply) -> dict[str, Any]:
        """A finished output as one entry of `choices`."""

    def _object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"object": self.kind, **self._head, "choices": choices, **more}

    def _usage(self) -> dict[str, Any]:
        """usage, and the figures that were asked for."""
        replies, ask = self.generation.replies, self.ask
        stats = [reply.result.stats for reply in replies if reply.result]
        prompt_tokens = sum(len(prompt.ids) for prompt in self.generation.prompts)
        thinking = sum(reply.thinking_tokens for reply in replies)
        found: dict[str, Any] = {"usage": figures.usage(prompt_tokens, stats, thinking)}
        if ask.timings:
            found["timings"] = figures.timings(stats[0])
        if ask.metrics:
            found["metrics"] = figures.metrics(stats[0]) if len(stats) == 1 else None
        if ask.meta_info:
            found["meta_info"] = {"id": self._head["id"]} | figures.meta_info(stats[0])
        if ask.warnings:
            found["warnings"] = list(ask.warnings)
        return found

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        """What `entries` become in a choice; None where nobody asked."""
        if self.ask.logprobs is None:
            return None
        tokenizer = self.generation.model.engine.tokenizer
        shape = chat_logprobs if self.ask.api == "chat" else completion_logprobs
        return shape(entries, tokenizer)

    def _fresh_logprobs(self, reply: Reply) -> dict[str, Any] | None:
        """Those of a chunk: what no chunk has had yet."""
        entries, reply.reported = reply.logprobs[reply.reported :], len(reply.logprobs)
        return self._logprobs(entries)

    def _last(self, reply: Reply) -> dict[str, Any]:
        """What the end of an output adds to its chunk."""
        if self.ask.stream and not self.ask.usage_chunk and len(self.generation.replies) == 1:
            found = self._usage()
            return {k: v for k, v in found.items() if k != "usage"}
        return {}


class ChatWriter(OpenAI):
    """/v1/chat/completions."""

    prefix, kind = "chatcmpl-", "chat.completion"

    def start(self) -> bytes:
        self.kind = "chat.completion.chunk"
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(reply, first) for reply in self.generation.replies)

    def events(self, reply: Reply, events: list[Event]) -> bytes:
        out = b""
        for event in events:
            match event:
                case Content(text):
                    out += self._chunk(reply, {"content": text})
                case Thinking(text):
                    out += self._chunk(reply, {"reasoning_content": text})
                case CallBegun(index, name):
                    head = {"index": index, "id": reply.calls[index].id, "type": "function"}
                    call = head | {"function": {"name": name, "arguments": ""}}
                    out += self._chunk(reply, {"tool_calls": [call]})
                case Arguments(index, text):
                    call = {"index": index, "function": {"arguments": text}}
                    out += self._chunk(reply, {"tool_calls": [call]})
        if reply.result is not None:
            choice: dict[str, Any] = {"finish_reason": reply.finish_reason}
            choice["finish_details"] = reply.details
            if self.ask.token_ids:
                choice["token_ids"] = reply.ids
            out += self._chunk(reply, {}, choice, **self._last(reply))
        return out

    def _chunk(
        self, reply: Reply, delta: dict[str, Any], choice: dict[str, Any] | None = None, **more: Any
    ) -> bytes:
        base: dict[str, Any] = {"index": reply.index, "delta": delta, "finish_reason": None}
        base["logprobs"] = self._fresh_logprobs(reply)
        return data(self._object([base | (choice or {})], **more))

    def _choice(self, reply: Reply) -> dict[str, Any]:
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.done_calls
        ]
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = reply.content if reply.content or not calls else None
        if reply.thoughts:
            message["reasoning_content"] = reply.thoughts
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, Any] = {
            "index": reply.index,
            "message": message,
            "logprobs": self._logprobs(reply.logprobs),
            "finish_reason": reply.finish_reason,
            "finish_details": reply.details,
        }
        if self.ask.token_ids:
            choice["token_ids"] = reply.ids
        return choice


class CompletionWriter(OpenAI):
    """/v1/completions."""

    prefix, kind = "cmpl-", "text_completion"

    def start(self) -> bytes:
        if not self.ask.echo:
            return b""
        replies = self.generation.replies
        return b"".join(self._chunk(reply, self._echo(reply)) for reply in replies)

    def events(self, reply: Reply, events: list[Event]) -> bytes:
        text = "".join(event.text for event in events if isinstance(event, Content))
        if reply.result is not None:
            return self._chunk(reply, text, self._end(reply), **self._last(reply))
        return self._chunk(reply, text) if text else b""

    def _chunk(
        self, reply: Reply, text: str, choice: dict[str, Any] | None = None, **more: Any
    ) -> bytes:
        base: dict[str, Any] = {"index": reply.index, "text": text, "finish_reason": None}
        base["logprobs"] = self._fresh_logprobs(reply)
        return data(self._object([base | (choice or {})], **more))

    def _end(self, reply: Reply) -> dict[str, Any]:
        end = {"finish_reason": reply.finish_reason, "finish_details": reply.details}
        return end | ({"token_ids": reply.ids} if self.ask.token_ids else {})

    def _choice(self, reply: Reply) -> dict[str, Any]:
        text = (self._echo(reply) if self.ask.echo else "") + reply.content
        logprobs = self._logprobs(reply.logprobs)
        return {"index": reply.index, "text": text, "logprobs": logprobs} | self._end(reply)

    def _echo(self, reply: Reply) -> str:
        given = self.ask.prompts[reply.index // self.ask.n]
        if isinstance(given, str):
            return given
        tokenizer = self.generation.model.engine.tokenizer
        return tokenizer.decode(given) if tokenizer else ""
