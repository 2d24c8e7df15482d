"""Thread pools that keep slow work off the event loop: bodies, prompts and grammars."""

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dflash_jax.compiler.background import lower_priority
from dflash_jax.errors import InterruptedRequestError, PromptTooLongError
from dflash_jax.server.protocol import Problem
from dflash_jax.utils import interruption

T = TypeVar("T")
LARGE_BODY = 100_000  # bytes from which a body is read outside the event loop
LONG_PROMPT = 20_000  # characters from which a prompt does not queue with short ones
# Long work has threads of its own: however many long requests wait, short ones are served.
_short = concurrent.futures.ThreadPoolExecutor(4, "short-requests")
_long = concurrent.futures.ThreadPoolExecutor(2, "long-requests")
POOLS = {_short: 4, _long: 2}


async def in_thread(
    function: Callable[..., T], *arguments: Any, long: bool = False, param: str | None = None
) -> T:
    """Return the function's result, computed in a thread.

    If the awaiting task is cancelled, the work is dropped from the queue, or ends at its next
    `interruption.check`.

    Args:
      long: the work may take seconds.
      param: the field of the request that errors name.

    Raises:
      Problem: the work raised it, reached a time limit, or refused a prompt as too long.
    """
    gone = threading.Event()

    def work() -> T:
        with interruption.cancellable(gone):
            try:
                return function(*arguments)
            except BaseException as error:
                if isinstance(error, Exception):
                    raise
                raise RuntimeError(f"a library failed: {error}") from error  # a panic in Rust

    loop = asyncio.get_running_loop()
    try:
        context = contextvars.copy_context()
        return await loop.run_in_executor(_long if long else _short, context.run, work)
    except asyncio.CancelledError:
        gone.set()
        raise
    except InterruptedRequestError as error:
        raise Problem(400, str(error), param=param, code="time_limit") from None
    except PromptTooLongError as error:
        raise Problem(400, str(error), param=param, code="context_length_exceeded") from None


async def read_body(read: Callable[[bytes], T], body: bytes) -> T:
    """Return what `read` makes of a body: at once where it is small, else in a thread."""
    return await in_thread(read, body, long=True) if len(body) > LARGE_BODY else read(body)


MOST_SLOW = 4  # requests whose structure takes longer than a short trial and that may wait for it
RETRY_S = 30  # seconds after which one of them has been compiled or refused
Job = TypeVar("Job")


class StructureThreads(Generic[Job]):
    """Prepares jobs in the order they come, but for those whose structure takes long.

    Those are prepared by a second thread, one after the other, and at most `MOST_SLOW` of them wait
    for it.

    Args:
      decide: called with a job; whether `prepare` will take no longer than a short trial.
      prepare: called with a job; reports errors itself.
      refuse: called with a job that is not prepared, and why.
    """

    def __init__(
        self,
        decide: Callable[[Job], bool],
        prepare: Callable[[Job], None],
        refuse: Callable[[Job, Exception], None],
    ):
        self._decide, self._prepare, self._refuse = decide, prepare, refuse
        self._short = concurrent.futures.ThreadPoolExecutor(1, "structures", lower_priority)
        self._long = concurrent.futures.ThreadPoolExecutor(1, "slow-structures", lower_priority)
        self._slow = 0  # jobs in the second thread, or waiting for it
        self._lock = threading.Lock()

    def submit(self, job: Job) -> None:
        """Have a job prepared, or refused."""
        self._short.submit(self._begin, job)

    def stop(self) -> None:
        """Prepare no more jobs."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, job: Job) -> None:
        try:
            if self._decide(job):
                self._prepare(job)
                return
            with self._lock:
                if self._slow >= MOST_SLOW:
                    raise Problem(
                        503,
                        f"{self._slow} other requests wait for structures that take long to"
                        f" compile; try again in about {RETRY_S} s, or simplify the structure",
                        code="structures_busy",
                        retry_s=RETRY_S,
                    )
                self._slow += 1
            self._long.submit(self._finish, job)
        except Exception as error:  # a client waits for the answer
            self._refuse(job, error)

    def _finish(self, job: Job) -> None:
        try:
            self._prepare(job)
        finally:
            with self._lock:
                self._slow -= 1


def unfinished() -> Problem:
    """Return the error of a request whose time is up before its structure is compiled."""
    return Problem(
        503,
        "the request's time was up before its output structure was compiled; simplify the"
        " structure, or try again with a longer timeout",
        code="structure_unfinished",
        retry_s=RETRY_S,
    )
