"""Response writers: their base, and statistics in the formats of clients."""

import abc
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from dflash_jax.engine.result import RoundTrace, Stats
from dflash_jax.server.generation import Generation
from dflash_jax.server.logprobs import encoded
from dflash_jax.server.protocol import Api, GenerationRequest, Problem, new_id
from dflash_jax.server.reply import Reply
from dflash_jax.server.served_models import answer_name
from dflash_jax.tool_parsers.calls import Event

# Statistics of requests in the formats of OpenAI and llama.cpp.


def token_usage(generation: Generation) -> dict[str, Any]:
    """Return OpenAI's `usage`, summed over all outputs of a request as generated so far."""
    replies = generation.replies
    stats = [reply.result.stats for reply in replies if reply.result]
    num_unfinished = sum(len(reply.ids) for reply in replies if not reply.result)
    prompt_tokens = sum(len(prompt.ids) for prompt in generation.prompts)
    completion_tokens = sum(each.output_tokens for each in stats) + num_unfinished
    if generation.request.max_tokens == 0:
        completion_tokens = 0
    reasoning_tokens = sum(reply.thinking_tokens for reply in replies)
    usage: dict[str, Any] = {}
    if stats and generation.request.timings_per_token:
        usage |= _totals(stats)
    return usage | {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": all_cached_tokens(generation)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def responses_usage(generation: Generation) -> dict[str, Any]:
    """Return the `usage` of OpenAI's Responses."""
    totals = token_usage(generation)
    return {
        "input_tokens": totals["prompt_tokens"],
        "input_tokens_details": totals["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": totals["completion_tokens"],
        "output_tokens_details": totals["completion_tokens_details"],
        "total_tokens": totals["total_tokens"],
    }


def _totals(stats: Sequence[Stats]) -> dict[str, Any]:
    """Return total times, and the share of drafts that were accepted."""
    prefill_s = sum(each.prefill_s for each in stats)
    decode_s = sum(each.decode_s for each in stats)
    tokens = sum(each.output_tokens for each in stats)
    drafted = sum(each.drafted for each in stats)
    accepted = sum(each.accepted for each in stats)
    return {
        "timings": {
            "prefill_ms": round(prefill_s * 1e3, 1),
            "decode_ms": round(decode_s * 1e3, 1),
            "decode_tokens_per_sec": round(tokens / decode_s, 1) if decode_s > 0 else 0.0,
        },
        "accept_rate": accepted / max(drafted, 1),
    }


def requested_statistics(generation: Generation) -> dict[str, Any]:
    """Return the statistics that a finished request asked for, and its warnings."""
    stats = [reply.result.stats for reply in generation.replies if reply.result]
    fields: dict[str, Any] = {}
    if generation.request.timings_per_token:
        fields["timings"] = timings(stats[0])
    texts = warnings(generation)
    if texts:
        fields["warnings"] = texts
    return fields


def warnings(generation: Generation) -> list[str]:
    """Return the warnings about a request and its finished outputs, without duplicates."""
    texts = list(generation.request.warnings)
    for prompt in generation.prompts:
        texts += prompt.warnings
    for reply in generation.replies:
        if reply.result:
            texts += reply.warnings
    return list(dict.fromkeys(texts))


def choice_statistics(reply: Reply, request: GenerationRequest) -> dict[str, Any]:
    """Return OpenAI's finish reason of a choice, and the extra fields of vLLM."""
    assert reply.result is not None
    stop_ids = request.options.get("stop_token_ids") or ()
    stop_reason: str | int | None = reply.stop_string
    if reply.finish_reason == "stop" and not reply.stop_string:
        last = reply.ids[-1] if reply.ids else None
        if last in stop_ids:
            stop_reason = last
    fields: dict[str, Any] = {
        "finish_reason": reply.finish_reason,
        "finish_details": reply.details,
        "stop_reason": stop_reason,
    }
    if request.return_token_ids:
        fields["token_ids"] = reply.ids
    return fields


def encoded_round(trace: RoundTrace) -> msgspec.Raw:
    """Return a round of decoding as an entry of a choice's `rounds`, encoded as in `logprobs`."""
    texts = trace.texts or [""] * len(trace.tokens)
    rejected_texts = trace.rejected_texts or [""] * len(trace.rejected)
    tokens = zip(trace.tokens, texts, trace.sources, strict=True)
    rejected = zip(trace.rejected, rejected_texts, strict=True)
    fields = {
        "tokens": [{"id": token, "text": text, "source": source} for token, text, source in tokens],
        "rejected": [{"id": token, "text": text} for token, text in rejected],
        "proposed": trace.proposed,
        "accepted": trace.accepted,
        "copied": trace.copied,
        "ms": trace.seconds * 1e3,
    }
    return encoded(fields)


def all_cached_tokens(generation: Generation) -> int:
    """Return the number of cached prompt tokens of all prompts; each prompt counts once."""
    n = generation.request.n
    total = 0
    for first in range(0, len(generation.replies), n):
        replies = generation.replies[first : first + n]
        total += cached_tokens([reply.result.stats for reply in replies if reply.result])
    return total


def cached_tokens(stats: Sequence[Stats]) -> int:
    """Return the number of cached prompt tokens of outputs that share one prompt."""
    return max((each.cached_tokens for each in stats), default=0)


def queued_s(stats: Stats) -> float:
    """Return the seconds that a request was queued."""
    return max(stats.first_token_s - stats.prefill_s - stats.compile_s, 0.0)


def timings(stats: Stats) -> dict[str, Any]:
    """Return llama.cpp's `timings`, with fields about speculation and its fallbacks."""
    computed = stats.prompt_tokens - stats.cached_tokens
    prompt_ms = stats.prefill_s * 1e3
    predicted_ms = stats.decode_s * 1e3
    return {
        "cache_n": stats.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(computed, 1),
        "prompt_per_second": computed / stats.prefill_s if stats.prefill_s > 0 else 0.0,
        "predicted_n": stats.output_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(stats.output_tokens, 1),
        "predicted_per_second": stats.tokens_per_s,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
        "drafted_per_round": stats.drafts_per_round,
        "accepted_per_round": [length - 1 for length in stats.acceptance_lengths],
        "spec_ran": stats.rounds > 0,
        "fallback_reason": next(iter(stats.fallbacks), None),
        "retries": stats.fallbacks.get("empty_retry", 0),
    }


encode = msgspec.json.Encoder().encode


class ResponseWriter(abc.ABC):
    """Writes one request's response. All methods but `to_json` return server-sent events.

    Attributes:
      prefix: beginning of the ids of responses.
      id: id of the response.
    """

    prefix = ""

    def __init__(self, generation: Generation):
        self.generation = generation
        self.request = generation.request
        self.id = new_id(self.prefix)
        self._created = int(time.time())
        self._model = answer_name(generation.model.name, generation.request.model)

    def start(self) -> bytes:
        """Return the events before any output."""
        return b""

    @abc.abstractmethod
    def events(self, reply: Reply, events: list[Event]) -> bytes:
        """Return the events of new output; `reply.result` is set with the last output."""

    @abc.abstractmethod
    def close(self) -> bytes:
        """Return the events after all output."""

    @abc.abstractmethod
    def error(self, problem: Problem) -> bytes:
        """Return the events that replace the rest of a failed stream."""

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the response as one object, once all outputs are finished."""

    def _finished_fields(self, reply: Reply) -> dict[str, Any]:
        """Return further fields of a finished response of one output, beside those of its API."""
        fields: dict[str, Any] = {"finish_details": reply.details}
        if self.request.return_token_ids:
            fields["token_ids"] = reply.ids
            fields["prompt_token_ids"] = self.generation.prompts[0].ids
        return fields | requested_statistics(self.generation)


def sse_data(value: Any) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def sse_event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event named after the value's `type`."""
    return b"event: " + value["type"].encode() + b"\n" + sse_data(value)


def keepalive_event(api: Api, text: str) -> bytes:
    """Return a comment that keeps a stream alive, followed by a ping in Anthropic's API."""
    comment = f": {text}\n".encode()
    if api == "messages":
        return comment + sse_event({"type": "ping"})
    return comment + b"\n"
