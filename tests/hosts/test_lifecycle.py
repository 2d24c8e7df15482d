"""Engines that are loaded again after their hosts failed."""

import threading
from typing import Any

import pytest

from dflash_jax.errors import HostError
from dflash_jax.server import engine_thread
from dflash_jax.server.engine_thread import EngineRestarts


class Engines:
    """Loads engines, some of which fail, and records what became of them."""

    def __init__(self, failures: int):
        self.failures, self.attempts = failures, 0
        self.loading, self.may_load = threading.Event(), threading.Event()
        self.may_load.set()
        self.ends: list[Any] = []
        self.ended, self.closed = threading.Event(), threading.Event()

    def make(self) -> Any:
        self.attempts += 1
        self.loading.set()
        assert self.may_load.wait(10)
        if self.attempts <= self.failures:
            raise HostError(f"attempt {self.attempts}")
        return self

    def close(self) -> None:
        self.closed.set()

    def end(self, found: Any) -> None:
        self.ends.append(found)
        self.ended.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "FIRST_PAUSE_S", 0.001)


def restarts(engines: Engines) -> EngineRestarts:
    return EngineRestarts(engines.make, engines.end, engines.end)


def test_attempts_are_repeated_until_one_loads() -> None:
    engines = Engines(failures=2)
    found = restarts(engines)
    engines.may_load.clear()
    for _ in range(3):  # as every use of the lost engine begins it
        found.begin(1)
    engines.may_load.set()
    assert engines.ended.wait(10)
    assert (engines.ends, engines.attempts, found.count) == ([engines], 3, 1)
    engines.ended.clear()
    found.begin(1)
    assert engines.ended.wait(10)
    assert found.count == 2


def test_the_last_error_is_given_after_the_last_attempt() -> None:
    engines = Engines(failures=100)
    found = restarts(engines)
    found.begin(1)
    assert engines.ended.wait(10)
    assert str(engines.ends[0]) == f"attempt {engine_thread.ATTEMPTS}"
    assert found.count == 0


def test_an_engine_that_loads_after_the_stop_is_closed() -> None:
    engines = Engines(failures=0)
    found = restarts(engines)
    engines.may_load.clear()
    found.begin(1)
    assert engines.loading.wait(10)
    found.stop()
    engines.may_load.set()
    assert engines.closed.wait(10)
    assert not engines.ends
    found.begin(1)
    assert engines.attempts == 1
