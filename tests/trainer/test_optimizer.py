"""The optimizer against optax's Muon."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from dflash_jax.graph.build import jit
from dflash_jax.trainer import optimizer
from dflash_jax.trainer.recipes import Schedule

SCHEDULE = Schedule(steps=8, rate=1e-2)


def parameters(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    shapes = {"q": (24, 2, 16), "up": (24, 40), "down": (40, 24), "norm": (24,), "embed": (7, 24)}
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def by_optax(decay: float) -> optax.GradientTransformation:
    axes = {
        name: contrib.MuonDimensionNumbers(0, tuple(range(1, leaf.ndim)))
        if name in ("q", "up", "down")
        else None
        for name, leaf in parameters(0).items()
    }
    matrices = optimizer.ramp(SCHEDULE, optimizer.MATRIX_FACTOR * SCHEDULE.rate)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        contrib.muon(
            matrices,
            weight_decay=decay,
            adam_b1=0.9,
            adam_b2=0.95,
            adam_learning_rate=optimizer.ramp(SCHEDULE, SCHEDULE.rate),
            muon_weight_dimension_numbers=axes,
            consistent_rms=optimizer.UPDATE_RMS,
        ),
    )


def test_updates_are_those_of_optax() -> None:
    ours, theirs = optimizer.build(SCHEDULE, decay=0.1), by_optax(0.1)
    params = parameters(0)
    state, other = ours.init(params), theirs.init(params)
    our_update, their_update = jit(ours.update), jit(theirs.update)
    for step in range(5):
        slopes = parameters(step + 1)
        update, state = our_update(slopes, state, params)
        wanted, other = their_update(slopes, other, params)
        for got, want in zip(jax.tree.leaves(update), jax.tree.leaves(wanted), strict=True):
            assert np.abs(want).max() > 0 or step == 0
            np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
        params = optax.apply_updates(params, update)


@pytest.mark.parametrize("shape", [(48, 160), (160, 48), (64, 64)])
@pytest.mark.parametrize("rank", [1, 7, 48])
def test_what_has_no_slope_gets_none(shape: tuple[int, int], rank: int) -> None:
    """Singular values near zero stay near zero, and the others become close to one."""
    rng = np.random.default_rng(rank)
    left, right = rng.standard_normal((shape[0], rank)), rng.standard_normal((rank, shape[1]))
    matrix = (left * np.logspace(0, -2, rank) @ right).astype(np.float32)
    wanted = contrib_orthogonal(matrix)
    found = np.asarray(jit(optimizer.orthogonal)(matrix))
    np.testing.assert_allclose(found, wanted, atol=2e-3)
    values = np.linalg.svd(found, compute_uv=False)
    assert values[0] < 1.3
    assert values[rank:].max(initial=0) < 5e-3


def contrib_orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Orthogonalise with optax's iteration."""
    axes = {"x": contrib.MuonDimensionNumbers(0, 1)}
    muon = contrib.scale_by_muon(beta=0.0, weight_dimension_numbers=axes)
    given = {"x": jnp.asarray(matrix)}
    made: Any = jit(muon.update)(given, muon.init(given))[0]
    return np.asarray(made["x"])


def test_an_update_without_gradient_is_none() -> None:
    params = parameters(0)
    nothing = jax.tree.map(np.zeros_like, params)
    maker = optimizer.build(SCHEDULE, decay=0.0)
    update, _ = jit(maker.update)(nothing, maker.init(params), params)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(update))


def test_the_shortest_schedule_is_one_step() -> None:
    maker, params = optimizer.build(Schedule(steps=1, rate=1e-2), decay=0.0), parameters(0)
    update, _ = jit(maker.update)(params, maker.init(params), params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(update))
