"""How answers are written: server-sent events, and what OpenAI's two older APIs share."""

import abc
import time
from typing import Any, Protocol

import msgspec

from dflash_jax.engine.result import TokenLogprob
from dflash_jax.server import statistics
from dflash_jax.server.generation import Generation
from dflash_jax.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from dflash_jax.server.protocol import Api, Problem, new_id
from dflash_jax.server.reply import Reply
from dflash_jax.tokenizer import TextStream
from dflash_jax.tool_parsers.events import Event

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class ResponseWriter(Protocol):
    """One API's way to answer. The stream methods give server-sent events."""

    id: str  # of the answer

    def start(self) -> bytes:
        """Before any output."""
        ...

    def events(self, reply: Reply, events: list[Event]) -> bytes:
        """New output; the last of a reply comes with `reply.result` set."""
        ...

    def close(self) -> bytes:
        """After the last output."""
        ...

    def error(self, problem: Problem) -> bytes:
        """Instead of the rest."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The answer as one object."""
        ...


def sse_data(value: Any) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def sse_event(value: dict[str, Any]) -> bytes:
    """A server-sent event whose name is the value's type."""
    return b"event: " + value["type"].encode() + b"\n" + sse_data(value)


def keepalive_event(api: Api, text: str) -> bytes:
    """What keeps a stream from being silent: a comment, and in Anthropic's API its own event."""
    return f": {text}\n".encode() + (sse_event({"type": "ping"}) if api == "messages" else b"\n")


class OpenAIWriter(abc.ABC):
    """What chat completions and completions have in common."""

    prefix = kind = ""

    def __init__(self, generation: Generation):
        self.generation, self.request = generation, generation.request
        self.id = new_id(self.prefix)
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": generation.model.name,
            "system_fingerprint": generation.model.fingerprint,
        }

    def start(self) -> bytes:
        return b""

    def error(self, problem: Problem) -> bytes:
        return sse_data(problem.to_json()) + DONE

    def close(self) -> bytes:
        tail = sse_data(self._object([], **self._usage())) if self.request.include_usage else b""
        return tail + DONE

    def to_json(self) -> dict[str, Any]:
        choices = [self._choice(reply) for reply in self.generation.replies]
        return self._object(choices, **self._usage())

    @abc.abstractmethod
    def _choice(self, reply: Reply) -> dict[str, Any]:
        """A finished output as one entry of `choices`."""

    def _chunk_event(self, choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        """A chunk with one choice."""
        if self.request.continuous_usage_stats:
            more = {"usage": statistics.usage(self.generation)} | more
        return sse_data(self._object([choice], **more))

    def _object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"object": self.kind, **self._head, "choices": choices, **more}

    def _usage(self) -> dict[str, Any]:
        """usage, and the figures that were asked for."""
        usage = statistics.usage(self.generation)
        return {"usage": usage} | statistics.requested_statistics(self.generation, self.id)

    def _logprobs(
        self, entries: list[TokenLogprob], said: TextStream | None = None
    ) -> dict[str, Any] | None:
        """What `entries` become in a choice; None where nobody asked.

        Args:
          said: the output before them, to which they are added; None where it begins with them.
        """
        if self.request.logprobs is None:
            return None
        tokenizer = self.generation.model.engine.tokenizer
        if self.request.api == "chat":
            return chat_logprobs(entries, tokenizer)
        return completion_logprobs(entries, tokenizer, said)

    def _new_logprobs(self, reply: Reply) -> dict[str, Any] | None:
        """Those of a chunk: what no chunk has had yet."""
        entries, reply.reported = reply.logprobs[reply.reported :], len(reply.logprobs)
        return self._logprobs(entries, reply.logprob_text)

    def _prompt_logprobs(self, reply: Reply) -> dict[str, Any]:
        """vLLM's log-probabilities of the prompt, where they were asked for."""
        most = self.request.prompt_logprobs
        found = None if reply.result is None else reply.result.prompt_logprobs
        if most is None or found is None:
            return {}
        tokenizer = self.generation.model.engine.tokenizer
        return {"prompt_logprobs": prompt_logprobs(found, most, tokenizer)}

    def _final_fields(self, reply: Reply) -> dict[str, Any]:
        """What the end of an output adds to its chunk."""
        if (
            self.request.stream
            and not self.request.include_usage
            and len(self.generation.replies) == 1
        ):
            found = self._usage()
            return {k: v for k, v in found.items() if k != "usage"}
        last = all(reply.result for reply in self.generation.replies)
        told = self.request.stream and not self.request.include_usage and last
        found = statistics.warnings(self.generation) if told else []
        return {"warnings": found} if found else {}
