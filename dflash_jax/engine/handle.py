"""A submitted request as its caller holds it."""

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

from dflash_jax.engine.core import EngineCore
from dflash_jax.engine.result import Piece, Result, Stats
from dflash_jax.engine.running_request import RunningRequest
from dflash_jax.engine.scheduler import variants_of
from dflash_jax.errors import RequestError
from dflash_jax.graph.keys import Variant

Notify = Callable[[BaseException | None], None]


class RequestHandle:
    """A request from `Engine.submit`: iterate over its pieces, await it, or call `result`.

    `for` runs turns of the engine; `async for` and `await` have a thread run them, and never block
    the event loop. Every iteration begins with the first piece. One that is left before its end
    cancels the request, and so does garbage collection of the handle: at the engine's next turn,
    as collection may happen in any thread at any time and must take no lock.

    Attributes:
      sequence: the engine's own.
      queued: whether the engine has the request; set by `Engine.enqueue`.
    """

    def __init__(self, sequence: RunningRequest, driver: "TurnDriver"):
        self.sequence, self.queued, self._driver = sequence, False, driver

    @property
    def number(self) -> int:
        """The number by which log lines name the request; unique in the process."""
        return self.sequence.number

    @property
    def variants(self) -> list[Variant]:
        """Variants of programs that the request may need."""
        return variants_of(self.sequence)

    @property
    def done(self) -> bool:
        """Whether the request ended; its pieces are complete then."""
        return self.sequence.done

    @property
    def finish_reason(self) -> str | None:
        """Why the request ended: "stop", "length", "cancelled" or "error"; None while it runs."""
        return self.sequence.finish.value if self.sequence.finish else None

    @property
    def pieces(self) -> list[Piece]:
        """Output so far, in the portions in which it was generated. The list only grows."""
        return self.sequence.output.pieces

    @property
    def token_ids(self) -> list[int]:
        """Output tokens so far."""
        return self.sequence.output.ids

    @property
    def num_fed(self) -> int:
        """Prompt tokens computed, or restored from the prefix cache, so far."""
        return self.sequence.cursor.num_fed

    @property
    def num_cached(self) -> int:
        """Prompt tokens restored from the prefix cache so far."""
        return self.sequence.cursor.num_cached

    @property
    def stats(self) -> Stats:
        """Statistics so far."""
        return self.sequence.stats

    def delay(self, seconds: float) -> None:
        """Count seconds before the request was queued as `Stats.compile_s`; moves its deadline."""
        self.sequence.delay(seconds)

    def result(self, timeout: float | None = None) -> Result:
        """Return the result; run turns of the engine until the request ends.

        Args:
          timeout: seconds after which no further turn is run.

        Raises:
          TimeoutError: the request still runs.
          RequestError: the request was prepared but not queued, or its grammar gave up.
          ComputeError: the device or the target's numbers broke.
        """
        if self.sequence.dropped:
            self.close()
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done:
            if time.monotonic() >= end:
                raise TimeoutError(f"the request still runs after {timeout} s; ask again, or close")
            self._advance()
        return self.sequence.result()

    def close(self) -> None:
        """End the request if it still runs; `result` then has its output so far."""
        self._driver.core.cancel(self.sequence)

    def __del__(self) -> None:
        self.sequence.dropped = True

    def __iter__(self) -> Iterator[Piece]:
        given = 0
        try:
            while True:
                done = self.done  # before looking: another thread may run turns
                while given < len(self.pieces):
                    given += 1
                    yield self.pieces[given - 1]
                if done:
                    self.result()
                    return
                self._advance()
        except GeneratorExit:
            self.sequence.dropped = True
            raise
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[Piece]:
        loop, news, given = asyncio.get_running_loop(), asyncio.Event(), 0
        failures: list[BaseException] = []

        def notify(failure: BaseException | None) -> None:
            failures.extend([failure] if failure else ())
            if failure or self.done or len(self.pieces) > given:
                loop.call_soon_threadsafe(news.set)

        try:
            self._check_queued()
            self._driver.attach(self, notify)
            while True:
                news.clear()
                done = self.done  # before looking: a thread runs turns
                while given < len(self.pieces):
                    given += 1
                    yield self.pieces[given - 1]
                if done:
                    self.result()
                    return
                if failures:
                    raise failures[0]
                await news.wait()
        finally:
            self.sequence.dropped = True  # without effect on a request that ended

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        async for _ in self:
            pass
        return self.result()

    def _check_queued(self) -> None:
        if not self.queued:
            raise RequestError("the request is not queued; give it to `Engine.enqueue` first")

    def _advance(self) -> None:
        self._check_queued()
        self._driver.core.step()


class TurnDriver:
    """Runs an engine's turns in a thread while requests are awaited in event loops."""

    def __init__(self, core: EngineCore):
        self.core, self._lock = core, threading.Lock()
        self._attached: dict[Notify, RequestHandle] = {}

    def attach(self, handle: RequestHandle, notify: Notify) -> None:
        """Run turns until a request ended.

        Args:
          notify: called in the thread after every turn, with the error if the turn failed, which
            ends all attached requests.
        """
        with self._lock:
            idle = not self._attached
            self._attached[notify] = handle
        if idle:  # a daemon, as one turn may compile
            threading.Thread(target=self._run, name="async", daemon=True).start()

    def _run(self) -> None:
        ended = False
        while not ended:
            failure: BaseException | None = None
            try:
                self.core.step()
            except BaseException as error:  # nothing may end this thread silently
                failure = error
            with self._lock:
                told = list(self._attached.items())
                for notify, handle in told:
                    if failure or handle.done:
                        del self._attached[notify]
                ended = not self._attached
            for notify, handle in told:
                try:
                    notify(failure)
                except RuntimeError:  # the event loop is closed
                    handle.sequence.dropped = True
