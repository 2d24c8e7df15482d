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


class Lane(NamedTuple):
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


UNTRIED = Lane()


def heard(
    lane: Lane, decided: int, drafts: int, *, finite: bool, break_even: float, fixed: bool
) -> tuple[Lane, str | None]:
    """What a step taught, and why a fallback follows from it, if one does.

    Args:
      decided: tokens the step decided; 0 if the row was frozen.
      drafts: tokens drafted for the row; 0 in a plain step.
      break_even: tokens a round must decide to be worth its time; 0 if not known.
      fixed: drafting goes on whatever happens. Whether the step in the air drafts, too, hangs on
        the clock, and tokens that are drawn hang on whether it does (R11).
    """
    if not finite:
        lane = lane._replace(bad=lane.bad + 1)
        if lane.bad >= BAD_DRAFTS:
            off, dead = None if fixed else "draft_not_finite", lane.dead or not lane.accepted
            lane = lane._replace(off=off, dead=dead)
        return lane, "draft_not_finite"
    if lane.pause:
        return _paused(lane, decided), None
    if not decided or not drafts or lane.off:
        return lane, None
    first = lane.length == 0
    lane = lane._replace(
        bad=0,
        drafted=lane.drafted + drafts,
        accepted=lane.accepted + decided - 1,
        length=decided if first else lane.length + SMOOTHING * (decided - lane.length),
        trial=max(lane.trial - 1, 0),
    )
    if lane.drafted >= DEAD_AFTER and not lane.accepted and not lane.dead:
        off = DEAD if break_even else None
        return lane._replace(dead=True, off=off), off
    if lane.trial == 0 and lane.length < break_even:
        pause = min(PAUSE << min(lane.pauses, 8), LONGEST_PAUSE)
        return lane._replace(pause=pause, pauses=lane.pauses + 1), "below_break_even"
    return lane, None


def _paused(lane: Lane, decided: int) -> Lane:
    """Counts a pause down; at its end a probe begins with a fresh mind."""
    pause = max(lane.pause - decided, 0)
    if pause:
        return lane._replace(pause=pause)
    return lane._replace(pause=0, trial=PROBE, length=0.0)
