"""`TargetModel`: the forward pass of a target as a function that JAX can transform."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.errors import RequestError
from dflash_jax.graph.build import jit

IDS = np.array([[1, 2, 3], [4, 5, 6]], np.int32)


@pytest.fixture(scope="module")
def model(oracle: Path) -> dj.TargetModel:
    return dj.load_target(oracle / "drafters" / "target_small")


@pytest.mark.exhaustive
def test_forward_may_be_called_inside_a_traced_function(model: dj.TargetModel) -> None:
    expected = model.forward(IDS)
    found = jit(model.forward)(IDS)
    assert isinstance(found, dj.ForwardOutput)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-5)
    np.testing.assert_allclose(found.hidden, expected.hidden, atol=1e-5)
    each = jax.vmap(lambda row: model.forward(row[None]).logits[0])(jnp.asarray(IDS))
    np.testing.assert_allclose(each, expected.logits, atol=1e-5)


@pytest.mark.exhaustive
def test_apply_is_differentiable_in_its_parameters(model: dj.TargetModel) -> None:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, jnp.asarray(IDS)).logits
        return -jax.nn.log_softmax(logits[:, :-1])[:, :, 7].mean()

    value, slope = jit(jax.value_and_grad(loss))(model.params)
    assert jax.tree.structure(slope) == jax.tree.structure(model.params)
    step = 1e-3
    for name in ("head", "norm"):
        direction = jax.tree.map(jnp.zeros_like, model.params)
        direction[name] = jnp.ones_like(direction[name])
        moved = jax.tree.map(lambda p, d: p + step * d, model.params, direction)
        expected = (float(loss(moved)) - float(value)) / step
        assert float(slope[name].sum()) == pytest.approx(expected, rel=0.05, abs=2e-3)


def test_invalid_ids_are_refused_traced_or_not(model: dj.TargetModel) -> None:
    for wrong in (np.zeros(3, np.int32), np.zeros((1, 3), np.float32), np.zeros((1, 0), np.int32)):
        for call in (model.forward, jit(model.forward)):
            with pytest.raises(RequestError, match="expected integers"):
                call(wrong)
    with pytest.raises(RequestError, match="ids run from 1 to 99; the target knows 0 to 8"):
        model.forward([[1, 99]])
