"""The cut of a step: which of its tokens count. Nothing has happened yet."""

import dataclasses
from typing import Any

from dflash_jax.engine.recovery.repeated_calls import KIND
from dflash_jax.engine.recovery.request_state import Finish, Ids, Policy, State


@dataclasses.dataclass(slots=True)
class StepCut:
    """How the tokens of one step are cut: the ids that count, and what follows from them."""

    state: State
    before: int  # ids decided before
    new: list[int] = dataclasses.field(default_factory=list)
    replace: int | None = None
    force: Ids = ()
    finish: Finish | None = None
    retract: int = 0
    retry_call: bool = False  # the call at `State.call_at` is to be decoded once more
    notes: list[str] = dataclasses.field(default_factory=list)
    places: list[int] = dataclasses.field(default_factory=list)  # of the notes

    @property
    def ids(self) -> Ids:
        return (*self.state.ids[:], *self.new)

    def since(self, place: int) -> Ids:
        """Return the output from a place on."""
        return (*self.state.ids[place:], *self.new[max(place - self.before, 0) :])

    @property
    def length(self) -> int:
        return self.before + len(self.new)

    def mark(self, **changes: Any) -> None:
        self.state = self.state._replace(**changes)

    def note(self, event: str) -> None:
        """Record a recovery event at the place of the next output token."""
        self.notes.append(event)
        self.places.append(self.length)

    def force_tokens(self, ids: Ids, note: str) -> None:
        """Put ids in place of the pending token and after it."""
        self.note(note)
        self.new += ids
        self.replace, self.force = ids[0], ids[1:]

    def end(self, finish: Finish) -> None:
        """Ends the output; a loop it ran into is why, unless it ended by itself.

        Repeated calls are noted in both cases.
        """
        self.finish, guard = finish, self.state.guard
        if guard is not None and (finish is Finish.LENGTH or guard == KIND):
            self.note(guard)

    def end_at_stop(self, policy: Policy) -> None:
        """End the output at the first end token among forced ones: the row would freeze there."""
        ends = [i for i, token in enumerate(self.new) if token in policy.stop_ids]
        if ends:
            del self.new[ends[0] + 1 :]
            self.end(Finish.STOP)
