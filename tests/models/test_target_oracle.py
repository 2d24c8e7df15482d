"""Targets against Hugging Face transformers: whole passes, cached passes, greedy text."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import dflash_jax as dj
from dflash_jax.families.configs import read_target_config
from dflash_jax.graph.build import jit
from dflash_jax.graph.state import DecodeState, commit
from dflash_jax.networks import build_pair
from dflash_jax.testing import folder_params, planned

WITHIN = {"atol": 2e-4, "rtol": 0}


TARGETS = (
    "llama3",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "qwen2",
    "mistral",
    "smollm3",
    "gemma3",
    "olmo2",
    "granite",
    "glm4",
    "phi3",
    "ministral3",
    "lfm2",
)


def but(soaked: str) -> pytest.MarkDecorator:
    """Return all targets; one of them runs in the full suite only."""
    soak = {soaked: pytest.mark.soak}
    cases = [pytest.param(name, marks=soak.get(name, ())) for name in TARGETS]
    return pytest.mark.parametrize("case", cases, indirect=True, scope="module")


@pytest.fixture(scope="module", params=TARGETS)
def case(request: pytest.FixtureRequest, oracle: Path) -> SimpleNamespace:
    path = oracle / "targets" / request.param
    lengths = json.loads((path / "meta.json").read_text())["lengths"]
    return SimpleNamespace(path=path, vectors=load_file(path / "vectors.safetensors"), **lengths)


@pytest.mark.parametrize(
    "spelling", ["config.json", pytest.param("config.hub.json", marks=pytest.mark.exhaustive)]
)
def test_logits_and_hidden_states_of_a_whole_pass(
    case: SimpleNamespace, spelling: str, tmp_path: Path
) -> None:
    shutil.copy(case.path / spelling, tmp_path / "config.json")
    shutil.copy(case.path / "model.safetensors", tmp_path)
    out = dj.load_target(tmp_path).forward(case.vectors["input_ids"])
    assert out.logits.dtype == jnp.float32
    np.testing.assert_allclose(out.logits, case.vectors["logits"], **WITHIN)
    assert len(out.hidden) == sum(name.startswith("hidden.") for name in case.vectors)
    for i, state in enumerate(out.hidden):
        np.testing.assert_allclose(state, case.vectors[f"hidden.{i}"], **WITHIN)


@pytest.mark.sample("gpt_oss", "mistral", "lfm2")
def test_a_sequence_longer_than_two_chunks_in_one_pass(case: SimpleNamespace) -> None:
    ids = case.vectors["long.input_ids"]
    logits = dj.load_target(case.path).forward(jnp.asarray(ids)).logits
    np.testing.assert_allclose(logits, case.vectors["long.logits"], **WITHIN)


WIDTH = 8


class Cached:
    """A target with its caches, run call by call: chunks, and blocks padded with junk."""

    def __init__(self, path: Path, *, rows: int):
        config = read_target_config(path)
        self.pair = build_pair(config, None)
        self.params = {"target": jax.device_put(folder_params(path, config))}
        plan = dj.Plan(rows=rows, max_length=160, block=8, chunk=32, dtype="float32")
        self.empty = planned(config, None, plan).empty_state()
        self.taps = tuple(range(config.num_layers + 1))
        self.run: Callable[..., Any] = jit(self._run)

    def _run(self, params: Any, state: DecodeState, ids: Any, n: Any) -> Any:
        out = self.pair.target_call(params, ids, state.target, state.position, taps=self.taps)
        logits = self.pair.target_call(params, out.hidden, method="logits")
        return commit(state, out.caches, (), n, ids[:, -1]), logits, out

    def __call__(self, state: DecodeState, ids: np.ndarray, keep: int) -> Any:
        """Feed ids and commit the first `keep` of them."""
        fed = np.pad(ids, ((0, 0), (0, max(0, WIDTH - ids.shape[1]))), constant_values=3)
        return self.run(self.params, state, fed, np.full(len(ids), keep, np.int32))


@pytest.fixture(scope="module")
def cached(case: SimpleNamespace) -> Cached:
    return Cached(case.path, rows=2)


@but("qwen3_moe")
def test_blocks_after_a_prefill_with_rejected_tokens_rolled_back(
    case: SimpleNamespace, cached: Cached
) -> None:
    v = case.vectors
    ids, final = v["input_ids"], v["final_norm"]

    def same(name: str, at: int, logits: Any, out: Any) -> None:
        np.testing.assert_allclose(logits, v[f"incr.{name}.logits"], **WITHIN)
        for i, tap in enumerate(out.taps):
            if (wanted := v.get(f"incr.{name}.hidden.{i}")) is not None:
                np.testing.assert_allclose(tap, wanted, **WITHIN)
        right = out.hidden.shape[1] if name != "block1" else case.keep - case.prefill
        wanted = final[:, at : at + right]
        np.testing.assert_allclose(out.hidden[:, :right], wanted, **WITHIN)

    state, *seen = cached(cached.empty, ids[:, : case.prefill], case.prefill)
    same("prefill", 0, *seen)
    state, *seen = cached(state, v["incr.block1.input_ids"], case.keep - case.prefill)
    same("block1", case.prefill, *seen)
    assert state.position.tolist() == [case.keep] * 2
    state, *seen = cached(state, v["incr.block2.input_ids"], case.block)
    same("block2", case.keep, *seen)
    for i in range(v["incr.step.input_ids"].shape[1]):
        state, logits, out = cached(state, v["incr.step.input_ids"][:, i : i + 1], 1)
        np.testing.assert_allclose(logits[:, 0], v["incr.step.logits"][:, i], **WITHIN)
        wanted = v["hidden.1"][:, case.keep + case.block + i]
        np.testing.assert_allclose(out.taps[1][:, 0], wanted, **WITHIN)
    assert state.position.tolist() == [case.seq] * 2


@but("qwen3_moe")
def test_a_long_sequence_chunk_by_chunk(case: SimpleNamespace, cached: Cached) -> None:
    ids, wanted = case.vectors["long.input_ids"], case.vectors["long.logits"]
    state, at = cached.empty, 0
    for width in (32, 32, 32, 32, 8):
        part = np.repeat(ids[:, at : at + width], 2, axis=0)
        state, logits, _ = cached(state, part, width)
        np.testing.assert_allclose(logits[:1], wanted[:, at : at + width], **WITHIN)
        at += width
    assert at == case.long


@pytest.mark.sample("llama3", "qwen3_moe", "gemma3")
@but("gpt_oss")
def test_the_engine_continues_greedily_as_transformers_does(case: SimpleNamespace) -> None:
    engine = dj.load(case.path, plan=dj.Plan(rows=2, max_length=64, chunk=16, block=8))
    prompts = case.vectors["input_ids"][:, : case.prompt].tolist()
    results = engine.generate_many(prompts, max_tokens=case.greedy, ignore_eos=True)
    assert [r.token_ids for r in results] == case.vectors["greedy.tokens"].tolist()
