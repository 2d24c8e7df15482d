"""The optimizer is Muon as optax computes it, by fewer products."""

import jax
import numpy as np
import optax
from optax import contrib

from dflash_jax.train import optimizer
from dflash_jax.train.recipe import Schedule

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
    mine, other = ours.init(params), theirs.init(params)
    for step in range(5):
        slopes = parameters(step + 1)
        update, mine = ours.update(slopes, mine, params)
        wanted, other = theirs.update(slopes, other, params)
        for got, want in zip(jax.tree.leaves(update), jax.tree.leaves(wanted), strict=True):
            assert np.abs(want).max() > 0 or step == 0
            np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
        params = optax.apply_updates(params, update)


def test_an_update_without_gradient_is_none() -> None:
    params = parameters(0)
    nothing = jax.tree.map(np.zeros_like, params)
    maker = optimizer.build(SCHEDULE, decay=0.0)
    update, _ = maker.update(nothing, maker.init(params), params)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(update))
