"""Numbers of target and drafter that are not finite (C7): they affect their own request alone."""

from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax.engine.engine import Engine
from dflash_jax.errors import (
    ComputeError,
)
from dflash_jax.testing import set_script
from tests.engine.test_engine import PROMPT, twin


@pytest.fixture(scope="module")
def truth(tiny: Engine) -> list[int]:
    """The target's own continuation of PROMPT."""
    return tiny.generate(PROMPT, max_tokens=60, speculative=False).token_ids


def test_a_non_finite_draft_costs_a_plain_step_and_is_counted(
    scripted: Engine, truth: list[int]
) -> None:
    script: list[float] = [*PROMPT, *truth]
    script[len(PROMPT) + 6] = float("nan")
    set_script(scripted, script)
    result = scripted.generate(PROMPT, max_tokens=20)
    assert result.token_ids == truth[:20]
    assert result.stats.fallbacks == {"draft_not_finite": 2}  # drafted twice over that place
    assert result.stats.acceptance_lengths[:5] == [4, 1, 1, 4, 4]


@pytest.mark.exhaustive
def test_a_step_with_a_non_finite_draft_samples_as_a_plain_step(scripted: Engine) -> None:
    """Also where the token that replaces a non-finite draft has the largest logit."""
    set_script(scripted, [float("nan")] * 100)
    mask = scripted.graph.drafter_config.mask_token_id
    sampling = {"temperature": 1.0, "logit_bias": {mask: 6.0}, "max_tokens": 6}
    for seed in range(3):
        drawn, plain = (
            scripted.generate(PROMPT, seed=seed, speculative=speculative, **sampling)
            for speculative in (True, False)
        )
        assert drawn.stats.fallbacks["draft_not_finite"] >= 3
        assert drawn.token_ids == plain.token_ids


def test_three_non_finite_drafts_turn_drafting_off_for_the_request(
    scripted: Engine, truth: list[int]
) -> None:
    set_script(scripted, [float("nan")] * 100)
    result = scripted.generate(PROMPT, max_tokens=30)
    assert result.token_ids == truth[:30]
    assert result.stats.fallbacks["draft_not_finite"] in (3, 4)  # one more may be in flight
    assert result.stats.plain_steps >= 25
    set_script(scripted, [*PROMPT, *truth])
    assert scripted.generate(PROMPT, max_tokens=30).stats.acceptance_lengths[:3] == [4, 4, 4]


@pytest.fixture
def broken(tiny: Engine) -> Engine:
    """A target whose embedding of token 77 is not a number."""
    table = np.array(tiny.params["target"]["embed"])
    table[:, 77] = np.nan
    target = tiny.params["target"] | {"embed": jax.device_put(table)}
    return twin(tiny, params=tiny.params | {"target": target})


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("place", [0, 4, 20, 39])
def test_non_finite_logits_fail_the_request_and_leave_a_clean_row(
    broken: Engine, truth: list[int], speculative: bool, place: int
) -> None:
    prompt = [1] * 40
    prompt[place] = 77
    with pytest.raises(ComputeError, match="logits are not finite after 0 output tokens"):
        broken.generate(prompt, max_tokens=10, speculative=speculative)
    floats = [x for x in jax.tree.leaves(broken.core.runner.state) if x.dtype == np.float32]
    assert all(np.isfinite(x).all() for x in floats)
    assert 77 not in truth[:20]
    after = broken.generate(PROMPT, max_tokens=20, speculative=speculative)
    assert after.token_ids == truth[:20]


def test_a_rejected_draft_with_a_non_finite_embedding_changes_nothing(
    broken: Engine, scripted: Engine, truth: list[int]
) -> None:
    """A rejected token changes neither the output nor the drafter's context."""
    assert 77 not in [*PROMPT, *truth[:20]]
    scripted = twin(scripted, params=scripted.params | {"target": broken.params["target"]})
    set_script(scripted, [77 if p % 3 == 0 else t for p, t in enumerate([*PROMPT, *truth])])
    result = scripted.generate(PROMPT, max_tokens=20)
    assert result.token_ids == truth[:20]
    assert result.stats.acceptance_lengths[1:5] == [3, 3, 3, 3]


@pytest.mark.parametrize("cancelled", [True, False])
def test_non_finite_numbers_of_a_finished_row_do_not_fail_the_next_request(
    broken: Engine, truth: list[int], cancelled: bool
) -> None:
    """The step in flight feeds the last token of an output, although its row has stopped."""
    handle = broken.submit(
        [9] * 20, max_tokens=9, logit_bias={77: 100.0}, stop_token_ids=[] if cancelled else [77]
    )
    while not (handle.token_ids if cancelled else handle.done):
        broken.advance()
    handle.close()
    assert broken.generate(PROMPT, max_tokens=20).token_ids == truth[:20]


@pytest.fixture
def breaking(scripted: Engine, truth: list[int]) -> tuple[Engine, int]:
    """A target with a non-finite embedding of one of its output tokens, and that token's index."""
    new = [i for i in range(5, 60) if truth[i] not in [*truth[:i], *PROMPT, 0]]
    at = next(i for i in new if i % 4)  # the others are not drafts, in blocks of 4
    table = np.array(scripted.params["target"]["embed"])
    table[:, truth[at]] = np.inf
    target = scripted.params["target"] | {"embed": jax.device_put(table)}
    engine = twin(scripted, params=scripted.params | {"target": target})
    set_script(engine, [*PROMPT, *truth])
    return engine, at


@pytest.mark.parametrize("speculative", [True, False])
def test_output_before_non_finite_logits_is_kept(
    breaking: tuple[Engine, int], truth: list[int], speculative: bool
) -> None:
    engine, at = breaking
    pieces = iter(engine.submit(PROMPT, max_tokens=60, speculative=speculative))
    got: list[int] = []
    while len(got) <= at:
        got += next(pieces).token_ids
    assert got == truth[: at + 1]
    with pytest.raises(ComputeError, match=f"after {at + 1} output tokens; the weights are dam"):
        next(pieces)


@pytest.mark.parametrize("speculative", [True, False])
def test_non_finite_numbers_after_the_end_of_an_output_do_not_fail_it(
    breaking: tuple[Engine, int], truth: list[int], speculative: bool
) -> None:
    """Drafts after a stop token or the limit are verified with the others."""
    engine, at = breaking
    for end in ({"stop_token_ids": [truth[at]]}, {"max_tokens": at + 1}):
        options: dict[str, Any] = {"max_tokens": 60, "speculative": speculative} | end
        assert engine.generate(PROMPT, **options).token_ids == truth[: at + 1]


def test_non_finite_numbers_of_a_replaced_end_token_do_not_fail_the_output(
    tiny3: Engine, truth: list[int]
) -> None:
    """The step in flight feeds it, although its row has stopped, since another row continues."""
    table = np.array(tiny3.params["target"]["embed"])
    table[:, truth[0]] = np.nan
    target = tiny3.params["target"] | {"embed": jax.device_put(table)}
    broken = twin(tiny3, params=tiny3.params | {"target": target})
    options: dict[str, Any] = {"max_tokens": 9, "min_tokens": 9, "stop_token_ids": [truth[0]]}
    wanted, found = (
        [r.token_ids for r in engine.generate_many([[9], PROMPT], **options)]
        for engine in (tiny3, broken)
    )
    assert found == wanted


def test_a_failed_request_does_not_affect_other_rows(tiny3: Engine, tiny: Engine) -> None:
    table = np.array(tiny3.params["target"]["embed"])
    table[:, 77] = np.nan
    target = tiny3.params["target"] | {"embed": jax.device_put(table)}
    engine = twin(tiny3, params=tiny3.params | {"target": target})
    prompts = [[1, 2], [1, 77, 3], [9] * 20, [4]]
    handles = [engine.submit(p, max_tokens=12) for p in prompts]
    while not all(handle.done for handle in handles):
        engine.advance()
    with pytest.raises(ComputeError):
        handles[1].result()
    for i in (0, 2, 3):  # the last one took over a row
        wanted = tiny.generate(prompts[i], max_tokens=12).token_ids
        assert 77 not in wanted
        assert handles[i].result().token_ids == wanted
