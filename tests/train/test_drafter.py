"""The drafter's training path: no leaks, equal to the cached path, learns one sample by heart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models import qwen3
from dflash_jax.models.dflash import DFlash
from dflash_jax.state import empty_cache
from dflash_jax.train import drafter, optimizer, target
from dflash_jax.train.presets import SMOKE, Schedule

LENGTH, BLOCK = 24, SMOKE.block


@pytest.fixture(scope="module")
def pair():
    config, shape = SMOKE.target_config((1,)), SMOKE.drafter_config()
    models = qwen3.build(config), DFlash(shape)
    params = (
        target.initial(models[0], config, 0),
        drafter.initial(models[1], shape, 1),
    )
    return models, (config, shape), jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, params)


def tokens(seed: int, rows: int = 1) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, LENGTH), 0, SMOKE.vocabulary - 1)


def drafted(pair, ids, anchors):
    models, configs, params = pair

    @jax.jit
    def run(params, ids, anchors):
        read = drafter.reading(models[0], *configs, params[0], ids)
        taught = drafter.lesson(models[0], configs[1], params[0], ids, read)
        x = drafter.block_embeddings(taught, anchors, BLOCK)
        variables = {"params": params[1]}
        return models[1].apply(variables, taught.taps, x, anchors, method=drafter.anchored)

    return run(params, ids, anchors)


def served(pair, ids, anchor):
    """The engine's way: prefill up to the anchor, context keys from the taps, one cached draft."""
    models, (config, shape), params = pair

    @jax.jit
    def run(params, prefix, first):
        start, slots = jnp.zeros(1, jnp.int32), LENGTH + BLOCK
        target_call = {"params": params[0]}
        drafter_call = {"params": params[1]}
        read = tuple(i + 1 for i in shape.target_layer_ids)
        caches = target.blank_caches(config, 1, slots)
        out = models[0].apply(target_call, prefix, caches, start, taps=read)
        empty = [
            empty_cache(1, shape.num_kv_heads, slots, shape.head_dim, dtype=jnp.float32)
        ] * shape.num_layers
        filled = models[1].apply(drafter_call, out.taps, empty, start, method="context")
        block = jnp.concatenate([first, jnp.full((1, BLOCK - 1), SMOKE.mask_id)], axis=1)
        x = models[0].apply(target_call, block, method="embed")
        return models[1].apply(drafter_call, x, filled, start + anchor)[0]

    return run(params, ids[:, :anchor], ids[:, anchor : anchor + 1])


def test_training_equals_the_cached_draft_at_the_same_prefix(pair):
    ids = tokens(0)
    trained = drafted(pair, ids, jnp.asarray([[1, 6, 20]]))
    for n, anchor in enumerate((1, 6, 20)):
        np.testing.assert_allclose(trained[:, n], served(pair, ids, anchor), atol=2e-5)


def test_a_block_never_depends_on_what_comes_after_its_anchor(pair):
    ids = tokens(1)
    anchors = jnp.asarray([[4, 6, 15]])
    before = drafted(pair, ids, anchors)
    after = drafted(pair, ids.at[:, 7:].add(1), anchors)
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert not np.allclose(before[:, 2], after[:, 2])


def test_blocks_do_not_see_each_other(pair):
    ids = tokens(2)
    alone = drafted(pair, ids, jnp.asarray([[9]]))
    together = drafted(pair, ids, jnp.asarray([[8, 9, 10]]))
    np.testing.assert_allclose(alone[:, 0], together[:, 1], atol=1e-6)


def test_one_sample_is_learnt(pair):
    models, configs, params = pair
    ids = tokens(3)
    wanted = jnp.ones(ids.shape, bool)
    maker = optimizer.build(Schedule(steps=40, rate=2e-2), decay=0.0)
    step = jax.jit(drafter.step(models, configs[1], maker, decay=2.0, seed=0), static_argnums=(5,))
    read = drafter.reading(models[0], *configs, params[0], ids)
    state = target.TrainState(params=params[1], optimizer=maker.init(params[1]))
    losses = []
    for number in range(40):
        state, metrics = step(state, params[0], (ids, wanted), read, number, 8)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:3])


def test_the_loss_ignores_padding_and_dead_anchors():
    labels = jnp.zeros((1, 2, 3), jnp.int32)
    counts = jnp.asarray([[[True, True, False], [False] * 3]])
    logits = jax.random.normal(jax.random.key(0), (1, 2, 3, 5))
    blocks = drafter.Blocks(anchors=jnp.zeros((1, 2), jnp.int32), labels=labels, counts=counts)
    loss, _ = drafter.objective(logits, blocks, 2.0)
    other = logits.at[0, 1].add(7.0).at[0, 0, 2].add(jnp.arange(5.0))
    np.testing.assert_array_equal(loss, drafter.objective(other, blocks, 2.0)[0])
