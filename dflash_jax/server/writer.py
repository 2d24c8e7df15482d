"""Response writers: their base, statistics and log probabilities in the formats of clients."""

import abc
import collections
import functools
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from dflash_jax.engine.result import RoundTrace, Stats, TokenLogprob
from dflash_jax.server.generation import Generation
from dflash_jax.server.protocol import Api, GenerationRequest, Problem, new_id
from dflash_jax.server.reply import Reply
from dflash_jax.server.served_models import answer_name
from dflash_jax.tokenizer import TextStream, Tokenizer
from dflash_jax.tool_parsers.calls import Event

# Log probabilities in the formats of chat completions, completions and vLLM.
#
# Each token with its alternatives is encoded at once, as `msgspec.Raw`: a tree of objects of a
# large response would hold the interpreter lock for a second while it is encoded, freed, or
# searched by the garbage collector.


def chat_logprobs(
    entries: Sequence[TokenLogprob], tokenizer: Tokenizer | None, *, as_ids: bool = False
) -> dict[str, Any]:
    """Return `choices[].logprobs` of chat completions; entries of `content` are encoded.

    Args:
      as_ids: write tokens as vLLM's "token_id:NUMBER".
    """

    @functools.cache
    def description(token: int) -> tuple[str, list[int] | None]:
        known = tokenizer.raw_bytes(token) if tokenizer else None
        text = _id_text(token) if as_ids else _text(token, tokenizer)
        return text, None if known is None else list(known)

    def described(token: int, value: float | None) -> dict[str, Any]:
        text, data = description(token)
        return {"token": text, "logprob": value, "bytes": data}

    def content(entry: TokenLogprob) -> dict[str, Any]:
        top = [described(token, value) for token, value in entry.top]
        return described(entry.token_id, entry.logprob) | {"top_logprobs": top}

    return {"content": [_encoded(content(entry)) for entry in entries], "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprob],
    tokenizer: Tokenizer | None,
    before: TextStream | None = None,
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Return `choices[].logprobs` of completions. `top_logprobs` include the sampled token.

    The entries of `top_logprobs` are encoded. They and the log probability are null for
    tokens without one, such as the first token of a prompt.

    Args:
      before: text of the tokens before `entries`; it is extended by them. A token's offset is the
        number of complete characters before it.
      as_ids: write tokens as vLLM's "token_id:NUMBER".
    """

    @functools.cache
    def text(token: int) -> str:
        return _id_text(token) if as_ids else _byte_text(token, tokenizer)

    before = before or (tokenizer.stream() if tokenizer else None)
    offsets, top = [], []
    for entry in entries:
        offsets.append(len(before.text) if before else 0)
        if before:
            before.push([entry.token_id])
        own = () if entry.logprob is None else ((entry.token_id, entry.logprob),)
        top.append(_encoded({text(i): value for i, value in (*entry.top, *own)} or None))
    return {
        "tokens": [text(entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprob], num_top: int, tokenizer: Tokenizer | None
) -> list[msgspec.Raw]:
    """Return vLLM's `prompt_logprobs`: for each token, log probabilities by token id, encoded.

    Each entry includes the prompt token itself, whose rank is null unless it is among the top
    tokens. Tokens without a log probability, such as the first, get null.

    Args:
      num_top: number of top tokens to include.
    """
    text = functools.cache(functools.partial(_text, tokenizer=tokenizer))

    def ranks(entry: TokenLogprob) -> dict[str, Any] | None:
        if entry.logprob is None:
            return None
        ranked = [(token, value, at + 1) for at, (token, value) in enumerate(entry.top)]
        own = (entry.token_id, entry.logprob, None)
        known = {token: (value, rank) for token, value, rank in (own, *ranked)}
        wanted = (entry.token_id, *(token for token, _, _ in ranked[:num_top]))
        return {
            str(token): {
                "logprob": known[token][0],
                "rank": known[token][1],
                "decoded_token": text(token),
            }
            for token in wanted
        }

    return [_encoded(ranks(entry)) for entry in entries]


def _encoded(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _id_text(token: int) -> str:
    return f"token_id:{token}"


def _byte_text(token: int, tokenizer: Tokenizer | None) -> str:
    """Return a token's text; a part of a character is written as bytes, as in OpenAI's API."""
    text = _text(token, tokenizer)
    data = tokenizer.raw_bytes(token) if tokenizer and "\ufffd" in text else None
    return text if data is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return str(token)
    return tokenizer.raw([token])


# Statistics of requests in the formats of OpenAI, llama.cpp, vLLM and SGLang.


def token_usage(generation: Generation) -> dict[str, Any]:
    """Return OpenAI's `usage`, summed over all outputs of a request as generated so far."""
    replies = generation.replies
    stats = [reply.result.stats for reply in replies if reply.result]
    unfinished = [len(reply.ids) for reply in replies if not reply.result]
    prompt = sum(len(prompt.ids) for prompt in generation.prompts)
    completion = sum(s.output_tokens for s in stats) + sum(unfinished)
    if generation.request.max_tokens == 0:
        completion = 0
    thinking = sum(reply.thinking_tokens for reply in replies)
    more = _totals(stats) if stats and generation.request.timings else {}
    return more | {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reused(generation)},
        "completion_tokens_details": {"reasoning_tokens": thinking},
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
    prefill, decode = sum(s.prefill_s for s in stats), sum(s.decode_s for s in stats)
    tokens, drafted = sum(s.output_tokens for s in stats), sum(s.drafted for s in stats)
    return {
        "timings": {
            "prefill_ms": round(prefill * 1e3, 1),
            "decode_ms": round(decode * 1e3, 1),
            "decode_tokens_per_sec": round(tokens / decode, 1) if decode > 0 else 0.0,
        },
        "accept_rate": sum(s.accepted for s in stats) / max(drafted, 1),
    }


def requested_statistics(generation: Generation, answer_id: str) -> dict[str, Any]:
    """Return the statistics that a finished request asked for, and its warnings."""
    request = generation.request
    stats = [reply.result.stats for reply in generation.replies if reply.result]
    fields: dict[str, Any] = {}
    if request.timings:
        fields["timings"] = timings(stats[0])
    if request.metrics:
        fields["metrics"] = vllm_metrics(stats[0]) if len(stats) == 1 else None
    if request.meta_info:
        fields["meta_info"] = {"id": answer_id} | meta_info(stats[0])
    if texts := warnings(generation):
        fields["warnings"] = texts
    return fields


def warnings(generation: Generation) -> list[str]:
    """Return the warnings about a request and its finished outputs, without duplicates."""
    of_prompts = (text for prompt in generation.prompts for text in prompt.warnings)
    of_replies = (text for reply in generation.replies if reply.result for text in reply.warnings)
    every = (*generation.request.warnings, *of_prompts, *of_replies)
    return list(dict.fromkeys(every))


def choice_statistics(reply: Reply, request: GenerationRequest, answer_id: str) -> dict[str, Any]:
    """Return OpenAI's finish reason of a choice, and the extra fields of vLLM and SGLang."""
    assert reply.result is not None
    stop_ids = request.options.get("stop_token_ids") or ()
    last = next(reversed(reply.ids), None)
    by_id = reply.finish_reason == "stop" and not reply.stop_string and last in stop_ids
    fields: dict[str, Any] = {
        "finish_reason": reply.finish_reason,
        "finish_details": reply.details,
        "stop_reason": last if by_id else reply.stop_string,
    }
    if request.return_token_ids:
        fields["token_ids"] = reply.ids
    if request.meta_info:
        fields["meta_info"] = {"id": answer_id} | meta_info(reply.result.stats)
    return fields


def encoded_round(traced: RoundTrace) -> msgspec.Raw:
    """Return a round of decoding as an entry of a choice's `rounds`, encoded as in `logprobs`."""
    texts = traced.texts or [""] * len(traced.tokens)
    rejected_texts = traced.rejected_texts or [""] * len(traced.rejected)
    tokens = zip(traced.tokens, texts, traced.sources, strict=True)
    rejected = zip(traced.rejected, rejected_texts, strict=True)
    fields = {
        "tokens": [{"id": i, "text": text, "source": source} for i, text, source in tokens],
        "rejected": [{"id": i, "text": text} for i, text in rejected],
        "proposed": traced.proposed,
        "accepted": traced.accepted,
        "copied": traced.copied,
        "ms": traced.seconds * 1e3,
    }
    return _encoded(fields)


def reused(generation: Generation) -> int:
    """Return the prompt tokens found in the prefix cache; each prompt counts once."""
    n, replies = generation.request.n, generation.replies
    groups = (replies[at : at + n] for at in range(0, len(replies), n))
    return sum(cached_tokens([r.result.stats for r in group if r.result]) for group in groups)


def cached_tokens(stats: Sequence[Stats]) -> int:
    """Return the cached prompt tokens of outputs that share one prompt."""
    return max((s.cached_tokens for s in stats), default=0)


def queued_s(stats: Stats) -> float:
    """Return the seconds that a request was queued."""
    return max(stats.first_token_s - stats.prefill_s - stats.compile_s, 0.0)


def timings(stats: Stats) -> dict[str, Any]:
    """Return llama.cpp's `timings`, with fields about speculation and its fallbacks."""
    reused = cached_tokens([stats])
    fresh = stats.prompt_tokens - reused
    prompt_ms, predicted_ms = stats.prefill_s * 1e3, stats.decode_s * 1e3
    return {
        "cache_n": reused,
        "prompt_n": fresh,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(fresh, 1),
        "prompt_per_second": fresh / stats.prefill_s if stats.prefill_s > 0 else 0.0,
        "predicted_n": stats.output_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(stats.output_tokens, 1),
        "predicted_per_second": stats.tokens_per_s,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
        "spec_ran": stats.rounds > 0,
        "fallback_reason": next(iter(stats.fallbacks), None),
        "retries": stats.fallbacks.get("empty_retry", 0),
    }


def vllm_metrics(stats: Stats) -> dict[str, Any]:
    """Return vLLM's `metrics`, including `speculative_decoding`."""
    drafts = len(stats.accepted_per_position)
    accepted = [n - 1 for n in stats.acceptance_lengths]
    histogram = collections.Counter(accepted)
    pairs = collections.Counter(zip(stats.drafts_per_round, accepted, strict=True))
    speculation = None
    if stats.rounds:
        speculation = {
            "mean_acceptance_length": stats.acceptance_length,
            "draft_acceptance_rate": stats.accepted / max(stats.drafted, 1),
            "acceptance_histogram": [histogram[k] for k in range(drafts + 1)],
            "acceptance_histogram_by_draft_length": {
                str(n): [pairs[n, k] for k in range(n + 1)]
                for n in sorted(set(stats.drafts_per_round))
            },
            "num_spec_steps": stats.rounds,
            "num_accepted_draft_tokens": stats.accepted,
            "num_draft_tokens": stats.drafted,
            "num_spec_tokens": drafts,
            "per_step_accepted": accepted,
            "per_step_drafted": stats.drafts_per_round,
        }
    return {
        "time_to_first_token_ms": stats.first_token_s * 1e3,
        "generation_time_ms": stats.decode_s * 1e3,
        "queue_time_ms": queued_s(stats) * 1e3,
        "tokens_per_second": stats.tokens_per_s,
        "speculative_decoding": speculation,
    }


def meta_info(stats: Stats) -> dict[str, Any]:
    """Return SGLang's `meta_info`, which z-lab's benchmark reads."""
    fields: dict[str, Any] = {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.output_tokens,
        "cached_tokens": cached_tokens([stats]),
        "spec_verify_ct": stats.rounds,
        "spec_num_correct_drafts": stats.accepted,
        "spec_num_proposed_drafts": stats.drafted,
    }
    if stats.rounds:
        fields["spec_accept_length"] = stats.acceptance_length
        fields["spec_accept_rate"] = stats.accepted / max(stats.drafted, 1)
        fields["spec_correct_drafts_histogram"] = vllm_metrics(stats)["speculative_decoding"][
            "acceptance_histogram"
        ]
    return fields


encode = msgspec.json.Encoder().encode


class ResponseWriter(abc.ABC):
    """Writes one request's response. All methods but `to_json` return server-sent events.

    Attributes:
      prefix: of response ids.
      id: of the response.
    """

    prefix = ""

    def __init__(self, generation: Generation):
        self.generation, self.request = generation, generation.request
        self.id, self._created = new_id(self.prefix), int(time.time())
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
        """Return what a finished response of one output has in addition to its API's fields."""
        fields: dict[str, Any] = {"finish_details": reply.details}
        if self.request.return_token_ids:
            fields["token_ids"] = reply.ids
            fields["prompt_token_ids"] = self.generation.prompts[0].ids
        return fields | requested_statistics(self.generation, self.id)


def sse_data(value: Any) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def sse_event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event named after the value's `type`."""
    return b"event: " + value["type"].encode() + b"\n" + sse_data(value)


def keepalive_event(api: Api, text: str) -> bytes:
    """Return a comment that keeps a stream alive, followed by a ping in Anthropic's API."""
    return f": {text}\n".encode() + (sse_event({"type": "ping"}) if api == "messages" else b"\n")
