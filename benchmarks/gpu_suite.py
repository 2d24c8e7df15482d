"""Decoding on a GPU against its memory bandwidth, in one command and under ten minutes.

    python -m benchmarks.gpu_suite [--budget 560] [--stages bitwise,steps,forced]
        [--json benchmarks/results/gpu.json]

Nothing is downloaded: full-size models get random weights made on the device. Plain and verified
logits are compared bit for bit; then come bandwidth and compute limits, single steps over a grid of
rows and contexts, decoding at forced acceptance, packed weights, and the official package on the
same weights, if torch, transformers and dflash are installed. A stage whose estimate exceeds the
remaining budget is skipped with a message. The JSON is rewritten after every measurement. --smoke
runs every stage with tiny models on a CPU, to test the script.
"""

import argparse
import dataclasses
import functools
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import environment
from benchmarks.gpu_cases import (
    FULL,
    Bench,
    Configs,
    full,
    logits_step,
    one_token,
    planned,
    random_params,
    smoke,
)
from benchmarks.modes import DeviceLoop, Run, generate
from dflash_jax import Graph
from dflash_jax.bench.compare import one_token_engine
from dflash_jax.cli import terminal
from dflash_jax.device import free_memory
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import PlanError
from dflash_jax.graph.build import jit
from dflash_jax.graph.keys import Step
from dflash_jax.graph.roofline import Device, StepWork, find_device, roofline, work
from dflash_jax.plan import Kernels, Plan, Weights
from dflash_jax.testing import force_acceptance, scripted_engine, set_script

TAUS = (1, 3, 5, 7)
GRID = [(1, 1024), (1, 8192), (4, 1024), (16, 1024), (1, 32768), (4, 8192), (16, 8192)]
GRID += [(4, 32768), (16, 32768)]  # rows and context, most important first
CELLS = {False: GRID, True: [(2, 24)]}  # True: with --smoke
ESTIMATES = {  # seconds per cell of the grid, updated by measurements
    "qwen3-8b": 40.0,
    "qwen3.6-27b": 70.0,
    "gemma-4-31b": 70.0,
    "gpt-oss-20b": 50.0,
}
ROOM = 256  # slots after the context, for the timed steps
STAGES = ("ceilings", "bitwise", "steps", "forced", "official", "packed")
WIDTH = 200  # columns of the table, so that it stays one
STEPS = ("plain1", "plain", "verify", "draft", "fused")


class Suite:
    """Budget, results and ceilings of one run."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.started = time.perf_counter()
        self.smoke: bool = options.smoke
        self.device: Device = find_device(jax.local_devices()[0].device_kind)
        self.took: dict[str, float] = {}  # seconds of the last stage of a kind
        self.result: dict[str, Any] = {
            "suite": "gpu",
            "smoke": self.smoke,
            "environment": environment(),
            "measurements": [],
            "left_out": [],
        }

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.options.budget - (time.perf_counter() - self.started)

    def configs(self, name: str) -> Configs:
        """Return the configs of a model of this name, small ones with --smoke."""
        return smoke(name) if self.smoke else full(name)

    def graph(
        self,
        name: str,
        rows: int,
        context: int,
        *,
        weights: Weights = "auto",
        kernels: Kernels = "auto",
    ) -> Graph:
        """Return a graph for this device with one step per call, as on a GPU."""
        plan = Plan(
            rows=rows,
            max_length=context + ROOM,
            steps_per_call=1,
            weights=weights,
            kernels=kernels,
        )
        if not self.smoke:
            plan = dataclasses.replace(plan, dtype="bfloat16")
        device = jax.local_devices()[0]
        return planned(
            self.configs(name), plan, platform=device.platform, memory=free_memory(device)
        )

    def add(self, name: str, **values: Any) -> None:
        """Add a measurement, print it, and rewrite the file."""
        at = round(time.perf_counter() - self.started, 1)
        self.result["measurements"].append({"name": name, "at_s": at} | values)
        shown = {k: v for k, v in values.items() if k not in ("plan", "samples")}
        print(f"{at:6.1f} s  {name}  {json.dumps(shown)}", flush=True)
        self.save()

    def save(self) -> None:
        """Write the result as JSON, if there is a place for it."""
        if path := self.options.json:
            path.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")

    def wants(self, stage: str) -> bool:
        """Return whether a stage was asked for."""
        return stage in self.options.stages.split(",")

    def stage(self, kind: str, name: str, estimate: float, run: Callable[[], None]) -> None:
        """Run a stage if it fits the remaining budget; a failure ends only the stage."""
        wanted = max(estimate, 1.1 * self.took.get(kind, 0.0)) if not self.smoke else 0.0
        if wanted > self.left:
            reason = f"needs about {wanted:.0f} s, {self.left:.0f} s are left"
            self.result["left_out"].append({"stage": name, "reason": reason})
            print(f"        {name}: left out, {reason}", flush=True)
            return self.save()
        started = time.perf_counter()
        try:
            run()
        except (PlanError, jax.errors.JaxRuntimeError) as error:
            if self.smoke:
                raise
            reason = f"{type(error).__name__}: {str(error)[:400]}"
            self.result["left_out"].append({"stage": name, "reason": reason})
            print(f"        {name}: failed, {reason}", flush=True)
            self.save()
        self.took[kind] = time.perf_counter() - started
        gc.collect()


def timed(call: Callable[[], Any], *, times: int, repeats: int = 5, warm: int = 3) -> list[float]:
    """Return milliseconds per call, for `repeats` batches of `times` enqueued calls."""
    for _ in range(warm):
        jax.block_until_ready(call())
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(times):
            out = call()
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - started) / times * 1e3)
    return samples


def ceilings(suite: Suite) -> None:
    """Measure the limits of the device: copying, reading, and products of 1 to 4096 rows."""
    size = 1 << (20 if suite.smoke else 30)
    block = jax.random.normal(jax.random.key(0), (size // 2,), jnp.bfloat16)
    copy = jit(lambda x: x + jnp.bfloat16(1))
    add_up = jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    copied = timed(functools.partial(copy, block), times=4)
    summed = timed(functools.partial(add_up, block), times=4)
    rate = 2 * size / min(copied) * 1e3
    suite.add("copy", tb_s=rate / 1e12, samples=copied)
    suite.add("read", tb_s=size / min(summed) * 1e3 / 1e12, samples=summed)
    if not suite.smoke:
        suite.device = dataclasses.replace(suite.device, bytes_per_s=rate)
    depth, columns = (64, 128) if suite.smoke else (4096, 24576)
    w = jax.random.normal(jax.random.key(1), (depth, columns), jnp.bfloat16)
    dot = jit(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32))
    for rows in (1, 8, 15, 16, 32, 64, 128, 256, 512, 4096):
        x = jax.random.normal(jax.random.key(2), (rows, depth), jnp.bfloat16)
        ms = timed(functools.partial(dot, x, w), times=10)
        flops = 2 * rows * depth * columns / min(ms) * 1e3
        suite.add("gemm", rows=rows, ms=min(ms), tb_s=w.nbytes / min(ms) / 1e9, tflops=flops / 1e12)


def compare_bitwise(suite: Suite, name: str, params: Any, graph: Graph, context: int) -> None:
    """Compare the logits of plain steps and of verified blocks bit for bit."""
    bench = Bench(graph, params, context)
    plan = graph.plan
    width = plan.block
    vocab = graph.config.vocab_size
    start = bench.state
    plain = jit(lambda p, s, r, b: logits_step(bench.pair, p, s, r, b, False))
    verify = jit(lambda p, s, r, b: logits_step(bench.pair, p, s, r, b, True))
    rng = np.random.default_rng(0)
    truth: list[np.ndarray] = []
    text: list[np.ndarray] = []
    state = start
    count = 3 * width
    for _ in range(count):  # plain, with filler tokens after the anchor
        text.append(np.asarray(state.anchor))
        junk = rng.integers(0, vocab, (plan.rows, width)).astype(np.int32)
        logits, state, _ = plain(params, state, bench.rules, junk)
        truth.append(np.asarray(logits[:, 0]))
    equal = compared = 0
    for accepted in (width - 1, 2, 0, 5 % width):  # blocks with this many right drafts
        state = start
        at = 0
        while at + width <= count:
            block = np.stack(text[at : at + width], axis=1)
            block[:, 1 + accepted :] = (block[:, 1 + accepted :] + 1) % vocab
            logits, state, out = verify(params, state, bench.rules, block)
            kept = int(out.num_tokens[0])
            for i in range(min(kept, accepted + 1)):
                equal += int((np.asarray(logits[:, i]) == truth[at + i]).all())
                compared += 1
            at += max(kept, 1)
    suite.add("bitwise", model=name, context=context, compared=compared, equal=equal)


def grid(suite: Suite, name: str, graph: Graph, params: Any, context: int) -> None:
    """Time every part of a step against its roofline."""
    plan = graph.plan
    bench = Bench(graph, params, context)
    started = time.perf_counter()
    built = bench.compile(*suite.options.steps.split(","))
    compile_s = time.perf_counter() - started
    times_of: dict[str, list[float]] = {}
    for step, executable in built.items():
        times_of[step] = timed(lambda run=executable: bench.run(run), times=2 if suite.smoke else 8)
    plain_forms = times_of.keys() & {"plain1", "plain"}
    best = min(plain_forms or times_of, key=lambda form: min(times_of[form]))
    least = _least_work(graph)
    for step, samples in times_of.items():
        ideal = roofline(least[step], suite.device, plan.dtype)
        suite.add(
            "step",
            model=name,
            step=step,
            rows=plan.rows,
            context=context,
            slots=plan.slots,
            block=plan.block,
            weights=plan.weights,
            kernels=plan.kernels,
            median_ms=statistics.median(samples),
            min_ms=min(samples),
            roofline_ms=ideal.seconds * 1e3,
            roofline_percent=100 * ideal.seconds * 1e3 / min(samples),
            bound=ideal.bound,
            gb_s=least[step].bytes / min(samples) / 1e6,
            over_faster_plain=min(samples) / min(times_of[best]),
            faster_plain=best,
            temporary_bytes=built[step].temporary_bytes,
            compile_s=round(built[step].seconds, 1),
            all_compiled_s=round(compile_s, 1),
            samples=samples,
            plan=plan.to_json(),
        )


def _least_work(graph: Graph) -> dict[str, StepWork]:
    """Return the least bytes and operations of each part of a step.

    Those of a draft are those of a fused step less those of its plain one.
    """
    fused = work(graph, Step.SPECULATIVE)
    plain = work(graph, Step.PLAIN)
    return {
        "plain1": work(one_token(graph), Step.PLAIN),
        "plain": plain,
        "verify": plain,
        "draft": StepWork(fused.bytes - plain.bytes, fused.flops - plain.flops),
        "fused": fused,
    }


def forced(suite: Suite, name: str, params: Any) -> None:
    """Measure decoding at forced acceptance lengths over the faster form of plain decoding."""
    count, length = (24, 20) if suite.smoke else (128, 1024)
    graph = suite.graph(name, 1, length + count)
    engine = Engine(graph, params)
    vocab = graph.config.vocab_size
    prompt = np.random.default_rng(3).integers(0, vocab - 1, length).tolist()

    def best_of_three(of: Engine, *, speculative: bool) -> Run:
        runs = [
            generate(of, prompt, max_tokens=count, ignore_eos=True, speculative=speculative)
            for _ in range(4)
        ]
        return min(runs[1:], key=lambda run: run.decode_s)  # the first one compiles

    plain = best_of_three(engine, speculative=False)
    plain1 = best_of_three(one_token_engine(engine), speculative=False)
    plain_s = {"plain": plain.decode_s, "plain1": plain1.decode_s}
    best = min(plain_s, key=lambda form: plain_s[form])
    said = plain.token_ids
    same = plain1.token_ids == said
    suite.add("plain_decoding", model=name, decode_s=plain_s, plain1_equal=same)
    script = scripted_engine(engine)
    loop = DeviceLoop(script)
    for tau in TAUS:
        if tau > graph.plan.block:
            continue
        text = force_acceptance([*prompt, *said], length, (tau - 1,), vocab)
        set_script(script, text)
        run = best_of_three(script, speculative=True)
        rounds = len(run.acceptance_lengths)
        looped = min(
            loop.run(prompt, max_tokens=count, stop_ids=(), rounds=rounds).decode_s
            for _ in range(3)
        )
        suite.add(
            "forced",
            model=name,
            tau=sum(run.acceptance_lengths) / rounds,
            tokens_per_s=(count - 1) / run.decode_s,
            over_plain=plain_s[best] / run.decode_s,
            faster_plain=best,
            same_tokens=run.token_ids == said,
            host_us_per_step=(run.decode_s - looped) / rounds * 1e6,
            over_device_loop=looped / run.decode_s,
        )


def official(suite: Suite, name: str, params: Any) -> None:
    """Time the official package on the same weights and forced acceptance, interleaved."""
    from benchmarks.official import Official

    count = 96
    length = 512
    graph = suite.graph(name, 1, length + count)
    engine = Engine(graph, params)
    vocab = graph.config.vocab_size
    prompt = np.random.default_rng(3).integers(0, vocab - 1, length).tolist()
    plain = generate(engine, prompt, max_tokens=count, ignore_eos=True, speculative=False)
    said = plain.token_ids
    script = scripted_engine(engine)
    text = force_acceptance([*prompt, *said], length, (4,), vocab)
    set_script(script, text)
    theirs = Official(engine, device="cuda", dtype="bfloat16")
    ours_s = []
    theirs_s = []
    for _ in range(4):
        ours = generate(script, prompt, max_tokens=count, ignore_eos=True)
        other = theirs.generate(prompt, script=text, max_tokens=count)
        ours_s.append((len(ours.token_ids) - 1) / ours.decode_s)
        theirs_s.append((len(other.token_ids) - 1) / other.decode_s)
    ratios = [a / b for a, b in zip(ours_s[1:], theirs_s[1:], strict=True)]
    suite.add(
        "official",
        model=name,
        tokens_per_s=ours_s[1:],
        official_tokens_per_s=theirs_s[1:],
        ratio_median=statistics.median(ratios),
        acceptance=[sum(r.acceptance_lengths) / len(r.acceptance_lengths) for r in (ours, other)],
    )


Stage = tuple[str, str, float, Callable[[], None]]  # kind, name, estimate in seconds, call


def first(suite: Suite, name: str) -> Iterator[Stage]:
    """Yield the stages of one row at the shortest context, and those of the first model only."""
    params = _weights(suite, name)
    rows, context = CELLS[suite.smoke][0]
    if name == "qwen3-8b" and suite.wants("bitwise"):
        graph = suite.graph(name, 1, context)
        yield "bitwise", "bitwise", 40, lambda: compare_bitwise(suite, name, params, graph, context)
    if suite.wants("steps"):
        yield _cell(suite, name, params, rows, context)
    if name == "qwen3-8b" and suite.wants("forced"):
        yield "forced", "forced", 60, lambda: forced(suite, name, params)
    if name == "qwen3-8b" and suite.wants("official") and importlib.util.find_spec("dflash"):
        yield "official", "official", 120, lambda: official(suite, name, params)


def others(suite: Suite, name: str) -> Iterator[Stage]:
    """Yield the stages of more rows and longer contexts."""
    params = _weights(suite, name)
    target, _ = suite.configs(name)
    if not suite.wants("steps"):
        return
    for rows, context in CELLS[suite.smoke][1:]:
        if context + ROOM <= target.max_length:
            yield _cell(suite, name, params, rows, context)


def _cell(suite: Suite, name: str, params: Any, rows: int, context: int) -> Stage:
    label = f"steps {name} rows {rows} context {context}"

    def run() -> None:
        grid(suite, name, suite.graph(name, rows, context), params, context)

    return f"steps {name}", label, ESTIMATES[name], run


def _weights(suite: Suite, name: str) -> Any:
    context = CELLS[suite.smoke][0][1]
    params = random_params(suite.graph(name, 1, context))
    return jax.block_until_ready(params)


def packed(suite: Suite, name: str) -> Iterator[Stage]:
    """Yield the stages of Pallas attention and of int8 and int4 weights."""
    context = CELLS[suite.smoke][0][1]
    kinds: list[tuple[Weights, Kernels]] = [("float", "pallas"), ("int8", "auto")]
    kinds += [("int4", "auto"), ("int4", "pallas"), ("int4", "xla")]

    def run(weights: Weights, kernels: Kernels) -> None:
        graph = suite.graph(name, 1, context, weights=weights, kernels=kernels)
        grid(suite, name, graph, random_params(graph), context)

    for weights, kernels in kinds:
        stage = functools.partial(run, weights, kernels)
        yield "packed", f"steps {name} {weights} by {kernels}", 30, stage


def summary(suite: Suite) -> str:
    """Return the table of all steps: the least of their samples, and the roofline's share of it."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for m in suite.result["measurements"]:
        if m["name"] == "step":
            key = m["model"], f"{m['weights']}/{m['kernels']}", str(m["rows"]), str(m["context"])
            text = f"{m['min_ms']:.2f} ms {m['roofline_percent']:.0f} %"
            cells.setdefault(key, {})[m["step"]] = text
    rows = [[*key, *(texts.get(step, "-") for step in STEPS)] for key, texts in cells.items()]
    shown = terminal.table(("model", "weights", "rows", "context", *STEPS), rows, WIDTH)
    return f"{shown}\n(least of the samples, and the roofline's share of it)"


def arguments(words: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=560, help="seconds, compiling included")
    parser.add_argument("--models", default=",".join(FULL), help="some of these, in this order")
    parser.add_argument("--stages", default=",".join(STAGES), help="some of these")
    parser.add_argument("--steps", default=",".join(STEPS), help="some of these")
    parser.add_argument("--smoke", action="store_true", help="tiny models, a minute on a CPU")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    for name, known in (("models", FULL), ("stages", STAGES), ("steps", STEPS)):
        if unknown := sorted(set(getattr(options, name).split(",")) - set(known)):
            parser.error(f"unknown {name} {unknown}; known: {', '.join(known)}")
    if not options.smoke and jax.local_devices()[0].platform != "gpu":
        parser.error("there is no GPU here; --smoke runs the script over tiny models")
    return options


def run_all(suite: Suite, stages: Iterator[Stage]) -> None:
    """Run stages in turn; their shared weights are freed at the end."""
    for kind, name, estimate, run in stages:
        suite.stage(kind, name, estimate, run)


def main(words: list[str] | None = None) -> int:
    """Run the stages that fit the budget; return 1 if logits were not bitwise equal."""
    suite = Suite(arguments(words))
    names = suite.options.models.split(",")
    if suite.wants("ceilings"):
        suite.stage("ceilings", "ceilings", 15, lambda: ceilings(suite))
    for name in names:
        run_all(suite, first(suite, name))
    if suite.wants("packed"):
        run_all(suite, packed(suite, names[0]))
    for name in names:
        run_all(suite, others(suite, name))
    suite.result["seconds"] = round(time.perf_counter() - suite.started, 1)
    suite.save()
    print(summary(suite))
    checks = [m for m in suite.result["measurements"] if m["name"] == "bitwise"]
    return 1 if any(m["equal"] != m["compared"] for m in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
