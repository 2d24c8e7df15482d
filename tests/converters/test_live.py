"""Parameters in the memory of other libraries, against their own forward passes."""

from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax import CheckpointError, Plan, TargetConfig, TargetModel
from dflash_jax.converters import live
from dflash_jax.testing import random_engine
from tests.tunix import CONFIGS

FILES = {"qwen3": "qwen3", "llama": "llama3"}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest, oracle: Path) -> Any:
    """Config, state in Tunix's form, tokens and logits."""
    name = request.param
    arrays = load_file(oracle / "tunix" / f"{FILES[name]}.safetensors")
    tokens, logits = arrays.pop("tokens"), arrays.pop("logits")
    return CONFIGS[name], live.nested(arrays), tokens, logits


@pytest.mark.sample("llama")
def test_logits_equal_those_of_tunix(model: Any) -> None:
    config, state, tokens, logits = model
    variables = nnx.State(jax.tree.map(lambda x: nnx.Param(jnp.asarray(x)), state))
    for given in (state, variables):
        params = live.from_arrays(given, config)
        found = TargetModel(config, params, "float32").forward(tokens).logits
        np.testing.assert_allclose(found, logits, rtol=0, atol=1e-4)


def test_both_directions_are_inverse(model: Any) -> None:
    config, state, _, _ = model
    params = live.from_arrays(state, config)
    back = live.to_arrays(params, config, naming="tunix")
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)
    named = live.to_arrays(params, config, naming="huggingface")
    assert "model.layers.1.self_attn.k_proj.weight" in named
    again = live.from_arrays(named, config)
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.sample("llama")
def test_an_engine_takes_converted_weights(model: Any) -> None:
    config, state, _, _ = model
    engine = random_engine(config, None, Plan(max_length=48, chunk=16))
    first = engine.generate([1, 2, 3], max_tokens=20).token_ids
    params = live.from_arrays(state, config)
    engine.update_params({"target": params})
    found = engine.generate([1, 2, 3], max_tokens=20).token_ids
    logits = TargetModel(config, params, "float32").forward([[1, 2, 3, *found]]).logits[0]
    assert found == logits[2:-1].argmax(axis=-1).tolist() != first
    kept = live.to_arrays(engine.params["target"], config, naming="tunix")
    jax.tree.map(np.testing.assert_array_equal, kept, state)


def test_arrays_that_do_not_fit_are_refused_by_name(model: Any) -> None:
    config, state, _, _ = model
    mlp = state["layers"][1]["mlp"]
    for key, change, message in (
        ("up_proj", {}, r"layers\.1\.mlp\.up_proj\.weight"),
        (
            "up_proj",
            {"kernel": mlp["up_proj"]["kernel"][:-1]},
            r"layers/1/mlp/up_proj/kernel is \[15, 24\], expected \[16, 24\]",
        ),
        ("more", {"kernel": mlp["up_proj"]["kernel"]}, "layers/1/mlp/more/kernel"),
        ("up_proj", {"kernel": "x"}, "up_proj/kernel is no array; give arrays by name"),
    ):
        layers = state["layers"] | {1: state["layers"][1] | {"mlp": mlp | {key: change}}}
        with pytest.raises(CheckpointError, match=message):
            live.from_arrays(state | {"layers": layers}, config)
    biased = dict(vars(config)) | {"mlp_bias": True, "model_type": "llama", "qk_norm": False}
    whole = random_engine(TargetConfig(**biased), None, Plan(max_length=16)).params["target"]
    with pytest.raises(CheckpointError, match=r"Tunix has no name for layers\.0\.mlp\.\w+\.bias"):
        live.to_arrays(whole, TargetConfig(**biased), naming="tunix")
