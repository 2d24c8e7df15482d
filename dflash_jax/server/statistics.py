"""Statistics of requests in the formats of OpenAI, llama.cpp, vLLM and SGLang."""

import collections
from collections.abc import Sequence
from typing import Any

import msgspec

from dflash_jax.engine.result import RoundTrace, Stats
from dflash_jax.server.generation import Generation
from dflash_jax.server.protocol import GenerationRequest
from dflash_jax.server.reply import Reply


def usage(generation: Generation) -> dict[str, Any]:
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
    totals = usage(generation)
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
        fields["metrics"] = metrics(stats[0]) if len(stats) == 1 else None
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
    return msgspec.Raw(msgspec.json.encode(fields))


def reused(generation: Generation) -> int:
    """Return the prompt tokens found in the prefix cache; each prompt counts once."""
    n, replies = generation.request.n, generation.replies
    groups = (replies[at : at + n] for at in range(0, len(replies), n))
    return sum(cached([r.result.stats for r in group if r.result]) for group in groups)


def cached(stats: Sequence[Stats]) -> int:
    """Return the cached prompt tokens of outputs that share one prompt."""
    return max((s.cached_tokens for s in stats), default=0)


def queued_s(stats: Stats) -> float:
    """Return the seconds that a request was queued."""
    return max(stats.first_token_s - stats.prefill_s - stats.compile_s, 0.0)


def timings(stats: Stats) -> dict[str, Any]:
    """Return llama.cpp's `timings`, with fields about speculation and its fallbacks."""
    reused = cached([stats])
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


def metrics(stats: Stats) -> dict[str, Any]:
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
        "cached_tokens": cached([stats]),
        "spec_verify_ct": stats.rounds,
        "spec_num_correct_drafts": stats.accepted,
        "spec_num_proposed_drafts": stats.drafted,
    }
    if stats.rounds:
        fields["spec_accept_length"] = stats.acceptance_length
        fields["spec_accept_rate"] = stats.accepted / max(stats.drafted, 1)
        fields["spec_correct_drafts_histogram"] = metrics(stats)["speculative_decoding"][
            "acceptance_histogram"
        ]
    return fields
