"""Response writers: the protocol, server-sent events, and the base of OpenAI's older APIs."""

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
from dflash_jax.server.served_models import answer_name
from dflash_jax.tokenizer import TextStream
from dflash_jax.tool_parsers.calls import Event

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class ResponseWriter(Protocol):
    """Writes one request's response. All methods but `to_json` return server-sent events.

    Attributes:
      id: of the response.
    """

    id: str

    def start(self) -> bytes:
        """Return the events before any output."""
        ...

    def events(self, reply: Reply, events: list[Event]) -> bytes:
        """Return the events of new output; `reply.result` is set with the last output."""
        ...

    def close(self) -> bytes:
        """Return the events after all output."""
        ...

    def error(self, problem: Problem) -> bytes:
        """Return the events that replace the rest of a failed stream."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the response as one object, once all outputs are finished."""
        ...


def sse_data(value: Any) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def sse_event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event named after the value's `type`."""
    return b"event: " + value["type"].encode() + b"\n" + sse_data(value)


def keepalive_event(api: Api, text: str) -> bytes:
    """Return a comment that keeps a stream alive, followed by a ping in Anthropic's API."""
    return f": {text}\n".encode() + (sse_event({"type": "ping"}) if api == "messages" else b"\n")


class OpenAIWriter(abc.ABC):
    """Base of the writers of chat completions and completions.

    Attributes:
      prefix: of response ids.
      kind: the `object` field.
    """

    prefix = kind = ""

    def __init__(self, generation: Generation):
        self.generation, self.request = generation, generation.request
        self.id = new_id(self.prefix)
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": answer_name(generation.model.name, generation.request.model),
            "system_fingerprint": generation.model.fingerprint,
        }

    def start(self) -> bytes:
        """Return the events before any output."""
        return b""

    def error(self, problem: Problem) -> bytes:
        """Return the error object and the end of the stream."""
        return sse_data(problem.to_json()) + DONE

    def close(self) -> bytes:
        """Return the usage chunk, if requested, and the end of the stream."""
        tail = sse_data(self._object([], **self._usage())) if self.request.include_usage else b""
        return tail + DONE

    def to_json(self) -> dict[str, Any]:
        """Return the response object."""
        choices = [self._choice(reply) for reply in self.generation.replies]
        return self._object(choices, **self._usage())

    @abc.abstractmethod
    def _choice(self, reply: Reply) -> dict[str, Any]:
        """Return a finished output as an entry of `choices`."""

    def _chunk_event(self, choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        """Return a chunk with one choice."""
        if self.request.continuous_usage_stats:
            more = {"usage": statistics.usage(self.generation)} | more
        return sse_data(self._object([choice], **more))

    def _new_rounds(self, reply: Reply) -> dict[str, Any]:
        """Return the rounds that were not sent yet as a field of a choice, if requested."""
        if not self.request.return_token_sources:
            return {}
        return {"rounds": list(map(statistics.encoded_round, reply.take_rounds()))}

    def _object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"object": self.kind, **self._head, "choices": choices, **more}

    def _usage(self) -> dict[str, Any]:
        """Return `usage` and the requested statistics."""
        usage = statistics.usage(self.generation)
        return {"usage": usage} | statistics.requested_statistics(self.generation, self.id)

    def _logprobs(
        self, entries: list[TokenLogprob], before: TextStream | None = None
    ) -> dict[str, Any] | None:
        """Return the `logprobs` of a choice, or None if they were not requested.

        Args:
          before: text of the tokens before `entries`; it is extended by them. None if there are
            none.
        """
        if self.request.logprobs is None:
            return None
        tokenizer = self.generation.model.engine.tokenizer
        as_ids = self.request.tokens_as_ids
        if self.request.api == "chat":
            return chat_logprobs(entries, tokenizer, as_ids=as_ids)
        return completion_logprobs(entries, tokenizer, before, as_ids=as_ids)

    def _new_logprobs(self, reply: Reply) -> dict[str, Any] | None:
        """Return the log probabilities that were not sent in a chunk yet."""
        entries, reply.reported = reply.logprobs[reply.reported :], len(reply.logprobs)
        return self._logprobs(entries, reply.logprob_text)

    def _prompt_logprobs(self, reply: Reply) -> dict[str, Any]:
        """Return vLLM's `prompt_logprobs` field, if it was requested."""
        most = self.request.prompt_logprobs
        logprobs = None if reply.result is None else reply.result.prompt_logprobs
        if most is None or logprobs is None:
            return {}
        tokenizer = self.generation.model.engine.tokenizer
        return {"prompt_logprobs": prompt_logprobs(logprobs, most, tokenizer)}

    def _final_fields(self, reply: Reply) -> dict[str, Any]:
        """Return additional fields of an output's last chunk."""
        if (
            self.request.stream
            and not self.request.include_usage
            and len(self.generation.replies) == 1
        ):
            fields = self._usage()
            return {k: v for k, v in fields.items() if k != "usage"}
        last = all(reply.result for reply in self.generation.replies)
        adds_warnings = self.request.stream and not self.request.include_usage and last
        fields = statistics.warnings(self.generation) if adds_warnings else []
        return {"warnings": fields} if fields else {}
