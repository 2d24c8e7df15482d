"""The training loop: steps, saved state, exact resumption, a clean stop on a signal.

The batch and the randomness of a step depend only on its number, so a resumed run is bitwise
equal to an uninterrupted one on the same machine.
"""

import contextlib
import dataclasses
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import distributed
from dflash_jax.errors import ComputeError
from dflash_jax.trainer import picture, saved
from dflash_jax.trainer.files import saved_as
from dflash_jax.utils.progress import duration, time_left

State = TypeVar("State")
Metrics = Mapping[str, jax.Array | float]
HELD_OUT = "held_out"  # tokens per round of held-out prompts, among the metrics
SIMULATED = "simulated"  # tokens per round at random places of a batch, among the metrics
WINDOW = 20  # steps between two progress lines
BOUNDS = ("_low", "_high")  # ends of names of metrics that bound another one
PICTURE = "run.svg"  # beside the log
DRAWN_S = 5.0  # seconds between two pictures
LONG = 100  # steps of a run whose time is told before it begins


class TrainingStopped(Exception):
    """Raised once the state is saved after SIGINT or SIGTERM."""


class StopFlag:
    """A flag set by a signal and read between steps."""

    raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal; a second one has its default effect."""
        self.raised = True
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """Yield a flag that SIGINT and SIGTERM set during the block (main thread only)."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {n: signal.signal(n, flag) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """Settings of a training run.

    Attributes:
      path: folder of the saved states.
      identity: everything that the result depends on; saved states of another identity are
        rejected.
      log: file for the metrics, one JSON object per step; `PICTURE` beside it has their curves.
      batch: describes the batch of a step in error messages.
      measured: returns further metrics of the state after a number of steps.
      on_step: called with each line of the log, in order.
    """

    path: Path
    steps: int
    save_every: int
    identity: str
    label: str
    log: Path | None = None
    batch: Callable[[int], str] = "batch {}".format
    measured: Callable[[Any, int], Mapping[str, float]] = lambda state, done: {}
    on_step: Callable[[dict[str, Any]], Any] = lambda metrics: None


@dataclasses.dataclass(frozen=True)
class Watch:
    """The functions that watch a run; calling it reports a line of progress.

    Attributes:
      on_progress: called with lines.
      on_step: called with the number and the metrics of each step, in order.
      held_out: returns metrics of held-out prompts by the parameters of a drafter after a number
        of steps.
    """

    on_progress: Callable[[str], Any]
    on_step: Callable[[dict[str, Any]], Any] = lambda metrics: None
    held_out: Callable[[Any, int], dict[str, float]] | None = None

    def __call__(self, line: str) -> None:
        """Report a line."""
        self.on_progress(line)

    @classmethod
    def of(cls, report: Callable[[str], None]) -> "Watch":
        """Return a function that reports lines as a watch, a watch as it is."""
        return report if isinstance(report, Watch) else cls(report)


def fit(
    run: TrainingRun,
    state: State,
    advance: Callable[[State, int], tuple[State, Metrics]],
    *,
    report: Callable[[str], None] = lambda line: None,
) -> State:
    """Run the remaining steps and return the final state.

    Args:
      advance: (state, step) -> (state, scalar metrics).
      report: called with a progress line every few steps.

    Raises:
      TrainingStopped: a signal arrived, at any host; the state is saved and the same call resumes
        from it.
      ComputeError: a metric is not finite; the last good state stays saved.
      CheckpointError: the saved state belongs to another run, or the disk is full.
    """
    first, state = saved.newest(run.path, state, run.identity)
    group = distributed.current()
    if run.steps - first >= LONG:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no memory for a second state
            seconds = seconds_of_step(advance, state, first)
            whole = duration(seconds * (run.steps - first))
            report(f"{run.steps - first:,} steps of about {seconds:.2f} s: {whole}")
    window = MetricsWindow(run, first)
    with stop_flag() as flag:
        for step in range(first, run.steps):
            state, metrics = advance(state, step)
            done = step + 1
            window.add({**metrics, **run.measured(state, done)})
            due = done % run.save_every == 0 or done == run.steps
            stopping = group.any("stop", flag.raised)
            reported = due or stopping or done % WINDOW == 0
            if reported:
                report(f"{run.label} {done}/{run.steps}  {window.close()}")
                # A signal usually arrives while metrics are awaited.
                stopping = group.any("stop", flag.raised)
            if due or stopping:
                saved.save(run.path, done, state, run.identity)
                if group.any("stop", flag.raised):
                    raise TrainingStopped(
                        f"{run.label} stopped at step {done} of {run.steps}; state saved"
                    )
    return state


def seconds_of_step(
    advance: Callable[[State, int], tuple[State, Metrics]], state: State, step: int
) -> float:
    """Return the time of a step, by two whose results are not used; the first one compiles."""
    seconds = 0.0
    for _ in range(2):
        begun = time.monotonic()
        _, metrics = advance(jax.tree.map(jnp.copy, state), step)
        jax.block_until_ready(metrics)
        seconds = time.monotonic() - begun
    return seconds


class MetricsWindow:
    """Metrics of the steps since the last progress line: checked, logged, averaged and drawn."""

    def __init__(self, run: TrainingRun, first: int):
        self._run = run
        self._step = first
        self._seen: list[Metrics] = []
        self._since = time.monotonic()
        self._drawn = -DRAWN_S
        self._lines: list[dict[str, Any]] = []  # of the log
        if run.log is not None:
            run.log.parent.mkdir(parents=True, exist_ok=True)
            cut_log(run.log, first)
            self._lines = read_log(run.log)

    def add(self, metrics: Metrics) -> None:
        """Add the metrics of one step without waiting for them."""
        self._seen.append(metrics)

    def close(self) -> str:
        """Return one line about the steps since the last call.

        Raises:
          ComputeError: a metric is not finite; the message names step and batch.
        """
        first = self._step
        seen = [{name: float(x) for name, x in metrics.items()} for metrics in self._seen]
        for number, metrics in enumerate(seen, first):
            if not np.isfinite(list(metrics.values())).all():
                raise ComputeError(self._explanation(number, metrics))
        now = time.monotonic()
        pace = (now - self._since) / max(len(seen), 1)
        lines = [{"step": n + 1, **m, "seconds": round(pace, 4)} for n, m in enumerate(seen, first)]
        self._lines += lines
        if self._run.log is not None:
            append_lines(self._run.log, [json.dumps(line) for line in lines])
            self._draw(self._run.log.with_name(PICTURE), now)
        for line in lines:
            self._run.on_step(line)
        self._seen = []
        self._since = now
        self._step = first + len(seen)
        names = dict.fromkeys(name for m in seen for name in m if not name.endswith(BOUNDS))
        means = {name: np.mean([m[name] for m in seen if name in m]) for name in names}
        remaining = self._run.steps - self._step
        left = f", {time_left(pace * remaining)}" if remaining else ""
        shown = [f"{name} {value:.3f}" for name, value in means.items()]
        if curve := picture.bars(self._lines, SIMULATED):
            shown = [f"{x} {curve}" if x.startswith(f"{SIMULATED} ") else x for x in shown]
        return "  ".join(shown) + f"  {pace:.2f} s/step{left}"

    def _draw(self, path: Path, now: float) -> None:
        """Draw the curves, unless they were drawn a short while ago.

        Raises:
          CheckpointError: the picture cannot be written.
        """
        ends = self._step + len(self._seen) == self._run.steps
        if now - self._drawn < DRAWN_S and not ends:
            return
        self._drawn = now
        try:
            with saved_as(path) as partial:
                partial.write_text(picture.picture(self._lines, self._run.steps), "utf-8")
        except OSError as error:
            raise saved.full(path, error) from error

    def _explanation(self, number: int, metrics: dict[str, float]) -> str:
        run = self._run
        values = ", ".join(f"{k} {v}" for k, v in metrics.items())
        kept = number // run.save_every * run.save_every
        last = f"the state after step {kept} is kept in {run.path}" if kept else "none is saved yet"
        return (
            f"{run.label}: step {number + 1} gave {values}, at {run.batch(number)}; training"
            f" stopped, {last}. Look at that batch, or lower the rate and train into another folder"
        )


def cut_log(path: Path, steps: int) -> None:
    """Drop log lines of steps after the last saved one, and incomplete lines."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[:steps]
        with saved_as(path) as partial:
            partial.write_text("".join(lines), encoding="utf-8")


def read_log(log: Path) -> list[dict[str, Any]]:
    """Return the metrics of a log's steps, without lines that are damaged; none without a log."""
    if not log.is_file():
        return []
    lines = []
    for text in log.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict) and "step" in line]


def append_lines(path: Path, lines: list[str]) -> None:
    """Append lines to a file.

    Raises:
      CheckpointError: the file cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
    except OSError as error:
        raise saved.full(path, error) from error


def finished(run: TrainingRun, state: State) -> State | None:
    """Return the saved state if the run has finished, otherwise None."""
    step, state = saved.newest(run.path, state, run.identity)
    return state if step == run.steps else None


def to_stderr(line: str) -> None:
    """Print a progress line to standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
