"""Whether drafting pays: speculate, decode plainly, or probe. Counts tokens, never seconds."""

from typing import NamedTuple

# Notes about drafting: plain decoding has none of them, and they say nothing about the answer.
# Whether "drafter_dead" is noted depends on the block size: a block of one token drafts nothing,
# and in larger ones the drafts differ, so one size may see 256 rejected drafts where another
# accepted some. Tokens, finish reasons and `stats.recovery` do not depend on it: these notes go to
# logs, and retries to `stats.fallbacks`.
DEAD = "drafter_dead"
RETRY, CONFIRMED, RECOVERED = "empty_retry", "empty_retry_confirmed_eos", "empty_retry_recovered"
RETRIES = (RETRY, CONFIRMED, RECOVERED)
NOTES = (DEAD, *RETRIES)
DEAD_AFTER = 256  # drafts of which none was accepted
BAD_DRAFTS = 3  # non-finite drafts in a row after which a request goes on without drafting
SMOOTHING = 0.2
TRIAL, PROBE = 8, 4  # rounds before a verdict: at first, and after a pause
PAUSE, LONGEST_PAUSE = 64, 1024  # tokens decoded plainly between probes


class DraftingState(NamedTuple):
    """What a request has learnt about its drafter.

    Attributes:
      drafted, accepted: drafts so far.
      bad: the last drafts in a row whose numbers were not finite.
      length: smoothed tokens per round; 0 before the first.
      trial: rounds to go before the next verdict.
      pause: plain tokens to go before the next probe; 0 while drafting.
      pauses: pauses so far; each is twice as long as the one before.
      dead: whether it was never right, for long or until its numbers broke for good; known even
        where drafting has to go on.
      off: why this request drafts no more.
    """

    drafted: int = 0
    accepted: int = 0
    bad: int = 0
    length: float = 0.0
    trial: int = TRIAL
    pause: int = 0
    pauses: int = 0
    dead: bool = False
    off: str | None = None

    @property
    def drafts(self) -> bool:
        """Whether the next step should draft."""
        return self.off is None and self.pause == 0


UNTRIED = DraftingState()


def after_step(
    state: DraftingState, decided: int, drafts: int, *, finite: bool, break_even: float, fixed: bool
) -> tuple[DraftingState, str | None]:
    """What a step taught, and why a fallback follows from it, if one does.

    Args:
      decided: tokens the step decided; 0 if the row was frozen.
      drafts: tokens drafted for the row; 0 in a plain step.
      break_even: tokens a round must decide to be worth its time; 0 if not known.
      fixed: drafting goes on whatever happens. Whether the step in the air drafts, too, hangs on
        the clock, and tokens that are drawn hang on whether it does (R11).
    """
    if not finite:
        state = state._replace(bad=state.bad + 1)
        if state.bad >= BAD_DRAFTS:
            off, dead = None if fixed else "draft_not_finite", state.dead or not state.accepted
            state = state._replace(off=off, dead=dead)
        return state, "draft_not_finite"
    if state.pause:
        return _paused(state, decided), None
    if not decided or not drafts or state.off:
        return state, None
    first = state.length == 0
    state = state._replace(
        bad=0,
        drafted=state.drafted + drafts,
        accepted=state.accepted + decided - 1,
        length=decided if first else state.length + SMOOTHING * (decided - state.length),
        trial=max(state.trial - 1, 0),
    )
    if state.drafted >= DEAD_AFTER and not state.accepted and not state.dead:
        off = DEAD if break_even else None
        return state._replace(dead=True, off=off), off
    if state.trial == 0 and state.length < break_even:
        pause = min(PAUSE << min(state.pauses, 8), LONGEST_PAUSE)
        return state._replace(pause=pause, pauses=state.pauses + 1), "below_break_even"
    return state, None


def _paused(state: DraftingState, decided: int) -> DraftingState:
    """Counts a pause down; at its end a probe begins with a fresh mind."""
    pause = max(state.pause - decided, 0)
    if pause:
        return state._replace(pause=pause)
    return state._replace(pause=0, trial=PROBE, length=0.0)
