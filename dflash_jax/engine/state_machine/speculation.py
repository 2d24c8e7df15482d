"""Decide whether the next step drafts. Counts tokens, never seconds."""

import bisect
from typing import NamedTuple

# Notes about drafting, which go to logs, and retries to `stats.fallbacks`. Plain decoding has none
# of them, and no token, finish reason or `stats.recovery` depends on them. Whether "drafter_dead"
# is noted depends on the block size: one size may see 256 rejected drafts where another accepted
# some, and a block of one token drafts nothing.
DEAD = "drafter_dead"
RETRY, CONFIRMED, RECOVERED = "empty_retry", "empty_retry_confirmed_eos", "empty_retry_recovered"
RETRIES = (RETRY, CONFIRMED, RECOVERED)
NOTES = (DEAD, *RETRIES)
DEAD_AFTER = 256  # drafts of which none was accepted
BAD_DRAFTS = 3  # non-finite drafts in a row after which a request goes on without drafting
# Acceptance is judged by a mean over about 1 / SMOOTHING rounds. One over 5 rounds is noise: where
# drafting gains a fifth, chance stops it for 85 % of the tokens, as against 16 %.
SMOOTHING = 0.04
PRIOR = 16  # rounds that an expectation weighs as much as
HEADROOM = 1.3  # of break-even: the mean rises no further, so that it falls in time
TRIAL, PROBE = 8, 4  # rounds before a verdict: without an expectation, and with one
PAUSE, LONGEST_PAUSE = 64, 1024  # tokens decoded plainly between probes
FIRST_PAUSE = 32  # tokens before the first probe where drafting is not expected to pay off
HORIZON = 64  # rounds over which the acceptance of requests is averaged
EXPLORE_EVERY = 16  # one of 16 requests drafts at once whatever the history, to update it


class BreakEven(NamedTuple):
    """Tokens that a drafted round must commit to pay off, by the tokens before it.

    That is the time of a drafted step over that of a plain one. Where attention is limited by
    arithmetic, it takes longer for a block than for a token, so that the number grows with the
    context.
    """

    positions: tuple[int, ...] = ()  # tokens before the step, ascending; none if nothing is known
    lengths: tuple[float, ...] = ()  # break-even at each

    def at(self, position: int) -> float:
        """Return the number at a position, interpolated; 0 if it is unknown."""
        after = bisect.bisect_right(self.positions, position)
        if not self.positions or after in (0, len(self.positions)):
            return self.lengths[max(after - 1, 0)] if self.lengths else 0.0
        (low, high), (first, last) = (x[after - 1 : after + 1] for x in self)
        return first + (last - first) * (position - low) / (high - low)


UNKNOWN = BreakEven()


class DraftingState(NamedTuple):
    """What is known about the use of drafting for one request."""

    rounds: int = 0  # that drafted
    drafted: int = 0  # drafts so far
    accepted: int = 0  # of these
    bad: int = 0  # steps in a row whose draft was not finite
    length: float = 0.0  # mean tokens per round; 0 where nothing is known
    evidence: int = 0  # rounds that the mean rests on
    trial: int = TRIAL  # rounds until the next decision
    pause: int = 0  # plain tokens until drafting is tried again; 0 while drafting
    pauses: int = 0  # number of pauses; each is twice as long as the last
    # No draft was accepted, in many rounds or before drafts stopped being finite; recorded even if
    # drafting must continue.
    dead: bool = False
    off: str | None = None  # why this request no longer drafts

    @property
    def drafts(self) -> bool:
        """Whether the next step should draft."""
        return self.off is None and self.pause == 0


class AcceptanceHistory(NamedTuple):
    """Acceptance of an engine's requests so far, from which later ones begin."""

    length: float = 0.0  # smoothed tokens per round; 0 before the first
    requests: int = 0  # that drafted and ended

    def after_request(self, ended: DraftingState) -> "AcceptanceHistory":
        """Return the history with the rounds of a request that ended."""
        if not ended.rounds:
            return self
        length = 1 + ended.accepted / ended.rounds
        weight = 1 - (1 - 1 / HORIZON) ** ended.rounds if self.requests else 1.0
        return AcceptanceHistory(self.length + weight * (length - self.length), self.requests + 1)

    def first_state(self, number: int, break_even: float) -> DraftingState:
        """Return the state in which a request begins.

        A request that is not expected to gain by drafting first decodes some tokens plainly.

        Args:
          number: of the request, in their order.
          break_even: of its first step.
        """
        if not self.requests:
            return DraftingState()
        if self.length < break_even and number % EXPLORE_EVERY:
            return DraftingState(pause=FIRST_PAUSE)
        length = max(self.length, break_even)
        return DraftingState(length=length, evidence=PRIOR, trial=PROBE)


NO_HISTORY = AcceptanceHistory()


def after_step(
    state: DraftingState, decided: int, drafts: int, *, finite: bool, break_even: float, fixed: bool
) -> tuple[DraftingState, str | None]:
    """Return the state after a step, and the reason if drafting stops or pauses.

    Args:
      decided: number of tokens the step committed; 0 if the row had stopped.
      drafts: number of tokens drafted for the row; 0 in a plain step.
      break_even: of the step; 0 if it is unknown.
      fixed: see `Policy`.
    """
    if not finite:
        state = state._replace(bad=state.bad + 1)
        if state.bad >= BAD_DRAFTS:
            off, dead = None if fixed else "draft_not_finite", state.dead or not state.accepted
            state = state._replace(off=off, dead=dead)
        return state, "draft_not_finite"
    if state.pause:
        pause = max(state.pause - decided, 0)
        if not pause:  # drafting is tried again, as if it had paid off just so
            state = state._replace(trial=PROBE, length=break_even, evidence=PRIOR)
        return state._replace(pause=pause), None
    if not decided or not drafts or state.off:
        return state, None
    evidence = state.evidence + 1
    weight = max(SMOOTHING, 1 / evidence)
    length = state.length + weight * (decided - state.length)
    state = state._replace(
        bad=0,
        rounds=state.rounds + 1,
        drafted=state.drafted + drafts,
        accepted=state.accepted + decided - 1,
        length=min(length, HEADROOM * break_even) if break_even else length,
        evidence=evidence,
        trial=max(state.trial - 1, 0),
    )
    if state.drafted >= DEAD_AFTER and not state.accepted and not state.dead:
        off = DEAD if break_even else None
        return state._replace(dead=True, off=off), off
    if state.trial == 0 and state.length < break_even:
        pause = min(PAUSE << min(state.pauses, 8), LONGEST_PAUSE)
        return state._replace(pause=pause, pauses=state.pauses + 1), "below_break_even"
    return state, None
