"""Qwen3.5 and Qwen3-Next against transformers; C1 with recurrent states, LFM2's among them."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import dflash_jax as dj
from dflash_jax.converters.models import open_model
from dflash_jax.converters.names.published import fields
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import ConfigError
from dflash_jax.families.configs import read_target_config, target_config
from dflash_jax.families.lfm2 import Lfm2Config
from dflash_jax.families.qwen3_5 import HybridConfig
from dflash_jax.graph.build import compile_programs, jit
from dflash_jax.graph.keys import ProgramKey, Step
from dflash_jax.graph.memory import budget
from dflash_jax.graph.state import DecodeState, commit
from dflash_jax.graph.steps.inputs import ForcedTokensInputs
from dflash_jax.kernels.caches import LayerCache, RecurrentCache
from dflash_jax.networks import build_pair
from dflash_jax.testing import (
    folder_params,
    planned,
    random_engine,
    random_params,
    scripted_engine,
    set_script,
    tiny_drafter,
    tiny_hybrid,
    tiny_target,
)

WITHIN = {"atol": 1e-3, "rtol": 0}
CASES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_vl", "qwen3_5_moe_vl", "qwen3_next")
SOAKED = ("qwen3_5_vl", "qwen3_5_moe_vl")
CHUNK, BLOCK, NEW = 16, 4, 40


@pytest.fixture(scope="module")
def dense(oracle: Path) -> SimpleNamespace:
    return read_case(oracle / "targets" / "qwen3_5")


def read_case(path: Path) -> SimpleNamespace:
    lengths = json.loads((path / "meta.json").read_text())["lengths"]
    return SimpleNamespace(path=path, vectors=load_file(path / "vectors.safetensors"), **lengths)


# -- against transformers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name in SOAKED)) for name in CASES]
)
def test_logits_and_hidden_states_of_a_whole_pass(oracle: Path, name: str) -> None:
    case = read_case(oracle / "targets" / name)
    out = dj.load_target(case.path).forward(case.vectors["input_ids"])
    np.testing.assert_allclose(out.logits, case.vectors["logits"], **WITHIN)
    assert len(out.hidden) == sum(name.startswith("hidden.") for name in case.vectors)
    for i, state in enumerate(out.hidden):
        np.testing.assert_allclose(state, case.vectors[f"hidden.{i}"], **WITHIN)


@pytest.mark.parametrize("name", CASES)
def test_both_spellings_of_a_config_mean_the_same(oracle: Path, name: str, tmp_path: Path) -> None:
    path = oracle / "targets" / name
    shutil.copy(path / "config.hub.json", tmp_path / "config.json")
    config = read_target_config(tmp_path)
    assert config == read_target_config(path)
    assert isinstance(config, HybridConfig)
    assert HybridConfig.from_json(config.to_json()) == config
    assert target_config(fields(config, config.dtype)) == config


def test_other_inputs_and_predictors_are_set_aside_and_named(oracle: Path) -> None:
    model = open_model(oracle / "targets" / "qwen3_5_vl", role="target")
    model.check()
    reasons = {name.split(".")[0]: why for name, why in model.tensors.ignored.items()}
    assert set(reasons) == {"model", "mtp"}
    assert all(n.startswith(("model.visual.", "mtp.")) for n in model.tensors.ignored)


class Cached:
    """A target with its caches, run call by call: in chunks, then token by token."""

    def __init__(self, path: Path):
        config = read_target_config(path)
        self.pair = build_pair(config, None)
        self.params = {"target": jax.device_put(folder_params(path, config))}
        plan = dj.Plan(rows=2, max_length=160, block=8, chunk=32, dtype="float32")
        self.empty = planned(config, None, plan).empty_state()
        self.taps = tuple(range(config.num_layers + 1))
        self.run: Any = jit(self._run, static_argnums=4)

    def _run(self, params: Any, state: DecodeState, ids: Any, n: Any, chunked: bool) -> Any:
        out = self.pair.target_call(
            params, ids, state.target, state.position, taps=self.taps, chunked=chunked
        )
        logits = self.pair.target_call(params, out.hidden, method="logits")
        return commit(state, out.caches, (), n, ids[:, -1]), logits, out.taps

    def __call__(self, state: DecodeState, ids: np.ndarray, keep: int) -> Any:
        n = np.full(len(ids), keep, np.int32)
        return self.run(self.params, state, ids, n, ids.shape[1] == 32)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.soak] * (name in ("qwen3_5_moe", *SOAKED)))
        for name in (*CASES, "lfm2")
    ],
)
def case(request: pytest.FixtureRequest, oracle: Path) -> SimpleNamespace:
    return read_case(oracle / "targets" / request.param)


@pytest.fixture(scope="module")
def cached(case: SimpleNamespace) -> Cached:
    return Cached(case.path)


def test_blocks_and_states_after_a_prefill_and_a_rollback(
    case: SimpleNamespace, cached: Cached
) -> None:
    v = case.vectors

    def same(name: str, logits: Any, taps: Any) -> None:
        np.testing.assert_allclose(logits, v[f"incr.{name}.logits"], **WITHIN)
        for i, tap in enumerate(taps):
            if (wanted := v.get(f"incr.{name}.hidden.{i}")) is not None:
                np.testing.assert_allclose(tap, wanted, **WITHIN)

    def same_states(name: str, state: DecodeState) -> None:
        for i, cache in enumerate(state.target):
            if not isinstance(cache, LayerCache):
                at = f"incr.{name}.state.{i}"
                inputs = np.swapaxes(cache.inputs, 1, 2)
                np.testing.assert_allclose(inputs, v[f"{at}.conv"], **WITHIN)
            if isinstance(cache, RecurrentCache):
                np.testing.assert_allclose(cache.state, v[f"{at}.recurrent"], **WITHIN)

    state, *seen = cached(cached.empty, v["input_ids"][:, : case.prefill], case.prefill)
    same("prefill", *seen)
    same_states("prefill", state)
    state, *seen = cached(state, v["incr.block1.input_ids"], case.keep - case.prefill)
    same("block1", *seen)
    same_states("rollback", state)
    state, *seen = cached(state, v["incr.block2.input_ids"], case.block)
    same("block2", *seen)
    steps = v["incr.step.input_ids"]
    state, logits, _ = cached(
        state, np.pad(steps, ((0, 0), (0, 8 - steps.shape[1]))), steps.shape[1]
    )
    np.testing.assert_allclose(logits[:, : steps.shape[1]], v["incr.step.logits"], **WITHIN)
    same_states("end", state)
    assert state.position.tolist() == [case.seq] * 2


def test_a_long_sequence_chunk_by_chunk(case: SimpleNamespace, cached: Cached) -> None:
    ids, wanted = case.vectors["long.input_ids"], case.vectors["long.logits"]
    state, at = cached.empty, 0
    for width in (32, 32, 32, 32, 8):
        part = np.repeat(ids[:, at : at + width], 2, axis=0)
        state, logits, _ = cached(state, part, width)
        np.testing.assert_allclose(logits[:1], wanted[:, at : at + width], **WITHIN)
        at += width
    assert at == case.long


@pytest.mark.sample("qwen3_5")
def test_the_engine_continues_greedily_as_transformers_does(case: SimpleNamespace) -> None:
    engine = dj.load(case.path, plan=dj.Plan(rows=2, max_length=64, chunk=16, block=8))
    prompts = case.vectors["input_ids"][:, : case.prompt].tolist()
    results = engine.generate_many(prompts, max_tokens=case.greedy, ignore_eos=True)
    assert [r.token_ids for r in results] == case.vectors["greedy.tokens"].tolist()


# -- lossless ----------------------------------------------------------------------------------


PAIR = {"num_layers": 2, "recurrent": (True, False)}
EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_size": 16,
    "shared_expert_size": 20,
    **PAIR,
}
LFM2 = Lfm2Config(
    **vars(tiny_target(model_type="lfm2", qk_norm=True)),
    recurrent=(True, False, True),
    conv_kernel=3,
    conv_bias=True,
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("float32", PAIR), id="float32"),
        pytest.param(("float32", LFM2), id="lfm2-float32"),
        pytest.param(("bfloat16", LFM2), id="lfm2-bfloat16", marks=pytest.mark.soak),
        pytest.param(("float32", {}), id="three-float32", marks=pytest.mark.soak),
        pytest.param(("bfloat16", EXPERTS), id="experts-bfloat16", marks=pytest.mark.soak),
        pytest.param(("bfloat16", {}), id="bfloat16", marks=pytest.mark.soak),
    ],
)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Two rows with a scripted drafter."""
    dtype, changes = request.param
    target = changes if isinstance(changes, Lfm2Config) else tiny_hybrid(**changes)
    chunk = 7 if target.num_experts else CHUNK
    plan = dj.Plan(rows=2, max_length=192, chunk=chunk, block=BLOCK, dtype=dtype)
    return scripted_engine(random_engine(target, tiny_drafter(target), plan))


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 97, length).tolist()


def scripts(truth: list[int], seed: int) -> Iterator[tuple[str, list[int]]]:
    rng = np.random.default_rng(seed)
    yield "oracle", truth
    yield "adversarial", [(t + 1) % 97 for t in truth]
    for share in (0.5, 0.8, 0.95):  # random acceptance
        yield f"noisy {share}", [t if rng.random() < share else (t + 1) % 97 for t in truth]


def recurrent(engine: Engine, row: int = 0) -> list[np.ndarray]:
    """Return the recurrent states of a row."""
    caches = [c for c in engine.core.runner.state.target if not isinstance(c, LayerCache)]
    return [np.asarray(x[row]) for c in caches for x in jax.tree.leaves(c)]


@pytest.mark.exhaustive
@pytest.mark.optimised
@pytest.mark.parametrize("length", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5, 90])
def test_every_accept_pattern_gives_plain_tokens_and_plain_states(
    engine: Engine, length: int
) -> None:
    prompt = prompt_of(length)
    plain = engine.generate(prompt, max_tokens=NEW, speculative=False).token_ids
    states = recurrent(engine)
    assert states[0].dtype == np.float32
    assert len(set(plain)) > (5 if isinstance(engine.graph.config, HybridConfig) else 2)
    for name, script in scripts([*prompt, *plain], seed=length):
        set_script(engine, script)
        result = engine.generate(prompt, max_tokens=NEW)
        assert result.token_ids == plain, name
        if name == "oracle":
            assert result.stats.rounds == -(-(NEW - 1) // BLOCK)
        for ours, theirs in zip(recurrent(engine), states, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.optimised
def test_a_row_does_not_depend_on_its_neighbours_or_its_past(engine: Engine) -> None:
    given = [prompt_of(n) for n in (1, 15, 33, 20)]
    alone = [engine.generate(p, max_tokens=NEW).token_ids for p in given]
    together = [r.token_ids for r in engine.generate_many(given, max_tokens=NEW)]
    assert together == alone
    idle = recurrent(engine, row=1)
    engine.generate(given[2], max_tokens=NEW)  # in row 0; row 1 is inactive
    for ours, theirs in zip(recurrent(engine, row=1), idle, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    engine.core.runner.clear_rows([0])
    assert not any(x.any() for x in recurrent(engine, row=0))
    for ours, theirs in zip(recurrent(engine, row=1), idle, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.exhaustive
@pytest.mark.optimised
def test_forced_tokens_leave_the_states_of_chosen_ones(engine: Engine) -> None:
    """R7: the same tokens, fed by forced steps of any lengths."""
    prompt = prompt_of(21)
    plain = engine.generate(prompt, max_tokens=NEW, speculative=False).token_ids
    states = recurrent(engine)
    key = ProgramKey(Step.FORCED_TOKENS)
    forced = compile_programs([engine.core.runner.compiled.programs[key]])[key]
    for cuts in ([BLOCK] * (NEW // BLOCK), [1, 3, 2] * NEW):
        engine.generate(prompt, max_tokens=1)
        state, at = engine.core.runner.state, 0
        for n in cuts:
            n = min(n, len(plain) - 1 - at)
            tokens = np.zeros((2, BLOCK), np.int32)
            tokens[0, :n] = plain[at : at + n]
            count, anchor = np.array([n, 0], np.int32), np.array([plain[at + n], 0], np.int32)
            inputs = ForcedTokensInputs(
                tokens, num_tokens=count, forced=np.ones(len(count), bool), anchor=anchor
            )
            state, _, _ = forced(engine.params, state, None, inputs)
            at += n
        engine.core.runner.state = state
        for ours, theirs in zip(recurrent(engine), states, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.exhaustive
@pytest.mark.optimised
def test_states_are_updated_in_place(engine: Engine) -> None:
    engine.warm_up()
    for executable in engine.core.runner.executables.values():
        assert executable.aliased_bytes == executable.donated_bytes > 0
        allowed = budget(
            planned(engine.graph.config, engine.graph.drafter_config, engine.plan)
        ).temporaries
        if engine.plan.dtype != "float32":  # a CPU converts weights to float32 for products
            allowed += (
                2
                * budget(
                    planned(engine.graph.config, engine.graph.drafter_config, engine.plan)
                ).weights
            )
        assert executable.temporary_bytes <= allowed, executable.key


@pytest.mark.exhaustive
def test_chunks_of_any_size_prefill_the_same_state() -> None:
    """Up to rounding, as the grid of a plan is fixed; chunks of one are token by token."""
    target = tiny_hybrid(num_layers=2, recurrent=(True, False))
    params = jax.device_put(random_params(build_pair(target, None)))
    pair, prompt = build_pair(target, None), np.asarray([prompt_of(70)], np.int32)

    @jit
    def step(state: DecodeState, ids: Any, n: Any) -> Any:
        out = pair.target_call(params, ids, state.target, state.position, chunked=True)
        return commit(state, out.caches, (), n, ids[:, -1]), out.hidden

    found = []
    for chunk in (1, 7, 64, 512):
        plan = dj.Plan(max_length=80, chunk=chunk, block=2, dtype="float32")
        state, hidden = planned(target, None, plan).empty_state(), []
        for at in range(0, 70, chunk):
            n = min(chunk, 70 - at)
            ids = np.pad(prompt[:, at : at + n], ((0, 0), (0, chunk - n)))
            state, out = step(state, ids, np.array([n], np.int32))
            hidden.append(np.asarray(out)[:, :n])
        cache = state.target[0]
        assert isinstance(cache, RecurrentCache)
        found.append((np.concatenate(hidden, axis=1), cache))
    for hidden, cache in found[1:]:
        np.testing.assert_allclose(hidden, found[0][0], atol=1e-4)
        np.testing.assert_allclose(cache.state, found[0][1].state, atol=2e-5)
        np.testing.assert_allclose(cache.inputs, found[0][1].inputs, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", [("float32", PAIR)], indirect=True, ids=["float32"])
def test_inexact_plans_commit_from_factors_and_agree_in_float32(engine: Engine) -> None:
    given, plan = prompt_of(20), dataclasses.replace(engine.plan, exact=False, plain_width=1)
    plain = engine.generate(given, max_tokens=NEW, speculative=False).token_ids
    target = engine.graph.config
    loose = scripted_engine(random_engine(target, tiny_drafter(target), plan))
    assert loose.generate(given, max_tokens=NEW, speculative=False).token_ids == plain
    for _, script in scripts([*given, *plain], seed=1):
        set_script(loose, script)
        assert loose.generate(given, max_tokens=NEW).token_ids == plain


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layer_types", ["linear_attention"] * 4, "expected 5 entries"),
        ("layer_types", ["sliding_attention"] * 5, "expected 5 entries"),
        ("layer_types", "linear_attention", "expected 5 entries"),
        ("layer_types", [["linear_attention"]] * 5, "expected 5 entries"),
        ("full_attention_interval", 3, "contradicts"),
        ("full_attention_interval", 0, "expected 1 or more"),
        ("attn_output_gate", False, "attn_output_gate is False"),
        ("mamba_ssm_dtype", "bfloat16", "mamba_ssm_dtype"),
        ("linear_num_key_heads", 3, "cannot share 3 key heads"),
        ("linear_value_head_dim", None, "lacks 'linear_value_head_dim'"),
        ("num_experts", 4, "num_experts"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_by_name(
    dense: SimpleNamespace, field: str, value: Any, message: str
) -> None:
    found = json.loads((dense.path / "config.hub.json").read_text())
    with pytest.raises(ConfigError, match=message):
        target_config(found | {field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_experts", 0, "3 of 0 experts"),
        ("num_experts", 2**31 - 1, "4096 at most"),
        ("eos_token_id", {"a": 1}, "token ids are"),
        ("num_experts_per_tok", 9, "9 of 8 experts"),
        ("norm_topk_prob", False, "norm_topk_prob is False"),
        ("mlp_only_layers", [0], "mlp_only_layers"),
        ("shared_expert_intermediate_size", None, "lacks 'shared_expert_intermediate_size'"),
    ],
)
def test_experts_that_cannot_be_run_are_refused_by_name(
    oracle: Path, field: str, value: Any, message: str
) -> None:
    path = oracle / "targets" / "qwen3_5_moe" / "config.hub.json"
    with pytest.raises(ConfigError, match=message):
        target_config(json.loads(path.read_text()) | {field: value})


def test_a_field_of_the_text_model_that_changes_the_computation_is_refused(oracle: Path) -> None:
    path = oracle / "targets" / "qwen3_5_vl" / "config.hub.json"
    config = json.loads(path.read_text())
    config["text_config"]["attention_sinks"] = True
    with pytest.raises(ConfigError, match=r"text_config asks for .*attention_sinks"):
        target_config(config)


def test_rotary_sections_do_not_affect_text(dense: SimpleNamespace) -> None:
    found = json.loads((dense.path / "config.hub.json").read_text())
    wanted = target_config(found)
    rope = found.pop("rope_parameters")
    other = {"rope_parameters": rope | {"mrope_section": [11, 11, 10]}}
    older = {"rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.25}
    older["rope_scaling"] = {"type": "default", "mrope_section": [2], "mrope_interleaved": True}
    assert wanted.rotary_dim == wanted.head_dim * rope["partial_rotary_factor"]
    assert target_config(found | other) == wanted
    if rope["partial_rotary_factor"] == 0.25:
        assert target_config(found | older) == wanted


def test_a_rescaled_embedding_rotates_the_outer_share(dense: SimpleNamespace) -> None:
    """As in transformers, for any object of rotary settings."""
    found = json.loads((dense.path / "config.hub.json").read_text())
    width, rope = found["head_dim"], found["rope_parameters"]
    plain = rope | {"partial_rotary_factor": 0.5}
    linear = plain | {"rope_type": "linear", "factor": 2.0}
    outer = {"partial_rotary_factor": 0.75}
    for extra, share in ({}, 0.25), (outer, 0.75):
        for rope, rotated in (plain, 0.5), (linear, share):
            config = target_config(found | extra | {"rope_parameters": rope})
            assert config.rotary_dim == width * rotated
