"""C1 for drafters that choose tokens along a path: speculative output equals plain output."""

from typing import Any

import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.errors import PlanError
from dflash_jax.graph.resolve import resolve
from dflash_jax.networks import build_pair
from dflash_jax.testing import (
    AMPLE,
    random_engine,
    scripted_engine,
    set_script,
    tiny_drafter,
    tiny_target,
)

CHUNK, NEW = 16, 40
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 70)
SMALL: dict[str, Any] = {"num_layers": 1, "causal": (False,), "target_layer_ids": (0,)}
KINDS: dict[str, dict[str, Any]] = {
    "dflash2": {},
    "dspark": {"markov_head": "gated", "draft_vocab_size": 60, "own_head": True},
    "domino": {"draft_vocab_size": 60, "own_head": True},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("dflash2", "float32"),
        ("dspark", "float32"),
        ("domino", "float32"),
        pytest.param("dspark", "bfloat16", marks=[pytest.mark.optimised, pytest.mark.soak]),
        pytest.param("dflash2", "bfloat16", marks=pytest.mark.soak),
    ],
)
def test_speculative_tokens_are_the_plain_ones(kind: str, dtype: str) -> None:
    """Outputs longer than the drafter's window, with real, right, wrong and non-finite drafts."""
    target = tiny_target(num_layers=1, windows=(20,))
    drafter = tiny_drafter(target, kind, windows=(12,), **SMALL, **KINDS[kind])
    plan = Plan(max_length=128, chunk=CHUNK, block=4, dtype=dtype)
    real = random_engine(target, drafter, plan)
    scripted = scripted_engine(real) if dtype == "float32" else real
    rng = np.random.default_rng(3)
    for length in LENGTHS:
        prompt = rng.integers(0, target.vocab_size, length).tolist()
        plain = real.generate(prompt, max_tokens=NEW, speculative=False).token_ids
        result = real.generate(prompt, max_tokens=NEW)
        assert result.token_ids == plain
        assert not result.stats.fallbacks
        if scripted is real or length != LENGTHS[-1]:
            continue
        truth = [*prompt, *plain]
        noisy = [t if rng.random() < 0.7 else int(rng.integers(97)) for t in truth]
        broken = [t if rng.random() < 0.8 else float("nan") for t in truth]
        for name, script in {"oracle": truth, "noisy": noisy, "broken": broken}.items():
            set_script(scripted, script)
            result = scripted.generate(prompt, max_tokens=NEW)
            assert result.token_ids == plain, name
            if name == "oracle":
                assert result.stats.rounds == -(-(NEW - 1) // 4)
            assert (name == "broken") == bool(result.stats.fallbacks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bar", [1.0, pytest.param(0.0, marks=pytest.mark.soak)])
def test_blocks_are_cut_where_the_drafter_loses_confidence(bar: float) -> None:
    """The tokens are the same, and fewer drafts are verified: none at a bar of 1."""
    target = tiny_target(num_layers=1)
    drafter = tiny_drafter(target, "dspark", windows=(None,), **SMALL)
    prompt = np.random.default_rng(5).integers(0, target.vocab_size, 9).tolist()
    plan = Plan(max_length=64, chunk=CHUNK, block=4, confidence_threshold=bar)
    scripted = scripted_engine(random_engine(target, drafter, plan))
    plain = scripted.generate(prompt, max_tokens=NEW, speculative=False).token_ids
    set_script(scripted, [*prompt, *plain])
    result = scripted.generate(prompt, max_tokens=NEW)
    assert result.token_ids == plain
    assert result.stats.drafted == (0 if bar else 3 * result.stats.rounds)
    assert result.stats.rounds == (NEW - 1 if bar else -(-(NEW - 1) // 4))


def test_a_bar_needs_a_confidence_head() -> None:
    target = tiny_target()
    for drafter in (None, tiny_drafter(target), tiny_drafter(target, "dspark")):
        plan = Plan(max_length=64, confidence_threshold=0.5)
        if drafter is not None and drafter.predicts_confidence:
            resolved = resolve(plan, build_pair(target, drafter), platform="cpu", memory=AMPLE)
            assert resolved.block == drafter.block_size + 1  # the anchor also predicts
            continue
        with pytest.raises(PlanError, match="has no confidence head"):
            resolve(plan, build_pair(target, drafter), platform="cpu", memory=AMPLE)
    with pytest.raises(PlanError, match="expected a number from 0 to 1"):
        Plan(confidence_threshold=1.5)
