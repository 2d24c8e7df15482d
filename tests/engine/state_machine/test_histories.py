"""Invariants of recovery, for random outputs and settings."""

from fake_device import (
    COLON,
    END_FUNCTION,
    END_THINK,
    EOS,
    FUNCTION,
    PREFIX,
    SPECIAL,
    STOPS,
    THINK,
    VOCABULARY,
    Device,
    Outcome,
    always,
    scripted,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.engine.state_machine import Recovery
from dflash_jax.engine.state_machine.controller import (
    Cancelled,
    Effects,
    Finish,
    Policy,
    Stepped,
    advance,
)
from dflash_jax.engine.state_machine.output_vocabulary import OutputVocabulary
from dflash_jax.engine.state_machine.speculation import UNKNOWN, BreakEven

TOKENS = [EOS, 3, COLON, THINK, END_THINK, FUNCTION, END_FUNCTION, SPECIAL, 9, 9, 10, 11, 12]
scripts = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=60)
accepted = st.lists(st.integers(0, 7), min_size=1, max_size=6)
recoveries = st.builds(
    Recovery,
    floor=st.sampled_from([0, 1, 5, 20, 300]),
    tool_prefix=st.booleans(),
    empty_retry=st.booleans(),
    repeat_limit=st.sampled_from([0, 0, 2, 5]),
    loops=st.booleans(),
    loop_tokens=st.sampled_from([2, 9, 20, 96]),
    repeated_calls=st.sampled_from([0, 2, 3]),
    watchdog=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 0, 7]),
    answer_reserve=st.sampled_from([0, 0, 3, 20, 1000]),
    floor_in_thought=st.booleans(),
)
CALLS = (
    (PREFIX,),
    (PREFIX, (900, 9, 11), (900, 9, 12, 902), (900, 10)),
    ((900, EOS, 10), (900, 11, 11), (900, 11, SPECIAL, 9)),
)
vocabulary = st.builds(
    lambda close, inside, calls: OutputVocabulary(
        **vars(VOCABULARY) | {"close": close, "inside_thought": inside, "calls": calls}
    ),
    st.sampled_from([(), (END_THINK,), (800, END_THINK, 801, 802)]),
    st.booleans(),
    st.sampled_from(CALLS),
)
RISING = BreakEven((1,), (0, 30), (4,), (((1.0,), (9.0,)),))
policies = st.builds(
    Policy,
    max_tokens=st.integers(1, 60),
    stop_ids=st.sampled_from([STOPS, STOPS, frozenset[int]()]),
    speculative=st.booleans(),
    break_even=st.sampled_from(
        [UNKNOWN, always(2.0), BreakEven((1,), (0, 30), (4,), (((1.0,), (9.0,)),))]
    ),
    recovery=recoveries,
    vocabulary=vocabulary,
)


def outcome(script: list[int], policy: Policy, accepts: list[int], broken: int = -1) -> Outcome:
    """Run a request; the fake device asserts S1, S2, S3 and S7 at every event."""
    finite = lambda step: step % 5 != broken  # noqa: E731
    device = Device(scripted(script, then=12), policy, accepts=accepts, draft_finite=finite)
    return device.run()


@settings(max_examples=300, deadline=None)
@given(scripts, policies, accepted, st.integers(-1, 4))
def test_every_history_ends_once_and_stays_within_its_limits(
    script: list[int], policy: Policy, accepts: list[int], broken: int
) -> None:
    seen = outcome(script, policy, accepts, broken)
    emitted = seen.emitted
    assert emitted == list(seen.state.ids)  # nothing is held or retracted at the end
    assert 0 < len(emitted) <= policy.max_tokens
    assert not set(emitted[:-1]) & policy.stop_ids  # never a token after an end token
    assert (emitted[-1] in policy.stop_ids) == (seen.finish is Finish.STOP)
    if seen.finish is Finish.LENGTH:
        assert len(emitted) == policy.max_tokens or seen.loop
    assert sum(e.finish is not None for e in seen.effects) == 1
    assert sum(PREFIX[0] in e.emit for e in seen.effects) == seen.notes["tool_prefix"] <= 1
    if seen.notes["tool_prefix"]:  # only a declared tool can have been named
        rest = tuple(emitted[emitted.index(PREFIX[0]) :])
        ended = emitted[-1] in policy.stop_ids
        assert any(
            rest[: len(call)] == call or (ended and call[: len(rest)] == rest)
            for call in policy.vocabulary.calls
        )
    assert seen.attempts <= 2
    for late in (Stepped((5,)), Cancelled()):
        assert advance(seen.state, late, policy) == (seen.state, Effects())


@settings(max_examples=200, deadline=None)
@given(scripts, policies, accepted, accepted, st.booleans(), st.integers(-1, 4))
def test_decode_modes_and_block_sizes_change_no_token(
    script: list[int],
    policy: Policy,
    accepts: list[int],
    others: list[int],
    speculative: bool,
    broken: int,
) -> None:
    first = outcome(script, policy, accepts)
    changed = Policy(
        **{f: getattr(policy, f) for f in policy.__slots__} | {"speculative": speculative}
    )
    second = outcome(script, changed, others, broken)
    assert first.emitted == second.emitted
    assert first.finish == second.finish
    assert first.loop == second.loop


@settings(max_examples=100, deadline=None)
@given(scripts, policies, accepted, st.integers(0, 30))
def test_a_cancelled_output_is_a_prefix_of_the_whole_output(
    script: list[int], policy: Policy, accepts: list[int], steps: int
) -> None:
    whole = outcome(script, policy, accepts)
    device = Device(scripted(script, then=12), policy, accepts=accepts)
    device.prefill()
    while not device.seen.finish and steps:
        device.step()
        steps -= 1
    ended = device.seen.finish
    device.process(Cancelled()) if not ended else None
    assert device.seen.finish is (ended or Finish.CANCELLED)
    assert device.seen.emitted == whole.emitted[: len(device.seen.emitted)]
