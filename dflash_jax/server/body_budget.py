"""One budget over the request bodies that are held in memory at a time."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

from dflash_jax.server.errors import bodies_full


@dataclasses.dataclass(eq=False)
class HeldBody:
    """A request's body, from its first byte until the request has been handled.

    Attributes:
      size: bytes received so far.
      counts: whether the budget still counts them.
    """

    size: int = 0
    counts: bool = True


class BodyBudget:
    """Counts the bytes of all bodies. Beyond a bound, the largest unfinished one has to make room.

    So a client with a small body is not refused because others send large ones slowly.

    Args:
      max_bytes: returns the bound.

    Attributes:
      held: bytes of all bodies.
    """

    def __init__(self, max_bytes: Callable[[], int]):
        self._max_bytes = max_bytes
        self.held = 0
        self._unfinished: dict[HeldBody, asyncio.Timeout] = {}  # each ends the reading of one

    @contextlib.asynccontextmanager
    async def reading(self, body: HeldBody) -> AsyncIterator[None]:
        """Have the body make room for others if necessary, while it is being read.

        Raises:
          Problem: 503, it made room.
        """
        try:
            async with asyncio.timeout(None) as unfinished:
                self._unfinished[body] = unfinished
                yield
            if not body.counts:
                raise TimeoutError
        except TimeoutError:
            raise bodies_full(self._max_bytes()) from None
        finally:
            self._unfinished.pop(body, None)

    def add(self, body: HeldBody, size: int) -> None:
        """Count bytes that came for a body that is being read, and make room for them.

        Raises:
          TimeoutError: the body itself has to make room.
        """
        body.size += size
        self.held += size
        while self.held > self._max_bytes() and self._unfinished:
            largest = max(self._unfinished, key=lambda other: other.size)
            unfinished = self._unfinished.pop(largest)
            self.release(largest)
            if largest is body:
                raise TimeoutError
            unfinished.reschedule(0)

    def release(self, body: HeldBody) -> None:
        """Count a body no more."""
        if body.counts:
            body.counts = False
            self.held -= body.size
