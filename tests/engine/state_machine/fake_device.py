"""A fake device: a scripted target, and the rules by which the real device cuts blocks."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.engine.state_machine.controller import (
    CallRetried,
    Effects,
    Finish,
    Policy,
    Prefilled,
    Restart,
    State,
    Stepped,
    advance,
)
from dflash_jax.engine.state_machine.output_vocabulary import OutputVocabulary
from dflash_jax.engine.state_machine.request_state import choices, opening, room, speculates
from dflash_jax.engine.state_machine.speculation import BreakEven
from dflash_jax.engine.state_machine.trace import CallTime, RoundTrace, TraceRecorder
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.tool_schema import Tool

EOS, CHAT_EOS, COLON = 2, 3, 58
STOPS = frozenset({EOS, CHAT_EOS})
PREFIX = (900, 901, 902)
LOOPS = ("repeat", "runaway", "period", "repeated_calls")
BEST = 77  # the target's choice where end tokens are masked
THINK, END_THINK, FUNCTION, END_FUNCTION, SLIP, MENTION, UNKNOWN = 60, 61, 62, 63, 64, 65, 66
SPECIAL = 70  # hidden from callers
TEXTS = {
    COLON: ":",
    59: ":\n\n",
    57: "\N{FULLWIDTH COLON}",
    46: ".",
    THINK: "<think>",
    END_THINK: "</think>",
    FUNCTION: "<function=w>",
    END_FUNCTION: "</function>",
    SLIP: "\ncall:w{}",
    UNKNOWN: "<function=x>",
    MENTION: "`<tool_call>`",
    900: "\n<function=",
    50: " all",
    51: " done",
    52: " Let me look at it",
}
VOCABULARY = OutputVocabulary(
    text=lambda ids: "".join(TEXTS.get(i, "w") for i in ids),
    syntax=SYNTAXES["qwen_xml"],
    tools=(Tool("w", {}),),
    hidden=frozenset({SPECIAL}),
    calls=(PREFIX,),
)
STALL: dict[str, Any] = {"floor": 64, "tool_prefix": True}

DEAD = collections.Counter(drafter_dead=1)  # whether this is noted depends on the block size

NextToken = Callable[[tuple[int, ...]], int]


def recovery(**changes: Any) -> Recovery:
    """Return settings with all rules off, except for the changes."""
    return dataclasses.replace(OFF, **changes)


def scripted(script: Sequence[int], then: int = 0) -> NextToken:
    """Return a target that outputs `script`, and afterwards counts up from 1000."""
    return lambda ids: script[len(ids)] if len(ids) < len(script) else then or 1000 + len(ids)


@dataclasses.dataclass
class Outcome:
    """The results of a request, and what happened on the device."""

    emitted: list[int] = dataclasses.field(default_factory=list)
    finish: Finish | None = None
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    fallbacks: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    effects: list[Effects] = dataclasses.field(default_factory=list)
    state: State = dataclasses.field(default_factory=State)
    trace: list[RoundTrace] = dataclasses.field(default_factory=list)
    fed: list[int] = dataclasses.field(default_factory=list)  # tokens the device's caches hold
    prefills: int = 0
    attempts: int = 1
    drafted_steps: int = 0
    plain_steps: int = 0

    @property
    def loop(self) -> str | None:
        """The kind of loop that ended the output, or None."""
        return loop_of(self.notes)


def loop_of(notes: Iterable[str]) -> str | None:
    """Return the kind of loop among recovery events, or None."""
    return next((n for n in notes if n in LOOPS), None)


class Device:
    """Runs one request: decides blocks, cuts them as the real device does, applies effects."""

    def __init__(
        self,
        target: NextToken,
        policy: Policy,
        *,
        accepts: Sequence[int] = (3,),
        retry_target: NextToken | None = None,
        floor: NextToken = lambda ids: BEST,
        prefer: Callable[[tuple[int, ...], tuple[int, ...]], int] = lambda ids, of: max(of),
        odds: Callable[[tuple[int, ...], int], float] | None = None,
        restored: bool = False,
        draft_finite: Callable[[int], bool] = lambda step: True,
    ):
        self.target, self.policy, self.accepts = target, policy, accepts
        self.retry_target, self.floor, self.restored = retry_target, floor, restored
        self.draft_finite, self.prefer, self.odds = draft_finite, prefer, odds
        self.ids: list[int] = []  # decided, the last one pending
        self.seen = Outcome()
        self.recorder = TraceRecorder()

    def run(self, turns: int = 4000) -> Outcome:
        """Run the request to its end."""
        self.seen.prefills += 1
        self.prefill()
        for _ in range(turns):
            if self.seen.finish:
                return self.seen
            self.step()
        raise AssertionError(f"no end after {turns} turns: {self.seen}")

    def prefill(self) -> None:
        token = self.target(())
        self.ids, self.seen.fed = [token], []
        odds = self.odds_after(())
        self.process(
            Prefilled(token, self.floor(()), restored=self.restored, tool_call_margin=odds)
        )

    def odds_after(self, ids: tuple[int, ...]) -> float | None:
        """Return the odds that the device reports after these ids."""
        wanted = opening(self.seen.state, self.policy)
        return self.odds(ids, wanted) if self.odds and wanted >= 0 else None

    def step(self) -> None:
        """Run one step: decide a block, cut after stop tokens and at the limit."""
        drafting = speculates(self.seen.state, self.policy)
        taken = self.seen.drafted_steps + self.seen.plain_steps
        finite = self.draft_finite(taken) if drafting else True
        accepted = self.accepts[taken % len(self.accepts)] if drafting and finite else 0
        frozen = self.ids[-1] in self.policy.stop_ids
        tokens: list[int] = []
        while not frozen and len(tokens) <= accepted:
            if len(self.ids) >= room(self.seen.state, self.policy):
                break
            tokens.append(self.target(tuple(self.ids)))
            self.seen.fed.append(self.ids[-1])
            self.ids.append(tokens[-1])
            frozen = tokens[-1] in self.policy.stop_ids
        assert tokens, "the host took no action on a stopped row"
        self.seen.drafted_steps += drafting
        self.seen.plain_steps += not drafting
        before, named = tuple(self.ids[:-1]), choices(self.seen.state)
        self.process(
            Stepped(
                tuple(tokens),
                draft_finite=finite,
                replacement_token=self.prefer(before, named) if named else self.floor(before),
                num_drafts=7 if drafting and finite else 0,
                tool_call_margin=self.odds_after(before),
            )
        )

    def retry_call(self) -> None:
        """Retry a call as the host does once it has a grammar: feed the row up to the call."""
        seen, held, event = self.seen, self.seen.state.held, CallRetried()
        decided = seen.state.num_decided
        seen.state, effects = advance(seen.state, event, self.policy)
        self.record(event, effects, decided)
        assert effects.retract == held
        assert not effects.emit
        seen.notes.update(effects.notes)
        seen.attempts += 1
        self.target = self.retry_target or self.target
        if not seen.state.ids:
            self.prefill()
            return
        self.ids = list(seen.state.ids)
        seen.fed = self.ids[:-1]

    def record(self, event: Any, effects: Effects, decided: int) -> None:
        """Record an event in the trace, of which the emitted tokens are all and no others."""
        seen, new = self.seen, self.seen.state.ids[decided - effects.retract :]
        time = CallTime(float(len(seen.effects) + 1))
        given = {"retracted": effects.retract, "drafts": ()}
        self.recorder.record(event, new, **given, time=time)
        if effects.restart in (Restart.SAVED, Restart.FRESH):
            self.recorder.discard()
        seen.trace += self.recorder.emit(len(effects.emit))
        if effects.finish:
            seen.trace += self.recorder.finish()
            tokens = [token for traced in seen.trace for token in traced.tokens]
            assert tokens == [*seen.emitted, *effects.emit]
            assert all(traced.tokens and traced.seconds >= 1 for traced in seen.trace)

    def process(self, event: Any) -> None:
        """Advance the state machine by an event, and apply the effects."""
        seen = self.seen
        decided = seen.state.num_decided
        before = decided - seen.state.held
        seen.state, effects = advance(seen.state, event, self.policy)
        self.record(event, effects, decided)
        assert effects.retract <= seen.state.num_decided + effects.retract - before
        seen.effects.append(effects)
        seen.emitted += effects.emit
        seen.notes.update(effects.notes)
        seen.fallbacks.update([effects.fallback] if effects.fallback else [])
        assert effects.emit == seen.state.ids[before : before + len(effects.emit)]
        if effects.restart is Restart.CALL:
            self.retry_call()
            return
        if effects.finish:
            assert seen.finish is None
            seen.finish = effects.finish
            return
        if effects.restart:
            assert not seen.emitted
            seen.attempts += 1
            self.target = self.retry_target or self.target
            self.restored &= effects.restart is Restart.SAVED
            seen.prefills += effects.restart is Restart.FRESH
            self.prefill()
            return
        if effects.replace is not None:
            self.ids[-1] = effects.replace
        for token in effects.force:
            seen.fed.append(self.ids[-1])
            self.ids.append(token)
        if seen.state.phase.value != "waiting":
            assert tuple(self.ids) == seen.state.ids  # S1: the host and the device agree
            assert (
                len(seen.fed) == seen.state.num_computed == len(self.ids) - 1
            )  # S2: one is pending
            assert seen.fed == self.ids[:-1]  # S7: fed once each, in order
            late, nothing = advance(seen.state, Stepped(()), self.policy)
            assert nothing == Effects()  # the step that was in flight when the row stopped
            assert late._replace(ran=seen.state.ran) == seen.state


def always(length: float) -> BreakEven:
    """Return a break-even that is the same for every step."""
    return BreakEven.constant(length)


def run(
    script: Sequence[int],
    settings: Recovery = OFF,
    *,
    max_tokens: int = 200,
    speculative: bool = True,
    vocabulary: OutputVocabulary = VOCABULARY,
    stops: frozenset[int] = STOPS,
    **device: Any,
) -> Outcome:
    """Return the outcome of a scripted request."""
    policy = Policy(
        max_tokens=max_tokens,
        stop_ids=stops,
        speculative=speculative,
        recovery=settings,
        vocabulary=vocabulary,
    )
    return Device(scripted(script), policy, **device).run()


def both(script: Sequence[int], settings: Recovery, **options: Any) -> Outcome:
    """Return the outcome, after comparing it with plain decoding and other block sizes (S6)."""
    first = run(script, settings, **options)
    for accepts in ((0,), (7,), (2, 0, 5, 1)):
        other = run(script, settings, **options | {"accepts": accepts})
        assert (other.emitted, other.finish) == (first.emitted, first.finish)
        assert other.notes - DEAD == first.notes - DEAD
    plain = run(
        script, settings, **{k: v for k, v in options.items() if k != "accepts"}, speculative=False
    )
    assert (plain.emitted, plain.finish) == (first.emitted, first.finish)
    return first
