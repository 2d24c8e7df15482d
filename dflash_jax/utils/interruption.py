"""Cancellation of work in threads, which calls `check` regularly.

The event is a context variable, so that code in between need not pass it on.
"""

import contextlib
import contextvars
import threading
from collections.abc import Iterator

from dflash_jax.errors import InterruptedRequestError

_cancelled: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar(
    "cancelled", default=None
)


@contextlib.contextmanager
def cancellable(event: threading.Event) -> Iterator[None]:
    """Make `check` raise inside the block once the event is set, by any thread."""
    token = _cancelled.set(event)
    try:
        yield
    finally:
        _cancelled.reset(token)


def check() -> None:
    """Raise InterruptedRequestError if the surrounding work was cancelled."""
    event = _cancelled.get()
    if event is not None and event.is_set():
        raise InterruptedRequestError("the request was cancelled")
