"""A running request as its caller holds it."""

from collections.abc import Callable, Iterator

from dflash_jax.engine.result import Piece, Result
from dflash_jax.engine.sequence import Live
from dflash_jax.errors import RequestError


class Stream:
    """A running request: iterate for pieces, then read `result`. Closing it cancels it.

    An iterator, or a stream, that is let go of has the next turn end the request. Whoever lets go,
    it may be the garbage collector in any thread, anywhere, under any lock: so it waits for none.
    """

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
        except GeneratorExit:
            self._live.dropped = True
            raise
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        self._live.dropped = True

    def close(self) -> None:
        """Ends the request if it still runs; what it produced so far stays in `result`."""
        self._cancel(self._live)

    @property
    def result(self) -> Result:
        """The result so far; final once iteration ended."""
        if self._live.dropped:
            self.close()
        if not self._live.done:
            raise RequestError("the stream still runs; iterate it to its end, or close it first")
        return self._live.result()
