"""Prometheus metrics, named as vLLM's but for the prefix, so that its dashboards can be reused."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dflash_jax.engine.engine import Engine
from dflash_jax.server.generation import Generation
from dflash_jax.server.served_models import ServedModel
from dflash_jax.server.writer import cached_tokens, queued_s
from dflash_jax.version import __version__

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engines = _EngineCollector()
        self._registry.register(self._engines)
        self._waiting = self._gauge("num_requests_waiting", "Outputs without a row yet.")
        self._running = self._gauge("num_requests_running", "Outputs that have a row.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens.")
        self._output = self._counter("generation_tokens", "Output tokens.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found.")
        self._ended = self._counter("request_success", "Outputs by end.", "finished_reason")
        self._failed = self._counter("request_failure", "Requests by HTTP status.", "status")
        self._cancelled = self._counter(
            "request_cancelled", "Requests by reason and by what they had come to.",
            "reason", "phase",
        )  # fmt: skip
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
        self._prefill = self._counter("prompt_seconds", "Spent on prompts, output by output.")
        self._decode = self._counter("tokens_predicted_seconds", "Spent on output tokens.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"dflash_jax:{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"dflash_jax:{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"dflash_jax:{name}", text, buckets=SECONDS, registry=self._registry)

    def ended(self, generation: Generation) -> None:
        """Record a finished request."""
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
            self._prefill.inc(stats.prefill_s)
            self._decode.inc(stats.decode_s)
            self._queries.inc(stats.prompt_tokens)
            self._hits.inc(cached_tokens([stats]))
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
            self._queued.observe(queued_s(stats))
            if stats.output_tokens > 1:
                self._between.observe(stats.decode_s / (stats.output_tokens - 1))

    def failed(self, status: int) -> None:
        """Record a request that ended with an error response."""
        self._failed.labels(status).inc()

    def cancelled(self, reason: str, phase: str) -> None:
        """Record a request that was cancelled.

        Args:
          phase: "body", "tokenisation", "queued", "prompt" or "output".
        """
        self._cancelled.labels(reason, phase).inc()

    def text(self, models: Iterable[ServedModel]) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._engines.models = models
        pairs = ((m.worker.active, m.worker.engine) for m in models)
        active = [(jobs, engine.plan.rows if engine else 0) for jobs, engine in pairs]
        self._running.set(sum(min(jobs, rows) for jobs, rows in active))
        self._waiting.set(sum(max(jobs - rows, 0) for jobs, rows in active))
        return generate_latest(self._registry)


class _EngineCollector:
    """Collects the counters of engines at scrape time."""

    def __init__(self) -> None:
        self.models: Iterable[ServedModel] = ()

    def describe(self) -> list[Metric]:
        """Return no metrics: engines may not be loaded yet."""
        return []

    def named(self) -> list[tuple[str, Engine]]:
        """Return the loaded engines with the names of their models."""
        return [(m.name, engine) for m in self.models if (engine := m.worker.engine) is not None]

    def collect(self) -> Iterator[Metric]:
        """Yield metrics of cache usage, compilation, memory and the build."""
        engines = [engine for _, engine in self.named()]
        slots = sum(engine.plan.rows * engine.plan.max_length for engine in engines)
        yield GaugeMetricFamily(
            "dflash_jax:kv_cache_usage_perc",
            "Share of all rows' positions that hold tokens; 1 is all.",
            sum(model.worker.held_tokens for model in self.models) / max(slots, 1),
        )
        yield CounterMetricFamily(
            "dflash_jax:jit_compile_seconds",
            "Spent on programs that no cache had; several are compiled at a time.",
            sum(engine.core.runner.compiled.compile_seconds for engine in engines),
        )
        yield CounterMetricFamily(
            "dflash_jax:jit_cache_misses",
            "Programs that had to be compiled; after warm-up only what nobody had asked for.",
            sum(engine.core.runner.compiled.compiled for engine in engines),
        )
        yield GaugeMetricFamily(
            "dflash_jax:jit_pending",
            "Programs that are still to be compiled; requests that need one wait for it.",
            sum(engine.core.runner.compiled.pending for engine in engines),
        )
        counters = [c.counters for engine in engines if (c := engine.core.prefix_cache)]
        for name, text in (
            ("stored", "Prompt chunks that were kept."),
            ("evictions", "Prompt chunks that had to go."),
            ("refused", "Prompt chunks that did not fit the state."),
        ):
            total = sum(getattr(each, name) for each in counters)
            yield CounterMetricFamily(f"dflash_jax:prefix_cache_{name}", text, total)
        workers = [model.worker for model in self.models]
        yield GaugeMetricFamily(
            "dflash_jax:hosts",
            "Processes that run programs.",
            sum(engine.core.runner.executor.hosts for engine in engines),
        )
        yield CounterMetricFamily(
            "dflash_jax:hosts_restarts",
            "Times that the workers of several hosts were started again.",
            sum(worker.restarts.count for worker in workers),
        )
        memory = GaugeMetricFamily(
            "dflash_jax:memory_bytes",
            "Kept by weights, caches, prefix cache and programs (0 on a CPU: not known there).",
            labels=("model", "part"),
        )
        for name, engine in self.named():
            for part, size in engine.core.runner.memory.items():
                memory.add_metric((name, part), size)
        yield memory
        if resident := resident_bytes():
            yield GaugeMetricFamily(
                "dflash_jax:resident_memory_bytes", "Host memory of the whole process.", resident
            )
        labels = ("version", "jax", "backend", "target", "draft")
        info = GaugeMetricFamily("dflash_jax:build_info", "Always 1.", labels=labels)
        for name, engine in self.named():
            build = __version__, jax.__version__, engine.core.runner.executor.platform
            info.add_metric((*build, name, getattr(engine.graph.drafter_config, "kind", "none")), 1)
        yield info


def resident_bytes() -> int:
    """Return the resident memory of the process in bytes; 0 on systems without /proc."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
