"""P18, P19, P38: when drafting stops, and when it is tried again."""

import random

import pytest
from fake_device import DEAD, EOS, VOCABULARY, Device, always, recovery, run, scripted

from dflash_jax.engine.request import Request
from dflash_jax.engine.running_request import RunningRequest
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.state_machine.controller import Policy, Prefilled, Stepped
from dflash_jax.engine.state_machine.speculation import (
    EXPLORE_EVERY,
    FIRST_PAUSE,
    HORIZON,
    NO_HISTORY,
    PAUSE,
    PROBE,
    TRIAL,
    UNKNOWN,
    Acceptance,
    AcceptanceHistory,
    BreakEven,
    Drafting,
    DraftingState,
    after_step,
    choose_drafts,
)

SCRIPT = range(10, 700)


def test_P18_a_non_finite_draft_costs_one_step_and_is_counted() -> None:
    seen = run(SCRIPT, max_tokens=100, draft_finite=lambda step: step != 2)
    assert seen.fallbacks == {"draft_not_finite": 1}
    assert seen.emitted == list(SCRIPT[:100])
    assert seen.plain_steps == 0


def test_P19_drafting_stops_after_three_non_finite_drafts() -> None:
    seen = run(SCRIPT, max_tokens=100, draft_finite=lambda step: False)
    assert seen.fallbacks == {"draft_not_finite": 3}
    assert seen.drafted_steps == 3
    assert seen.emitted == run(SCRIPT, max_tokens=100, speculative=False).emitted
    assert seen.state.drafting.off == "draft_not_finite"
    assert seen.notes == {"drafter_dead": 1}


def test_drafting_continues_where_tokens_would_depend_on_when_it_stops() -> None:
    """Whether a step is in flight after the third non-finite draft depends on timing (R11)."""
    policy = Policy(max_tokens=100, fixed=True)
    seen = Device(scripted(SCRIPT), policy, draft_finite=lambda step: step > 7).run()
    assert seen.fallbacks == {"draft_not_finite": 8}
    assert seen.plain_steps == 0
    assert seen.notes == {"drafter_dead": 1}
    assert seen.emitted == list(SCRIPT[:100])


def test_I7_occasional_non_finite_drafts_do_not_stop_drafting() -> None:
    seen = run(SCRIPT, max_tokens=600, draft_finite=lambda step: step % 3 == 0)
    assert seen.plain_steps == 0
    assert seen.state.drafting.off is None
    assert not seen.notes
    seen = run(SCRIPT, max_tokens=600, draft_finite=lambda step: step not in (2, 20, 21, 22))
    assert seen.fallbacks == {"draft_not_finite": 4}
    assert seen.state.drafting.off == "draft_not_finite"
    assert not seen.notes  # drafts were accepted before
    assert seen.emitted == list(SCRIPT[:600])


def test_P38_a_drafter_whose_drafts_are_all_rejected_is_reported() -> None:
    seen = run(SCRIPT, max_tokens=300, accepts=[0])
    assert seen.notes == {"drafter_dead": 1}
    assert seen.emitted == list(SCRIPT[:300])
    assert seen.plain_steps == 0  # drafting never pauses where its cost is not known


def test_only_notes_about_the_drafter_depend_on_the_block_size() -> None:
    """One run rejects all drafts, the other none: only the note differs."""
    settings = recovery(loops=True, min_tokens=400)
    script = [*range(100, 390), EOS, *[*range(400, 424)] * 12]
    ones, eights, plain = (
        run(script, settings, max_tokens=600, accepts=accepts, speculative=speculative)
        for accepts, speculative in (([0], True), ([7], True), ([0], False))
    )
    assert ones.notes - eights.notes == {"drafter_dead": 1}
    assert ones.notes - DEAD == eights.notes == plain.notes == {"min_tokens": 1, "period": 1}
    assert ones.emitted == eights.emitted == plain.emitted
    assert ones.finish == eights.finish == plain.finish
    request = Request(
        prompt=(1,), params=SamplingParams(max_tokens=600), recovery=settings, vocabulary=VOCABULARY
    )
    statistics = []
    for drafts in (7, 0):  # a block of one token drafts nothing
        sequence = RunningRequest(request, None)
        sequence.start()
        sequence.take(Prefilled(10))
        for token in range(11, 60):
            sequence.take(Stepped((token,), num_drafts=drafts))
        assert sequence.state.drafting.dead is (drafts > 0)
        statistics.append((sequence.stats.recovery, sequence.stats.fallbacks))
    assert statistics == [({}, {})] * 2


def test_drafting_stops_for_a_drafter_whose_drafts_are_all_rejected() -> None:
    seen = run_device([0], 0.5).seen
    assert seen.notes == {"drafter_dead": 1}
    assert seen.fallbacks == {"drafter_dead": 1}
    assert seen.drafted_steps == -(-256 // 7)
    assert seen.emitted == list(SCRIPT[:600])


def run_device(accepts: list[int], break_even: float, max_tokens: int = 600) -> Device:
    policy = Policy(max_tokens=max_tokens, break_even=always(break_even))
    device = Device(scripted(SCRIPT), policy, accepts=accepts)
    device.run()
    return device


def test_drafting_above_break_even_continues() -> None:
    seen = run_device([1, 3], 2.5).seen
    assert seen.plain_steps == 0
    assert not seen.fallbacks


def test_drafting_below_break_even_pauses_and_is_tried_again() -> None:
    seen = run_device([1, 0], 2.5).seen
    assert seen.fallbacks == {"below_break_even": 4}  # for 64, 128, 256 tokens and the rest
    assert seen.drafted_steps == TRIAL + 3 * PROBE
    assert seen.plain_steps >= PAUSE * (1 + 2 + 4)
    assert seen.emitted == list(SCRIPT[:600])


def test_break_even_is_interpolated_between_the_positions_where_it_was_measured() -> None:
    found = BreakEven((1,), (0, 100, 300), (4,), (((1.2,), (1.4,), (2.0,)),))
    assert [found.at(n) for n in (0, 100, 300, 9000)] == [1.2, 1.4, 2.0, 2.0]
    assert [found.at(n) for n in (50, 150)] == pytest.approx([1.3, 1.55])
    assert UNKNOWN.at(7) == 0


def test_drafting_stops_where_the_context_is_so_long_that_it_no_longer_pays_off() -> None:
    rising = BreakEven(
        (1,), (0, 400), (4,), (((1.5,), (5.5,)),)
    )  # 2 tokens a round pay off up to position 50
    for prompt, drafts in ((0, True), (200, False)):
        policy = Policy(max_tokens=600, prompt_tokens=prompt, break_even=rising)
        seen = Device(scripted(SCRIPT), policy, accepts=[1]).run()
        early = seen.drafted_steps - 4 * PROBE
        assert (early > 20) == drafts
        assert seen.plain_steps > 400
        assert seen.emitted == list(SCRIPT[:600])


def test_drafting_that_gains_a_little_is_hardly_stopped_by_chance() -> None:
    """At 1.68 tokens a round and a break-even of 1.4, as SmolLM2 writes code in int8."""
    plain = 0
    for seed in range(16):
        accepts = random.Random(seed).choices(range(4), (0.56, 0.25, 0.14, 0.05), k=600)
        device = Device(
            scripted(SCRIPT), Policy(max_tokens=600, break_even=always(1.4)), accepts=accepts
        )
        known = AcceptanceHistory(length=1.68, requests=20)
        device.seen.state = device.seen.state._replace(drafting=known.first_state(1, 1.4))
        plain += device.run().plain_steps
    assert plain < 0.2 * 16 * 600


def test_drafting_stops_soon_where_drafts_are_no_longer_accepted() -> None:
    """However good they were: the time of at most ten tokens is lost, at 0.4 a round."""
    good = [3] * 100
    policy = Policy(max_tokens=600, break_even=always(1.4))
    device = Device(scripted(SCRIPT), policy, accepts=[*good, *[0] * 600])
    seen = device.run()
    wasted = seen.drafted_steps - len(good)
    assert 0 < wasted - PROBE <= 20


def test_a_request_begins_plainly_where_earlier_ones_gained_nothing() -> None:
    earlier = run_device([1, 0], 2.5).seen.state.drafting
    assert earlier.accepted / earlier.rounds == pytest.approx(0.5, abs=0.1)
    seen = NO_HISTORY.after_request(earlier)
    assert seen.length == pytest.approx(1.5, abs=0.1)
    assert seen.first_state(1, 2.5).pause == FIRST_PAUSE
    assert seen.first_state(1, 1.2).drafts  # drafting pays off
    assert seen.first_state(1, 0.0).drafts  # its cost is not known
    assert seen.first_state(EXPLORE_EVERY, 2.5).drafts
    assert NO_HISTORY.first_state(1, 2.5).drafts
    policy = Policy(max_tokens=600, break_even=always(2.5))
    device = Device(scripted(SCRIPT), policy, accepts=[1, 0])
    device.seen.state = device.seen.state._replace(drafting=seen.first_state(1, 2.5))
    found = device.run()
    assert found.emitted == list(SCRIPT[:600])
    assert found.drafted_steps == 4 * PROBE  # after 32, 64, 128 and 256 tokens


def test_the_history_follows_the_requests_that_drafted() -> None:
    seen = NO_HISTORY.after_request(DraftingState(rounds=10, total=20))
    assert seen == NO_HISTORY.after_request(DraftingState()).after_request(
        DraftingState(rounds=1, total=2)
    )
    for _ in range(HORIZON):
        seen = seen.after_request(DraftingState(rounds=4, total=24))
    assert seen.length == pytest.approx(6, abs=0.1)


def test_a_drafter_that_recovers_is_used_again() -> None:
    policy = Policy(max_tokens=600, break_even=always(2.5))
    device = Device(scripted(SCRIPT), policy, accepts=[0] * (TRIAL + PAUSE) + [5] * 1000)
    seen = device.run()
    assert seen.fallbacks == {"below_break_even": 1}
    assert seen.plain_steps == PAUSE
    assert seen.state.drafting.drafts


# -- how many drafts a row makes -------------------------------------------------------------------

BLOCKS = (2, 4, 8)


def costing(*lengths: float) -> BreakEven:
    """Return the break-even of blocks of 2, 4 and 8 tokens, for any number of rows."""
    return BreakEven((1,), (0,), BLOCKS, ((lengths,),))


COSTS = costing(1.1, 1.3, 1.6)


def accepting(*rounds: int, block: int = 8) -> Acceptance:
    """Return the acceptance after rounds of a block that accepted these numbers of drafts."""
    seen = Acceptance()
    for accepted in rounds:
        seen = seen.after_round(accepted, block)
    return seen


def chosen(*rows: Acceptance, costs: BreakEven = COSTS, most: int = 8, plain: int = 0) -> list[int]:
    """Return the tokens of each row's block, next to some rows that decode plainly."""
    drafting = {row: Drafting(seen, costs, 40, most - 1) for row, seen in enumerate(rows)}
    return [1 + drafts for drafts in choose_drafts(drafting, len(rows) + plain).values()]


@pytest.mark.parametrize(
    ("rounds", "costs", "block"),
    [
        ([7] * 30, (1.1, 1.3, 1.6), 8),
        ([0] * 30, (1.1, 1.3, 1.6), 2),
        ([1] * 30, (1.1, 1.3, 1.6), 2),
        ([3] * 30, (1.1, 1.3, 1.6), 4),
        ([4] * 30, (1.1, 1.3, 1.6), 5),
        ([7] * 30, (1.1, 1.3, 5.0), 4),  # more drafts are too dear
        ([3] * 30, (1.1, 2.5, 2.6), 2),
        ([0, 7] * 15, (1.1, 1.3, 1.6), 8),  # text that is copied at times
        ([], (1.1, 1.3, 1.6), 8),  # nothing is known
    ],
)
def test_a_row_makes_the_drafts_that_pay_off_most(
    rounds: list[int], costs: tuple[float, float, float], block: int
) -> None:
    assert chosen(accepting(*rounds), costs=costing(*costs)) == [block]


def test_the_tokens_of_a_block_follow_from_the_acceptance_at_each_place() -> None:
    seen = accepting(*[2] * 400)
    assert [seen.tokens(n) for n in (1, 2, 3, 8)] == pytest.approx([1, 2, 3, 3], abs=0.2)
    half = accepting(*[0, 1] * 200)
    assert half.tokens(2) == pytest.approx(1.5, abs=0.1)
    # Places that were never reached are taken to be as good as the last one before them.
    narrow = accepting(*[1, 1, 0] * 200, block=2)
    assert narrow.tokens(4) == pytest.approx(1 + 2 / 3 + 4 / 9 + 8 / 27, abs=0.1)
    assert Acceptance().tokens(8) > 5


def test_a_narrow_block_whose_drafts_are_all_accepted_grows() -> None:
    seen = accepting(*[0] * 200)
    used = []
    for _ in range(40):
        used += chosen(seen)
        seen = seen.after_round(used[-1] - 1, used[-1])
    assert used[0] == 2
    assert used[-1] == 8
    assert used == sorted(used)


def test_a_wide_block_of_which_little_is_accepted_shrinks_soon() -> None:
    seen, rounds = accepting(*[7] * 200), 0
    while chosen(seen) > [3]:
        seen, rounds = seen.after_round(1, *chosen(seen)), rounds + 1
    assert 3 <= rounds <= 25


def test_rows_draft_as_their_own_drafts_are_accepted() -> None:
    easy, hard = accepting(*[7] * 30), accepting(*[1] * 30)
    assert chosen(easy, hard, hard) == [8, 2, 2]
    assert chosen(easy, most=3) == [3]  # what its request allows
    dear = costing(1.5, 3.0, 9.0)  # each draft costs as much as a token
    assert chosen(easy, hard, costs=dear) == [2, 2]
    assert choose_drafts({}, 3) == {}


def test_a_draft_costs_less_where_fewer_rows_draft_or_decode() -> None:
    some = accepting(*[0, 3] * 30)
    crowded = BreakEven((1, 8), (0,), BLOCKS, (((1.1, 1.2, 1.3),), ((1.2, 2.4, 5.0),)))
    alone, with_plain, with_others = (
        chosen(*[some] * n, costs=crowded, plain=plain)[0] for n, plain in ((1, 0), (1, 7), (8, 0))
    )
    assert with_others == 2
    assert with_others <= with_plain <= alone
    assert alone >= 4
    assert crowded.at(40, 4, 1) == 1.2
    assert crowded.at(40, 4, 8) == crowded.at(40, 4, 16) == 2.4
    assert crowded.at(40, 3, 1) == pytest.approx(1.15)


def test_all_drafts_are_made_where_their_costs_are_unknown() -> None:
    hard = accepting(*[0] * 30)
    assert chosen(hard, costs=UNKNOWN) == chosen(hard, costs=always(1.5)) == [8]
    some = {0: Drafting(hard, COSTS, 40, 7), 1: Drafting(hard, always(1.5), 40, 3)}
    assert choose_drafts(some, 2) == {0: 7, 1: 3}


def stepped(state: DraftingState, decided: int, block: int, **changes: int) -> DraftingState:
    given = {"drafts": block - 1} | changes
    options = {"finite": True, "cost": COSTS.of_step(9, block, 1), "fixed": False}
    return after_step(state, decided, block=block, **given, **options)[0]


def test_a_narrow_block_is_worth_what_its_tokens_are_in_the_time_of_the_plans() -> None:
    """So that drafting continues where any number of drafts pays off, and stops where none does."""
    state = DraftingState()
    for _ in range(200):
        state = stepped(state, 2, 2)
    assert state.drafts
    assert state.total / state.rounds == pytest.approx(2 * 1.6 / 1.1)
    for _ in range(60):
        state = stepped(state, 1, 2) if state.drafts else state
    assert state.pauses == 1
    assert state.pause < PAUSE / 4  # as a narrow probe loses less time


def test_a_block_without_drafts_counts_as_a_round_that_accepted_none() -> None:
    """A drafter that copies from the text may have nothing to copy; the step costs the same."""
    state = DraftingState()
    for _ in range(TRIAL):
        state = stepped(state, 1, 8, drafts=0)
    assert state.rounds == TRIAL
    assert state.drafted == 0
    assert state.pauses == 1
    assert state.acceptance.tokens(8) < 1.5
    plain = stepped(DraftingState(), 1, 0, drafts=0)  # in a step in which other rows draft
    assert plain == DraftingState()


def test_later_requests_begin_with_the_block_of_earlier_ones() -> None:
    hard = DraftingState(rounds=30, total=45.0, acceptance=accepting(*[1] * 30))
    history = NO_HISTORY.after_request(hard)
    first = history.first_state(1, 1.2)
    assert chosen(first.acceptance) <= [3]
    for _ in range(12):  # it weighs little
        first = stepped(first, 8, 8)
    assert chosen(first.acceptance) == [8]
