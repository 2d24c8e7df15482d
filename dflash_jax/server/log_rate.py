"""Log lines that clients cause, at a limited rate."""

import asyncio
import logging
import time
from typing import Any

log = logging.getLogger("dflash_jax.server")
WINDOW_S = 10.0  # seconds
MOST_LINES = 20  # of one message in a window


class RateLimit(logging.Filter):
    """Drops warnings of one kind beyond a rate, and adds their number to the next one that passes.

    A kind is a logger with a message before its arguments are inserted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}  # start, and lines since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        if record.levelno < logging.WARNING:
            return True
        now = time.monotonic()
        kind = (record.name, str(record.msg)[:100])
        start, count = self._windows.get(kind, (now, 0))
        if now - start > WINDOW_S:
            if (dropped := count - MOST_LINES) > 0:
                record.msg = f"{record.getMessage()} ({dropped} more such lines were left out)"
                record.args = ()
            start = now
            count = 0
        if len(self._windows) > 1000:  # messages that were formatted before
            self._windows.clear()
        self._windows[kind] = (start, count + 1)
        return count < MOST_LINES


LIMIT = RateLimit()  # one for all loggers, which counts each of them separately
LOGGERS = ("dflash_jax.server", "uvicorn.error", "asyncio")


def limit_logs() -> None:
    """Limit the rate of warnings of the server, of uvicorn and of asyncio; may be repeated."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(LIMIT)


def report_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop, in one line if the system refused something.

    asyncio repeats the traceback of an accept that failed as often as it may accept at once.
    """
    if isinstance(error := context.get("exception"), OSError):
        log.warning("%s: %s", context.get("message", "the event loop failed"), error)
    else:
        loop.default_exception_handler(context)
