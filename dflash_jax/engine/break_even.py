"""Measure how many tokens a drafted round must commit to pay off, for each width of its block."""

import itertools
import math
import time
from collections.abc import Mapping

import jax
import numpy as np

from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.scheduler import make_rules, steps_of_call
from dflash_jax.engine.state_machine.speculation import BreakEven
from dflash_jax.graph.keys import NARROWED, ProgramKey, Step, Variant
from dflash_jax.graph.programs import is_multi_step
from dflash_jax.graph.settings import untraced
from dflash_jax.graph.state import read_output
from dflash_jax.graph.steps.inputs import DecodeInputs, PrefillInputs

POSITIONS = (0, 128, 512, 1024, 2048)  # tokens in the caches when steps are timed
SAMPLES = 2  # of each step while requests run
FURTHER, MARGIN = 2, 256  # a measurement serves up to this multiple of its position, and past it
PREFILL_STEPS = 4  # tokens of a prompt chunk are fed in the time of as many plain steps, or faster


class Stopwatch:
    """Times calls of a runner between its other calls; no row makes progress.

    Args:
      variant: of the programs, which must be compiled.
    """

    def __init__(self, runner: ModelRunner, variant: Variant = Variant.GREEDY):
        self._runner, self.plan, self._variant = runner, runner.plan, variant
        idle = [(None, False)] * runner.plan.rows
        self._rules = make_rules(runner.plan, idle, {}, runner.executor.put)
        self._most = runner.plan.steps_per_call if is_multi_step(self.plan, variant) else 1
        self._counts: dict[ProgramKey, int] = {}
        self.fed = 0  # tokens in the caches

    @property
    def steps(self) -> list[tuple[Step, int]]:
        """The decode steps that are compiled, the narrowest first.

        Speculative ones are told apart by the tokens of their blocks, 0 for the plan's.
        """
        *narrower, _ = self._runner.blocks(self._variant)
        return [(Step.PLAIN, 0), *((Step.SPECULATIVE, block) for block in (*narrower, 0))]

    def step_seconds(self, step: Step, block: int = 0) -> float:
        """Return the seconds of a step, in a call of as many as a request's make.

        A single step would bear all the costs of a call, which plain steps feel more.
        """
        key = ProgramKey(step, self._variant, block)
        if key not in self._counts:
            self._seconds(key, 1)  # caches are cold, and earlier calls may still run
            seconds = self._seconds(key, 1)
            self._counts[key] = steps_of_call(seconds, self._most)
            if self._counts[key] == 1:
                return seconds
        return self._seconds(key, self._counts[key])

    def _seconds(self, key: ProgramKey, count: int) -> float:
        exactly = self._runner.executor.put(np.int32(-count)) if self._most > 1 else None
        return self._call(key, DecodeInputs(self._rules, num_steps=exactly)) / count

    def feed(self) -> float:
        """Feed the next chunk of a prompt to all rows, or to the first; return the seconds."""
        rows, chunk = self.plan.fed_rows, self.plan.chunk
        row = None if rows == self.plan.rows else np.int32(0)
        tokens, num_fed = np.zeros((rows, chunk), np.int32), np.full(rows, chunk, np.int32)
        inputs = PrefillInputs(tokens, num_fed, np.full(rows, not self.fed), self._rules, row=row)
        self.fed += chunk
        return self._call(ProgramKey(Step.PREFILL, self._variant), inputs)

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
        self.doubted = False  # whether the gain of any request was in doubt

    def use(self, known: BreakEven) -> None:
        """Use a measurement that was made before; none is made any more."""
        self.value, self.enabled = known, self.enabled and not known.positions

    def measure(self, place: int) -> bool:
        """Measure if nothing is known about a position; return whether it did.

        Once narrower blocks are compiled, all is measured again. Only the engine's turn may call
        this.

        Args:
          place: tokens in the longest row whose gain by drafting is in doubt.
        """
        self.doubted, variant = True, self._variant
        if variant is None or jax.process_count() > 1:
            return False
        known = BreakEven() if self.outdated else self.value
        if known.positions and place <= FURTHER * known.positions[-1] + MARGIN:
            return False
        watch = Stopwatch(self._runner, variant)
        seconds = {
            step: min(watch.step_seconds(*step) for _ in range(SAMPLES)) for step in watch.steps
        }
        self.value = _extended(known, place, seconds)
        return True

    @property
    def outdated(self) -> bool:
        """Whether narrower blocks were compiled since it was measured."""
        variant = self._variant
        blocks = self._runner.blocks(variant)[:-1] if variant else []
        return len(blocks) > len(self.value.narrower)

    @property
    def _variant(self) -> Variant | None:
        """The variant whose steps are measured, if they are compiled."""
        made, needed = self._runner.executables, (Step.SPECULATIVE, Step.PLAIN)
        compiled = (v for v in NARROWED if all(ProgramKey(x, v) in made for x in needed))
        return next(compiled, None)


def _extended(known: BreakEven, place: int, seconds: Mapping[tuple[Step, int], float]) -> BreakEven:
    """Return a break-even with a further position, given the seconds of `Stopwatch.steps`."""
    before, plain = dict(known.narrower), seconds[Step.PLAIN, 0]

    def lengths(earlier: tuple[float, ...], block: int) -> tuple[float, ...]:
        ratio = seconds[Step.SPECULATIVE, block] / plain
        return *earlier, max([ratio, *earlier])  # a longer context makes no step cheaper

    narrower = [(block, lengths(before.get(block, ()), block)) for _, block in seconds if block]
    return BreakEven((*known.positions, place), lengths(known.lengths, 0), tuple(narrower))


def measure(runner: ModelRunner, samples: int = 5, seconds: float = 3.0) -> BreakEven:
    """Return the least times of drafted steps over that of a plain one, at some positions.

    Narrower blocks are measured if they are compiled.

    Args:
      samples: of each step at each position, repeated while there is time.
      seconds: after which neither prompts are fed nor samples begun.

    Returns:
      Nothing known if several processes run one program: by their clocks they would differ in
      their decisions, and wait for each other.
    """
    if jax.process_count() > 1:
        return BreakEven()
    return untraced(lambda: _measure(runner, samples, time.perf_counter() + seconds))


def _measure(runner: ModelRunner, samples: int, end: float) -> BreakEven:
    watch = Stopwatch(runner)
    least: dict[tuple[int, Step, int], float] = {}
    started, took = time.perf_counter(), 0.0
    while time.perf_counter() + took < end:
        for position in POSITIONS:
            if not _feed_up_to(watch, position, end):
                break
            for sample, step in itertools.product(range(samples), watch.steps):
                place = watch.fed, *step
                if not (sample and time.perf_counter() > end):
                    least[place] = min(watch.step_seconds(*step), least.get(place, math.inf))
        if watch.fed:
            runner.clear_rows(range(runner.plan.rows))  # the prompts are nobody's
        watch.fed, took = 0, took or time.perf_counter() - started
    positions = tuple(sorted({position for position, _, _ in least}))

    def lengths(block: int) -> tuple[float, ...]:
        ratios = [least[at, Step.SPECULATIVE, block] / least[at, Step.PLAIN, 0] for at in positions]
        # A longer context makes no step cheaper: what is larger than at a later position is noise.
        return tuple(itertools.accumulate(reversed(ratios), min))[::-1]

    narrower = tuple((block, lengths(block)) for _, block in watch.steps if block)
    return BreakEven(positions, lengths(0), narrower)


def _feed_up_to(watch: Stopwatch, position: int, end: float) -> bool:
    """Feed prompts up to a position; return whether the plan and the time have room for that."""
    if position > watch.plan.max_length - watch.plan.chunk:
        return False
    seconds = watch.step_seconds(Step.PLAIN) * watch.plan.chunk / PREFILL_STEPS
    while watch.fed < position:
        if time.perf_counter() + seconds > end:
            return False
        seconds = watch.feed()
    return True
