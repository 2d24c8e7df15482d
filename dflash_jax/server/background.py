"""Runs work on requests in threads, so that the event loop serves the others meanwhile."""

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

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
