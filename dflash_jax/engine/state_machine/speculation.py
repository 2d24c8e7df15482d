"""Decide whether the next step drafts, and how many tokens the block of each row has.

Counts tokens, never seconds. A row verifies as many drafts as pay off: where native kernels skip
tokens that do not count, a draft that is not made costs nothing.
"""

import bisect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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
# The acceptance at a place is a mean over about 1 / FORGETTING rounds, and of NEIGHBOUR rounds as
# at the place before it. So a narrow block whose drafts are all accepted soon grows: nothing
# recent is known about the places after it.
FORGETTING, NEIGHBOUR = 0.08, 1.5
FIRST_PLACE = 0.9  # acceptance at the first place of which nothing is known
INHERITED = 4.0  # rounds that the acceptance of earlier requests weighs as much as


class BreakEven(NamedTuple):
    """Tokens that a drafted round must commit to pay off.

    That is the time of a drafted step over that of a plain one, by the rows that decode, by the
    tokens before the step, and by the tokens of each row's block. Where a step is limited by
    arithmetic, a block takes longer than a token, so that the number grows with all three.
    """

    rows: tuple[int, ...] = ()  # ascending, as those below; all empty if nothing is known
    positions: tuple[int, ...] = ()  # tokens before the step
    blocks: tuple[int, ...] = ()  # tokens of each row's block; the last is the plan's
    lengths: tuple[tuple[tuple[float, ...], ...], ...] = ()  # break-even [rows][positions][blocks]

    @classmethod
    def constant(cls, length: float) -> "BreakEven":
        """Return a break-even that is the same for every step."""
        return cls((1,), (0,), (1,), (((length,),),))

    def at(self, position: int, block: float | None = None, rows: int = 1) -> float:
        """Return the number for a step, interpolated; 0 if it is unknown.

        Args:
          block: tokens of each row's block, in the mean; by default the plan's.
          rows: that decode.
        """
        if not self.lengths:
            return 0.0
        where = (rows, position, self.blocks[-1] if block is None else block)
        return _interpolated((self.rows, self.positions, self.blocks), self.lengths, where)

    def of_step(self, position: int, block: int, rows: int) -> "StepCost":
        """Return what the rounds of a step cost, with blocks of some tokens."""
        whole, own, least = (self.at(position, x, rows) for x in (None, block, 1))
        return StepCost(whole, own, min(whole, own, least))


class StepCost(NamedTuple):
    """Break-even of a step, in tokens that a round must commit; 0 if it is unknown."""

    whole: float  # of the plan's block
    own: float  # of the step's blocks
    least: float  # of the smallest block


def _interpolated(axes: tuple[tuple[int, ...], ...], table: Any, where: tuple[float, ...]) -> float:
    """Return a number between those of a table, in which axes are nested; its ends go on."""
    if not axes:
        return table
    axis, place = axes[0], where[0]
    after = bisect.bisect_right(axis, place)

    def along(i: int) -> float:
        return _interpolated(axes[1:], table[i], where[1:])

    if after in (0, len(axis)):
        return along(max(after - 1, 0))
    low, first = axis[after - 1], along(after - 1)
    return first + (along(after) - first) * (place - low) / (axis[after] - low)


UNKNOWN = BreakEven()


class Acceptance(NamedTuple):
    """How often the draft at each place of a block was accepted lately.

    A place counts as tried if all drafts before it were accepted, also where there was no draft.
    """

    tried: tuple[float, ...] = ()  # rounds by place, older ones less
    kept: tuple[float, ...] = ()  # those in which the draft was accepted

    def after_round(self, accepted: int, block: int) -> "Acceptance":
        """Return it with a round that accepted so many drafts of a block of some tokens."""

        def counted(counts: tuple[float, ...], reached: int) -> tuple[float, ...]:
            places = (*counts, *[0.0] * (block - 1 - len(counts)))
            return tuple(x * (1 - FORGETTING) + (i < reached) for i, x in enumerate(places))

        tried = counted(self.tried, min(accepted + 1, block - 1))
        return Acceptance(tried, counted(self.kept, accepted))

    def reached(self, drafts: int) -> Iterator[float]:
        """Yield the probability that each of so many drafts is accepted, those before it too."""
        reached, rate, known = 1.0, FIRST_PLACE, len(self.tried)
        for i in range(drafts):
            tried, kept = (self.tried[i], self.kept[i]) if i < known else (0.0, 0.0)
            rate = (kept + NEIGHBOUR * rate) / (tried + NEIGHBOUR)
            reached *= rate
            yield reached

    def tokens(self, block: int) -> float:
        """Return how many tokens a round with a block of some tokens is expected to commit."""
        return 1 + sum(self.reached(block - 1))

    def weighing(self, rounds: float) -> "Acceptance":
        """Return the same acceptance, as if known from at most so many rounds."""
        scale = min(1.0, rounds / max([*self.tried, rounds]))
        return Acceptance(*(tuple(x * scale for x in counts) for counts in self))


class DraftingState(NamedTuple):
    """What is known about the use of drafting for one request."""

    rounds: int = 0  # that drafted
    drafted: int = 0  # drafts so far
    accepted: int = 0  # of these
    bad: int = 0  # steps in a row whose draft was not finite
    # Mean tokens per round; those of a block of fewer tokens count by what they would be worth in
    # the time of the plan's. 0 where nothing is known.
    length: float = 0.0
    total: float = 0.0  # of all rounds, counted the same way
    evidence: int = 0  # rounds that the mean rests on
    trial: int = TRIAL  # rounds until the next decision
    pause: int = 0  # plain tokens until drafting is tried again; 0 while drafting
    pauses: int = 0  # number of pauses; each is twice as long as the last
    acceptance: Acceptance = Acceptance()
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

    length: float = 0.0  # smoothed tokens per round, as `DraftingState.length`; 0 before the first
    requests: int = 0  # that drafted and ended
    acceptance: Acceptance = Acceptance()  # of the last of them, mostly

    def after_request(self, ended: DraftingState) -> "AcceptanceHistory":
        """Return the history with the rounds of a request that ended."""
        if not ended.rounds:
            return self
        length = ended.total / ended.rounds
        weight = 1 - (1 - 1 / HORIZON) ** ended.rounds if self.requests else 1.0
        length = self.length + weight * (length - self.length)
        acceptance = ended.acceptance.weighing(INHERITED)
        return AcceptanceHistory(length, self.requests + 1, acceptance)

    def first_state(self, number: int, break_even: float) -> DraftingState:
        """Return the state in which a request begins.

        A request that is not expected to gain by drafting first decodes some tokens plainly.

        Args:
          number: of the request, in their order.
          break_even: of its first step.
        """
        if not self.requests:
            return DraftingState()
        state = DraftingState(acceptance=self.acceptance)
        if self.length < break_even and number % EXPLORE_EVERY:
            return state._replace(pause=FIRST_PAUSE)
        length = max(self.length, break_even)
        return state._replace(length=length, evidence=PRIOR, trial=PROBE)


NO_HISTORY = AcceptanceHistory()


class Drafting(NamedTuple):
    """What the number of drafts of a row that drafts depends on."""

    acceptance: Acceptance
    break_even: BreakEven
    position: int
    most: int  # drafts that its request and the plan allow, at least 1


def choose_drafts(drafting: Mapping[int, Drafting], rows: int) -> dict[int, int]:
    """Return how many drafts each row makes, so that a step commits the most tokens in its time.

    The first draft of each row is made in any case. Others follow in the order of the probability
    that they are accepted, as long as that gains; all do where it is not known what they cost.

    Args:
      drafting: the rows that draft.
      rows: all that decode, some of them plainly.
    """
    if not drafting or not all(x.break_even.blocks[1:] for x in drafting.values()):
        return {row: x.most for row, x in drafting.items()}
    position = sum(x.position for x in drafting.values()) // len(drafting)
    known = next(iter(drafting.values())).break_even
    blocks, times = known.blocks, [known.at(position, block, rows) for block in known.blocks]
    slope = (times[1] - times[0]) / (blocks[1] - blocks[0])
    blocks, times = (0, *blocks), (times[0] - slope * blocks[0], *times)
    odds = {row: tuple(x.acceptance.reached(x.most)) for row, x in drafting.items()}
    further = sorted(((p, row) for row, each in odds.items() for p in each[1:]), reverse=True)
    tokens = rows + sum(each[0] for each in odds.values())
    best, most = 0, 0.0
    for count in range(len(further) + 1):
        tokens += further[count - 1][0] if count else 0.0
        drafts = (len(odds) + count) / rows
        if (gain := tokens / _interpolated((blocks,), times, (1 + drafts,))) >= most:
            best, most = count, gain
    chosen = dict.fromkeys(odds, 1)
    for _, row in further[:best]:
        chosen[row] += 1
    return chosen


def after_step(
    state: DraftingState,
    decided: int,
    drafts: int,
    *,
    block: int = 0,
    finite: bool,
    cost: StepCost,
    fixed: bool,
) -> tuple[DraftingState, str | None]:
    """Return the state after a step, and the reason if drafting stops or pauses.

    Args:
      decided: number of tokens the step committed; 0 if the row had stopped.
      drafts: number of tokens drafted for the row; 0 in a plain step.
      block: tokens of the block if the row drafted, as some drafters propose nothing; else 0.
      cost: of the step.
      fixed: see `Policy`.
    """
    block, (whole, own, cheapest) = max(block, drafts + 1), cost
    if not finite:
        state = state._replace(bad=state.bad + 1)
        if state.bad >= BAD_DRAFTS:
            off, dead = None if fixed else "draft_not_finite", state.dead or not state.accepted
            state = state._replace(off=off, dead=dead)
        return state, "draft_not_finite"
    if state.pause:
        pause = max(state.pause - decided, 0)
        if not pause:  # drafting is tried again, as if it had paid off just so
            recent = state.acceptance.weighing(PROBE)
            state = state._replace(trial=PROBE, length=whole, evidence=PRIOR, acceptance=recent)
        return state._replace(pause=pause), None
    if not decided or block < 2 or state.off:
        return state, None
    evidence = state.evidence + 1
    weight = max(SMOOTHING, 1 / evidence)
    worth = decided * whole / own if own else float(decided)
    length = state.length + weight * (worth - state.length)
    state = state._replace(
        bad=0,
        rounds=state.rounds + 1,
        drafted=state.drafted + drafts,
        accepted=state.accepted + decided - 1,
        length=min(length, HEADROOM * whole) if whole else length,
        total=state.total + worth,
        acceptance=state.acceptance.after_round(decided - 1, block),
        evidence=evidence,
        trial=max(state.trial - 1, 0),
    )
    if state.drafted >= DEAD_AFTER and not state.accepted and not state.dead:
        off = DEAD if whole else None
        return state._replace(dead=True, off=off), off
    if state.trial == 0 and state.length < whole:
        pause = min(PAUSE << min(state.pauses, 8), LONGEST_PAUSE)
        if 1 < cheapest < whole:  # a probe loses less time, and may come sooner
            pause = max(round(pause * (cheapest - 1) / (whole - 1)), PROBE)
        return state._replace(pause=pause, pauses=state.pauses + 1), "below_break_even"
    return state, None
