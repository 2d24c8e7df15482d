"""Who waits and who has a row, and what follows from it for the next step."""

import collections
import dataclasses

import jax
import numpy as np

from dflash_jax.compiler.keys import STEP_VARIANTS, Variant
from dflash_jax.engine.lanes import lane_of, make_rules
from dflash_jax.engine.sequence import Live
from dflash_jax.plan import Plan
from dflash_jax.state import RowRules


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What the rows can use now, by row.

    Attributes:
      feeding: requests whose prompt is not wholly fed.
      decoding: requests that decode.
      drafting: those of them that draft.
      lane: the least lane that serves every row.
    """

    feeding: dict[int, Live]
    decoding: dict[int, Live]
    drafting: frozenset[int]
    lane: Variant


class Rows:
    """A fixed number of rows, and the queue for them.

    `work` and `rules` are worked out once for many steps: who changes what they follow from
    (who has a row, whether its prompt is fed, how far it may go, whether it drafts) says so by
    `changed`.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self.waiting: collections.deque[Live] = collections.deque()
        self.lives: list[Live | None] = [None] * plan.rows
        self._work: Work | None = None
        self._rules: RowRules | None = None
        self._there: dict[str, tuple[np.ndarray, jax.Array]] = {}  # columns of rules

    @property
    def active(self) -> int:
        """Requests that have a row."""
        return sum(live is not None for live in self.lives)

    @property
    def work(self) -> Work:
        """What the rows can use now."""
        if self._work is None:
            self._work = self._look()
        return self._work

    @property
    def rules(self) -> RowRules:
        """The rules of all rows; those that do not decode are frozen."""
        if self._rules is None:
            self._rules = make_rules(self._plan, self.lives, self.work.decoding, self._there)
        return self._rules

    def changed(self) -> None:
        """Has work and rules worked out anew."""
        self._work = self._rules = None

    def admit(self) -> list[Live]:
        """Gives free rows to those who have waited longest, and says who they are."""
        if not self.waiting:
            return []
        admitted = []
        for row, live in enumerate(self.lives):
            if live is None and self.waiting:
                self.lives[row] = first = self.waiting.popleft()
                first.start()
                admitted.append(first)
                self.changed()
        return admitted

    def release(self, live: Live) -> None:
        """Lets go of a request, wherever it was."""
        if live in self.waiting:
            self.waiting.remove(live)
        self.lives = [None if x is live else x for x in self.lives]
        self.changed()

    def _look(self) -> Work:
        feeding: dict[int, Live] = {}
        decoding: dict[int, Live] = {}
        for row, live in enumerate(self.lives):
            if live is None or live.call_grammar:
                continue
            if live.fed < len(live.request.prompt):
                feeding[row] = live
            elif not live.rebuilding:
                decoding[row] = live
        needed = [lane_of(live.request) for live in self.lives if live]
        return Work(
            feeding,
            decoding,
            frozenset(row for row, live in decoding.items() if live.speculates),
            max(needed, key=STEP_VARIANTS.index, default=Variant.GREEDY),
        )
