"""What the controller knows of a request, what it hears, and what it answers."""

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

from dflash_jax.engine.recovery.guards import NO_MEMORY, LoopMemory
from dflash_jax.engine.recovery.settings import OFF, Recovery
from dflash_jax.engine.recovery.speculation import NOTES, UNTRIED, DraftingState
from dflash_jax.engine.recovery.words import SILENT, Words

Ids = tuple[int, ...]


class TokenIds(Sequence[int]):
    """Output ids, a value: slices are tuples, and it equals the tuple of its ids.

    What continues it shares its list, so that a step costs what it adds, however much was said.
    """

    __slots__ = ("_ids", "_length")

    def __init__(self, ids: Iterable[int] = ()):
        self._ids = list(ids)
        self._length = len(self._ids)

    def extended(self, ids: Iterable[int]) -> "TokenIds":
        """These ids and more behind them; this one stays as it is."""
        longer = TokenIds()
        last = 0 < self._length == len(self._ids)  # an empty one is everybody's, and lends nothing
        longer._ids = self._ids if last else self._ids[: self._length]
        longer._ids += ids
        longer._length = len(longer._ids)
        return longer

    def last(self, count: int) -> Ids:
        """The last ids, at most this many."""
        return self[max(self._length - count, 0) :]

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

    def __repr__(self) -> str:
        return f"TokenIds({self[:]})"


class Phase(enum.Enum):
    """Where a request stands."""

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
    """From where a request is decoded once more."""

    SAVED = "saved"  # the state behind its prompt
    CALL = "call"  # the opening of a call that was not readable; the host makes a grammar first
    FRESH = "fresh"  # its prompt, without any cache; a snapshot it came from is to be dropped


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What the caller asked for, and what the engine knows of the model."""

    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    speculative: bool = True
    break_even: float = 0.0  # tokens a drafted round must decide to pay; 0 if not known
    fixed: bool = False  # drafting is never left: seeded and inexact tokens would hang on when
    recovery: Recovery = OFF
    words: Words = SILENT

    @property
    def close_at(self) -> int | None:
        """Output place where a thought that is still open gets closed."""
        reserve = self.recovery.answer_reserve
        if not reserve or not self.words.close:
            return None
        return self.max_tokens - (reserve if reserve < self.max_tokens else self.max_tokens // 2)


class CallProbe(NamedTuple):
    """A possible stall about which the target is being asked.

    What leads to a tool call was forced in the place of the end token, and is held back. The next
    decided token shows how likely the target finds a call there.

    Attributes:
      end: the end token, which comes back if a call is not likely enough.
      lead: how many ids at the output's end lead to a call.
      odds: log-ratio of the first of them and the end token.
      wanted: least log-ratio of a call and the end token at which a call is forced.
    """

    end: int
    lead: int
    odds: float
    wanted: float


class State(NamedTuple):
    """What is remembered of a request.

    Attributes:
      ids: decided output, append-only but for a retry of what nobody saw.
      held: how many of them were not emitted yet.
      fed: how many of them are in the caches.
      guard: the loop the last token ran into; the next token ends the output.
      memory: the facts by which the rules against loops judge the next token.
      injected: a tool call was begun.
      calls: how that call may go on, while several declared tools are possible: for each of them
        the ids up to its arguments.
      call_at: output place where a call begins that is held back; -1 without one.
      call_retried: a call was decoded once more.
      probe: the target is being probed for a tool call.
      closed: a thought was closed at its limit.
      past_close: the place where a thought would be closed lies behind.
      ran: drafting was on when tokens were decided.
      retried: decodings so far that showed nothing.
      restored: the prompt's state came from a cache.
    """

    phase: Phase = Phase.WAITING
    ids: TokenIds = TokenIds()
    held: int = 0
    fed: int = 0
    drafting: DraftingState = UNTRIED
    guard: str | None = None
    memory: LoopMemory = NO_MEMORY
    injected: bool = False
    calls: tuple[Ids, ...] = ()
    call_at: int = -1
    call_retried: bool = False
    probe: CallProbe | None = None
    closed: bool = False
    past_close: bool = False
    ran: bool = False
    retried: int = 0
    restored: bool = False

    @property
    def num_decided(self) -> int:
        """Tokens decided so far, held ones included."""
        return len(self.ids)


class Prefilled(NamedTuple):
    """The prompt was fed; its last row decided the first token."""

    token: int
    next_best: int = -1
    finite: bool = True
    restored: bool = False
    call_odds: float | None = None


class Stepped(NamedTuple):
    """The device decided tokens for this row; none if the row was frozen.

    Attributes:
      floor: what the last place says with the stop tokens masked.
      drafts: tokens that were drafted for the row; 0 in a plain step.
      odds: of the token that leads to a tool call at the last place, see `StepOutput`; None where
        the device does not report them.
    """

    tokens: Ids
    finite: bool = True
    draft_finite: bool = True
    next_best: int = -1
    num_drafts: int = 0
    call_odds: float | None = None


class Cancelled(NamedTuple):
    """The caller went away, time ran out, or a stop string was completed."""

    reason: Finish = Finish.CANCELLED


class CallRetried(NamedTuple):
    """A call that could not be read goes: what follows is decoded under a grammar."""


Event = Prefilled | Stepped | Cancelled | CallRetried


class Effects(NamedTuple):
    """What the engine must do now, in this order.

    Attributes:
      emit: give these tokens to the caller.
      replace: the pending token becomes this one.
      force: then feed the pending token and these but the last, which is pending afterwards.
      restart: decode once more from there.
      finish: the request ended.
      fallback: why this round was, or later ones will be, plain.
      notes: recovery events, to be counted and logged.
      places: output place of each event; the token there may be one that was not decided yet.
      retract: before that, this many of the last ids, which were never emitted, are dropped.
    """

    emit: Ids = ()
    replace: int | None = None
    force: Ids = ()
    restart: Restart | None = None
    finish: Finish | None = None
    fallback: str | None = None
    notes: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    retract: int = 0

    def notes_before(self, place: int) -> tuple[str, ...]:
        """The events of an answer that ends before an output place, and those of drafting."""
        pairs = zip(self.notes, self.places, strict=True)
        return tuple(note for note, at in pairs if at < place or note in NOTES)
