"""Measure how many tokens a drafted round must commit to pay off, by rows, context and drafts."""

import itertools
import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.scheduler import steps_of_call
from dflash_jax.engine.state_machine.speculation import BreakEven
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.graph.programs import is_multi_step
from dflash_jax.graph.settings import untraced
from dflash_jax.graph.state import (
    COMMITS_NOTHING,
    PromptPart,
    RowRules,
    idle_arrays,
    prompt_arrays,
    read_output,
)
from dflash_jax.graph.steps.inputs import (
    DecodeInputs,
    PrefillInputs,
)

POSITIONS = (0, 512, 2048)  # tokens in the caches when steps are timed
SAMPLES = 2  # of each step while requests run
# A measurement serves up to this multiple of its position, and as many tokens past that.
FURTHER = 2
MARGIN = 256
PREFILL_STEPS = 4  # tokens of a prompt chunk are fed in the time of as many plain steps, or faster


class Timed(NamedTuple):
    """A decode step to time: the rows that decode, and the tokens of their blocks."""

    rows: int
    block: int = 1  # 1 for a plain step


class Stopwatch:
    """Times calls of a runner between its other calls; no row makes progress.

    Args:
      variant: of the programs, which must be compiled.
      row: that decodes where a single one does.
      rows: numbers of rows to time steps for, ascending; by default one and all.
    """

    def __init__(
        self,
        runner: ModelRunner,
        variant: Variant = Variant.GREEDY,
        row: int = 0,
        rows: tuple[int, ...] = (),
    ):
        self._runner = runner
        self.plan = runner.plan
        self._variant = variant
        self.rows = rows or tuple(sorted({1, self.plan.rows}))
        self._row = row
        self._rules: dict[Timed, RowRules] = {}
        self._most = runner.plan.steps_per_call if is_multi_step(self.plan, variant) else 1
        self._counts: dict[Timed, int] = {}
        self.fed = 0  # tokens in the caches

    @property
    def blocks(self) -> tuple[int, ...]:
        """Numbers of tokens of a block to time, ascending; the last is the plan's.

        Others cost as much as it does unless tokens that do not count are skipped.
        """
        most = self.plan.block
        fewer = self._runner.graph.pair.skips_dead_tokens
        return (*(2**i for i in range(1, most.bit_length()) if fewer and 2**i < most), most)

    def step_seconds(self, step: Timed) -> float:
        """Return the seconds of a step, in a call of as many as a request's make.

        A single step would bear all the costs of a call, which plain steps feel more.
        """
        if step not in self._counts:
            self._seconds(step, 1)  # caches are cold, and earlier calls may still run
            seconds = self._seconds(step, 1)
            self._counts[step] = steps_of_call(seconds, self._most)
            if self._counts[step] == 1:
                return seconds
        return self._seconds(step, self._counts[step])

    def _seconds(self, step: Timed, count: int) -> float:
        kind = Step.PLAIN if step.block == 1 else Step.SPECULATIVE
        key = self._runner.graph.key(kind, self._variant)
        exactly = self._runner.executor.put(np.int32(-count)) if self._most > 1 else None
        return self._call(key, DecodeInputs(self._rules_of(step), num_steps=exactly)) / count

    def _rules_of(self, step: Timed) -> RowRules:
        """Return rules under which a step's rows are computed, but commit nothing."""
        if step not in self._rules:
            arrays = idle_arrays(self.plan)
            row = self._row
            decodes = slice(row, row + 1) if step.rows == 1 else slice(step.rows)
            arrays["limit"][decodes] = COMMITS_NOTHING
            arrays["max_drafts"][:] = step.block - 1
            self._rules[step] = RowRules(**self._runner.executor.put(arrays))
        return self._rules[step]

    def feed(self) -> float:
        """Feed the next chunk of a prompt to all rows, or to the first; return the seconds."""
        rows = self.plan.prefill_rows
        chunk = self.plan.chunk
        tokens = np.zeros(chunk, np.int32)
        parts = [PromptPart(row, self.fed, tokens) for row in range(rows)]
        inputs = PrefillInputs(
            *prompt_arrays(parts, rows, chunk),
            self._rules_of(Timed(0)),
            row=None if rows == self.plan.rows else np.int32(0),
        )
        self.fed += chunk
        return self._call(self._runner.graph.key(Step.PREFILL, self._variant), inputs)

    def _call(self, key: ProgramKey, inputs: DecodeInputs | PrefillInputs) -> float:
        started = time.perf_counter()
        read_output(self._runner.run(key, inputs))
        return time.perf_counter() - started


class BreakEvenMeter:
    """The break-even of an engine, measured between steps of requests once it is in doubt.

    Requests whose drafts are accepted nearly always gain by drafting on any device, so nothing is
    measured for them. Measuring takes the time of a few steps, and changes no row.
    """

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self.value = BreakEven()  # until it is measured
        self.enabled = False  # whether requests may start a measurement

    def use(self, known: BreakEven) -> None:
        """Use a measurement that was made before; none is made any more."""
        self.value = known
        self.enabled = self.enabled and not known.positions

    def measure(self, place: int, row: int, rows: int) -> bool:
        """Measure if nothing is known about a position or a number of rows; return whether it did.

        Only the engine's turn may call this. Requests wait meanwhile, so that no other numbers of
        rows are timed than those that were seen.

        Args:
          place: tokens in the longest row whose gain by drafting is in doubt.
          row: its number.
          rows: that decode.
        """
        variant = self._variant
        known = self.value
        if variant is None or self._runner.executor.hosts > 1:
            return False
        seen = bool(known.rows) and known.rows[0] <= rows <= known.rows[-1]
        if seen and place <= FURTHER * known.positions[-1] + MARGIN:
            return False
        if not seen:
            numbers = sorted({rows, *known.rows[:1], *known.rows[-1:]})
            known = BreakEven(tuple(dict.fromkeys((numbers[0], numbers[-1]))))
        watch = Stopwatch(self._runner, variant, row, known.rows)
        least = {
            step: min(watch.step_seconds(step) for _ in range(SAMPLES)) for step in _steps(watch)
        }
        seconds = {(place, step): x for step, x in least.items()}
        self.value = _joined(known, _table(watch, seconds))
        return True

    @property
    def _variant(self) -> Variant | None:
        """The variant whose steps are measured, if they are compiled."""
        made = self._runner.executables
        needed = (Step.SPECULATIVE, Step.PLAIN)
        for variant in (Variant.GREEDY, Variant.SAMPLED):
            if all(self._runner.graph.key(step, variant) in made for step in needed):
                return variant
        return None


def _steps(watch: Stopwatch) -> list[Timed]:
    return [Timed(rows, block) for rows in watch.rows for block in (1, *watch.blocks)]


def _table(watch: Stopwatch, seconds: Mapping[tuple[int, Timed], float]) -> BreakEven:
    """Return the break-even by the seconds of steps at positions."""
    positions = tuple(sorted({position for position, _ in seconds}))

    def length(rows: int, position: int, block: int) -> float:
        return seconds[position, Timed(rows, block)] / seconds[position, Timed(rows)]

    lengths = []
    for rows in watch.rows:
        # A longer context or a longer block makes no step cheaper: the contrary is noise.
        table = np.array([[length(rows, at, n) for n in watch.blocks] for at in positions])
        for axis in (0, 1):
            table = np.maximum.accumulate(table, axis=axis)
        lengths.append(tuple(map(tuple, table.tolist())))
    return BreakEven(watch.rows, positions, watch.blocks, tuple(lengths))


def _joined(known: BreakEven, further: BreakEven) -> BreakEven:
    """Return a break-even with a further position, after those that are known."""
    if not known.positions:
        return further
    lengths = []
    for before, (new,) in zip(known.lengths, further.lengths, strict=True):
        # A longer context makes no step cheaper.
        lengths.append((*before, tuple(map(max, before[-1], new))))
    return further._replace(
        positions=(*known.positions, *further.positions), lengths=tuple(lengths)
    )


def measure(runner: ModelRunner, samples: int = 5, seconds: float = 3.0) -> BreakEven:
    """Return the least times of drafted steps over that of a plain one, at some positions.

    Args:
      samples: of each step at each position, repeated while there is time.
      seconds: after which neither prompts are fed nor samples begun.

    Returns:
      Nothing known if several processes run one program: by their clocks they would differ in
      their decisions, and wait for each other.
    """
    if runner.executor.hosts > 1:
        return BreakEven()
    return untraced(lambda: _measure(runner, samples, time.perf_counter() + seconds))


def _measure(runner: ModelRunner, samples: int, end: float) -> BreakEven:
    watch = Stopwatch(runner)
    least: dict[tuple[int, Timed], float] = {}
    started = time.perf_counter()
    took = 0.0
    while time.perf_counter() + took < end:
        for position in POSITIONS:
            if not _feed_up_to(watch, position, end):
                break
            for sample, step in itertools.product(range(samples), _steps(watch)):
                place = watch.fed, step
                if not (sample and time.perf_counter() > end):
                    least[place] = min(watch.step_seconds(step), least.get(place, math.inf))
        if watch.fed:
            runner.clear_rows(range(runner.plan.rows))  # the prompts are nobody's
        watch.fed = 0
        took = took or time.perf_counter() - started
    return _table(watch, least)


def _feed_up_to(watch: Stopwatch, position: int, end: float) -> bool:
    """Feed prompts up to a position; return whether the plan and the time have room for that."""
    if position > watch.plan.max_length - watch.plan.chunk:
        return False
    seconds = watch.step_seconds(Timed(1)) * watch.plan.chunk / PREFILL_STEPS
    while watch.fed < position:
        if time.perf_counter() + seconds > end:
            return False
        seconds = watch.feed()
    return True
