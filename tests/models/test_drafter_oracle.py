"""The DFlash v1 drafter against the official package: single rounds, then whole generations."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import dflash_jax as dj
from dflash_jax.config import check_pair
from dflash_jax.engine.engine import Engine
from dflash_jax.families.configs import read_drafter_config, read_target_config
from dflash_jax.graph.build import jit
from dflash_jax.graph.keys import Step
from dflash_jax.networks import build_pair
from dflash_jax.testing import folder_params, planned, random_params, tiny_drafter, tiny_target

CASES = (
    "v1_full",
    "v1_full_causal",
    "v1_sliding",
    "v1_sliding_bidirectional",
    "v1_small_vocab",
    "v1_trained",
)
# Only drafts of these are checked: generation would compile a program for each.
OTHERS = ("v1_gemma_target", "v1_hybrid_target")
WITHIN = {"atol": 2e-4, "rtol": 0}


@pytest.fixture(scope="module", params=[*CASES, *OTHERS])
def case(request: pytest.FixtureRequest, oracle: Path) -> SimpleNamespace:
    path = oracle / "drafters" / request.param
    meta = json.loads((path / "meta.json").read_text())
    target = (path / meta["target"]).resolve()
    vectors = load_file(path / "vectors.safetensors")
    return SimpleNamespace(path=path, target=target, vectors=vectors, **meta["rounds"])


def test_two_rounds_with_context_added_per_round(case: SimpleNamespace) -> None:
    """Round 2 gets its new features only; what the block of round 1 wrote is overwritten."""
    target, drafter = read_target_config(case.target), read_drafter_config(case.path)
    check_pair(target, drafter)
    pair, v = build_pair(target, drafter), case.vectors
    params = jax.device_put(
        {"target": folder_params(case.target, target), "drafter": folder_params(case.path, drafter)}
    )
    plan = dj.Plan(max_length=96, block=8, chunk=case.prompt, dtype="float32")
    caches = planned(target, drafter, plan).empty_state().drafter
    assert [c.ring for c in caches] == [w is not None for w in drafter.windows]

    @jit
    def draft(params: Any, caches: Any, features: Any, at: Any, new: Any, block: Any) -> Any:
        taps = jnp.split(features, len(drafter.target_layer_ids), axis=-1)
        nothing = jnp.zeros(features.shape[:2], jnp.int32)
        caches = pair.drafter_call(params, caches, nothing, taps, at, method="observe")
        x = pair.target_call(params, block, method="embed")
        noise = pair.drafter_call(params, x, method="scaled")
        hidden, caches = pair.drafter_call(params, x, caches, at + new, method="__call__")
        logits = pair.shared(params).head(hidden)
        return noise, hidden, pair.drafter_call(params, logits, method="adjust"), caches

    at = 0
    for name, new in (("round1", case.prompt), ("round2", case.produced)):
        features = v[f"{name}.target_hidden"]
        assert features.shape[1] == new
        features = np.pad(  # junk after the committed rows, as in the engine
            features, ((0, 0), (0, case.prompt - new), (0, 0)), constant_values=7.0
        )
        block, start, kept = v[f"{name}.block_ids"], np.array([at], np.int32), np.int32(new)
        noise, hidden, logits, caches = draft(params, caches, features, start, kept, block)
        at += new
        np.testing.assert_allclose(noise, v[f"{name}.noise_embedding"], **WITHIN)
        np.testing.assert_allclose(hidden, v[f"{name}.hidden"], **WITHIN)
        np.testing.assert_allclose(logits[:, 1:], v[f"{name}.logits"], **WITHIN)
        path = jnp.argmax(logits[:, 1:], axis=-1)
        np.testing.assert_array_equal(path, v[f"{name}.greedy_path"])
        assert v[f"{name}.position_ids"][0, -8:].tolist() == list(range(at, at + 8))


FIRST = pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)],
    indirect=True,
    scope="module",
)
_built: dict[Any, dict[str, Any]] = {}


@pytest.fixture(scope="module")
def engine(case: SimpleNamespace) -> Engine:
    """Return a loaded pair; pairs of equal shape share compiled programs."""
    engine = dj.load(case.target, case.path, plan=dj.Plan(max_length=96, chunk=16))
    shapes = (engine.plan.shape, engine.graph.config, engine.graph.drafter_config)
    engine.core.runner.compiled.executables = _built.setdefault(
        shapes, engine.core.runner.executables
    )
    del engine.core.runner.compiled.programs[
        engine.graph.key(Step.PLAIN)
    ]  # not needed here, and compiling is most of this file's time
    engine.warm_up()
    _built[shapes] = engine.core.runner.executables
    return engine


def whole_blocks(lengths: list[int], *, prompt: int, total: int, block: int) -> list[int]:
    """Return the first rounds, in which the official loop had room for a whole block."""
    starts = prompt + np.cumsum([0, *lengths[:-1]])
    return [n for n, start in zip(lengths, starts, strict=True) if start + block <= total]


@pytest.mark.sample("v1_full", "v1_sliding_bidirectional", "v1_trained")
@FIRST
def test_generation_commits_the_official_tokens_in_the_official_rounds(
    case: SimpleNamespace, engine: Engine
) -> None:
    v, block = case.vectors, engine.plan.block
    wanted = v["spec.output_ids"][0, case.prompt :].tolist()
    assert wanted == v["ar.output_ids"][0, case.prompt :].tolist()
    assert len(wanted) == case.new_tokens
    lengths = v["spec.acceptance_lengths"].tolist()
    result = engine.generate(
        v["prompt_ids"][0], max_tokens=case.new_tokens + block, ignore_eos=True
    )
    assert result.token_ids[: case.new_tokens] == wanted
    total = case.prompt + case.new_tokens
    lengths = whole_blocks(lengths, prompt=case.prompt, total=total, block=block)
    assert len(lengths) > 10
    assert result.stats.acceptance_lengths[: len(lengths)] == lengths


@pytest.mark.sample("v1_trained")
@FIRST
def test_generation_stops_at_a_token_and_keeps_it_as_the_last(
    case: SimpleNamespace, engine: Engine
) -> None:
    v, block = case.vectors, engine.plan.block
    stop = int(v["spec_stop.stop_token_id"][0])
    wanted = v["spec_stop.output_ids"][0, case.prompt :].tolist()
    lengths = v["spec_stop.acceptance_lengths"].tolist()
    result = engine.generate(
        v["prompt_ids"][0], max_tokens=case.new_tokens, ignore_eos=True, stop_token_ids=[stop]
    )
    assert result.token_ids == wanted
    assert result.token_ids[-1] == stop
    assert result.finish_reason == "stop"
    total = case.prompt + case.new_tokens
    lengths = whole_blocks(lengths, prompt=case.prompt, total=total, block=block)
    assert result.stats.acceptance_lengths[: len(lengths)] == lengths


# -- properties that follow from the definition -------------------------------------------------

WINDOW, BLOCK = 6, 4


CONTEXT, ROWS = 16, 17


@pytest.fixture(scope="module", params=[True, False], ids=["causal", "bidirectional"])
def one_layer(request: pytest.FixtureRequest) -> SimpleNamespace:
    """One sliding layer, so that a slot depends on the slots it attends to only."""
    target = tiny_target(num_layers=2)
    drafter = tiny_drafter(
        target, num_layers=1, windows=(WINDOW,), causal=(request.param,), target_layer_ids=(0,)
    )
    pair = build_pair(target, drafter)
    params = jax.device_put(random_params(build_pair(target, drafter)))
    plan = dj.Plan(rows=ROWS, max_length=64, block=BLOCK, chunk=2, dtype="float32")

    @jit
    def draft(features: Any, x: Any, start: Any) -> Any:
        """Return hidden states of a block at `start`, after context rows added in pairs."""
        caches = planned(target, drafter, plan).empty_state().drafter
        assert caches[0].ring
        for at in range(0, CONTEXT, 2):
            part, where = features[:, at : at + 2], jnp.full((ROWS,), at)
            nothing = jnp.zeros((ROWS, 2), jnp.int32)
            caches = pair.drafter_call(params, caches, nothing, [part], where, method="observe")
        return pair.drafter_call(params, x, caches, start, method="__call__")[0]

    def run(features: np.ndarray, x: np.ndarray, start: int) -> np.ndarray:
        return np.asarray(draft(features, x, np.full(ROWS, start, np.int32)))

    rng = np.random.default_rng(0)
    width = target.hidden_size
    features = rng.standard_normal((CONTEXT, width)).astype(np.float32)
    x = rng.standard_normal((BLOCK, width)).astype(np.float32)
    return SimpleNamespace(
        draft=run,
        causal=request.param,
        features=np.repeat(features[None], ROWS, axis=0),
        x=np.repeat(x[None], ROWS, axis=0),
    )


def test_a_slot_attends_to_exactly_the_context_inside_its_window(
    one_layer: SimpleNamespace,
) -> None:
    features = one_layer.features.copy()  # in row i, context row i is changed; in the last row none
    features[np.arange(CONTEXT), np.arange(CONTEXT)] += 1.0
    hidden = one_layer.draft(features, one_layer.x, CONTEXT)
    changed = (hidden[:-1] != hidden[-1:]).any(axis=-1)  # [context row, slot]
    for j in range(BLOCK):
        seen = np.flatnonzero(changed[:, j]).tolist()
        assert seen == list(range(CONTEXT - (WINDOW - 1 - j), CONTEXT))


def test_a_slot_attends_to_later_slots_only_in_bidirectional_layers(
    one_layer: SimpleNamespace,
) -> None:
    x = one_layer.x.copy()
    x[np.arange(BLOCK), np.arange(BLOCK)] += 1.0
    hidden = one_layer.draft(one_layer.features, x, CONTEXT)
    changed = (hidden[:BLOCK] != hidden[-1:]).any(axis=-1)  # [changed slot, slot]
    both = np.ones((BLOCK, BLOCK), bool)
    np.testing.assert_array_equal(changed, np.triu(both) if one_layer.causal else both)


def test_a_constant_shift_of_all_positions_changes_nothing(one_layer: SimpleNamespace) -> None:
    """Rows before the window are masked, so junk before the context only shifts positions."""
    half = CONTEXT // 2
    shifted = np.roll(one_layer.features, half, axis=1)  # its first rows are at `half` now
    shifted[:, :half] = 3.0
    early = one_layer.draft(one_layer.features, one_layer.x, half)
    late = one_layer.draft(shifted, one_layer.x, CONTEXT)
    np.testing.assert_allclose(early, late, atol=2e-5, rtol=0)
