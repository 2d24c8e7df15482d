"""Time of a decode step by part: a device trace, summed over named scopes.

Every operation of a compiled step carries its scope path, which names the stages (draft, target,
verify, commit, context) and the parts of layers (attention, mlp, head, ...). On a GPU, kernels in
command buffers may lack names; XLA_FLAGS=--xla_gpu_enable_command_buffer= (empty) disables them.
"""

import collections
import dataclasses
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.scheduler import StepPacer
from dflash_jax.errors import RequestError
from dflash_jax.graph.keys import Step

STAGES = ("draft", "context", "target", "verify", "commit")
PARTS = ("attention", "delta", "experts", "mlp", "head", "selector", "markov")
REST = "rest"
_CONTAINERS = ("while", "call", "conditional")  # the operations inside are timed separately
_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = .*?[\])}] ([\w-]+)\(", re.M)
_CALLS = re.compile(r"calls=%([\w.-]+)")
_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An operation of a step; times are means over steps."""

    name: str
    part: str
    seconds: float  # in one step
    calls: float
    operation: str  # the name without its number, or the function that is called


@dataclasses.dataclass(frozen=True)
class Profile:
    """Device time of a step by part, summed over CPU threads."""

    program: str
    steps: int
    wall_s: float  # seconds of one step, on the host
    parts: dict[str, float]  # seconds of one step by stage and part, largest first
    kernels: tuple[Kernel, ...]  # largest first

    @property
    def busy_s(self) -> float:
        """Seconds of all operations of one step together."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        busy = max(self.busy_s, 1e-12)
        head = (
            f"{self.program}: {self.wall_s * 1e3:.3f} ms a step over {self.steps} steps,"
            f" operations {busy * 1e3:.3f} ms, {len(self.kernels)} of them"
        )
        form = "  {:20} {:9.3f} ms {:5.1f} %".format
        lines = (form(name, s * 1e3, 100 * s / busy) for name, s in self.parts.items())
        return "\n".join([head, *lines])


def profile(
    engine: Engine,
    prompt: Sequence[int],
    *,
    steps: int = 8,
    speculative: bool = True,
    keep: Path | None = None,
) -> Profile:
    """Decode a few steps of one greedy request under the profiler.

    Args:
      keep: folder for the trace, which xprof and Perfetto read.

    Raises:
      RequestError: prompt and steps exceed `max_length`.
      ComputeError: the target produced non-finite logits.
    """
    plan = engine.plan
    count = steps + 3  # two to warm up, one for lookahead
    longest = 1 + count * (plan.block if speculative else 1)
    if steps < 1 or len(prompt) + longest > plan.max_length:
        raise RequestError(
            f"{steps} steps after {len(prompt)} tokens may take {longest}; max_length is"
            f" {plan.max_length}, and at least one step is needed"
        )
    engine.warm_up()
    name = Step.SPECULATIVE if speculative and engine.graph.drafter_config else Step.PLAIN
    core = engine.core
    pacer = core.pacer
    core.pacer = StepPacer(max_steps=1)
    live = engine.submit(list(prompt), max_tokens=longest, ignore_eos=True, speculative=speculative)
    try:
        while live.num_computed < len(prompt) and not live.done:
            engine.advance()
        for _ in range(2):
            engine.advance()
        wall, trace = _traced(engine, steps, None if keep is None else keep / name)
        if live.done:  # only an error ends it here
            live.result()
    finally:
        live.close()
        core.pacer = pacer
    program = engine.core.runner.executables[engine.graph.key(name)]
    kernels = _kernels(trace, program.compiled.as_text() or "", steps)
    parts: dict[str, float] = collections.defaultdict(float)
    for kernel in kernels:
        parts[kernel.part] += kernel.seconds
    largest_first = dict(sorted(parts.items(), key=lambda item: -item[1]))
    return Profile(name, steps, wall / steps, largest_first, kernels)


def _traced(engine: Engine, steps: int, keep: Path | None) -> tuple[float, Any]:
    """Return the seconds of `steps` steps, and their trace."""
    jax.block_until_ready(engine.core.runner.state)
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) if keep is None else keep  # the profiler names its files by the second
        with jax.profiler.trace(str(where)):
            started = time.perf_counter()
            for _ in range(steps):
                engine.advance()
            jax.block_until_ready(engine.core.runner.state)
            wall = time.perf_counter() - started
        newest = max(where.rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
        return wall, jax.profiler.ProfileData.from_file(str(newest))


def part_of(op_name: str) -> str:
    """Return the stage and part of a scope path, such as "target/attention"."""
    scopes = op_name.split("/")
    stage = next((s for s in scopes if s in STAGES), "")
    part = next((s for s in reversed(scopes) if s in PARTS), "")
    return "/".join(filter(None, (stage, part))) or REST


def _kernels(trace: Any, hlo: str, steps: int) -> tuple[Kernel, ...]:
    """Return the operations of a program that ran, largest first."""
    parts: dict[str, str] = {}  # by operation
    bodies: dict[str, str] = {}  # parts of computations
    operations: dict[str, str] = {}
    for text in re.split(r"\n(?=%|ENTRY)", hlo):  # computations, callees first
        for line in _LINE.finditer(text):
            rest = text[line.end() : text.find("\n", line.end())]
            part = _named(rest)
            if part == REST and (called := _CALLS.search(rest)):
                part = bodies.get(called[1], REST)
            if line[2] not in _CONTAINERS:
                called = _TARGET.search(rest)
                parts[line[1]] = part
                operations[line[1]] = called[1] if called else line[1].rstrip(".0123456789")
        if body := re.match(r"%([\w.-]+)", text):
            bodies[body[1]] = _named(text)
    header = re.match(r"HloModule ([\w.-]+)", hlo)
    module = header[1] if header else ""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for name, seconds in _events(trace, module):
        if name in parts:
            times[name].append(seconds)
    kernels = [
        Kernel(n, parts[n], sum(t) / steps, len(t) / steps, operations[n]) for n, t in times.items()
    ]
    return tuple(sorted(kernels, key=lambda k: -k.seconds))


def _named(text: str) -> str:
    """Return the part of the first scope path that names one."""
    parts = (part_of(path) for path in _NAME.findall(text))
    return next((part for part in parts if part != REST), REST)


def _events(trace: Any, module: str) -> Iterator[tuple[str, float]]:
    """Yield the operations of a module and their seconds, from all planes of the trace."""
    for event in (e for plane in trace.planes for line in plane.lines for e in line.events):
        stats = {} if event.name.startswith("end: ") else dict(event.stats)
        if stats.get("hlo_module") == module and "hlo_op" in stats:
            yield stats["hlo_op"], event.duration_ns * 1e-9
