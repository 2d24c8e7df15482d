"""Measure how many tokens a drafted round must commit to pay off."""

import itertools
import math
import time

import jax
import numpy as np

from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.scheduler import make_rules, steps_of_call
from dflash_jax.engine.state_machine.speculation import BreakEven
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.graph.programs import is_multi_step
from dflash_jax.graph.settings import untraced
from dflash_jax.graph.state import read_output
from dflash_jax.graph.steps.inputs import DecodeInputs, PrefillInputs

DECODE_STEPS = (Step.SPECULATIVE, Step.PLAIN)
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
        self._counts: dict[Step, int] = {}
        self.fed = 0  # tokens in the caches

    def step_seconds(self, step: Step) -> float:
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

    def _seconds(self, step: Step, count: int) -> float:
        exactly = self._runner.executor.put(np.int32(-count)) if self._most > 1 else None
        return self._call(step, DecodeInputs(self._rules, num_steps=exactly)) / count

    def feed(self) -> float:
        """Feed the next chunk of a prompt to all rows, or to the first; return the seconds."""
        rows, chunk = self.plan.fed_rows, self.plan.chunk
        row = None if rows == self.plan.rows else np.int32(0)
        tokens, num_fed = np.zeros((rows, chunk), np.int32), np.full(rows, chunk, np.int32)
        inputs = PrefillInputs(tokens, num_fed, np.full(rows, not self.fed), self._rules, row=row)
        self.fed += chunk
        return self._call(Step.PREFILL, inputs)

    def _call(self, step: Step, inputs: DecodeInputs | PrefillInputs) -> float:
        started = time.perf_counter()
        read_output(self._runner.run(ProgramKey(step, self._variant), inputs))
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
        self.value, self.enabled = known, self.enabled and not known.positions

    def measure(self, place: int) -> bool:
        """Measure if nothing is known about a position; return whether it did.

        Only the engine's turn may call this.

        Args:
          place: tokens in the longest row whose gain by drafting is in doubt.
        """
        known = self.value.positions
        if jax.process_count() > 1 or (known and place <= FURTHER * known[-1] + MARGIN):
            return False
        variant = next((v for v in (Variant.GREEDY, Variant.SAMPLED) if self._compiled(v)), None)
        if variant is None:
            return False
        watch = Stopwatch(self._runner, variant)
        drafted, plain = (
            min(watch.step_seconds(step) for _ in range(SAMPLES)) for step in DECODE_STEPS
        )
        ratio = drafted / plain
        ratio = max([ratio, *self.value.lengths])  # a longer context makes no step cheaper
        self.value = BreakEven((*known, place), (*self.value.lengths, ratio))
        return True

    def _compiled(self, variant: Variant) -> bool:
        made = self._runner.executables
        return all(ProgramKey(step, variant) in made for step in DECODE_STEPS)


def measure(runner: ModelRunner, samples: int = 5, seconds: float = 3.0) -> BreakEven:
    """Return the least time of a drafted step over that of a plain one, at some positions.

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
    least: dict[tuple[int, Step], float] = {}
    started, took = time.perf_counter(), 0.0
    while time.perf_counter() + took < end:
        for position in POSITIONS:
            if not _feed_up_to(watch, position, end):
                break
            for sample, step in itertools.product(range(samples), DECODE_STEPS):
                place = watch.fed, step
                if not (sample and time.perf_counter() > end):
                    least[place] = min(watch.step_seconds(step), least.get(place, math.inf))
        if watch.fed:
            runner.clear_rows(range(runner.plan.rows))  # the prompts are nobody's
        watch.fed, took = 0, took or time.perf_counter() - started
    positions = tuple(sorted({position for position, _ in least}))
    ratios = [least[at, Step.SPECULATIVE] / least[at, Step.PLAIN] for at in positions]
    # A longer context makes no step cheaper: what is larger than at a later position is noise.
    lengths = tuple(itertools.accumulate(reversed(ratios), min))[::-1]
    return BreakEven(positions, lengths)


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
