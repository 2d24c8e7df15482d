"""States, events and effects of the recovery state machine."""

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

from dflash_jax.engine.state_machine import guards
from dflash_jax.engine.state_machine.guards import NO_MEMORY, LoopMemory
from dflash_jax.engine.state_machine.output_reader import OutputReader
from dflash_jax.engine.state_machine.output_vocabulary import NO_VOCABULARY, Ids, OutputVocabulary
from dflash_jax.engine.state_machine.settings import OFF, Recovery
from dflash_jax.engine.state_machine.speculation import NOTES, UNKNOWN, BreakEven, DraftingState


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

    max_tokens: int  # most tokens of output
    stop_ids: frozenset[int] = frozenset()
    speculative: bool = True  # whether the request may draft
    prompt_tokens: int = 0  # number of tokens of the prompt
    break_even: BreakEven = UNKNOWN
    # Whether the request drafts even where that does not pay off. Whether the step in flight drafts
    # depends on timing, and inexact tokens would depend on that.
    fixed: bool = False
    recovery: Recovery = OFF
    vocabulary: OutputVocabulary = NO_VOCABULARY
    # Reads the output by `vocabulary`; None where no rule applies.
    reader: OutputReader | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        is_known = self.reader is not None and self.reader.vocabulary is self.vocabulary
        if self.recovery is not OFF and not is_known:
            object.__setattr__(self, "reader", OutputReader(self.vocabulary))

    @property
    def output(self) -> OutputReader:
        """The reader of the output, for rules."""
        assert self.reader is not None
        return self.reader

    @property
    def close_at(self) -> int | None:
        """Output length at which an open thought is closed; None for never."""
        reserve = self.recovery.answer_reserve
        if not reserve or not self.vocabulary.close:
            return None
        if reserve >= self.max_tokens:
            reserve = self.max_tokens // 2
        return self.max_tokens - reserve


class CallProbe(NamedTuple):
    """A possible stall at which the target is probed for a tool call.

    The text that leads to a call (the lead) was forced in place of the end token, and is held. Each
    further step reports the margin of one token of the call's marker, which is then forced as well.
    """

    end: int  # the end token, which is restored if a call is not likely enough
    lead: int  # number of ids of `OutputVocabulary.opening` at the output's end
    margin: float  # sum of the margins so far, the first of them against the end token
    wanted_margin: float  # least sum of the margins at which a call is forced


class State(NamedTuple):
    """The state of a request."""

    phase: Phase = Phase.WAITING
    ids: TokenIds = TokenIds()  # decided output; only held tokens are ever dropped from it
    held: int = 0  # number of ids at the end that were not emitted yet
    num_computed: int = 0  # number of ids in the caches
    drafting: DraftingState = DraftingState()
    guard: str | None = None  # the loop the last token completed; the next token ends the output
    memory: LoopMemory = NO_MEMORY  # of the rules for loops
    injected: bool = False  # a tool call was begun
    # Possible continuations of the call that was begun: for each declared tool, the ids up to its
    # arguments. Empty once the tool is chosen.
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
    replacement_token: int = -1
    finite: bool = True
    restored: bool = False
    tool_call_margin: float | None = None


class Stepped(NamedTuple):
    """The device decided tokens for the row; none if the row had stopped."""

    tokens: Ids
    finite: bool = True  # whether the target's logits are
    draft_finite: bool = True  # whether the drafter's logits are
    replacement_token: int = -1  # best token at the last position that is no stop token
    num_drafts: int = 0  # tokens that were drafted for the row; 0 in a plain step
    # Margin of the token that leads to a tool call at the last position, see `StepOutput`; None if
    # the device does not report it.
    tool_call_margin: float | None = None
    # Tokens of the row's block if it drafted, even if the drafter proposed nothing; else 0.
    block: int = 0
    rows: int = 1  # number of rows that decoded in the step


class Cancelled(NamedTuple):
    """The caller cancelled, the deadline passed, or a stop string was completed."""

    reason: Finish = Finish.CANCELLED


class CallRetried(NamedTuple):
    """A call that could not be parsed is dropped; decoding continues under a grammar."""


Event = Prefilled | Stepped | Cancelled | CallRetried


class Effects(NamedTuple):
    """The engine's tasks after an event, in this order."""

    emit: Ids = ()  # tokens to give to the caller
    replace: int | None = None  # the new pending token
    force: Ids = ()  # tokens to feed after the pending one; the last of them is pending afterwards
    restart: Restart | None = None  # from where to decode again
    finish: Finish | None = None  # why the request ended
    fallback: str | None = None  # why this round was plain, or later ones will be
    notes: tuple[str, ...] = ()  # recovery events, to be counted and logged
    positions: tuple[int, ...] = ()  # output index of each event, at most the output's length
    retract: int = 0  # number of held ids at the end that were dropped before anything else

    def notes_before(self, length: int) -> tuple[str, ...]:
        """Return the events of the first `length` output tokens, and those of drafting."""
        events = zip(self.notes, self.positions, strict=True)
        return tuple(note for note, at in events if at < length or note in NOTES)


@dataclasses.dataclass(slots=True)
class StepDecision:
    """What is decided about the tokens of one step, while rules judge them one by one.

    Fields that `Effects` has as well become those of the step's effects.
    """

    state: State  # the next state, as far as it is decided
    before: int  # number of ids that were decided before the step
    fallback: str | None = None
    token: int = -1  # the token that is judged; rules may replace it by another one
    loops: guards.Guard | None = None  # None where no rule for loops applies
    new: list[int] = dataclasses.field(default_factory=list)  # ids of the step that count
    replace: int | None = None
    force: Ids = ()
    finish: Finish | None = None
    retract: int = 0
    retry_call: bool = False  # whether the call at `State.call_at` is decoded again
    notes: list[str] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)

    @property
    def ids(self) -> Ids:
        """The output, the new ids included."""
        return (*self.state.ids[:], *self.new)

    def since(self, start: int) -> Ids:
        """Return the output from an index on."""
        return (*self.state.ids[start:], *self.new[max(start - self.before, 0) :])

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
        self.positions.append(self.length)

    def force_tokens(self, ids: Ids, note: str) -> None:
        """Replace the pending token by the first of these ids, and force the others after it."""
        self.note(note)
        self.new += ids
        self.replace = ids[0]
        self.force = ids[1:]

    def end(self, finish: Finish) -> None:
        """End the output, and note a loop if that is the reason.

        A loop is the reason unless an end token came first; repeated calls are always noted.
        """
        self.finish = finish
        guard = self.state.guard
        if guard is not None and (finish is Finish.LENGTH or guard == guards.REPEATED_CALLS):
            self.note(guard)

    def end_at_stop(self, policy: Policy) -> None:
        """End the output at the first end token among forced tokens, where the row would stop."""
        for i, token in enumerate(self.new):
            if token in policy.stop_ids:
                del self.new[i + 1 :]
                self.end(Finish.STOP)
                return

    def effects(self, **others: Any) -> Effects:
        """Return effects with the notes and the fallback of the step."""
        return Effects(
            fallback=self.fallback,
            notes=tuple(self.notes),
            positions=tuple(self.positions),
            **others,
        )


def speculates(state: State, policy: Policy) -> bool:
    """Return whether the next step should draft; a step that chooses a tool need not."""
    if not policy.speculative or state.retried or state.calls:
        return False
    return state.drafting.drafts


def is_visible(ids: Sequence[int], policy: Policy) -> bool:
    """Return whether anything of an output is visible to the caller."""
    if ids and ids[-1] in policy.stop_ids:
        ids = ids[:-1]
    return policy.vocabulary.is_visible(ids)


def room(state: State, policy: Policy) -> int:
    """Return the number of output tokens at which the device has to wait for the host."""
    if state.calls:  # the next token chooses a tool
        return min(state.num_decided + 1, policy.max_tokens)
    if policy.close_at is None or state.past_close:
        return policy.max_tokens
    return min(max(policy.close_at, state.num_decided) + 1, policy.max_tokens)


def choices(state: State) -> Ids:
    """Return the tokens among which the next step reports the best, ascending; usually none."""
    return tuple(sorted({ids[0] for ids in state.calls}))


def opening(state: State, policy: Policy) -> int:
    """Return the token whose margin the next step reports; -1 for none."""
    opening = policy.vocabulary.opening
    if state.probe:
        return opening[state.probe.lead]
    if policy.recovery.floor and opening:
        return opening[0]
    return -1
