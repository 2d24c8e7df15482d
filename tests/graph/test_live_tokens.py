"""Tokens that do not count: native kernels skip them, and those that count keep their bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.audit.models import FAMILIES, Setup, random_engine
from dflash_jax.graph.protocols import takes
from dflash_jax.kernels.native.build import library
from dflash_jax.plan import Plan

ROWS, WIDTH, MORE = 3, 8, 4
NUM_LIVE = np.array([WIDTH, 3, 0])
needs_native = pytest.mark.skipif(not library(), reason=f"no native kernels: {library().reason}")


@needs_native
@pytest.mark.sample("qwen2", "gpt_oss", "gemma4", "qwen3_5")
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_count_have_the_same_bits_beside_those_that_do_not(family: str) -> None:
    engine = random_engine(
        Setup(family=family, drafter="dflash", shape={}, drafter_shape={}, weights_seed=3),
        Plan(rows=ROWS, chunk=WIDTH, max_length=64, kernels="native"),
    )
    target, params = engine.graph.pair.target, {"params": engine.params["target"]}
    assert takes(target, "num_live")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, engine.graph.config.vocab_size, (ROWS, WIDTH + MORE))
    first, more = jnp.asarray(tokens[:, :WIDTH]), jnp.asarray(tokens[:, WIDTH:])

    @jax.jit
    def run(num_live: Any) -> tuple[Any, Any]:
        """Return hidden states of some tokens, and of those after the ones that count."""
        start = jnp.zeros(ROWS, jnp.int32)
        caches = engine.graph.init_state().target
        out = target.apply(params, first, caches, start, num_live=num_live)
        caches = tuple(update.commit(NUM_LIVE) for update in out.caches)
        after = target.apply(params, more, caches, jnp.asarray(NUM_LIVE, jnp.int32))
        return out.hidden, after.hidden

    whole, after_whole = run(jnp.full(ROWS, WIDTH, jnp.int32))
    found, after = run(jnp.asarray(NUM_LIVE, jnp.int32))
    live = (np.arange(WIDTH) < NUM_LIVE[:, None])[:, :, None]
    np.testing.assert_array_equal(found, np.where(live, whole, 0))
    np.testing.assert_array_equal(after, after_whole)
