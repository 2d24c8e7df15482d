"""Prometheus metrics, named as vLLM's but for the prefix, so that its dashboards can be reused."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.result import Stats
from dflash_jax.server.engine_thread import EngineThread
from dflash_jax.server.generation import Generation
from dflash_jax.server.served_models import ServedModel
from dflash_jax.server.writer import cached_tokens, queued_s
from dflash_jax.version import __version__

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server. All but those of the process have the label `model`.

    It is the name of the served model; "" for requests that end before they named one.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engines = _EngineCollector()
        self._registry.register(self._engines)
        self._of_models: list[Counter | Gauge | Histogram] = []  # without other labels
        self._waiting = self._gauge("num_requests_waiting", "Outputs without a row yet.")
        self._running = self._gauge("num_requests_running", "Outputs that have a row.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens.", "key")
        self._output = self._counter("generation_tokens", "Output tokens.", "key")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found.")
        self._ended = self._counter("request_success", "Outputs by end.", "key", "finished_reason")
        self._failed = self._counter("request_failure", "Requests by HTTP status.", "key", "status")
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
        return self._added(Counter, name, text, *labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._added(Gauge, name, text)

    def _histogram(self, name: str, text: str) -> Histogram:
        return self._added(Histogram, name, text, buckets=SECONDS)

    def _added(self, kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
        names = ("model", *labels)
        made = kind(f"dflash_jax:{name}", text, names, registry=self._registry, **more)
        if not labels:
            self._of_models.append(made)
        return made

    def ended(self, generation: Generation, key: str = "") -> None:
        """Record a finished request.

        Args:
          key: label of its API key.
        """
        now = time.perf_counter()
        model = generation.model.name
        if generation.first_token is not None:
            self._first.labels(model).observe(generation.first_token - generation.started)
        self._whole.labels(model).observe(now - generation.started)
        for reply in generation.replies:
            if reply.result is not None:
                self._count(reply.result.stats, model)
                self._prompt.labels(model, key).inc(reply.result.stats.prompt_tokens)
                self._output.labels(model, key).inc(reply.result.stats.output_tokens)
                self._ended.labels(model, key, reply.finish_reason).inc()

    def _count(self, stats: Stats, model: str) -> None:
        """Add the figures of one output."""
        self._prefill.labels(model).inc(stats.prefill_s)
        self._decode.labels(model).inc(stats.decode_s)
        self._queries.labels(model).inc(stats.prompt_tokens)
        self._hits.labels(model).inc(cached_tokens([stats]))
        self._rounds.labels(model).inc(stats.rounds)
        self._drafted.labels(model).inc(stats.drafted)
        self._accepted.labels(model).inc(stats.accepted)
        for place, count in enumerate(stats.accepted_per_position):
            self._places.labels(model, place).inc(count)
        for reason, count in stats.fallbacks.items():
            self._fallbacks.labels(model, reason).inc(count)
        for event, count in stats.recovery.items():
            self._recovery.labels(model, event).inc(count)
        self._queued.labels(model).observe(queued_s(stats))
        if stats.output_tokens > 1:
            mean = stats.decode_s / (stats.output_tokens - 1)
            self._between.labels(model).observe(mean)

    def failed(self, status: int, model: str = "", key: str = "") -> None:
        """Record a request that ended with an error response."""
        self._failed.labels(model, key, status).inc()

    def cancelled(self, reason: str, phase: str, model: str = "") -> None:
        """Record a request that was cancelled.

        Args:
          phase: "body", "tokenisation", "queued", "prompt" or "output".
        """
        self._cancelled.labels(model, reason, phase).inc()

    def text(self, models: Iterable[ServedModel]) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._engines.models = models
        for model in models:
            for metric in self._of_models:
                metric.labels(model.name)  # which are 0 before they are first counted
            jobs = model.engine_thread.active
            engine = model.engine_thread.engine
            rows = engine.plan.rows if engine else 0
            self._running.labels(model.name).set(min(jobs, rows))
            self._waiting.labels(model.name).set(max(jobs - rows, 0))
        return generate_latest(self._registry)


class _EngineCollector:
    """Collects the counters of engines at scrape time."""

    def __init__(self) -> None:
        self.models: Iterable[ServedModel] = ()

    def describe(self) -> list[Metric]:
        """Return no metrics: engines may not be loaded yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield metrics of cache usage, compilation, memory and the build."""
        for kind, name, text, value in OF_ENGINES:
            family = kind(f"dflash_jax:{name}", text, labels=("model",))
            for model in self.models:
                if model.engine_thread.engine is not None:
                    family.add_metric(
                        (model.name,), value(model.engine_thread, model.engine_thread.engine)
                    )
            yield family
        memory = GaugeMetricFamily(
            "dflash_jax:memory_bytes",
            "Kept by weights, caches, prefix cache and programs (0 on a CPU: not known there).",
            labels=("model", "part"),
        )
        labels = ("version", "jax", "backend", "model", "target", "draft")
        info = GaugeMetricFamily("dflash_jax:build_info", "Always 1.", labels=labels)
        for model in self.models:
            name = model.name
            engine = model.engine_thread.engine
            if engine is None:
                continue
            for part, size in engine.core.runner.memory.items():
                memory.add_metric((name, part), size)
            build = __version__, jax.__version__, engine.core.runner.executor.platform
            drafter = getattr(engine.graph.drafter_config, "kind", "none")
            info.add_metric((*build, name, name, drafter), 1)
        yield memory
        yield info
        if resident := resident_bytes():
            yield GaugeMetricFamily(
                "dflash_jax:resident_memory_bytes", "Host memory of the whole process.", resident
            )


def _prefixes(name: str) -> Callable[[EngineThread, Engine], int]:
    """Return what reads a counter of the prefix cache, 0 without one."""

    def value(thread: EngineThread, engine: Engine) -> int:
        cache = engine.core.prefix_cache
        return getattr(cache.counters, name) if cache else 0

    return value


# Kind, name, description and value of metrics that are read from a model's thread and engine.
OF_ENGINES: tuple[tuple[Any, str, str, Callable[[EngineThread, Engine], float]], ...] = (
    (
        GaugeMetricFamily,
        "kv_cache_usage_perc",
        "Share of all rows' positions that hold tokens; 1 is all.",
        lambda thread, engine: thread.held_tokens / (engine.plan.rows * engine.plan.max_length),
    ),
    (
        CounterMetricFamily,
        "jit_compile_seconds",
        "Spent on programs that no cache had; several are compiled at a time.",
        lambda thread, engine: engine.core.runner.compiled.compile_seconds,
    ),
    (
        CounterMetricFamily,
        "jit_cache_misses",
        "Programs that had to be compiled; after warm-up only what nobody had asked for.",
        lambda thread, engine: engine.core.runner.compiled.compiled,
    ),
    (
        GaugeMetricFamily,
        "jit_pending",
        "Programs that are still to be compiled; requests that need one wait for it.",
        lambda thread, engine: engine.core.runner.compiled.pending,
    ),
    (
        CounterMetricFamily,
        "prefix_cache_stored",
        "Prompt chunks that were kept.",
        _prefixes("stored"),
    ),
    (
        CounterMetricFamily,
        "prefix_cache_evictions",
        "Prompt chunks that had to go.",
        _prefixes("evictions"),
    ),
    (
        CounterMetricFamily,
        "prefix_cache_refused",
        "Prompt chunks that did not fit the state.",
        _prefixes("refused"),
    ),
    (
        GaugeMetricFamily,
        "hosts",
        "Processes that run programs.",
        lambda thread, engine: engine.core.runner.executor.hosts,
    ),
)


def resident_bytes() -> int:
    """Return the resident memory of the process in bytes; 0 on systems without /proc."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
