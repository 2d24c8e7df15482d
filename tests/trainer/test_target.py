"""Training of the target: added layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import TargetConfig
from dflash_jax.families import llama_net
from dflash_jax.graph.build import jit
from dflash_jax.testing import tiny_target
from dflash_jax.trainer import optimizer, target
from dflash_jax.trainer.recipes import Schedule


def losses(config: TargetConfig, params: dict, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(target.token_losses(llama_net.build(config), config, params, tokens))


@pytest.mark.soak
def test_a_deeper_target_says_the_same_until_its_new_layers_are_trained() -> None:
    shallow, deep = (tiny_target(num_layers=n, windows=(None,) * n) for n in (2, 3))
    params = target.initial(llama_net.build(shallow), shallow, seed=3)
    grown = target.deepened(params, 3)
    wanted = jax.tree.map(jnp.shape, target.initial(llama_net.build(deep), deep, seed=0))
    assert jax.tree.map(jnp.shape, grown) == wanted
    tokens = np.random.default_rng(1).integers(0, shallow.vocab_size, (2, 12)).astype(np.int32)
    np.testing.assert_array_equal(losses(deep, grown, tokens), losses(shallow, params, tokens))

    maker = optimizer.build(Schedule(steps=4, rate=1e-2), decay=0.1)
    step = jit(target.step(llama_net.build(deep), deep, maker, 0.2), donate=(0,))
    everything = np.ones((2, 12), bool)
    state = target.TrainState(params=grown, optimizer=maker.init(grown))
    for _ in range(2):  # donation needs a state without shared arrays
        state, _ = step(state, tokens, everything, everything)
    copies = [state.params["layers_1"][part][out] for part, out in target.OUTPUTS]
    assert all(np.abs(np.asarray(copy)).max() > 0 for copy in copies)


def test_as_many_layers_are_the_layers_there_are() -> None:
    config = tiny_target(num_layers=2)
    params = target.initial(llama_net.build(config), config, seed=3)
    assert jax.tree.structure(target.deepened(params, 2)) == jax.tree.structure(params)
    for ours, theirs in zip(
        jax.tree.leaves(target.deepened(params, 2)), jax.tree.leaves(params), strict=True
    ):
        assert ours is theirs
