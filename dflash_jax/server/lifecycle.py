"""Starts of engines: programs to compile first, and new engines in place of failed ones."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from dflash_jax.engine.engine import Engine
from dflash_jax.graph.keys import Variant

log = logging.getLogger("dflash_jax.server")
ATTEMPTS = 6  # starts that may fail in a row
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before the first and the last attempt

Warm = Literal["none", "common", "all"]
COMPILED_FIRST: dict[Warm, tuple[Variant, ...]] = {  # compiled before the server is ready
    "none": (Variant.GREEDY,),
    "common": (Variant.GREEDY, Variant.SAMPLED),
    "all": tuple(Variant),
}


def compilation_order(engine: Engine, warm: Warm) -> tuple[tuple[Variant, ...], list[Variant]]:
    """Return the variants to compile before the server is ready, and those after that."""
    served = [x for x in Variant if x is not Variant.CONSTRAINED or engine.core.grammars.available]
    first = tuple(variant for variant in COMPILED_FIRST[warm] if variant in served)
    return first, [] if warm == "none" else [x for x in served if x not in first]


class TurnClock:
    """Measures how long the engine's thread has been busy with one turn; for any thread."""

    def __init__(self) -> None:
        self._began: float | None = None

    def begin(self, *, busy: bool = True) -> None:
        """Begin a turn, or wait for work if not busy."""
        self._began = time.monotonic() if busy else None

    @property
    def seconds(self) -> float:
        """Seconds since the current turn began; 0 while there is no work."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began


class EngineRestarts:
    """Loads an engine again, with growing pauses after failures.

    Args:
      make: loads the engine.
      loaded: called in the thread with the new engine.
      gave_up: called in the thread with the last error.

    Attributes:
      count: number of engines that were loaded again.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        loaded: Callable[[Engine], None],
        gave_up: Callable[[Exception], None],
    ):
        self.count = 0
        self._make, self._loaded, self._gave_up = make, loaded, gave_up
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._running = False

    def begin(self, failures: int) -> None:
        """Start the thread, unless it runs.

        Args:
          failures: consecutive failures of running engines; each doubles the pauses.
        """
        with self._lock:
            if self._running or self._stopped.is_set():
                return
            self._running = True
        threading.Thread(target=self._run, args=(failures,), name="restart", daemon=True).start()

    def stop(self) -> None:
        """Make no further attempt, and close an engine that is being loaded."""
        self._stopped.set()

    def _run(self, failures: int) -> None:
        last: Exception | None = None
        for attempt in range(ATTEMPTS):
            pause = min(FIRST_PAUSE_S * 2 ** (failures - 1 + attempt), LONGEST_PAUSE_S)
            if self._stopped.wait(pause):
                return
            try:
                engine = self._make()
            except Exception as error:
                log.error("restart %d of at most %d failed: %s", attempt + 1, ATTEMPTS, error)
                last = error
                continue
            with self._lock:
                self._running = False
            if self._stopped.is_set():
                engine.close()
                return
            self.count += 1
            self._loaded(engine)
            return
        assert last is not None
        self._gave_up(last)


def rebuilt(old: Engine) -> Engine:
    """Return an engine with a new state, and the parameters and programs of one that failed.

    Raises:
      PlanError, JaxRuntimeError: there is no memory for it.
    """
    graph, params = old.graph, old.params
    old.core.runner.drop()  # there may be no room for two states
    new = Engine(graph, params, tokenizer=old.tokenizer)
    new.share_programs(old)
    new.core.grammars = old.core.grammars
    return new
