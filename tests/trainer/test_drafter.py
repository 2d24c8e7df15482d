"""The training path: equal to the engine's cached draft, without leaks."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.graph.state import idle_rules
from dflash_jax.graph.steps import decoding as steps
from dflash_jax.graph.steps.drafting import draft as draft_block
from dflash_jax.graph.steps.inputs import DecodeInputs, PrefillInputs
from dflash_jax.networks import build_pair
from dflash_jax.testing import (
    planned,
    random_params,
    tiny_drafter,
    tiny_gemma,
    tiny_hybrid,
    tiny_target,
)
from dflash_jax.trainer import drafter, features, objective
from dflash_jax.trainer.recipes import SMOKE

LENGTH, BLOCK = 24, 4
TARGETS = {"hybrid": tiny_hybrid, "gemma": tiny_gemma}
KINDS = ("dflash", "dflash2", "dspark", "domino")


@functools.cache
def made(kind: str, family: str = "qwen3") -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return pair, target config, drafter config and parameters."""
    target = tiny_target(num_layers=1) if family == "qwen3" else TARGETS[family]()
    config = tiny_drafter(target, kind, block_size=BLOCK, target_layer_ids=(0,))
    params = jax.device_put(random_params(build_pair(target, config), seed=3))
    return build_pair(target, config), target, config, params


def tokens(seed: int, rows: int = 1) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, LENGTH), 0, 96)


@functools.cache
def programs(kind: str, family: str = "qwen3") -> Any:
    """Return compiled functions: training hidden states, the engine's draft, training scores."""
    pair, target, config, _ = made(kind, family)
    width = config.step_width
    plan = Plan(max_length=64, block=width, chunk=LENGTH, dtype="float32")
    recipe = dataclasses.replace(SMOKE, kind=kind)
    keep = objective.wants_distribution(recipe)

    @jax.jit
    def trained(params, ids, anchors):
        read = features.target_features(pair, params["target"], ids, dtype="float32", keep=False)
        return drafter.draft_hidden(pair, params, read, ids, anchors)

    @jax.jit
    def served(params, prefix, count, first):
        """Run the engine's prefill and the draft of its fused step."""
        state, rules = planned(target, config, plan).empty_state(), idle_rules(plan)
        fresh = jnp.ones(1, bool)
        inputs = PrefillInputs(prefix, count, fresh, rules)
        state, _, _ = steps.prefill(pair, params, state, None, inputs)
        state = dataclasses.replace(state, anchor=first)
        wide = pair.with_options(dataclasses.replace(pair.options, block=width))
        _, _, draft = draft_block(wide, params, state, None, DecodeInputs(rules))
        at = (state.drafter, first, state.position, pair.shared(params), width - 1)
        hidden = pair.drafter_call(params, *at, method="predict")[0]
        return hidden[0], draft.block[0]

    @jax.jit
    def right(params, row, anchor, labels):
        read = features.target_features(pair, params["target"], row, dtype="float32", keep=keep)
        blocks = drafter.Blocks(anchor, labels, jnp.ones(labels.shape, bool))
        return drafter.scores(pair, params, recipe, read, row, blocks).right

    return trained, served, right


def trained(kind: str, ids: jax.Array, anchors: list[int]) -> np.ndarray:
    return np.asarray(programs(kind)[0](made(kind)[3], ids, jnp.asarray([anchors]))[0])


def soaked(cases: list) -> list:
    return [pytest.param(*case, marks=pytest.mark.soak) for case in cases]


PAIRS = [("dflash", "qwen3"), ("dflash2", "qwen3"), ("domino", "qwen3")]
PAIRS += soaked([("dspark", "qwen3"), ("dflash", "gemma"), ("dflash", "hybrid")])


@pytest.mark.sample("dflash-qwen3", "domino-qwen3")
@pytest.mark.parametrize(("kind", "family"), PAIRS)
def test_training_equals_the_engines_draft_at_the_same_prefix(kind, family):
    _, _, config, params = made(kind, family)
    train, serve, right = programs(kind, family)
    ids = tokens(0)
    anchors = (1, 6, LENGTH - config.step_width)
    hidden = train(params, ids, jnp.asarray([anchors]))
    for n, anchor in enumerate(anchors):
        expected, block = serve(params, ids, jnp.asarray([anchor]), ids[:, anchor])
        np.testing.assert_allclose(hidden[0, n], expected, atol=3e-5)
        # In a row that continues with the engine's drafts, training scores all drafts as right.
        row = ids.at[0, anchor : anchor + len(block)].set(block)
        at, labels = jnp.asarray([[anchor]]), block[None, None, 1:]
        assert right(params, row, at, labels).all()
        assert not right(params, row, at, (labels + 1) % 97).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_never_depends_on_what_comes_after_its_anchor(kind):
    ids, anchors = tokens(1), [4, 6, 15]
    before, after = (trained(kind, x, anchors) for x in (ids, ids.at[:, 7:].add(1)))
    np.testing.assert_array_equal(before[:2], after[:2])
    assert not np.allclose(before[2], after[2])


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_do_not_see_each_other(kind):
    ids = tokens(2)
    alone, together = trained(kind, ids, [9, 9, 9]), trained(kind, ids, [8, 9, 10])
    np.testing.assert_array_equal(alone[1], together[1])
    assert not np.allclose(alone[0], together[0])


def test_no_gradient_reaches_features_at_or_after_the_anchor():
    pair, _, _, params = made("dflash2")
    ids, anchor = tokens(4), 9

    @jax.jit
    @jax.grad
    def slopes(taps):
        read = features.TargetFeatures(taps, ids)
        return (drafter.draft_hidden(pair, params, read, ids, jnp.asarray([[anchor]])) ** 2).sum()

    taps = tuple(jax.random.normal(jax.random.key(i), (1, LENGTH, 32)) for i in range(1))
    for slope in slopes(taps):
        reached = np.abs(np.asarray(slope[0])).max(axis=1) > 0
        assert reached[:anchor].all()
        assert not reached[anchor:].any()


@functools.cache
def slope(kind: str, parts: int = 1) -> Any:
    """Return compiled gradient and metrics of a batch at step 7, for one-layer models."""
    target = tiny_target(num_layers=1)
    shape = {"num_layers": 1, "windows": (None,), "causal": (False,), "target_layer_ids": (0,)}
    config = tiny_drafter(target, kind, block_size=BLOCK, **shape)
    params = random_params(build_pair(target, config), seed=3)
    recipe = dataclasses.replace(SMOKE, kind=kind, parts=parts, head_weight=0.5)
    run = functools.partial(drafter.gradient, build_pair(target, config), recipe)
    given = jax.device_put((params["drafter"], params["target"]))
    program = jax.jit(run, static_argnums=(5,))
    return lambda rows, count: program(*given, rows, None, 7, count)


def rows_of_four() -> tuple[jax.Array, jax.Array]:
    wanted = jax.random.uniform(jax.random.key(9), (4, LENGTH)) < 0.7
    return tokens(6, rows=4), wanted.at[1].set(False)


def assert_alike(one: Any, two: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6), one, two)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_bfloat16_drafter_trains_float32_weights_by_bfloat16_products(dtype):
    """Activations are those of a bfloat16 drafter, whatever the target's; weights stay float32."""
    target = tiny_target(num_layers=1)
    shape = {"num_layers": 1, "windows": (None,), "causal": (False,), "target_layer_ids": (0,)}
    config = tiny_drafter(target, "dflash", block_size=BLOCK, **shape)
    params = jax.device_put(random_params(build_pair(target, config), seed=3))
    half = jax.tree.map(lambda x: x.astype(dtype), params["target"])
    recipe = dataclasses.replace(SMOKE, dtype=dtype, drafter_dtype="bfloat16")
    run = functools.partial(drafter.gradient, build_pair(target, config), recipe)
    rows = rows_of_four()
    slope, logged = jax.jit(run, static_argnums=(5,))(params["drafter"], half, rows, None, 7, 5)
    exact = dataclasses.replace(recipe, dtype="float32", drafter_dtype="same")
    run = functools.partial(drafter.gradient, build_pair(target, config), exact)
    wanted, _ = jax.jit(run, static_argnums=(5,))(
        params["drafter"], params["target"], rows, None, 7, 5
    )
    assert {x.dtype for x in jax.tree.leaves(slope)} == {jnp.dtype("float32")}
    assert np.isfinite(float(logged["loss"]))
    close = [cosine(a, b) for a, b in zip(*map(jax.tree.leaves, (slope, wanted)), strict=True)]
    assert min(close) > 0.9  # the same gradient up to rounding
    assert max(close) < 1.0  # but not bitwise equal


def cosine(one: jax.Array, two: jax.Array) -> float:
    a, b = np.ravel(one).astype(np.float64), np.ravel(two).astype(np.float64)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize("kind", soaked([("dflash2",), ("dflash",), ("dspark",)]))
def test_a_batch_in_parts_has_the_same_gradient(kind):
    whole, cut = (slope(kind, parts)(rows_of_four(), 5) for parts in (1, 4))
    assert whole[1]["places"] > 10
    assert_alike(whole, cut)


@pytest.mark.soak
def test_padding_and_dead_anchors_change_nothing():
    ids, wanted = rows_of_four()
    wanted &= jnp.cumsum(wanted, axis=1) < 6  # fewer places to start at than anchors
    expected = slope("dflash2")((ids, wanted), 5)
    pad = functools.partial(jnp.pad, pad_width=((0, 0), (0, 6)))
    longer = pad(ids, constant_values=7), pad(wanted)
    assert expected[1]["places"] > 4
    assert_alike(expected, slope("dflash2")(longer, 9))


@pytest.mark.soak
def test_target_features_in_chunks_equal_those_in_one_piece(monkeypatch):
    pair, _, _, params = made("dflash", "hybrid")
    ids = tokens(5, rows=2)

    def read():
        made = jax.jit(
            lambda p, x: features.target_features(pair, p["target"], x, dtype="float32", keep=True)
        )
        return made(params, ids)

    whole = read()
    monkeypatch.setattr(features, "CHUNK", 10)
    monkeypatch.setattr(features, "HEAD_TOKENS", 7)
    cut = read()
    assert whole.best.shape == (2, LENGTH)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.exhaustive
def test_a_table_of_tokens_does_not_turn_the_inputs_into_integers():
    pair, _, _, params = made("dflash")
    ids, anchors = tokens(0), jnp.asarray([[1, 6]])
    read = features.target_features(pair, params["target"], ids, dtype="float32", keep=False)
    table = {"d2t": jnp.zeros(9, jnp.int32)}  # of a reduced vocabulary; first in the tree
    both = params | {"drafter": table | params["drafter"]}
    hidden, with_table = (drafter.draft_hidden(pair, p, read, ids, anchors) for p in (params, both))
    np.testing.assert_array_equal(hidden, with_table)
