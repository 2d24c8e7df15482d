"""The thread that owns an engine, and the hand-over between it and the event loop.

The thread blocks on its queue while no request runs, and looks into it between two turns of the
engine otherwise: a cancellation takes effect within one block or prompt chunk. What an engine's
turn produced goes to the event loop in one call. Requests whose grammar has to be made, or whose
programs may have to be compiled, are submitted by a second thread, so that streams go on.
"""

import asyncio
import concurrent.futures
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.live import Live
from dflash_jax.engine.recovery import CancelCell
from dflash_jax.engine.recovery.cancellation import Reason
from dflash_jax.engine.result import Piece, Result
from dflash_jax.errors import ComputeError, DFlashError

log = logging.getLogger("dflash_jax.server")
Listener = Callable[[int, list[Piece], "Result | Exception | None"], None]
FAILURES = 2  # failed turns in a row after which an engine is given up
SLOW = {  # options that may need something compiled
    "structured",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
}
DICTATING = {"recovery", "min_tokens"}  # options that need it where warm-up left it out


@dataclasses.dataclass(eq=False)
class Job:
    """One output being made.

    `listener(index, pieces, end)` is called in the event loop: new pieces, and at the end the
    result or what went wrong.
    """

    prompt: list[int]
    options: dict[str, Any]
    index: int
    listener: Listener
    live: Live | None = None
    given: int = 0  # pieces handed over
    ended: bool = False  # somebody wants its end
    cell: CancelCell = dataclasses.field(default_factory=CancelCell)

    def news(self) -> "tuple[Job, list[Piece], Result | Exception | None] | None":
        """What the listener has not heard yet."""
        assert self.live is not None
        pieces = self.live.pieces[self.given :]
        self.given += len(pieces)
        if not self.live.done:
            return (self, pieces, None) if pieces else None
        try:
            return self, pieces, self.live.result()
        except DFlashError as error:
            return self, pieces, error


News = tuple[Job, list[Piece], Result | Exception | None]


class Worker:
    """An engine in a thread of its own.

    Args:
      make: opens the models and compiles; runs in the thread.
    """

    def __init__(self, make: Callable[[], Engine]):
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: list[Job] = []  # the thread's own
        self._failures = 0
        self._stopping = False
        self.engine: Engine | None = None
        self.active = 0  # jobs submitted and not ended; the event loop's own
        self.error: Exception | None = None  # why there is no engine (any more)
        self.ended = asyncio.Event()  # of the loop: the engine can or may not be used any more
        self.ready = asyncio.Event()
        self._slow = concurrent.futures.ThreadPoolExecutor(1, "slow-requests")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- for the event loop -------------------------------------------------------------------

    def room(self, jobs: int) -> bool:
        """Whether so many more jobs may wait or run; `Plan.queue` of them may."""
        return self.engine is not None and self.active + jobs <= self.engine.plan.queue

    @property
    def held_tokens(self) -> int:
        """Tokens of prompts and outputs in the caches of running requests."""
        lives = [job.live for job in list(self._jobs)]
        return sum(live.fed + len(live.ids) for live in lives if live and not live.done)

    def submit(self, job: Job) -> None:
        """Queues a job; its listener hears of it even if it is refused."""
        self.active += 1
        engine, asked = self.engine, job.options.keys()
        ready = engine is None or "forced" in engine.executables
        if SLOW & asked or (DICTATING & asked and not ready):
            self._slow.submit(self._start, job)
        else:
            self._commands.put(lambda: self._start(job))

    def cancel(self, job: Job, reason: Reason | None = None) -> None:
        """Ends a job; its listener hears the result so far.

        Args:
          reason: why nobody wants the rest; None where the answer is complete as it is.
        """
        if reason:
            job.cell.cancel(reason)  # the engine's next turn hears of it
        else:
            self._commands.put(lambda: self._cancel(job))

    async def stop(self) -> None:
        """Cancels what runs and ends the thread."""
        self._slow.shutdown(wait=False, cancel_futures=True)
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join, 30)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.engine = self._make()
        except Exception as error:
            self._give_up(error)
            return
        self._call(self.ready.set)
        while not self._stopping:
            if not self._jobs:
                self._commands.get()()
            while not self._stopping:
                try:
                    self._commands.get_nowait()()
                except queue.Empty:
                    break
            if self._jobs:
                self._turn()
        self.engine.close()

    def _turn(self) -> None:
        assert self.engine is not None
        try:
            self.engine.advance()
        except Exception as error:  # nothing may end this thread silently
            self._recover(error)
            return
        self._failures = 0
        self._tell([news for job in self._jobs if (news := job.news())])

    def _tell(self, news: list[News]) -> None:
        ended = {id(job) for job, _, end in news if end is not None}
        self._jobs = [job for job in self._jobs if id(job) not in ended]
        if news:
            self._call(self._deliver, news)

    def _deliver(self, news: list[News]) -> None:
        for job, pieces, end in news:
            self.active -= end is not None
            job.listener(job.index, pieces, end)

    def _start(self, job: Job) -> None:
        """Submits a job, in either thread."""
        engine = self.engine
        assert engine is not None
        try:
            live = engine.submit(job.prompt, cancel=job.cell, **job.options)
        except Exception as error:
            self._call(self._deliver, [(job, [], error)])
            return
        if threading.current_thread() is self._thread:
            self._follow(job, live, engine)
        else:
            self._commands.put(lambda: self._follow(job, live, engine))

    def _follow(self, job: Job, live: Live, engine: Engine) -> None:
        """From now on a job is told of its request."""
        job.live = live
        if engine is not self.engine:
            lost = ComputeError("a step failed while the request was prepared; send it again")
            self._call(self._deliver, [(job, [], lost)])
            return
        self._jobs.append(job)
        self._call(self._deliver, [(job, [], None)])  # it was accepted
        if job.ended:
            self._cancel(job)

    def _cancel(self, job: Job) -> None:
        job.ended = True
        if job.live is not None and not job.live.done:
            assert self.engine is not None
            self.engine.cancel(job.live)
            if news := job.news():
                self._tell([news])

    def _stop(self) -> None:
        for job in list(self._jobs):
            self._cancel(job)
        self._stopping = True

    def _recover(self, error: Exception) -> None:
        """A failed turn lost the device state: its requests end, and the engine starts anew."""
        assert self.engine is not None
        log.error("a step failed: %s", error, exc_info=error)
        failure = error if isinstance(error, DFlashError) else ComputeError(
            f"the computation failed ({type(error).__name__}: {error}); see the server's log"
        )  # fmt: skip
        self._tell([(job, job.live.pieces[job.given :], failure) for job in self._jobs if job.live])
        self._failures += 1
        old = self.engine
        parts = old.target, old.drafter, old.params, old.plan
        old.runner.drop()  # there may be no room for two states
        try:
            new = None if self._failures >= FAILURES else Engine(*parts, tokenizer=old.tokenizer)
        except Exception as last:
            new, error = None, last
        if new is None:
            self._give_up(error)
            self._stopping = True
            return
        new.executables, new.break_even = old.executables, old.break_even
        new.runner.compile_s = old.compile_s
        self.engine = new

    def _give_up(self, error: Exception) -> None:
        self.error = error
        self._call(self.ended.set)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed; nobody listens any more
            self._stopping = True
