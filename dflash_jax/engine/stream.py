"""A running request as its caller holds it."""

import sys
from collections.abc import Callable, Iterator

from dflash_jax.engine.live import Live
from dflash_jax.engine.result import Piece, Result
from dflash_jax.errors import RequestError


class Stream:
    """A running request: iterate for pieces, then read `result`. Closing it cancels it."""

    _at_exit = staticmethod(sys.is_finalizing)  # modules are emptied then, this class is not

    def __init__(self, live: Live, advance: Callable[[], None], cancel: Callable[[Live], None]):
        self._live, self._advance, self._cancel = live, advance, cancel

    def __iter__(self) -> Iterator[Piece]:
        given = 0
        try:
            while True:
                done = self._live.done  # before looking: another thread may drive
                while given < len(self._live.pieces):
                    given += 1
                    yield self._live.pieces[given - 1]
                if done:
                    self._live.result()
                    return
                self._advance()
        finally:
            if not self._at_exit():
                self.close()

    def __del__(self) -> None:
        """Has the next turn end a request that nobody may iterate any more.

        Not this thread: it may be anywhere, and hold any lock.
        """
        self._live.dropped = True

    def close(self) -> None:
        """Ends the request if it still runs; what it produced so far stays in `result`."""
        self._cancel(self._live)

    @property
    def result(self) -> Result:
        """The result so far; final once iteration ended."""
        if not self._live.done:
            raise RequestError("the stream still runs; iterate it to its end, or close it first")
        return self._live.result()
