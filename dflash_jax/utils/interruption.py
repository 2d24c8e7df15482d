"""Cancellation and time limits of work in threads, which calls `check` regularly.

The limits are context variables, so that code in between, such as a chat template, need not pass
them on.
"""

import contextlib
import contextvars
import threading
import time
from collections.abc import Iterator

from dflash_jax.errors import InterruptedRequestError

_cancelled: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar(
    "cancelled", default=None
)
_limit: contextvars.ContextVar[tuple[float, float, str] | None] = contextvars.ContextVar(
    "limit", default=None
)


@contextlib.contextmanager
def cancellable(event: threading.Event) -> Iterator[None]:
    """Make `check` raise inside the block once the event is set, by any thread."""
    token = _cancelled.set(event)
    try:
        yield
    finally:
        _cancelled.reset(token)


@contextlib.contextmanager
def time_limit(seconds: float, subject: str) -> Iterator[None]:
    """Make `check` raise inside the block once it has run for this long.

    Args:
      subject: name of the work in the error message.
    """
    token = _limit.set((time.monotonic() + seconds, seconds, subject))
    try:
        yield
    finally:
        _limit.reset(token)


def check() -> None:
    """Raise InterruptedRequestError if the surrounding work was cancelled or has timed out."""
    event, limit = _cancelled.get(), _limit.get()
    if event is not None and event.is_set():
        raise InterruptedRequestError("the request was cancelled")
    if limit is not None and time.monotonic() > limit[0]:
        raise InterruptedRequestError(
            f"{limit[2]} ran for more than {limit[1]:g} s and was stopped; send fewer or shorter"
            " messages, or use a template without nested loops"
        )
