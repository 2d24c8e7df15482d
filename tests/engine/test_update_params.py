"""Exchange of an engine's weights, also by those of a training loop."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax import Plan, Result, TargetModel, load, load_target
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import CheckpointError, RequestError
from dflash_jax.kernels.native.build import library
from dflash_jax.random_weights import random_params
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target

PROMPT = list(range(5, 42))
PLAN = Plan(max_length=96, block=4, chunk=16)
TARGET = tiny_target(num_layers=2, vocab_size=96)
DRAFTER = tiny_drafter(TARGET, target_layer_ids=(0,), num_layers=1, windows=(12,), causal=(False,))
NATIVE = pytest.mark.skipif(not library(), reason="no native kernels are compiled here")
PLANS = {
    "floats": dataclasses.replace(PLAN, kernels="xla"),
    "bfloat16": dataclasses.replace(PLAN, kernels="xla", dtype="bfloat16"),
    "int8": dataclasses.replace(PLAN, kernels="xla", weights="int8"),
    "int4": dataclasses.replace(PLAN, kernels="xla", weights="int4"),
    "native": dataclasses.replace(PLAN, kernels="native"),
    "native int8": dataclasses.replace(PLAN, kernels="native", weights="int8"),
}
MARKS = {"native": NATIVE, "native int8": NATIVE}
MARKS |= {"bfloat16": pytest.mark.soak}


def floats(engine: Engine, seed: int) -> dict[str, Any]:
    """Return the float weights of a random engine."""
    return random_params(engine.graph.pair, dtype=engine.plan.dtype, seed=seed)


def answer(engine: Engine) -> list[int]:
    return engine.generate(PROMPT, max_tokens=24).token_ids


def new_engine(engine: Engine, seed: int) -> Engine:
    """Return an engine over other weights, which were never exchanged, with the same programs."""
    other = Engine(engine.graph, random_engine(TARGET, DRAFTER, engine.plan, seed=seed).params)
    other.share_programs(engine)
    return other


@pytest.fixture(scope="module")
def engine() -> Engine:
    return random_engine(TARGET, DRAFTER, PLANS["floats"], seed=1)


@pytest.fixture
def unchanged(engine: Engine) -> Iterator[Engine]:
    """The engine, whose weights have to be those of before after a test."""
    engine.update_params(floats(engine, 1))
    before, wanted = engine.params, answer(engine)
    yield engine
    assert engine.params is before
    assert answer(engine) == wanted


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in PLANS])
def test_answers_equal_those_of_a_new_engine_and_nothing_is_compiled(name: str) -> None:
    engine = random_engine(TARGET, DRAFTER, PLANS[name], seed=1)
    first, other = answer(engine), new_engine(engine, 2)
    wanted = answer(other)
    assert first != wanted
    executables = dict(engine.core.runner.executables)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.core.runner.compiled, "build", None)
        engine.update_params(floats(engine, 2))
        assert engine.generate(PROMPT, max_tokens=1).stats.cached_tokens == 0
        assert answer(engine) == wanted
        engine.update_params(floats(engine, 1))
        assert answer(engine) == first
        engine.update_params(other.params)  # laid out and packed already
        assert answer(engine) == wanted
    assert engine.core.runner.executables == executables


@pytest.mark.parametrize("weights", ["float", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_become_the_weights_that_loading_makes(weights: Any, dtype: Any) -> None:
    engine = load("tiny", plan=Plan(weights=weights, dtype=dtype, max_length=64))
    before, model = engine.params, load_target("tiny", dtype="float32")
    engine.update_params({"target": model.params})
    assert jax.tree.structure(engine.params) == jax.tree.structure(before)
    jax.tree.map(np.testing.assert_array_equal, engine.params, before)


@NATIVE
def test_packed_weights_are_multiplied_as_the_engines_plan_says() -> None:
    by_floats = dataclasses.replace(PLANS["native int8"], activations="float")
    engine, other = (random_engine(TARGET, None, p) for p in (by_floats, PLANS["native int8"]))
    planned = jax.tree.structure(engine.graph.params)
    assert jax.tree.structure(engine.params) == planned != jax.tree.structure(other.params)
    engine.update_params(other.params)
    assert jax.tree.structure(engine.params) == planned


@NATIVE
def test_vectors_are_rounded_to_the_plans_dtype_though_kernels_compute_in_float32() -> None:
    plan = dataclasses.replace(PLANS["native"], dtype="bfloat16")
    engine = random_engine(TARGET, DRAFTER, plan, seed=1)
    tree = floats(random_engine(TARGET, DRAFTER, PLANS["floats"]), 2)
    engine.update_params(tree)
    found, norm = engine.params["target"]["norm"], tree["target"]["norm"]
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, norm.astype("bfloat16").astype(np.float32))
    assert (found != norm).any()


def test_one_role_may_be_replaced_alone(engine: Engine) -> None:
    engine.update_params(floats(engine, 1))
    first, other = answer(engine), floats(engine, 2)
    before = engine.params
    engine.update_params({"drafter": other["drafter"]})
    assert answer(engine) == first  # drafts decide nothing
    assert engine.params["target"]["embed"] is before["target"]["embed"]
    np.testing.assert_array_equal(engine.params["drafter"]["fc"], other["drafter"]["fc"])
    engine.update_params({"target": other["target"]})
    assert answer(engine) == answer(new_engine(engine, 2))


def test_other_precisions_and_variables_of_nnx_are_taken(engine: Engine) -> None:
    wide = jax.tree.map(lambda x: x.astype(np.float64), floats(engine, 2))
    state = nnx.State(jax.tree.map(lambda x: nnx.Param(jnp.asarray(x)), floats(engine, 2)))
    wanted = answer(new_engine(engine, 2))
    for tree in (wide, state):
        engine.update_params(floats(engine, 1))
        engine.update_params(tree)
        assert answer(engine) == wanted


def donated(tree: Any) -> Any:
    tree = jax.tree.map(jnp.array, tree)
    tree["drafter"]["fc"].delete()
    return tree


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: None, "has none of drafter, target"),
        (lambda p: {}, "has none of drafter, target"),
        (lambda p: p["target"], "has none of drafter, target"),
        (lambda p: {"drafter": {}}, r"drafter/.* is missing; .*; and \d+ more; give a tree like"),
        (lambda p: p | {"more": p["drafter"]}, "more/.* is unknown"),
        (lambda p: p | {"target": p["target"] | {"x": {}, "y": [1]}}, "target/y/0 is unknown"),
        (lambda p: p | {"target": p["target"] | {"norm": "x"}}, "norm is a str; expected float"),
        (lambda p: p | {"target": p["target"] | {"norm": 1.0}}, "norm is a float; expected"),
        (lambda p: jax.tree.map(lambda x: x[:-1], p), r"is float32\[.*; expected float32\["),
        (lambda p: jax.tree.map(lambda x: x > 0, p), r"is bool\[.*; expected float32\["),
        (lambda p: jax.tree.map(lambda x: x.astype(int), p), r"int64\[.*expected float32"),
        (lambda p: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), p), "ShapeDtype"),
        (donated, "drafter/fc was donated to another program"),
    ],
)
def test_trees_that_do_not_fit_are_refused_by_name(
    unchanged: Engine, change: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        unchanged.update_params(change(floats(unchanged, 2)))


def test_traced_weights_are_refused(unchanged: Engine) -> None:
    with pytest.raises(CheckpointError, match="is traced; call this outside"):
        jax.jit(unchanged.update_params)(floats(unchanged, 2))


def test_weights_packed_in_another_way_are_refused(unchanged: Engine) -> None:
    packed = random_engine(TARGET, DRAFTER, PLANS["int8"], seed=2).params
    with pytest.raises(CheckpointError, match="is packed in another way"):
        unchanged.update_params(packed)


def test_weights_cannot_be_replaced_while_requests_run(unchanged: Engine) -> None:
    stream = unchanged.submit(PROMPT, max_tokens=5)
    with pytest.raises(RequestError, match="requests are running; let them end, or close them"):
        unchanged.update_params(unchanged.params)
    stream.close()


@pytest.mark.exhaustive
def test_rollouts_of_a_trained_policy_equal_those_of_new_engines() -> None:
    """Three updates by REINFORCE: tokens of the lower half of the vocabulary are rewarded."""
    plan = dataclasses.replace(PLAN, rows=2)
    engine = random_engine(TARGET, DRAFTER, plan, seed=1)
    policy = jax.tree.map(jnp.asarray, floats(engine, 1)["target"])
    optimiser = optax.sgd(0.3)
    model, moments, seen = TargetModel(TARGET, policy, "float32"), optimiser.init(policy), []

    def loss(policy: Any, tokens: Any, advantages: Any) -> jax.Array:
        logits = model.apply(policy, tokens[:, :-1]).logits
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=2)
        return -(advantages[:, None] * chosen[:, len(PROMPT) - 1 :, 0]).mean()

    def rollouts(engine: Engine) -> list[Result]:
        options: dict[str, Any] = {"temperature": 1.0, "seed": len(seen), "ignore_eos": True}
        return engine.generate_many([PROMPT], n=4, max_tokens=16, **options)

    compiled: dict[str, Any] = {}
    for _ in range(3):
        answers = [result.token_ids for result in rollouts(engine)]
        compiled = compiled or dict(engine.core.runner.executables)
        assert engine.core.runner.executables == compiled
        fresh = Engine(engine.graph, engine.graph.place_params(engine.params | {"target": policy}))
        fresh.share_programs(engine)
        assert answers == [result.token_ids for result in rollouts(fresh)]
        assert answers not in seen
        seen.append(answers)
        tokens = jnp.asarray([PROMPT + answer for answer in answers])
        rewards = (tokens[:, len(PROMPT) :] < 48).mean(axis=1)
        gradients = jax.grad(loss)(policy, tokens, rewards - rewards.mean())
        updates, moments = optimiser.update(gradients, moments, policy)
        policy = optax.apply_updates(policy, updates)
        engine.update_params({"target": policy})
