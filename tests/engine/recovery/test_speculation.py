"""P18, P19, P38 and the lanes: when drafting stops, why, and when it is tried again."""

from fake_device import DEAD, EOS, WORDS, Device, recovery, run, says

from dflash_jax.engine.recovery.controller import Policy, Prefilled, Stepped
from dflash_jax.engine.recovery.speculation import PAUSE, PROBE, TRIAL
from dflash_jax.engine.request import Request
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.sequence import Sequence

SCRIPT = range(10, 700)


def test_P18_a_draft_that_broke_costs_a_step_and_a_count() -> None:
    seen = run(SCRIPT, max_tokens=100, draft_finite=lambda step: step != 2)
    assert seen.fallbacks == {"draft_not_finite": 1}
    assert seen.emitted == list(SCRIPT[:100])
    assert seen.plain_steps == 0


def test_P19_a_drafter_that_always_breaks_is_given_up_after_three() -> None:
    seen = run(SCRIPT, max_tokens=100, draft_finite=lambda step: False)
    assert seen.fallbacks == {"draft_not_finite": 3}
    assert seen.drafted_steps == 3
    assert seen.emitted == run(SCRIPT, max_tokens=100, speculative=False).emitted
    assert seen.state.drafting.off == "draft_not_finite"
    assert seen.notes == {"drafter_dead": 1}


def test_drafting_goes_on_where_tokens_would_hang_on_when_it_ends() -> None:
    """Behind the third broken draft a step is in the air, or not, by the clock (R11)."""
    policy = Policy(max_tokens=100, fixed=True)
    seen = Device(says(SCRIPT), policy, draft_finite=lambda step: step > 7).run()
    assert seen.fallbacks == {"draft_not_finite": 8}
    assert seen.plain_steps == 0
    assert seen.notes == {"drafter_dead": 1}
    assert seen.emitted == list(SCRIPT[:100])


def test_I7_drafts_that_break_now_and_then_do_not_end_drafting() -> None:
    seen = run(SCRIPT, max_tokens=600, draft_finite=lambda step: step % 3 == 0)
    assert seen.plain_steps == 0
    assert seen.state.drafting.off is None
    assert not seen.notes
    seen = run(SCRIPT, max_tokens=600, draft_finite=lambda step: step not in (2, 20, 21, 22))
    assert seen.fallbacks == {"draft_not_finite": 4}
    assert seen.state.drafting.off == "draft_not_finite"
    assert not seen.notes  # it was right before
    assert seen.emitted == list(SCRIPT[:600])


def test_P38_a_drafter_that_is_never_right_is_reported() -> None:
    seen = run(SCRIPT, max_tokens=300, accepts=[0])
    assert seen.notes == {"drafter_dead": 1}
    assert seen.emitted == list(SCRIPT[:300])
    assert seen.plain_steps == 0  # lanes are fixed where the cost of drafting is not known


def test_what_is_noted_of_a_drafter_depends_on_the_block_and_nothing_else_does() -> None:
    """Steps of one token reject all drafts, those of eight none: only the note differs."""
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
    asked = Request(
        prompt=(1,), params=SamplingParams(max_tokens=600), recovery=settings, words=WORDS
    )
    counted = []
    for drafts in (7, 0):  # a block of one token drafts nothing
        request = Sequence(asked, None)
        request.start()
        request.take(Prefilled(10))
        for token in range(11, 60):
            request.take(Stepped((token,), num_drafts=drafts))
        assert request.state.drafting.dead is (drafts > 0)
        counted.append((request.stats.recovery, request.stats.fallbacks))
    assert counted == [({}, {})] * 2


def test_a_drafter_that_is_never_right_is_given_up_where_lanes_may_change() -> None:
    seen = lanes([0], 0.5).seen
    assert seen.notes == {"drafter_dead": 1}
    assert seen.fallbacks == {"drafter_dead": 1}
    assert seen.drafted_steps == -(-256 // 7)
    assert seen.emitted == list(SCRIPT[:600])


def lanes(accepts: list[int], break_even: float, max_tokens: int = 600) -> Device:
    policy = Policy(max_tokens=max_tokens, break_even=break_even)
    device = Device(says(SCRIPT), policy, accepts=accepts)
    device.run()
    return device


def test_drafting_that_pays_goes_on() -> None:
    seen = lanes([1, 3], 2.5).seen
    assert seen.plain_steps == 0
    assert not seen.fallbacks


def test_drafting_that_does_not_pay_pauses_and_is_probed_again() -> None:
    seen = lanes([1, 0], 2.5).seen
    assert seen.fallbacks == {"below_break_even": 4}  # for 64, 128, 256 tokens and the rest
    assert seen.drafted_steps == TRIAL + 3 * PROBE
    assert seen.plain_steps >= PAUSE * (1 + 2 + 4)
    assert seen.emitted == list(SCRIPT[:600])


def test_a_drafter_that_recovers_is_used_again() -> None:
    policy = Policy(max_tokens=600, break_even=2.5)
    device = Device(says(SCRIPT), policy, accepts=[0] * (TRIAL + PAUSE) + [5] * 1000)
    seen = device.run()
    assert seen.fallbacks == {"below_break_even": 1}
    assert seen.plain_steps == PAUSE
    assert seen.state.drafting.drafts
