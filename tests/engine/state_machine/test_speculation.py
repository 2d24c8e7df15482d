"""P18, P19, P38: when drafting stops, and when it is tried again."""

import random

import pytest
from fake_device import DEAD, EOS, WORDS, Device, always, recovery, run, scripted

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
    AcceptanceHistory,
    BreakEven,
    DraftingState,
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
    settings = recovery(runaway="measured", floor=400, below_floor="replace")
    script = [*range(100, 390), EOS, *[*range(400, 424)] * 12]
    ones, eights, plain = (
        run(script, settings, max_tokens=600, accepts=accepts, speculative=speculative)
        for accepts, speculative in (([0], True), ([7], True), ([0], False))
    )
    assert ones.notes - eights.notes == {"drafter_dead": 1}
    assert ones.notes - DEAD == eights.notes == plain.notes == {"floor": 1, "period": 1}
    assert ones.emitted == eights.emitted == plain.emitted
    assert ones.finish == eights.finish == plain.finish
    request = Request(
        prompt=(1,), params=SamplingParams(max_tokens=600), recovery=settings, words=WORDS
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
    found = BreakEven((0, 100, 300), (1.2, 1.4, 2.0))
    assert [found.at(n) for n in (0, 100, 300, 9000)] == [1.2, 1.4, 2.0, 2.0]
    assert [found.at(n) for n in (50, 150)] == pytest.approx([1.3, 1.55])
    assert UNKNOWN.at(7) == 0


def test_drafting_stops_where_the_context_is_so_long_that_it_no_longer_pays_off() -> None:
    rising = BreakEven((0, 400), (1.5, 5.5))  # 2 tokens a round pay off up to position 50
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
    seen = NO_HISTORY.after_request(DraftingState(rounds=10, accepted=10))
    assert seen == NO_HISTORY.after_request(DraftingState()).after_request(
        DraftingState(rounds=1, accepted=1)
    )
    for _ in range(HORIZON):
        seen = seen.after_request(DraftingState(rounds=4, accepted=20))
    assert seen.length == pytest.approx(6, abs=0.1)


def test_a_drafter_that_recovers_is_used_again() -> None:
    policy = Policy(max_tokens=600, break_even=always(2.5))
    device = Device(scripted(SCRIPT), policy, accepts=[0] * (TRIAL + PAUSE) + [5] * 1000)
    seen = device.run()
    assert seen.fallbacks == {"below_break_even": 1}
    assert seen.plain_steps == PAUSE
    assert seen.state.drafting.drafts
