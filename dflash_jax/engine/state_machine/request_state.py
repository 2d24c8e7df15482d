"""States, events and effects of the recovery state machine."""

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

from dflash_jax.engine.state_machine import guards
from dflash_jax.engine.state_machine.guards import NO_MEMORY, LoopMemory
from dflash_jax.engine.state_machine.settings import OFF, Recovery
from dflash_jax.engine.state_machine.speculation import NOTES, UNKNOWN, BreakEven, DraftingState
from dflash_jax.engine.state_machine.words import NO_WORDS, Ids, Words


class TokenIds(Sequence[int]):
    """Immutable output ids: slices are tuples, and it equals the tuple of its ids.

    Extended values share one list, so that a step costs the tokens it adds, not the whole output.
    """

    __slots__ = ("_ids", "_length")

    def __init__(self, ids: Iterable[int] = ()):
        self._ids = list(ids)
        self._length = len(self._ids)

    def extended(self, ids: Iterable[int]) -> "TokenIds":
        """Return these ids followed by more."""
        longer = TokenIds()
        last = 0 < self._length == len(self._ids)  # the list of an empty value is never shared
        longer._ids = self._ids if last else self._ids[: self._length]
        longer._ids += ids
        longer._length = len(longer._ids)
        return longer

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Ids: ...
    def __getitem__(self, at: int | slice) -> int | Ids:
        if isinstance(at, int):
            return self._ids[range(self._length)[at]]
        start, stop, step = at.indices(self._length)
        if step == 1:
            return tuple(self._ids[start:stop])
        return tuple(map(self._ids.__getitem__, range(start, stop, step)))

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self._ids, self._length)

    def __eq__(self, other: Any) -> bool:
        return self[:] == (other[:] if isinstance(other, TokenIds) else other)

    def __hash__(self) -> int:
        return hash(self[:])


class Phase(enum.Enum):
    """The phase of a request."""

    WAITING = "waiting"
    SPECULATIVE = "speculative"
    PLAIN = "plain"
    RETRY = "retry"  # plain for the rest of the request
    DONE = "done"


class Finish(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Restart(enum.Enum):
    """From where a request is decoded again."""

    SAVED = "saved"  # the state after its prompt
    CALL = "call"  # the opening of a call that could not be parsed, once its grammar is compiled
    FRESH = "fresh"  # its prompt, without the prefix cache, which drops the prompt


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Options of the request and facts about the engine that the state machine depends on."""

    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    speculative: bool = True
    prompt_tokens: int = 0
    break_even: BreakEven = UNKNOWN
    # Never stop drafting. Whether the in-flight step drafts depends on timing, and inexact tokens
    # would depend on that.
    fixed: bool = False
    recovery: Recovery = OFF
    words: Words = NO_WORDS

    @property
    def close_at(self) -> int | None:
        """Output length at which an open thought is closed; None for never."""
        reserve = self.recovery.answer_reserve
        if not reserve or not self.words.close:
            return None
        return self.max_tokens - (reserve if reserve < self.max_tokens else self.max_tokens // 2)


class CallProbe(NamedTuple):
    """A possible stall at which the target is probed for a tool call.

    The text that leads to a call (the lead) was forced in place of the end token, and is held. Each
    further step reports the odds of one token of the call's marker, which is then forced as well.
    """

    end: int  # the end token, which is restored if a call is not likely enough
    lead: int  # number of ids of `Words.opening` at the output's end
    odds: float  # sum of the log-ratios so far, the first of them against the end token
    wanted: float  # least sum of the odds at which a call is forced


class State(NamedTuple):
    """The state of a request."""

    phase: Phase = Phase.WAITING
    ids: TokenIds = TokenIds()  # decided output; only held tokens are ever dropped from it
    held: int = 0  # number of them that were not emitted yet
    fed: int = 0  # number of them in the caches
    drafting: DraftingState = DraftingState()
    guard: str | None = None  # the loop the last token completed; the next token ends the output
    memory: LoopMemory = NO_MEMORY
    injected: bool = False  # a tool call was begun
    # Possible continuations of that call, for each declared tool the ids up to its arguments;
    # empty once the tool is chosen.
    calls: tuple[Ids, ...] = ()
    call_at: int = -1  # output index at which a held call begins; -1 without one
    call_retried: bool = False  # a call was decoded again
    probe: CallProbe | None = None  # the target is being probed for a tool call
    closed: bool = False  # a thought was closed at its limit
    past_close: bool = False  # the output is longer than `Policy.close_at`
    ran: bool = False  # drafting was on, or paused, when tokens were decided
    retried: int = 0  # number of decodings without visible output so far
    restored: bool = False  # the prompt's state came from the prefix cache

    @property
    def num_decided(self) -> int:
        """Number of tokens decided so far, held ones included."""
        return len(self.ids)


class Prefilled(NamedTuple):
    """The prompt was fed, and decided the first token; see `Stepped` for the fields."""

    token: int
    next_best: int = -1
    finite: bool = True
    restored: bool = False
    call_odds: float | None = None


class Stepped(NamedTuple):
    """The device decided tokens for the row; none if the row had stopped."""

    tokens: Ids
    finite: bool = True
    draft_finite: bool = True
    next_best: int = -1  # best token at the last position that is no stop token
    num_drafts: int = 0  # tokens that were drafted for the row; 0 in a plain step
    # Of the token that leads to a tool call at the last position, see `StepOutput`; None if the
    # device does not report them.
    call_odds: float | None = None
    # Tokens of the row's block where it drafted, which a drafter may leave without drafts; else 0.
    block: int = 0
    rows: int = 1  # that decoded in the step


class Cancelled(NamedTuple):
    """The caller cancelled, the deadline passed, or a stop string was completed."""

    reason: Finish = Finish.CANCELLED


class CallRetried(NamedTuple):
    """A call that could not be parsed is dropped; decoding continues under a grammar."""


Event = Prefilled | Stepped | Cancelled | CallRetried


class Effects(NamedTuple):
    """What the engine has to do, in this order."""

    emit: Ids = ()  # give these tokens to the caller
    replace: int | None = None  # the new pending token
    force: Ids = ()  # tokens to feed after it; the last of them is pending afterwards
    restart: Restart | None = None  # decode again from there
    finish: Finish | None = None  # the request ended
    fallback: str | None = None  # why this round was plain, or later ones will be
    notes: tuple[str, ...] = ()  # recovery events, to be counted and logged
    places: tuple[int, ...] = ()  # output index of each event, at most the output's length
    retract: int = 0  # number of held ids at the end that were dropped before anything else

    def notes_before(self, place: int) -> tuple[str, ...]:
        """Return the events before an output index, and those of drafting."""
        pairs = zip(self.notes, self.places, strict=True)
        return tuple(note for note, at in pairs if at < place or note in NOTES)


@dataclasses.dataclass(slots=True)
class StepCut:
    """The ids of one step that count, and the effects that follow, while they are being decided."""

    state: State
    before: int  # ids decided before
    fallback: str | None = None
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
        if guard is not None and (finish is Finish.LENGTH or guard == guards.REPEATED_CALLS):
            self.note(guard)

    def end_at_stop(self, policy: Policy) -> None:
        """End the output at the first end token among forced tokens, where the row would stop."""
        for i, token in enumerate(self.new):
            if token in policy.stop_ids:
                del self.new[i + 1 :]
                return self.end(Finish.STOP)

    def effects(self, **others: Any) -> Effects:
        """Return effects with the notes and the fallback of the step."""
        notes, places = tuple(self.notes), tuple(self.places)
        return Effects(fallback=self.fallback, notes=notes, places=places, **others)


def speculates(state: State, policy: Policy) -> bool:
    """Return whether the next step should draft; a step that chooses a tool need not."""
    return policy.speculative and not state.retried and state.drafting.drafts and not state.calls


def is_visible(ids: Sequence[int], policy: Policy) -> bool:
    """Return whether anything of an output is visible to the caller."""
    ended = bool(ids) and ids[-1] in policy.stop_ids
    return policy.words.is_visible(ids[:-1] if ended else ids)


def room(state: State, policy: Policy) -> int:
    """Return the number of output tokens at which the device has to wait for the host."""
    if state.calls:
        return min(state.num_decided + 1, policy.max_tokens)
    if policy.close_at is None or state.past_close:
        return policy.max_tokens
    return min(max(policy.close_at, state.num_decided) + 1, policy.max_tokens)


def choices(state: State) -> Ids:
    """Return the tokens among which the next step reports the best, ascending; usually none."""
    return tuple(sorted({ids[0] for ids in state.calls}))


def opening(state: State, policy: Policy) -> int:
    """Return the token whose odds the next step reports; -1 for none."""
    if state.probe:
        return policy.words.opening[state.probe.lead]
    judges = policy.recovery.floor and policy.recovery.below_floor == "odds"
    return policy.words.opening[0] if judges and policy.words.opening else -1
