"""A window over what the drafter sees: less memory, the same output."""

import dataclasses

import jax
import pytest

import dflash_jax as dj
from dflash_jax.config import TargetConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import PlanError
from dflash_jax.graph.ngram import NGram
from dflash_jax.networks import build_pair
from dflash_jax.testing import random_engine, tiny_drafter, tiny_gemma, tiny_hybrid, tiny_target

PLAN = dj.Plan(rows=2, block=4, max_length=128, chunk=8, prefix_cache=1 << 20)


def drafter_bytes(engine: Engine) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(engine.graph.state.drafter))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "kind"),
    [
        pytest.param(tiny_target(), "dflash", id="dflash"),
        pytest.param(tiny_hybrid(), "dflash2", id="dflash2"),
        pytest.param(tiny_gemma(), "dspark", id="dspark", marks=pytest.mark.soak),
    ],
)
def test_output_and_weights_are_those_of_the_whole_context(target: TargetConfig, kind: str) -> None:
    drafter = tiny_drafter(target, kind, windows=(None, None))
    whole = random_engine(target, drafter, PLAN)
    engine = Engine(whole.graph.with_plan(draft_window=16), whole.params)
    assert drafter_bytes(engine) < drafter_bytes(whole) / 2
    for prompt in ([5, 6, 7] * 20, [1, 2, 3]):
        for _ in range(2):  # the second time from the prefix cache
            options = {"max_tokens": 24, "ignore_eos": True}
            result = engine.generate(prompt, **options)
            assert result.stats.rounds
            plain = engine.generate(prompt, speculative=False, **options)
            assert result.token_ids == plain.token_ids


@pytest.mark.exhaustive
def test_a_row_does_not_read_past_its_window() -> None:
    """Drafts after long prompts that differ before the window only are the same."""
    target = tiny_target()
    plan = dataclasses.replace(PLAN, prefix_cache=0, draft_window=12, report_drafts=True)
    drafter = tiny_drafter(target, windows=(None, None), target_layer_ids=(0,))
    engine = random_engine(dataclasses.replace(target, windows=(4,) * 3), drafter, plan)
    drafts = []
    for first in (1, 2):
        prompt = [first] * 8 + [*range(40)]
        result = engine.generate(prompt, max_tokens=5, ignore_eos=True, trace=True)
        drafts.append([(step.tokens, step.rejected) for step in result.trace])
    assert drafts[0] == drafts[1]


def test_a_window_that_cannot_be_used_is_refused() -> None:
    target = tiny_target()
    pair = build_pair(target, tiny_drafter(target))
    with pytest.raises(PlanError, match=r"draft_window is 4, less than the block .* at least 8"):
        dj.Graph(pair, dataclasses.replace(PLAN, draft_window=4))
    copies = dataclasses.replace(pair, drafter=NGram())
    with pytest.raises(PlanError, match="NGram has no window to set"):
        dj.Graph(copies, dataclasses.replace(PLAN, draft_window=64))
