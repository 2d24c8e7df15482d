"""The training loop: steps, saved state, exact resumption, a clean stop on a signal.

A step's batch and randomness depend on its number alone, so that a run that was stopped and
resumed equals one that was not, bit for bit on one machine.
"""

import contextlib
import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from dflash_jax.errors import CheckpointError
from dflash_jax.train.files import saved_as

State = TypeVar("State")
Metrics = dict[str, jax.Array]


class Stopped(Exception):
    """Raised once the state is saved after SIGINT or SIGTERM."""


class StopFlag:
    """Set by a signal, read between two steps."""

    raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler; a second signal ends the process the usual way."""
        self.raised = True
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """A flag that SIGINT and SIGTERM raise while the block runs (main thread only)."""
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
class Run:
    """Where a training run stands: its saved state, its length, and what it was started with.

    `identity` names everything that the result depends on; a saved state of another identity
    is refused.
    """

    path: Path
    steps: int
    save_every: int
    identity: str
    label: str


def fit(
    run: Run,
    state: State,
    advance: Callable[[State, int], tuple[State, Metrics]],
    *,
    tell: Callable[[str], None] = lambda line: None,
) -> State:
    """The state after all steps, from the saved one if there is one.

    Args:
      advance: (state, step) -> (state, scalar metrics).
      tell: takes a progress line every few steps.

    Raises:
      Stopped: a signal came; the state is saved and the same call goes on from there.
      CheckpointError: the saved state belongs to another run.
    """
    first, state = restored(run, state)
    window = Window(first)
    with stop_flag() as flag:
        for step in range(first, run.steps):
            state, metrics = advance(state, step)
            window.add(metrics)
            done = step + 1
            if done % 20 == 0 or done == run.steps:
                tell(f"{run.label} {done}/{run.steps}  {window.summary(done)}")
            if flag.raised or done % run.save_every == 0 or done == run.steps:
                store(run, done, state)
            if flag.raised and done < run.steps:
                raise Stopped(f"{run.label} stopped at step {done} of {run.steps}; state saved")
    return state


class Window:
    """Means of the metrics since the last line, and the speed."""

    def __init__(self, first: int):
        self.seen: list[Metrics] = []
        self.since, self.step = time.monotonic(), first

    def add(self, metrics: Metrics) -> None:
        """Keeps one step's metrics without waiting for them."""
        self.seen.append(metrics)

    def summary(self, step: int) -> str:
        """One line about the steps since the last call."""
        means = {
            name: float(np.mean([np.asarray(m[name]) for m in self.seen])) for name in self.seen[0]
        }
        now = time.monotonic()
        pace = (now - self.since) / max(step - self.step, 1)
        self.seen, self.since, self.step = [], now, step
        return "  ".join(f"{k} {v:.3f}" for k, v in means.items()) + f"  {pace:.2f} s/step"


def store(run: Run, step: int, state: State) -> None:
    """Saves the state; the file is replaced whole."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    with saved_as(run.path) as partial:
        save_file(arrays, partial, {"step": str(step), "identity": run.identity})


def restored(run: Run, state: State) -> tuple[int, State]:
    """Step and state of the saved file, or 0 and the given state if there is none."""
    if not run.path.is_file():
        return 0, state
    paths, structure = jax.tree_util.tree_flatten_with_path(state)
    with safe_open(run.path, framework="numpy") as file:
        about = file.metadata() or {}
        if about.get("identity") != run.identity:
            raise CheckpointError(
                f"{run.path} was saved by another preset or seed; remove it, or train into"
                " another folder"
            )
        leaves = [file.get_tensor(jax.tree_util.keystr(path)) for path, _ in paths]
    return int(about["step"]), jax.tree.unflatten(structure, leaves)


def finished(run: Run, state: State) -> State | None:
    """The saved state if the run had come to its end, else None."""
    step, state = restored(run, state)
    return state if step == run.steps else None


def to_stderr(line: str) -> None:
    """Prints a progress line."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
