"""An engine as a worker of benchmarks.llama_cpp: it loads models once and answers requests.

    python -m benchmarks.jax_worker TARGET [--drafter DRAFTER [--forced]] [--plan JSON]

Requests and replies are those of llama_worker.cpp; the first line also has the seconds of each
phase of start-up, and what was compiled.
"""

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402
import collections  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from benchmarks.workers import memory_of  # noqa: E402

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
    "/jax/compilation_cache/cache_retrieval_time_sec": "read_cache",
}
HITS, MISSES = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


class JaxWorker:
    """An engine and the requests it answers."""

    def __init__(self, options: argparse.Namespace):
        self.phases: dict[str, float] = {}
        self.resident: dict[str, float] = {}
        self.compiling: dict[str, float] = collections.defaultdict(float)
        self._before = STARTED
        self._truth: dict[tuple[int, ...], list[int]] = {}
        from dflash_jax.utils.allocator import fewer_collections, tune_allocator

        tune_allocator()  # as the command line does
        with fewer_collections():
            import jax

            self._phase("import_jax")
            import dflash_jax.loading as loading
            from dflash_jax.engine import engine as _  # noqa: F401
            from dflash_jax.plan import Plan

            self._phase("import_dflash_jax")
        jax.devices()
        self._phase("start_backend")
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        loading.use_compilation_cache()
        with warnings.catch_warnings(action="ignore"):  # numbered vocabularies have no words
            pair = loading.open_pair(options.target, options.drafter)
        self._phase("open")
        self.engine = pair.engine(Plan(**json.loads(options.plan)))
        self._phase("load")
        if options.forced:
            from dflash_jax.testing import scripted_engine

            self.engine = scripted_engine(self.engine)
        self.forced = options.forced
        if options.warm_up:
            self.engine.warm_up()
        self._phase("warm_up")

    def _phase(self, name: str) -> None:
        now = time.perf_counter()
        self.phases[name], self._before = now - self._before, now
        self.resident[name] = memory_of().resident_mb

    def _on_duration(self, event: str, seconds: float, **_: Any) -> None:
        if event in EVENTS:
            self.compiling[EVENTS[event] + "_s"] += seconds
            self.compiling[EVENTS[event] + "_count"] += 1

    def _on_event(self, event: str, **_: Any) -> None:
        if event in (HITS, MISSES):
            self.compiling[event.rsplit("/", 1)[-1]] += 1

    def describe(self) -> dict[str, Any]:
        """Return the first line: phases of start-up, compilation, plan and programs."""
        programs, plan = self.engine.core.runner.executables, json.loads(self.engine.plan.to_json())
        return {
            "ready": True,
            "phases_s": self.phases,
            "resident_mb": self.resident,  # after each phase
            "compiling": dict(self.compiling),
            "programs_s": {str(key): built.seconds for key, built in programs.items()},
            "plan": {k: v for k, v in plan.items() if k != "stored"},
        }

    def answer(self, line: str) -> dict[str, Any]:
        """Answer one request."""
        mode, first, ids, *accepted = line.split()
        prompt = [int(i) for i in ids.split(",")]
        if mode == "logits":
            return self._logits(Path(first), prompt)
        options = {"max_tokens": int(first), "ignore_eos": bool(accepted)}
        drafted = mode == "drafted"
        if drafted and self.forced:
            self._force(prompt, options, [int(n) for n in accepted[0].split(",")])
        from benchmarks.modes import generate

        run = generate(self.engine, prompt, speculative=drafted, **options)
        rounds = len(run.acceptance_lengths) if drafted else len(run.token_ids) - 1
        return {
            "prefill_s": run.prefill_s,
            "decode_s": run.decode_s,
            "decode_cpu_s": run.decode_cpu_s,
            "rounds": rounds,
            "tokens": run.token_ids,
        }

    def _force(self, prompt: list[int], options: dict[str, Any], accepted: list[int]) -> None:
        """Script the drafter such that round i accepts `accepted[i]` drafts."""
        from dflash_jax.testing import force_acceptance, set_script

        key = (options["max_tokens"], *prompt)
        if key not in self._truth:
            plain = self.engine.generate(prompt, speculative=False, **options)
            self._truth[key] = [*prompt, *plain.token_ids]
        truth, size = self._truth[key], self.engine.graph.config.vocab_size
        set_script(self.engine, force_acceptance(truth, len(prompt), accepted, size))

    def _logits(self, path: Path, ids: list[int]) -> dict[str, Any]:
        import numpy as np

        from dflash_jax.target_model import TargetModel

        engine = self.engine
        model = TargetModel(engine.graph.config, engine.params["target"], engine.plan.dtype)
        logits = np.asarray(model.forward([ids]).logits[0], np.float32)
        logits.tofile(path)
        return {"rows": len(logits)}


def serve(answer: Callable[[str], dict[str, Any]], first: dict[str, Any]) -> None:
    """Print the first line, then answer the lines of standard input."""
    print(json.dumps(first), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)


def main() -> None:
    """Load the models and answer until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--drafter")
    parser.add_argument("--plan", default="{}", metavar="JSON")
    parser.add_argument("--forced", action="store_true", help="replace drafts as requests say")
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false")
    worker = JaxWorker(parser.parse_args())
    serve(worker.answer, worker.describe())


if __name__ == "__main__":
    main()
