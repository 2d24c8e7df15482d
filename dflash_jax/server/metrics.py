"""Prometheus metrics; the suffixes are vLLM's, so that its dashboards need a new prefix only."""

import time

import jax
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dflash_jax.server.figures import cached
from dflash_jax.server.generation import Generation, Model
from dflash_jax.version import __version__

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """All figures of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._waiting = self._gauge("num_requests_waiting", "Outputs without a row yet.")
        self._running = self._gauge("num_requests_running", "Outputs that have a row.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens.")
        self._output = self._counter("generation_tokens", "Output tokens.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found.")
        self._ended = self._counter("request_success", "Outputs by end.", "finished_reason")
        self._failed = self._counter("request_failure", "Requests by HTTP status.", "status")
        self._cancelled = self._counter("request_cancelled", "Requests by reason.", "reason")
        self._rounds = self._counter("spec_decode_num_drafts", "Speculative rounds.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted drafts.")
        self._places = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by place.", "position"
        )
        self._fallbacks = self._counter("spec_decode_disabled", "Plain rounds.", "reason")
        self._recovery = self._counter("recovery_events", "Recovery events.", "event")
        self._first = self._histogram("time_to_first_token_seconds", "From request to token.")
        self._between = self._histogram("inter_token_latency_seconds", "Mean of an output.")
        self._whole = self._histogram("e2e_request_latency_seconds", "From request to end.")
        self._queued = self._histogram("request_queue_time_seconds", "Until a row was free.")
        self._compiled = self._gauge("jit_compile_seconds_total", "Spent compiling.")
        info = self._gauge("build_info", "Always 1.", "version", "jax", "backend")
        info.labels(__version__, jax.__version__, jax.default_backend()).set(1)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"dflash_jax:{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"dflash_jax:{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"dflash_jax:{name}", text, buckets=SECONDS, registry=self._registry)

    def ended(self, generation: Generation) -> None:
        """Books a request whose outputs are complete."""
        now = time.perf_counter()
        if generation.first_token is not None:
            self._first.observe(generation.first_token - generation.started)
        self._whole.observe(now - generation.started)
        for reply in generation.replies:
            if reply.result is None:
                continue
            stats = reply.result.stats
            self._prompt.inc(stats.prompt_tokens)
            self._output.inc(stats.output_tokens)
            self._queries.inc(stats.prompt_tokens)
            self._hits.inc(cached([stats]))
            self._ended.labels(reply.finish_reason).inc()
            self._rounds.inc(stats.rounds)
            self._drafted.inc(stats.drafted)
            self._accepted.inc(stats.accepted)
            for place, count in enumerate(stats.accepted_per_position):
                self._places.labels(place).inc(count)
            for reason, count in stats.fallbacks.items():
                self._fallbacks.labels(reason).inc(count)
            for event, count in stats.recovery.items():
                self._recovery.labels(event).inc(count)
            self._queued.observe(max(stats.first_token_s - stats.prefill_s, 0.0))
            if stats.output_tokens > 1:
                self._between.observe(stats.decode_s / (stats.output_tokens - 1))

    def failed(self, status: int) -> None:
        """Books a request that ended in an error object."""
        self._failed.labels(status).inc()

    def cancelled(self, reason: str) -> None:
        """Books a request whose client went away."""
        self._cancelled.labels(reason).inc()

    def text(self, models: list[Model]) -> bytes:
        """The exposition text."""
        engines = [m.worker.engine for m in models if m.worker.engine is not None]
        rows = sum(engine.plan.rows for engine in engines)
        active = sum(m.worker.active for m in models)
        self._running.set(min(active, rows))
        self._waiting.set(max(active - rows, 0))
        self._compiled.set(sum(engine.compile_s for engine in engines))
        return generate_latest(self._registry)
