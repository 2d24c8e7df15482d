"""A call on its way: who is in it, and what its answers mean to them."""

import dataclasses

from dflash_jax.engine.recovery.controller import Prefilled, Stepped
from dflash_jax.engine.sequence import Live
from dflash_jax.state import RowStep, StepOutput


@dataclasses.dataclass(frozen=True)
class Flight:
    """A dispatched call whose answers were not read yet."""

    started: float
    output: StepOutput
    readers: dict[int, Live]  # by row: who was in it, and hears the answer
    decode: bool
    drafting: frozenset[int] = frozenset()  # rows that drafted
    first: int = 0  # row of the first answer
    rounds: int = 1  # most steps it makes

    def place(self, row: int) -> int:
        """Where an answer speaks of a row."""
        return row - self.first

    def most(self, row: int, block: int) -> int:
        """Tokens it may decide for a row."""
        return self.rounds * (block if row in self.drafting else 1)

    def event(self, row: int, step: RowStep) -> Prefilled | Stepped:
        """What a step's answer means to the request in a row."""
        if not self.decode:
            restored = self.readers[row].stats.cached_tokens > 0
            return Prefilled(step.tokens[0], step.next_best, step.finite, restored, step.call_odds)
        drafts = step.num_drafts if row in self.drafting else 0
        return Stepped(
            step.tokens, step.finite, step.draft_finite, step.next_best, drafts, step.call_odds
        )
