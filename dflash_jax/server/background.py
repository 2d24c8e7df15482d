"""Thread pools that keep slow work off the event loop: bodies, prompts and grammars."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, TypeVar

from dflash_jax.errors import InterruptedRequestError, PromptTooLongError
from dflash_jax.graph.background import lower_priority
from dflash_jax.server.errors import GRAMMAR_RETRY_S
from dflash_jax.server.protocol import Problem
from dflash_jax.utils import interruption

T = TypeVar("T")
LARGE_BODY = 100_000  # bytes; larger bodies are decoded in a thread
LONG_PROMPT = 20_000  # characters; longer prompts use the pool for long work
SHORT_TEXT = 1_000  # characters; encoding fewer takes less time than a change of threads
# Long work has its own pool, so that short requests never wait for it.
_short = concurrent.futures.ThreadPoolExecutor(4, "short-requests")
_long = concurrent.futures.ThreadPoolExecutor(2, "long-requests")
POOLS = {_short: 4, _long: 2}


async def in_thread(
    function: Callable[..., T], *arguments: Any, long: bool = False, param: str | None = None
) -> T:
    """Return the result of a function, called in a thread.

    If the awaiting task is cancelled, the call is removed from the queue, or ends at its next
    `interruption.check`.

    Args:
      long: the call may take seconds.
      param: request field to name in errors.

    Raises:
      Problem: raised by the call, a time limit was reached, or a prompt is too long.
    """
    gone = threading.Event()

    def work() -> T:
        with interruption.cancellable(gone):
            return _without_panics(function, *arguments)

    loop = asyncio.get_running_loop()
    try:
        context = contextvars.copy_context()
        with _as_problems(param):
            return await loop.run_in_executor(_long if long else _short, context.run, work)
    except asyncio.CancelledError:
        gone.set()
        raise


def at_once(function: Callable[..., T], *arguments: Any, param: str | None = None) -> T:
    """Return the result of a function that takes less time than a change of threads.

    Arguments and errors as for `in_thread`.
    """
    with _as_problems(param):
        return _without_panics(function, *arguments)


def _without_panics(function: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a function; a panic in Rust, which is no Exception, becomes one."""
    try:
        return function(*arguments)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"a library failed: {error}") from error


@contextlib.contextmanager
def _as_problems(param: str | None) -> Iterator[None]:
    """Raise errors of a time limit and of a prompt that is too long as problems of a field."""
    try:
        yield
    except InterruptedRequestError as error:
        raise Problem(str(error), param=param, code="time_limit") from None
    except PromptTooLongError as error:
        raise Problem(str(error), param=param, code="context_length_exceeded") from None


async def by_size(size: int, function: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a function, called in a thread if it handles many bytes."""
    if size > LARGE_BODY:
        return await in_thread(function, *arguments, long=True)
    return function(*arguments)


async def read_body(read: Callable[[bytes], T], body: bytes, *, stored: bool = False) -> T:
    """Return `read(body)`, called in a thread if the body is large.

    Args:
      stored: the body may refer to stored items, which can be large even if it is small.
    """
    if stored and len(body) <= LARGE_BODY:
        return await in_thread(read, body)
    return await by_size(len(body), read, body)


MOST_SLOW = 4  # requests with slow grammars that may wait, and as many with refused ones
MOST_CLIENTS = 4096  # clients whose use of time is remembered
Job = TypeVar("Job")
Later = Literal["slow", "refused"]  # why a grammar takes long: to compile, or to explain
Client = tuple[str, ...]  # names of a client, the widest first, such as its key and connection


class Turns(Generic[Job]):
    """Waiting jobs of several clients, which take turns: who has used the least time is next.

    Of those who used the same time, the one that waits longest and the one that came last are next
    by turns. So a client does not wait for all slow jobs of others that came before, and nobody
    waits more than twice as long as in a queue.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Client, Job]] = []
        self._last_is_next = False  # whether the last of clients with equal times is next
        self._used: dict[str, float] = {}  # seconds, by name of a client
        self._lock = threading.Lock()

    def put(self, client: Client, job: Job) -> None:
        """Add a job of a client."""
        with self._lock:
            self._waiting.append((client, job))

    def take(self) -> tuple[Client, Job]:
        """Remove and return the next job and its client; there has to be one."""
        with self._lock:
            clients = list(dict.fromkeys(client for client, _ in self._waiting))
            least = min(map(self._times, clients))
            equal = [client for client in clients if self._times(client) == least]
            chosen = equal[-1] if self._last_is_next else equal[0]
            if len(equal) > 1:
                self._last_is_next = not self._last_is_next
            place = [client for client, _ in self._waiting].index(chosen)
            return self._waiting.pop(place)

    def _times(self, client: Client) -> list[float]:
        """Return the seconds that a client has used, by each of its names."""
        return [self._used.get(name, 0.0) for name in client]

    def add_time(self, client: Client, seconds: float) -> None:
        """Add to the time that a client has used; it is forgotten once nobody waits."""
        with self._lock:
            if not self._waiting:
                self._used.clear()
                return
            for name in client:
                self._used[name] = self._used.pop(name, 0.0) + seconds
            while len(self._used) > MOST_CLIENTS:
                del self._used[next(iter(self._used))]


class StructureThreads(Generic[Job]):
    """Threads that prepare jobs with an output grammar, without blocking the engine.

    Jobs with known grammars have a thread of their own, and never wait for others. One thread tries
    grammars, those of the clients in turns; jobs with slow grammars go to a third thread, for which
    at most `MOST_SLOW` jobs wait. Refused grammars that take long to explain go there, too, and are
    counted by themselves; where as many wait, the refusal is brief.

    Args:
      decide: returns whether `prepare` will be fast for a job, after a trial compilation.
      prepare: prepares a job, and reports errors itself.
      refuse: called with a job that cannot be prepared, and the error.
      is_known: returns whether `prepare` needs no trial for a job.
      brief: returns the error of a job whose grammar the trial refused, without an explanation;
        None if it did not.
    """

    def __init__(
        self,
        decide: Callable[[Job], bool],
        prepare: Callable[[Job], None],
        refuse: Callable[[Job, Exception], None],
        is_known: Callable[[Job], bool] = lambda job: False,
        brief: Callable[[Job], Exception | None] = lambda job: None,
    ):
        self._decide = decide
        self._prepare = prepare
        self._refuse = refuse
        self._is_known = is_known
        self._brief = brief
        pool = concurrent.futures.ThreadPoolExecutor
        self._known = pool(1, "known-structures", lower_priority)
        self._short = pool(1, "structures", lower_priority)
        self._long = pool(1, "slow-structures", lower_priority)
        self._turns: Turns[Job] = Turns()
        # Numbers of jobs in the third thread or its queue.
        self._num_later: dict[Later, int] = {"slow": 0, "refused": 0}
        self._lock = threading.Lock()

    def submit(self, job: Job, client: Client = ()) -> None:
        """Queue a job of a client, which will be prepared or refused."""
        if self._is_known(job):
            self._known.submit(self._prepare, job)
            return
        self._turns.put(client, job)
        self._short.submit(self._begin_next)

    def stop(self) -> None:
        """Cancel queued jobs and accept no more."""
        for pool in (self._known, self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    def _begin_next(self) -> None:
        client, job = self._turns.take()
        begun = time.monotonic()
        self._begin(job)
        self._turns.add_time(client, time.monotonic() - begun)

    def _begin(self, job: Job) -> None:
        try:
            if self._decide(job):
                self._prepare(job)
                return
            refusal = self._brief(job)
            kind: Later = "slow" if refusal is None else "refused"
            with self._lock:
                if self._num_later[kind] >= MOST_SLOW:
                    raise refusal or _too_many_slow(MOST_SLOW)
                self._num_later[kind] += 1
            self._long.submit(self._prepare_later, job, kind)
        except Exception as error:  # the client has to get a response
            self._refuse(job, error)

    def _prepare_later(self, job: Job, kind: Later) -> None:
        try:
            self._prepare(job)
        finally:
            with self._lock:
                self._num_later[kind] -= 1


def _too_many_slow(waiting: int) -> Problem:
    return Problem(
        f"{waiting} other requests wait for structures that take long to compile; try again in"
        f" about {GRAMMAR_RETRY_S} s, or simplify the structure",
        status=503,
        code="structures_busy",
        retry_s=GRAMMAR_RETRY_S,
    )
