"""Signals that end a command."""

import gc
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dflash_jax.utils.command import exit_code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_comes_during_garbage_collection_is_heard(number: int, code: int) -> None:
    """Python drops exceptions in garbage collection, during which JAX runs Python code."""

    def press(phase: str, about: dict[str, int]) -> None:
        gc.callbacks.remove(press)
        os.kill(os.getpid(), number)

    def work() -> int:
        gc.callbacks.append(press)
        gc.collect()
        time.sleep(5)
        return 0

    assert exit_code("a command", work) == code


def test_a_repeated_signal_is_not_lost_while_its_timer_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, started = threading.Timer.start, []

    def interrupted(timer: threading.Timer) -> None:
        start(timer)
        started.append(timer)
        if len(started) == 1:
            timer.join()  # it sends the signal now, in the hook

    def work() -> int:
        monkeypatch.setattr(threading.Timer, "start", interrupted)
        sys.unraisablehook(SimpleNamespace(exc_type=KeyboardInterrupt))  # type: ignore[arg-type]
        time.sleep(5)
        return 0

    assert exit_code("a command", work) == 130
    assert len(started) == 2
