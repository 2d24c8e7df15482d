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
RETRY = "empty_retry"
CONFIRMED = "empty_retry_confirmed_eos"
RECOVERED = "empty_retry_recovered"
RETRIES = (RETRY, CONFIRMED, RECOVERED)
NOTES = (DEAD, *RETRIES)
DEAD_AFTER = 256  # drafts of which none was accepted
BAD_DRAFTS = 3  # non-finite drafts in a row after which a request goes on without drafting
# Acceptance is judged by a mean over about 1 / SMOOTHING rounds. One over 5 rounds is noise: where
# drafting gains a fifth, chance stops it for 85 % of the tokens, as against 16 %.
SMOOTHING = 0.04
PRIOR = 16  # an expectation weighs as much as so many rounds
HEADROOM = 1.3  # the mean rises no further than to this multiple of break-even, to fall in time
TRIAL = 8  # rounds before a verdict without an expectation
PROBE = 4  # rounds before a verdict with an expectation
PAUSE = 64  # tokens that are decoded plainly before the first probe after a verdict
LONGEST_PAUSE = 1024  # most tokens that are decoded plainly between probes
FIRST_PAUSE = 32  # tokens before the first probe where drafting is not expected to pay off
HORIZON = 64  # rounds over which the acceptance of requests is averaged
EXPLORE_EVERY = 16  # one of 16 requests drafts at once whatever the history, to update it
# The acceptance at a position is a mean over about 1 / FORGETTING rounds, and of NEIGHBOUR rounds
# as at the position before it. So a narrow block whose drafts are all accepted soon grows: nothing
# recent is known about the positions after it.
FORGETTING = 0.08
NEIGHBOUR = 1.5
FIRST_POSITION = 0.9  # acceptance at the first position while nothing is known of it
INHERITED = 4.0  # the acceptance of earlier requests weighs as much as so many rounds


class BreakEven(NamedTuple):
    """Number of tokens that a drafted round must commit to pay off; unknown if all is empty.

    That is the time of a drafted step over that of a plain one, by the rows that decode, by the
    tokens before the step, and by the tokens of each row's block. Where a step is limited by
    arithmetic, a block takes longer than a token, so that the number grows with all three.
    """

    rows: tuple[int, ...] = ()  # numbers of rows, ascending
    positions: tuple[int, ...] = ()  # numbers of tokens before the step, ascending
    blocks: tuple[int, ...] = ()  # tokens of each row's block, ascending; the last is the plan's
    lengths: tuple[tuple[tuple[float, ...], ...], ...] = ()  # break-even [rows][positions][blocks]

    @classmethod
    def constant(cls, length: float) -> "BreakEven":
        """Return a break-even that is the same for every step."""
        return cls((1,), (0,), (1,), (((length,),),))

    def at(self, position: int, block: float | None = None, rows: int = 1) -> float:
        """Return the break-even of a step, interpolated; 0 if it is unknown.

        Args:
          position: number of tokens before the step.
          block: tokens of each row's block, in the mean; by default the plan's.
          rows: number of rows that decode.
        """
        if not self.lengths:
            return 0.0
        if block is None:
            block = self.blocks[-1]
        axes = (self.rows, self.positions, self.blocks)
        return _interpolated(axes, self.lengths, (rows, position, block))

    def of_step(self, position: int, block: int, rows: int) -> "StepCost":
        """Return the cost of the rounds of a step, with blocks of some tokens."""
        whole = self.at(position, None, rows)
        own = self.at(position, block, rows)
        least = self.at(position, 1, rows)
        return StepCost(whole, own, min(whole, own, least))


class StepCost(NamedTuple):
    """Break-even of a step, in tokens that a round must commit; 0 if it is unknown."""

    whole: float  # with the plan's block
    own: float  # with the step's blocks
    least: float  # with the smallest block


def _interpolated(axes: tuple[tuple[int, ...], ...], table: Any, point: tuple[float, ...]) -> float:
    """Return the value of a table at a point, linearly between its entries, constant outside.

    Args:
      axes: coordinates of the entries, ascending along each axis.
      table: nested tuples, one level for each axis.
      point: a coordinate along each axis.
    """
    if not axes:
        return table
    axis = axes[0]
    coordinate = point[0]
    after = bisect.bisect_right(axis, coordinate)

    def value_at(index: int) -> float:
        return _interpolated(axes[1:], table[index], point[1:])

    if after == 0:
        return value_at(0)
    before = after - 1
    low = value_at(before)
    if after == len(axis):
        return low
    step = value_at(after) - low
    return low + step * (coordinate - axis[before]) / (axis[after] - axis[before])


UNKNOWN = BreakEven()


class Acceptance(NamedTuple):
    """How often the draft at each position of a block was accepted lately.

    A position counts as tried if all drafts before it were accepted, even if it had no draft.
    """

    tried: tuple[float, ...] = ()  # number of rounds that tried each position, older ones less
    kept: tuple[float, ...] = ()  # number of those rounds that accepted the draft

    def after_round(self, accepted: int, block: int) -> "Acceptance":
        """Return the acceptance after one more round.

        Args:
          accepted: number of drafts that the round accepted.
          block: tokens of its block.
        """

        def counted(counts: tuple[float, ...], reached: int) -> tuple[float, ...]:
            faded = [count * (1 - FORGETTING) for count in counts]
            faded += [0.0] * (block - 1 - len(counts))
            return tuple(count + 1 if i < reached else count for i, count in enumerate(faded))

        tried = counted(self.tried, min(accepted + 1, block - 1))
        return Acceptance(tried, counted(self.kept, accepted))

    def reached(self, drafts: int) -> Iterator[float]:
        """Yield for each of so many drafts the probability that it and all before it are kept."""
        reached = 1.0
        rate = FIRST_POSITION
        for i in range(drafts):
            tried = self.tried[i] if i < len(self.tried) else 0.0
            kept = self.kept[i] if i < len(self.kept) else 0.0
            rate = (kept + NEIGHBOUR * rate) / (tried + NEIGHBOUR)
            reached *= rate
            yield reached

    def tokens(self, block: int) -> float:
        """Return how many tokens a round with a block of some tokens is expected to commit."""
        return 1 + sum(self.reached(block - 1))

    def weighing(self, rounds: float) -> "Acceptance":
        """Return the same acceptance, as if known from at most so many rounds."""
        scale = min(1.0, rounds / max([*self.tried, rounds]))
        tried = tuple(count * scale for count in self.tried)
        kept = tuple(count * scale for count in self.kept)
        return Acceptance(tried, kept)


class DraftingState(NamedTuple):
    """Facts about one request by which it decides whether to draft."""

    rounds: int = 0  # number of rounds that drafted
    drafted: int = 0  # number of drafts so far
    accepted: int = 0  # number of drafts that were accepted so far
    bad: int = 0  # number of steps in a row whose draft was not finite
    # Mean tokens per round, 0 where nothing is known. Tokens of a block that is smaller than the
    # plan's count as many as the plan's block would have to commit in its own time.
    length: float = 0.0
    total: float = 0.0  # tokens of all rounds, counted as in `length`
    evidence: int = 0  # number of rounds that `length` rests on
    trial: int = TRIAL  # number of rounds until the next verdict
    pause: int = 0  # plain tokens until drafting is tried again; 0 while drafting
    pauses: int = 0  # number of pauses; each is twice as long as the last
    acceptance: Acceptance = Acceptance()
    # Whether no draft was accepted, in many rounds or before drafts stopped being finite. It is
    # recorded even if drafting must continue.
    dead: bool = False
    off: str | None = None  # why this request no longer drafts

    @property
    def drafts(self) -> bool:
        """Whether the next step should draft."""
        return self.off is None and self.pause == 0


class AcceptanceHistory(NamedTuple):
    """Acceptance of an engine's requests so far, from which later ones begin."""

    length: float = 0.0  # smoothed tokens per round, as `DraftingState.length`; 0 before the first
    requests: int = 0  # number of requests that drafted and ended
    acceptance: Acceptance = Acceptance()  # mostly of the request that ended last

    def after_request(self, ended: DraftingState) -> "AcceptanceHistory":
        """Return the history with the rounds of a request that ended."""
        if not ended.rounds:
            return self
        weight = 1.0
        if self.requests:
            weight = 1 - (1 - 1 / HORIZON) ** ended.rounds
        length = self.length + weight * (ended.total / ended.rounds - self.length)
        acceptance = ended.acceptance.weighing(INHERITED)
        return AcceptanceHistory(length, self.requests + 1, acceptance)

    def first_state(self, number: int, break_even: float) -> DraftingState:
        """Return the state in which a request begins.

        A request that is not expected to gain by drafting first decodes some tokens plainly.

        Args:
          number: the request's place in the order of all.
          break_even: tokens that a round of its first step must commit to pay off.
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
    """Facts about a row that drafts, by which its number of drafts is chosen."""

    acceptance: Acceptance
    break_even: BreakEven
    position: int  # number of tokens before the step
    most: int  # number of drafts that its request and the plan allow, at least 1


def choose_drafts(drafting: Mapping[int, Drafting], rows: int) -> dict[int, int]:
    """Return how many drafts each row makes, so that a step commits the most tokens in its time.

    Each row makes its first draft in any case. Further drafts are added in the order of the
    probability that they are accepted, for as long as that gains. Where the cost of drafts is not
    known, each row makes as many as it may.

    Args:
      drafting: the rows that draft.
      rows: number of rows that decode, some of them plainly.
    """
    if not drafting or not all(x.break_even.blocks[1:] for x in drafting.values()):
        return {row: x.most for row, x in drafting.items()}
    position = sum(x.position for x in drafting.values()) // len(drafting)
    break_even = next(iter(drafting.values())).break_even
    blocks, times = _step_times(break_even, position, rows)
    first_drafts = 0.0  # number of the first drafts that are expected to be accepted
    further: list[tuple[float, int]] = []  # probability and row of each further draft
    for row, x in drafting.items():
        first, *others = x.acceptance.reached(x.most)
        first_drafts += first
        further += [(probability, row) for probability in others]
    further.sort(reverse=True)
    tokens = rows + first_drafts
    best_count = 0
    best_gain = 0.0
    for count in range(len(further) + 1):
        if count:
            tokens += further[count - 1][0]
        mean_block = 1 + (len(drafting) + count) / rows
        gain = tokens / _interpolated((blocks,), times, (mean_block,))
        if gain >= best_gain:
            best_count = count
            best_gain = gain
    chosen = dict.fromkeys(drafting, 1)
    for _, row in further[:best_count]:
        chosen[row] += 1
    return chosen


def _step_times(
    break_even: BreakEven, position: int, rows: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return numbers of tokens of a block, from 0, and the time of a step with such blocks.

    A plain step takes 1. The first two known times are continued to a block without tokens.
    """
    blocks = break_even.blocks
    times = [break_even.at(position, block, rows) for block in blocks]
    slope = (times[1] - times[0]) / (blocks[1] - blocks[0])
    return (0, *blocks), (times[0] - slope * blocks[0], *times)


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
      block: tokens of the block if the row drafted, even if the drafter proposed nothing; else 0.
      finite: whether the drafter's logits are.
      cost: break-even of the step.
      fixed: whether drafting goes on even where it does not pay off, see `Policy`.
    """
    block = max(block, drafts + 1)
    whole, own, cheapest = cost
    if not finite:
        state = state._replace(bad=state.bad + 1)
        if state.bad >= BAD_DRAFTS:
            off = None if fixed else "draft_not_finite"
            dead = state.dead or not state.accepted
            state = state._replace(off=off, dead=dead)
        return state, "draft_not_finite"
    if state.pause:
        pause = max(state.pause - decided, 0)
        if not pause:  # drafting is tried again, as if it had just paid off
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
