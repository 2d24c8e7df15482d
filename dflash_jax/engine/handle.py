"""A submitted request as its caller holds it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from dflash_jax.engine.result import Piece, Result, Stats
from dflash_jax.engine.running_request import RunningRequest
from dflash_jax.engine.scheduler import variants_of
from dflash_jax.errors import RequestError
from dflash_jax.graph.keys import Variant


class RequestHandle:
    """A request from `Engine.submit`. `result` waits for it; any thread may look at it.

    Attributes:
      sequence: the engine's own.
      advance: runs a turn of the engine; None until the request is queued.
    """

    __slots__ = ("advance", "sequence")

    def __init__(self, sequence: RunningRequest):
        self.sequence = sequence
        self.advance: Callable[[], None] | None = None

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

    @property
    def dropped(self) -> bool:
        """Whether the request was given up by `drop`."""
        return self.sequence.dropped

    def drop(self) -> None:
        """Have the engine's next turn cancel the request. Takes no lock."""
        self.sequence.dropped = True

    def delay(self, seconds: float) -> None:
        """Count seconds before the request was queued as `Stats.compile_s`; moves its deadline."""
        self.sequence.delay(seconds)

    def result(self) -> Result:
        """Return the result; run turns of the engine until the request ends.

        Raises:
          RequestError: the request was prepared but not queued, or its grammar gave up.
          ComputeError: the device or the target's numbers broke.
        """
        while not self.sequence.done:
            if self.advance is None:
                raise RequestError("the request is not queued; give it to `Engine.enqueue` first")
            self.advance()
        return self.sequence.result()


class Stream:
    """A running request: iterate over it for pieces, then read `result`.

    A stream that is garbage-collected before its end cancels the request at the engine's next
    turn. That takes no lock, as collection may happen in any thread at any time.
    """

    def __init__(
        self,
        handle: RequestHandle,
        advance: Callable[[], None],
        cancel: Callable[[RequestHandle], None],
    ):
        self._handle, self._advance, self._cancel = handle, advance, cancel

    def __iter__(self) -> Iterator[Piece]:
        handle, given = self._handle, 0
        try:
            while True:
                done = handle.done  # before looking: another thread may drive the engine
                while given < len(handle.pieces):
                    given += 1
                    yield handle.pieces[given - 1]
                if done:
                    handle.result()
                    return
                self._advance()
        except GeneratorExit:
            handle.drop()
            raise
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        self._handle.drop()

    def close(self) -> None:
        """End the request if it still runs; its output so far stays in `result`."""
        self._cancel(self._handle)

    @property
    def result(self) -> Result:
        """The result, once iteration ended or the stream was closed.

        Raises:
          RequestError: the stream still runs, or its grammar gave up.
          ComputeError: the device or the target's numbers broke.
        """
        if self._handle.dropped:
            self.close()
        if not self._handle.done:
            raise RequestError("the stream still runs; iterate it to its end, or close it first")
        return self._handle.result()


class AsyncStream:
    """A request for `async for`: iterate over it for pieces, then read `result`.

    The request is queued when iteration begins. It is cancelled with the iterating task, and when
    the iterator is closed. The event loop is never blocked: a thread runs the engine.
    """

    def __init__(
        self,
        submit: Callable[[], RequestHandle],
        advance: Callable[[], None],
        driver: "AsyncDriver",
    ):
        self._submit, self._advance, self._driver = submit, advance, driver
        self._handle: RequestHandle | None = None

    async def __aiter__(self) -> AsyncIterator[Piece]:
        if self._handle is not None:
            raise RequestError("the stream was iterated already; call `astream` for another one")
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        queued = loop.run_in_executor(None, self._submit)  # may compile programs and grammars
        try:
            handle = self._handle = await asyncio.shield(queued)
        except asyncio.CancelledError:
            queued.add_done_callback(_drop_queued)
            raise
        failures: list[BaseException] = []
        given = 0

        def notify(failure: BaseException | None) -> None:
            failures.extend([failure] if failure else ())
            if failure or handle.done or len(handle.pieces) > given:
                loop.call_soon_threadsafe(news.set)

        try:
            self._driver.attach(handle, self._advance, notify)
            while True:
                news.clear()
                done = handle.done  # before looking: a thread drives the engine
                while given < len(handle.pieces):
                    given += 1
                    yield handle.pieces[given - 1]
                if done:
                    handle.result()
                    return
                if failures:
                    raise failures[0]
                await news.wait()
        finally:
            if not handle.done:
                handle.drop()

    @property
    def result(self) -> Result:
        """The result, once iteration ended.

        Raises:
          RequestError: the stream still runs or was not iterated, or its grammar gave up.
          ComputeError: the device or the target's numbers broke.
        """
        if self._handle is None or not self._handle.done:
            raise RequestError("the stream still runs; iterate it to its end first")
        return self._handle.result()


def _drop_queued(queued: "asyncio.Future[RequestHandle]") -> None:
    """Give up a request that was queued after its task was cancelled."""
    if not queued.cancelled() and queued.exception() is None:
        queued.result().drop()


class AsyncDriver:
    """Runs an engine's turns in a thread while requests of `AsyncStream`s run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attached: dict[RequestHandle, Callable[[BaseException | None], None]] = {}

    def attach(
        self,
        handle: RequestHandle,
        advance: Callable[[], None],
        notify: Callable[[BaseException | None], None],
    ) -> None:
        """Run turns until a request ended.

        Args:
          advance: runs a turn of the engine.
          notify: called in the thread after every turn, with the error if the turn failed, which
            ends all attached requests.
        """
        with self._lock:
            idle = not self._attached
            self._attached[handle] = notify
        if idle:  # a daemon, as one turn may compile
            threading.Thread(target=self._run, args=(advance,), name="async", daemon=True).start()

    def _run(self, advance: Callable[[], None]) -> None:
        ended = False
        while not ended:
            failure: BaseException | None = None
            try:
                advance()
            except BaseException as error:  # nothing may end this thread silently
                failure = error
            with self._lock:
                told = list(self._attached.items())
                for handle, _ in told:
                    if failure or handle.done:
                        del self._attached[handle]
                ended = not self._attached
            for handle, notify in told:
                try:
                    notify(failure)
                except RuntimeError:  # the event loop is closed
                    handle.drop()
