"""Scripted drafters, whose drafts are set row by row."""

from dflash_jax.engine.engine import Engine
from dflash_jax.testing import OWN, set_row_scripts

PROMPT = [5, 4, 3, 2, 1]


def test_a_script_may_leave_rows_and_places_to_the_drafter(tiny: Engine, scripted: Engine) -> None:
    truth = tiny.generate(PROMPT, max_tokens=20, speculative=False).token_ids
    own = tiny.generate(PROMPT, max_tokens=20)
    set_row_scripts(scripted, {})
    left = scripted.generate(PROMPT, max_tokens=20)
    assert left.stats.acceptance_lengths == own.stats.acceptance_lengths
    set_row_scripts(scripted, {0: [*PROMPT, *truth[:9]]})
    assert scripted.generate(PROMPT, max_tokens=20).stats.acceptance_lengths[:2] == [4, 4]
    set_row_scripts(scripted, {0: [OWN] * 5 + truth})
    assert scripted.generate(PROMPT, max_tokens=20).stats.acceptance_lengths == [4, 4, 4, 4, 3]
    with_own = [*PROMPT, *truth[:2], OWN, *truth[3:]]  # the first round drafts places 1 to 3
    set_row_scripts(scripted, {0: with_own})
    found = scripted.generate(PROMPT, max_tokens=20)
    assert found.token_ids == truth
    assert found.stats.acceptance_lengths[0] == 2
    assert not found.stats.fallbacks
