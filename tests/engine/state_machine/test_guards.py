"""G and R: looping outputs end; similar outputs do not."""

import pytest
from fake_device import COLON, EOS, STALL, both, recovery, run

from dflash_jax.engine.state_machine.controller import Finish
from dflash_jax.engine.state_machine.guards import runaway_drop
from dflash_jax.engine.state_machine.settings import OFF, Recovery
from dflash_jax.errors import ConfigError

REPEAT = recovery(repeat_limit=32)
RUNAWAY = recovery(loops=True, loop_tokens=2)


def test_G1_G2_the_last_emitted_token_is_the_last_of_the_allowed_run() -> None:
    near = both([10, *[9] * 31, 11, EOS], REPEAT)
    assert near.finish is Finish.STOP
    assert not near.notes
    seen = both([10, *[9] * 60], REPEAT)
    assert (seen.emitted, seen.finish) == ([10, *[9] * 32], Finish.LENGTH)
    assert seen.notes == {"repeat": 1}
    assert seen.loop == "repeat"


def test_G3_a_run_is_counted_across_decode_modes() -> None:
    seen = run([*[9] * 80], REPEAT, draft_finite=lambda step: step < 2)
    assert seen.drafted_steps
    assert seen.plain_steps
    assert seen.emitted == [9] * 32


def test_G8_a_limit_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 would end every output at its first token"):
        Recovery(repeat_limit=1)


@pytest.mark.parametrize(
    ("ids", "drop"),
    [
        pytest.param([1, 2, 3] + [9] * 20, 17, id="R1"),
        pytest.param([5, 6] + [7, 8, 9] * 12, 27, id="R2"),
        pytest.param([9] * 11, 0, id="R3"),
        pytest.param([9] * 12, 9, id="R4"),
        pytest.param(list(range(40)), 0, id="R5"),
        pytest.param([1, 2] * 10 + [3], 0, id="R6"),
        pytest.param([], 0, id="R7"),
        pytest.param(list(range(8)) * 12, 72, id="R8"),
        pytest.param(list(range(8)) * 11, 0, id="R9"),
        pytest.param(list(range(9)) * 40, 0, id="R10"),
        pytest.param([1, 2, 3] * 13 + [1], 30, id="R11"),
        pytest.param([1, 1, 2] * 12, 27, id="R12"),
        pytest.param([4] * 24, 21, id="R13"),
        pytest.param([x for i in range(30) for x in (i, 100, 101)], 0, id="R14"),
        pytest.param([1, 2] * 12 + [9], 0, id="R15"),
    ],
)
def test_runaway_drop_counts_the_ids_beyond_three_copies(ids: list[int], drop: int) -> None:
    assert runaway_drop(ids) == drop


def test_R16_R19_a_runaway_ends_after_twelve_copies_and_nothing_is_retracted() -> None:
    seen = both([42] * 400, RUNAWAY, max_tokens=390)
    assert seen.emitted == [42] * 12
    assert seen.finish is Finish.LENGTH
    assert (seen.loop, seen.notes) == ("runaway", {"runaway": 1})
    assert list(seen.state.ids) == seen.emitted
    assert runaway_drop(seen.state.ids) == 9


def test_R17_without_the_guard_it_runs_to_its_limit() -> None:
    seen = both([42] * 400, OFF, max_tokens=120)
    assert (seen.emitted, seen.loop) == ([42] * 120, None)


def test_R18_an_end_token_after_the_twelfth_copy_takes_precedence() -> None:
    seen = both([*[42] * 12, EOS, 1], RUNAWAY)
    assert (seen.finish, seen.loop) == (Finish.STOP, None)
    assert not seen.notes


def test_R20_healthy_output_is_the_same_with_the_guards_on() -> None:
    script = [100 + i % 11 if i % 5 else 200 + i for i in range(140)] + [EOS]
    on = recovery(loops=True, repeat_limit=32, watchdog=True)
    assert both(script, on).emitted == both(script, OFF).emitted == script


def test_a_loop_that_ends_at_the_length_limit_is_noted() -> None:
    seen = both([9] * 12, RUNAWAY, max_tokens=12)
    assert (seen.finish, seen.loop) == (Finish.LENGTH, "runaway")


def test_a_stall_after_a_loop_ends_the_output() -> None:
    seen = both([COLON] * 16 + [EOS], recovery(**STALL, loops=True, loop_tokens=2))
    assert (seen.finish, seen.notes["tool_prefix"]) == (Finish.STOP, 0)
