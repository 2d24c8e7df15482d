"""Which of a step's tokens count."""

import dataclasses
from typing import Any

from dflash_jax.engine.recovery.repeated_calls import KIND
from dflash_jax.engine.recovery.request_state import Finish, Ids, Policy, State


@dataclasses.dataclass(slots=True)
class StepCut:
    """The ids of one step that count, and the effects that follow, while they are being decided."""

    state: State
    before: int  # ids decided before
    new: list[int] = dataclasses.field(default_factory=list)
    replace: int | None = None
    force: Ids = ()
    finish: Finish | None = None
    retract: int = 0
    retry_call: bool = False  # decode the call at `State.call_at` again
    notes: list[str] = dataclasses.field(default_factory=list)
    places: list[int] = dataclasses.field(default_factory=list)  # of the notes

    @property
    def ids(self) -> Ids:
        """The output, the new ids included."""
        return (*self.state.ids[:], *self.new)

    def since(self, place: int) -> Ids:
        """Return the output from an index on."""
        return (*self.state.ids[place:], *self.new[max(place - self.before, 0) :])

    @property
    def length(self) -> int:
        """Length of the output, the new ids included."""
        return self.before + len(self.new)

    def mark(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.state = self.state._replace(**changes)

    def note(self, event: str) -> None:
        """Record a recovery event at the index of the next output token."""
        self.notes.append(event)
        self.places.append(self.length)

    def force_tokens(self, ids: Ids, note: str) -> None:
        """Put ids in place of the pending token and after it."""
        self.note(note)
        self.new += ids
        self.replace, self.force = ids[0], ids[1:]

    def end(self, finish: Finish) -> None:
        """End the output, and note a loop if that is the reason.

        A loop is the reason unless an end token came first; repeated calls are always noted.
        """
        self.finish, guard = finish, self.state.guard
        if guard is not None and (finish is Finish.LENGTH or guard == KIND):
            self.note(guard)

    def end_at_stop(self, policy: Policy) -> None:
        """End the output at the first end token among forced tokens, where the row would stop."""
        ends = [i for i, token in enumerate(self.new) if token in policy.stop_ids]
        if ends:
            del self.new[ends[0] + 1 :]
            self.end(Finish.STOP)
