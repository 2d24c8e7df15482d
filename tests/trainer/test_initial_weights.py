"""Drafters that start from their target, and reduced draft vocabularies."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.converters.models import open_model
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import ConfigError
from dflash_jax.loading import resolve_here
from dflash_jax.networks import build_graph, build_pair
from dflash_jax.plan import Plan
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import random_params, tiny_drafter, tiny_target
from dflash_jax.trainer import (
    drafter,
    features,
    initial_weights,
    objective,
    optimizer,
    run,
    setup,
    training,
)
from dflash_jax.trainer.recipes import SMOKE, Bucket, Schedule, new_drafter
from dflash_jax.trainer.rows import TokenRows

TARGET = tiny_target(num_layers=4)
PARAMS = random_params(build_pair(TARGET, None))["target"]


def test_a_drafter_starts_with_layers_of_its_target() -> None:
    config = tiny_drafter(TARGET)
    params = random_params(build_pair(TARGET, config), seed=1)["drafter"]
    whole, origin = initial_weights.from_target(params, PARAMS, (TARGET, config))
    assert origin == "what fits of the target's layers 1, 3"
    np.testing.assert_array_equal(whole["norm"], PARAMS["norm"])
    for i, source in enumerate((1, 3)):
        ours, theirs = whole[f"layers_{i}"], PARAMS[f"layers_{source}"]
        np.testing.assert_array_equal(ours["mlp"]["down"], theirs["mlp"]["down"])
        fused = theirs["attention"]["qkv"]  # [D, K, G+2, H], queries of a kv head first
        q = np.asarray(ours["attention"]["q"]).reshape(32, 2, 2, 8)
        np.testing.assert_array_equal(q, fused[:, :, :2])
        np.testing.assert_array_equal(ours["attention"]["kv"], fused[:, :, 2:])
    assert whole["fc"] is params["fc"]
    narrow = tiny_drafter(TARGET, num_layers=1, windows=(None,), causal=(False,), head_dim=16)
    assert initial_weights.spread_layers(TARGET, narrow) == [3]
    shapes = random_params(build_pair(TARGET, narrow))["drafter"]
    found, _ = initial_weights.from_target(shapes, PARAMS, (TARGET, narrow))
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, shapes)
    _, origin = initial_weights.from_target(shapes, {"experts": {}}, (TARGET, narrow))
    assert origin == "random layers: none of the target has a fitting shape"


def test_the_draft_vocabulary_is_the_most_frequent_tokens_of_answers() -> None:
    target = dataclasses.replace(TARGET, eos_token_ids=(90,))
    tokens = np.asarray([[7, 7, 5, 5, 5, 3], [9, 9, 9, 9, 4, 3]])
    wanted = np.asarray([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]], bool)
    lines: list[str] = []
    rows = [TokenRows(tokens, wanted, wanted)]
    found = initial_weights.draft_tokens(rows, 4, target, lines.append)
    assert found.tolist() == [3, 5, 7, 90]  # 9 is in a prompt, 4 is rarer
    assert lines == ["draft vocabulary: 4 tokens are 87.50% of those in the answers"]
    params, fixed = initial_weights.with_draft_vocabulary({"d2t": 0, "head": 0}, PARAMS, found)
    np.testing.assert_array_equal(params["head"], PARAMS["head"][:, found])
    assert (np.asarray(fixed[drafter.FIXED]["d2t"]) + np.arange(4)).tolist() == found.tolist()
    assert "d2t" not in params


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_scores_are_those_of_the_draft_vocabulary(kind: str) -> None:
    """Labels outside it are never right; distances are to what p gives to its tokens."""
    own: dict[str, Any] = {"selector_top_k": 2} if kind == "dflash2" else {}
    config = tiny_drafter(TARGET, kind, draft_vocab_size=3, own_head=True, **own)
    module = build_pair(TARGET, config).drafter
    tokens, rng = np.asarray([2, 5, 8]), np.random.default_rng(0)
    hidden, teacher = jnp.asarray(rng.standard_normal((2, 1, 4, 32)), jnp.float32)
    params, fixed = initial_weights.with_draft_vocabulary(
        random_params(build_pair(TARGET, config))["drafter"], PARAMS, tokens
    )
    labels = jnp.asarray([[5, 6, 8, 96]])
    places = objective.Places(hidden, labels, jnp.asarray([[1, 5, 6, 8]]), teacher)
    score = objective.scorer(module, pytest.fail, lambda x: x @ PARAMS["head"], "mix")
    found = jax.jit(score)(params | fixed[drafter.FIXED], places)
    assert found.known.tolist() == [[True, False, True, False]]
    assert np.isfinite(found.loss).all()
    assert np.isinf(found.nll[0, 1::2]).all()
    assert not found.right[0, 1::2].any()
    if kind == "dflash":
        p = jax.nn.softmax(np.asarray(teacher) @ PARAMS["head"])[..., tokens]
        q = jax.nn.softmax(np.asarray(hidden) @ PARAMS["head"][:, tokens])
        expected = 0.1 * found.nll + 0.9 * (1 - np.minimum(p, q).sum(axis=-1))
        np.testing.assert_allclose(found.loss[0, ::2], expected[0, ::2], rtol=1e-5)


def test_tokens_outside_the_draft_vocabulary_count_as_wrong_and_have_no_loss() -> None:
    config = tiny_drafter(TARGET, draft_vocab_size=3, own_head=True)
    module = build_pair(TARGET, config).drafter
    tokens, rng = np.asarray([2, 5, 8]), np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((1, 4, 32)), jnp.float32)
    params, fixed = initial_weights.with_draft_vocabulary(
        random_params(build_pair(TARGET, config))["drafter"], PARAMS, tokens
    )
    labels = jnp.asarray([[5, 6, 8, 96]])
    places = objective.Places(hidden, labels, labels, None)
    score = objective.scorer(module, pytest.fail, pytest.fail, "ce")
    found = jax.jit(score)(params | fixed[drafter.FIXED], places)
    logits = np.asarray(hidden) @ PARAMS["head"][:, tokens]
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -np.log(np.take_along_axis(chances, np.asarray([[[1], [0], [2], [0]]]), -1)[..., 0])
    np.testing.assert_allclose(found.loss[0, ::2], expected[0, ::2], rtol=1e-5)
    assert np.isinf(found.nll[0, 1::2]).all()
    assert not found.right[0, 1::2].any()
    four = jax.tree.map(lambda x: np.asarray(x)[None], found)
    for weights in "dpace", "uniform":
        chosen = dataclasses.replace(SMOKE, weights=weights)
        totals = jax.jit(functools.partial(objective.sums, chosen))(four, np.ones((1, 1, 4), bool))
        assert np.isfinite(totals.loss)
        assert totals.places == 4
    np.testing.assert_allclose(totals.loss, expected[0, ::2].sum(), rtol=1e-5)
    assert totals.weight == 2


def test_a_drafter_that_starts_another_keeps_its_columns_for_common_tokens() -> None:
    before = {"d2t": np.asarray([3, 5, 9]) - np.arange(3), "head": np.full((32, 3), [1, 2, 3.0])}
    tokens = np.asarray([2, 5, 8, 9])
    params, fixed = initial_weights.with_draft_vocabulary({"head": 0}, PARAMS, tokens, before)
    head = np.asarray(params["head"])
    np.testing.assert_array_equal(head[:, [1, 3]], np.full((32, 2), [2, 3.0]))
    np.testing.assert_array_equal(head[:, [0, 2]], PARAMS["head"][:, [2, 8]])
    assert (np.asarray(fixed[drafter.FIXED]["d2t"]) + np.arange(4)).tolist() == tokens.tolist()


def test_draft_vocabularies_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="draft_vocab is 97, but the target has 97 tokens"):
        new_drafter(dataclasses.replace(SMOKE, draft_vocab=97), TARGET, 96)
    with pytest.raises(ConfigError, match="initial is 'zeros'; expected fresh or layers"):
        dataclasses.replace(SMOKE, initial="zeros")


@functools.cache
def start_scores(kind: str) -> objective.Scores:
    """Return scores of a drafter of a kind that starts from one fixed DFlash drafter."""
    dflash, recipe = (
        dataclasses.replace(SMOKE, kind=name, confidence_head=False, sample_from_anchor=False)
        for name in ("dflash", kind)
    )
    first = random_params(build_pair(TARGET, new_drafter(dflash, TARGET, 96)), seed=2)["drafter"]
    pair = build_pair(TARGET, new_drafter(recipe, TARGET, 96))
    params, _ = initial_weights.replaced(initial_weights.fresh(pair, 0), first)
    ids = jax.random.randint(jax.random.key(0), (2, 24), 0, 96)
    anchors = jnp.asarray([[1, 7, 12], [3, 9, 20]])
    labels = jax.random.randint(jax.random.key(1), (2, 3, 3), 0, 96)
    blocks = drafter.Blocks(anchors, labels, jnp.ones(labels.shape, bool))

    @jax.jit
    def scored(params: dict) -> objective.Scores:
        read = features.target_features(pair, PARAMS, ids, dtype="float32", keep=False)
        both = {"target": PARAMS, "drafter": params}
        return drafter.scores(pair, both, recipe, read, ids, blocks)

    return scored(params)


@pytest.mark.sample("dspark", "domino")
@pytest.mark.parametrize("kind", ["dflash2", "dspark", "domino"])
def test_every_kind_starts_as_the_dflash_drafter_that_it_goes_on_from_bit_for_bit(
    kind: str,
) -> None:
    before, after = start_scores("dflash"), start_scores(kind)
    np.testing.assert_array_equal(after.nll, before.nll)
    np.testing.assert_array_equal(after.right, before.right)


OWN = {
    "dflash2": {"selector_hidden", "predecessor", "successor"},
    "dspark": {"markov_w1", "markov_w2"},
    "domino": {"gru_input", "gru_state", "correction_in", "correction_out"},
}


@pytest.mark.parametrize("kind", OWN)
def test_a_frozen_backbone_leaves_the_weights_that_a_kind_adds(kind: str) -> None:
    recipe = dataclasses.replace(SMOKE, kind=kind, confidence_head=False, draft_vocab=24)
    config = new_drafter(recipe, TARGET, 96)
    params = initial_weights.fresh(build_pair(TARGET, config), 0)
    own, backbone = initial_weights.without_backbone(params, config)
    convolutions = {"layers_0"} if kind == "dflash2" else set()
    assert own.keys() == OWN[kind] | convolutions
    assert {"fc", "norm", "layers_0", "head", "d2t"} <= backbone.keys()
    if convolutions:
        assert own["layers_0"].keys() == {"attention_conv", "mlp_conv"}
    jax.tree.map(np.testing.assert_array_equal, drafter.joined(own, backbone), params)


def test_only_a_kind_with_weights_of_its_own_that_goes_on_can_freeze_its_backbone(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="frozen_backbone is true, but kind=dflash has no"):
        dataclasses.replace(SMOKE, frozen_backbone=True)
    recipe = dataclasses.replace(SMOKE, kind="dspark", frozen_backbone=True)
    with pytest.raises(ConfigError, match=r"no drafter to go on from; give one \(--from\)"):
        run.run("tiny", "tiny", tmp_path / "out", recipe, report=print)
    assert not (tmp_path / "out").exists()


def test_a_frozen_backbone_has_the_same_bits_after_training(tmp_path: Path) -> None:
    model = TargetModel(TARGET, jax.device_put(PARAMS), "float32")
    tokens = np.random.default_rng(0).integers(0, 40, (4, 32)).astype(np.int32)
    rows = [TokenRows(tokens, np.ones(tokens.shape, bool), np.ones(tokens.shape, bool))]
    recipe = dataclasses.replace(
        SMOKE,
        kind="dspark",
        confidence_head=False,
        sample_from_anchor=False,
        frozen_backbone=True,
        buckets=(Bucket(length=32, rows=2),),
        schedule=Schedule(steps=2, rate=1e-2),
    )
    first = random_params(build_pair(TARGET, new_drafter(SMOKE, TARGET, 96)), seed=2)["drafter"]
    fitted = training.fit(
        model, recipe, 96, rows, tmp_path, identity="x", report=lambda line: None, start=first
    )
    own, backbone = initial_weights.without_backbone(fitted.params, fitted.config)
    jax.tree.map(np.testing.assert_array_equal, backbone, first)
    assert np.asarray(own["markov_w2"]).any()


@pytest.mark.parametrize("kind", ["dspark", "domino"])
def test_a_start_whose_places_are_shifted_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    first = new_drafter(SMOKE, TARGET, 96)
    params = random_params(build_pair(TARGET, first))["drafter"]
    run.write_drafter(tmp_path / "drafter", first, params)
    shifted, unshifted = (
        dataclasses.replace(SMOKE, kind=kind, sample_from_anchor=value) for value in (True, False)
    )
    config = new_drafter(unshifted, TARGET, 96)
    assert config.step_width == first.step_width
    assert setup.read_start(tmp_path / "drafter", config).keys() == params.keys()
    with pytest.raises(ConfigError, match="sample_from_anchor is False, expected True; change"):
        setup.read_start(tmp_path / "drafter", new_drafter(shifted, TARGET, 96))


def test_the_tables_of_corrections_are_trained_as_tables_of_tokens() -> None:
    for kind in ("dspark", "domino"):
        pair = build_pair(TARGET, new_drafter(dataclasses.replace(SMOKE, kind=kind), TARGET, 96))
        params = initial_weights.fresh(pair, 0)
        matrices = optimizer.are_matrices(params)
        tables = params.keys() & {"markov_w1", "markov_w2", "correction_out"}
        assert tables
        assert not any(matrices[name] for name in tables)
        assert matrices["fc"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_reduced_drafter_is_trained_written_and_decodes(kind: str, tmp_path: Path) -> None:
    model = TargetModel(TARGET, jax.device_put(PARAMS), "float32")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 40, (6, 32)).astype(np.int32)
    rows = [TokenRows(tokens, np.ones(tokens.shape, bool), np.ones(tokens.shape, bool))]
    chosen = dataclasses.replace(
        SMOKE,
        kind=kind,
        confidence_head=False,
        draft_vocab=24,
        initial="layers",
        buckets=(Bucket(length=32, rows=2),),
        schedule=Schedule(steps=4, rate=1e-3, save_every=2),
    )

    def fit(out: Path, start: dict | None = None) -> training.Fitted:
        return training.fit(
            model, chosen, 96, rows, out, identity="x", report=lambda line: None, start=start
        )

    fitted = fit(tmp_path / "a")
    config = fitted.config
    params = fitted.params
    run.write_drafter(tmp_path / "drafter", config, params)
    source = open_model(tmp_path / "drafter", role="drafter")
    assert source.config.draft_vocab_size == 24  # pyrefly: ignore
    back = source.load("float32")
    np.testing.assert_array_equal(back["d2t"], params["d2t"])
    again = setup.read_start(tmp_path / "drafter", config)
    np.testing.assert_array_equal(fit(tmp_path / "b", again).params["d2t"], params["d2t"])
    plan = resolve_here(Plan(max_length=64, block=4, chunk=16), build_pair(TARGET, config))
    both = {"target": model.params, "drafter": jax.device_put(back)}
    engine = Engine(build_graph(TARGET, config, plan), both)
    prompt = tokens[0].tolist()
    drafted = engine.generate(prompt, max_tokens=20)
    assert drafted.token_ids == engine.generate(prompt, max_tokens=20, speculative=False).token_ids
