"""How many decode steps one call makes: enough to be worth it, few enough to be heard soon."""

import time

BURST = 0.1  # seconds between two answers that nobody takes for a pause (Nielsen's limit)


class Pace:
    """As many steps as fit into `BURST`, by the time the last ones took.

    Attributes:
      most: of one call; 1 where programs make no more.
      rounds: of the next call.
    """

    def __init__(self, most: int):
        self.most, self.rounds = most, 1
        self._heard = 0.0

    def took(self, steps: int, started: float) -> None:
        """A call was read that was dispatched at `started` (`time.perf_counter`)."""
        now = time.perf_counter()
        if steps:
            each = (now - max(started, self._heard)) / steps  # the device was free since then
            self.rounds = max(1, min(self.most, int(BURST / each)))
        self._heard = now
