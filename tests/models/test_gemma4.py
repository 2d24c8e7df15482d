"""Gemma 4 against transformers, and speculative against plain decoding."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax.config import check_pair, paired
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import CheckpointError, ConfigError, PlanError
from dflash_jax.families.configs import read_drafter_config, read_target_config, target_config
from dflash_jax.families.gemma4 import Gemma4Config
from dflash_jax.graph.build import jit
from dflash_jax.graph.keys import ProgramKey, Step
from dflash_jax.graph.programs import declare
from dflash_jax.graph.state import DecodeState, commit
from dflash_jax.networks import build_drafter, build_pair
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import (
    folder_params,
    force_acceptance,
    planned,
    random_engine,
    random_params,
    scripted_engine,
    set_script,
    tiny_drafter,
    tiny_gemma,
)

FOLDERS = ("gemma4", "gemma4_moe", "gemma4_ple", "gemma4_unified", "gemma4_vl")
ALIKE = [pytest.param(name, marks=pytest.mark.soak) for name in ("gemma4_unified", "gemma4_vl")]
WITHIN = {"atol": 2e-4, "rtol": 0}
WIDTH = 8


class Blocks:
    """A target that runs block by block through one program, as in the engine."""

    def __init__(self, config: Gemma4Config, params: Any, dtype: str = "float32"):
        self.pair, self.params = build_pair(config, None), {"target": params}
        plan = dj.Plan(rows=2, max_length=160, block=WIDTH, chunk=WIDTH, dtype=dtype)
        self.empty = jax.device_put(planned(config, None, plan).empty_state())
        self.taps = tuple(range(config.num_layers + 1))
        self.run = jit(self._run)

    def _run(self, params: Any, state: DecodeState, ids: Any, n: Any) -> Any:
        out = self.pair.target_call(params, ids, state.target, state.position, taps=self.taps)
        logits = self.pair.target_call(params, out.hidden, method="logits")
        return commit(state, out.caches, (), n, ids[:, -1]), logits, jnp.stack(out.taps)

    def block(self, state: DecodeState, ids: np.ndarray, keep: int) -> Any:
        """Feed up to WIDTH ids, padded with junk, and commit the first `keep`."""
        fed = np.pad(ids, ((0, 0), (0, WIDTH - ids.shape[1])), constant_values=3)
        state, *seen = self.run(self.params, state, fed, np.full(len(ids), keep, np.int32))
        return state, *map(np.asarray, seen)

    def feed(self, state: DecodeState, ids: np.ndarray) -> tuple[DecodeState, np.ndarray]:
        """Feed all ids, block by block; return the state and all logits."""
        rows = []
        for at in range(0, ids.shape[1], WIDTH):
            part = ids[:, at : at + WIDTH]
            state, logits, _ = self.block(state, part, part.shape[1])
            rows.append(logits[:, : part.shape[1]])
        return state, np.concatenate(rows, axis=1)


@functools.cache
def loaded(folder: Path) -> Blocks:
    config = read_target_config(folder)
    return Blocks(config, jax.device_put(folder_params(folder, config)))


@pytest.mark.parametrize("name", FOLDERS)
def test_both_spellings_of_a_config_mean_the_same(oracle: Path, name: str) -> None:
    folder = oracle / "targets" / name
    config = read_target_config(folder)
    hub = target_config(json.loads((folder / "config.hub.json").read_text()))
    assert hub == config == Gemma4Config.from_json(config.to_json())


@pytest.mark.parametrize("name", ["gemma4", "gemma4_moe", "gemma4_ple", *ALIKE])
def test_logits_and_hidden_states_of_a_whole_pass(oracle: Path, name: str) -> None:
    folder = oracle / "targets" / name
    v = load_file(folder / "vectors.safetensors")
    out = dj.load_target(folder).forward(v["input_ids"])
    np.testing.assert_allclose(out.logits, v["logits"], **WITHIN)
    for i, state in enumerate(out.hidden):
        np.testing.assert_allclose(state, v[f"hidden.{i}"], **WITHIN)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["gemma4_ple", *(pytest.param(n, marks=pytest.mark.soak) for n in FOLDERS[:2]), *ALIKE]
)
def test_a_pass_in_bfloat16_begins_with_the_bits_of_the_reference(oracle: Path, name: str) -> None:
    folder = oracle / "targets" / name
    config, v = read_target_config(folder), load_file(folder / "vectors.safetensors")
    half = TargetModel(
        config, jax.device_put(folder_params(folder, config, "bfloat16")), "bfloat16"
    )
    out = half.forward(v["input_ids"])
    assert jnp.isfinite(out.logits).all()
    bits = [np.asarray(x).view(np.uint16) for x in (out.hidden[0], v["bf16.hidden.0"])]
    np.testing.assert_array_equal(*bits)  # the scale is rounded, then the product


@pytest.mark.parametrize(
    "name", ["gemma4_moe", "gemma4_ple", pytest.param("gemma4", marks=pytest.mark.soak), *ALIKE]
)
def test_blocks_with_rejected_tokens_rolled_back_and_long_contexts(oracle: Path, name: str) -> None:
    folder = oracle / "targets" / name
    v, run = load_file(folder / "vectors.safetensors"), loaded(folder)
    lengths = json.loads((folder / "meta.json").read_text())["lengths"]
    prefill, keep, ids = lengths["prefill"], lengths["keep"], v["input_ids"]
    state, logits = run.feed(run.empty, ids[:, :prefill])
    np.testing.assert_allclose(logits, v["incr.prefill.logits"], **WITHIN)
    for block, kept in (("block1", keep - prefill), ("block2", WIDTH)):
        state, logits, hidden = run.block(state, v[f"incr.{block}.input_ids"], kept)
        np.testing.assert_allclose(logits, v[f"incr.{block}.logits"], **WITHIN)
        for i, layer in enumerate(hidden):
            np.testing.assert_allclose(layer, v[f"incr.{block}.hidden.{i}"], **WITHIN)
    for i in range(v["incr.step.input_ids"].shape[1]):
        state, logits, _ = run.block(state, v["incr.step.input_ids"][:, i : i + 1], 1)
        np.testing.assert_allclose(logits[:, 0], v["incr.step.logits"][:, i], **WITHIN)
    assert state.position.tolist() == [lengths["seq"]] * 2
    rings = [c.ring for c in state.target]
    windows = run.pair.target.config.windows[: len(rings)]
    assert rings == [w is not None for w in windows]
    _, logits = run.feed(run.empty, np.repeat(v["long.input_ids"], 2, axis=0))
    np.testing.assert_allclose(logits[:1], v["long.logits"], **WITHIN)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gemma4_ple", *ALIKE])
def test_the_engine_continues_greedily_as_transformers_does(oracle: Path, name: str) -> None:
    folder = oracle / "targets" / name
    v = load_file(folder / "vectors.safetensors")
    engine = dj.load(folder, plan=dj.Plan(rows=2, max_length=64, chunk=8, block=8))
    results = engine.generate_many(v["input_ids"][:, :16].tolist(), max_tokens=32, ignore_eos=True)
    assert [r.token_ids for r in results] == v["greedy.tokens"].tolist()


# -- lossless ---------------------------------------------------------------------------------

WINDOW, CHUNK = 10, 16


SHORT = {"num_layers": 3, "windows": (WINDOW, None, WINDOW), "shared_layers": 1}


def make(dtype: str, *, chunk: int = CHUNK, **changes: Any) -> Engine:
    config = tiny_gemma(**changes)
    plan = dj.Plan(max_length=256, chunk=chunk, block=6, dtype=dtype)
    taps = (0, config.num_layers - 2)
    return random_engine(config, tiny_drafter(config, target_layer_ids=taps), plan)


def prompt(length: int, seed: int = 7) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "lengths", "changes"),
    [
        ("float32", (CHUNK + 1,), SHORT),
        pytest.param("bfloat16", (1, CHUNK - 1, CHUNK + 1, 50), {}, marks=pytest.mark.soak),
        pytest.param("float32", (1, CHUNK - 1, CHUNK + 1, 50), {}, marks=pytest.mark.soak),
    ],
)
def test_drafting_changes_no_token(
    dtype: str, lengths: tuple[int, ...], changes: dict[str, Any]
) -> None:
    real = make(dtype, chunk=1 if dtype == "bfloat16" else CHUNK, **changes)
    rings = [True, False] if changes else [True, False, True]  # none for layers that share
    assert [c.ring for c in real.core.runner.state.target] == rings
    scripted, rng = scripted_engine(real), np.random.default_rng(1)
    for length in lengths:
        given = prompt(length)
        new = 90 if length == 50 else 20  # longer than several windows
        plain = scripted.generate(given, max_tokens=new, speculative=False).token_ids
        assert len(set(plain)) > 5
        if not changes:  # two more programs to compile
            assert real.generate(given, max_tokens=new).token_ids == plain
        truth = [*given, *plain]
        scripts = {
            "oracle": truth,
            "adversarial": [(t + 1) % 97 for t in truth],
            "noisy": [t if rng.random() < 0.7 else int(rng.integers(97)) for t in truth],
            "pattern": force_acceptance(truth, length, [3, 0, 5, 1, 2, 4], 97),
        }
        for name, script in scripts.items():
            set_script(scripted, script)
            result = scripted.generate(given, max_tokens=new)
            assert result.token_ids == plain, (name, length)
            if name == "oracle":
                assert result.stats.rounds == -(-(new - 1) // 6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.soak)])
def test_a_tokens_bits_do_not_depend_on_its_block(dtype: str) -> None:
    """R2, R9: attention, routing and experts, at every position of a block and next to any row."""
    config = tiny_gemma(windows=(WINDOW, WINDOW, None), num_layers=3, shared_layers=0)
    params = random_params(build_pair(config, None), dtype=dtype, seed=3)["target"]
    run = Blocks(config, jax.device_put(params), dtype)
    ids = np.array([prompt(48), prompt(48, 8)], np.int32)
    _, wanted = run.feed(run.empty, ids)
    state, at, other = run.empty, 0, np.random.default_rng(2)
    for kept in (3, 1, 8, 5, 2):
        block = ids[:, at : at + WIDTH].copy()
        block[:, kept:] = other.integers(0, 97, block[:, kept:].shape)
        block[1] = other.integers(0, 97, block[1].shape)  # another row
        state, logits, _ = run.block(state, block, min(kept, block.shape[1]))
        np.testing.assert_array_equal(logits[0, :kept], wanted[0, at : at + kept])
        at += kept


# -- drafter --------------------------------------------------------------------------------


def test_a_drafter_config_without_scale_and_softcap_takes_those_of_its_target(oracle: Path) -> None:
    target = read_target_config(oracle / "targets" / "gemma4")
    explicit = read_drafter_config(oracle / "drafters" / "v1_gemma_target")
    assert (explicit.input_embedding_scale, explicit.final_logit_softcapping) == (8.0, 1.5)
    implicit = dataclasses.replace(
        explicit, input_embedding_scale=None, final_logit_softcapping=None
    )
    logits, x = np.linspace(-9, 9, 256, dtype="f4").reshape(1, 1, 256), np.ones((1, 2, 64), "f4")
    for config in (explicit, implicit, paired(target, implicit)):
        pair = build_pair(target, config)
        assert pair.drafter is not None
        np.testing.assert_array_equal(pair.drafter.scaled(jnp.asarray(x)), 8.0 * x)
        capped = pair.drafter.adjust(jnp.asarray(logits))
        np.testing.assert_allclose(capped, 1.5 * np.tanh(logits / 1.5), rtol=1e-6)
    head = pair.shared({"target": {}}).head  # so that the cap is not applied twice
    assert getattr(head, "keywords", {})["method"] == "raw_logits"
    off = dataclasses.replace(explicit, final_logit_softcapping=0.0)
    assert paired(target, off).final_logit_softcapping == 0.0


def test_a_derived_scale_is_rounded_as_in_the_target_and_an_explicit_one_is_not() -> None:
    target = tiny_gemma(hidden_size=5376, embedding_scale=5376**0.5)
    drafter = tiny_drafter(target)
    x = jnp.full((1, 1, 1), 7.0, ml_dtypes.bfloat16)
    for scale, wanted in ((None, 516.0), (5376**0.5, 512.0)):  # 7 · 73.5 and 7 · 73.32, rounded
        config = dataclasses.replace(drafter, input_embedding_scale=scale)
        assert build_drafter(paired(target, config)).scaled(x).item() == wanted


def test_taps_are_taken_where_the_plan_says() -> None:
    config = tiny_gemma(num_layers=3, windows=(WINDOW, WINDOW, None), shared_layers=0)
    params = random_params(build_pair(config, None), seed=1)
    scalars = (0.5, 2.0, 0.25)
    for i, value in enumerate(scalars):
        params["target"][f"layers_{i}"]["scalar"] = np.full(1, value, "f4")
    state = planned(
        config, None, dj.Plan(max_length=16, block=2, chunk=8, dtype="float32")
    ).empty_state()
    ids, every = jnp.asarray([prompt(8)], jnp.int32), tuple(range(4))
    pair = build_pair(config, None)

    @jit
    def run(params: Any, state: DecodeState) -> Any:
        call = functools.partial(pair.target_call, params, ids, state.target, state.position)
        return {at: call(taps=every, taps_at=at) for at in ("early", "late", "upstream")}

    outs = run(params, state)
    early, late, upstream = (np.stack(outs[at].taps) for at in ("early", "late", "upstream"))
    np.testing.assert_allclose(late[:-1], upstream[:-1], atol=1e-6)
    np.testing.assert_allclose(upstream[-1], outs["late"].hidden, atol=1e-5)
    per_layer = late[1:] / np.reshape(scalars, (3, 1, 1, 1)) - early[1:]
    assert (np.abs(per_layer).max(axis=(1, 2, 3)) > 1e-3).all()  # the per-layer input's part
    drafter = tiny_drafter(config, target_layer_ids=(0, 2))
    with pytest.raises(ConfigError, match=r"last target layer \(2\).*taps_at='late'"):
        check_pair(config, drafter)
    check_pair(config, drafter, taps_at="upstream")
    with pytest.raises(PlanError, match="taps_at is 'middle'; expected one of auto, early"):
        dj.Plan(taps_at="middle")  # pyrefly: ignore


def test_programs_follow_taps_at() -> None:
    config = tiny_gemma()
    drafter = tiny_drafter(config)
    for at, used in (("auto", "late"), ("late", "late"), ("early", "early")):
        plan = dj.Plan(max_length=32, chunk=8, block=2, dtype="float32", taps_at=at)
        pair = planned(config, drafter, plan)
        programs = declare(pair)
        keys = [pair.key(step) for step in (Step.PREFILL, Step.PLAIN, Step.SPECULATIVE)]
        for key in [ProgramKey(Step.FORCED_TOKENS), *keys]:
            step: Any = programs[key].function
            assert step.args[0].options.taps_at == used
        assert dj.Plan.parse(plan.to_json()) == plan


# -- bad input --------------------------------------------------------------------------------


def hub(oracle: Path, name: str = "gemma4", **changes: Any) -> dict[str, Any]:
    return json.loads((oracle / "targets" / name / "config.hub.json").read_text()) | changes


def test_layers_of_deep_models_are_numbered_with_zeros_in_front(oracle: Path) -> None:
    """The names that transformers writes."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    deep = hub(oracle, num_hidden_layers=12, layer_types=kinds * 2)
    own = {"num_key_value_heads": 2, "head_dim": 64}
    plain = target_config(deep | {"per_layer_config": {"5": own, "11": own}})
    assert target_config(deep | {"per_layer_config": {"05": own, "11": own}}) == plain
    with pytest.raises(ConfigError, match=r"names layers \['05', '5', '11'\]"):
        target_config(deep | {"per_layer_config": {"05": own, "5": own, "11": own}})


def test_full_layers_without_separate_sizes_have_those_of_the_others(oracle: Path) -> None:
    """Transformers writes no separate sizes if all layers have the same."""
    base = hub(oracle)
    config = target_config(base | {"per_layer_config": {}})
    assert (config.full_kv_heads, config.full_head_dim) == (config.num_kv_heads, config.head_dim)
    assert target_config(base | {"per_layer_config": None}) == config


def test_omitted_config_fields_have_the_defaults_of_transformers(oracle: Path) -> None:
    base = hub(oracle)
    theta = {"rope_type": "proportional", "rope_theta": 5.0}
    rope = target_config(base | {"rope_parameters": {"full_attention": theta}}).full_rope
    assert (rope.theta, rope.partial_rotary_factor) == (5.0, 1.0)
    rope = target_config(base | {"rope_parameters": None}).full_rope
    assert (rope.theta, rope.partial_rotary_factor) == (1e6, 0.25)
    bare = {"full_attention": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}}
    rope = target_config(base | {"rope_parameters": bare}).full_rope
    assert (rope.kind, rope.theta) == ("default", 5.0)
    for name, window in (("gemma4", 512), ("gemma4_unified", 1024)):
        assert target_config(hub(oracle, name, sliding_window=None)).windows[0] == window
    nested = hub(oracle, "gemma4_vl")
    del nested["text_config"]["model_type"]
    assert target_config(nested).model_type == "gemma4_text"


def test_a_rope_type_next_to_those_of_the_layers_is_ignored(oracle: Path) -> None:
    """Transformers writes it for models with full layers only."""
    base = hub(oracle)
    ropes = base["rope_parameters"]
    beside = base | {"rope_parameters": ropes | {"rope_type": "default"}}
    assert target_config(beside) == target_config(base)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'; expected true or false"),
        ({"sliding_window": 0}, "sliding_window is 0; expected a positive"),
        ({"layer_types": ["sliding_attention"]}, "expected 4 entries"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "expected the full-attention layers"),
        ({"num_kv_shared_layers": 3}, r"layers \[1, 3\] have no earlier layer of their kind"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4"),
        ({"enable_moe_block": True}, "lacks 'num_experts'"),
        (
            {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 5,
                "moe_intermediate_size": 8,
            },
            "top_k_experts is 5; expected 1 to 4",
        ),
        ({"num_global_key_value_heads": 3}, "4 heads cannot share 3"),
        (
            {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 9},
            "vocab_size_per_layer_input is 9",
        ),
        ({"altup_num_inputs": 4}, "does not apply to .*: altup_num_inputs 4"),
    ],
)
def test_configs_that_cannot_be_run_are_refused_by_name(
    oracle: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        target_config(hub(oracle, **changes))


def test_rope_and_nested_fields_are_not_ignored(oracle: Path) -> None:
    fields = hub(oracle)
    fields["rope_parameters"]["full_attention"] = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ConfigError, match="'dynamic' is not supported in a kind of layers"):
        target_config(fields)
    nested = hub(oracle, "gemma4_vl")
    nested["text_config"]["laurel_rank"] = 64
    with pytest.raises(ConfigError, match=r"text_config asks for .* laurel_rank"):
        target_config(nested)


def test_early_exports_are_read(oracle: Path) -> None:
    fields = hub(oracle, "gemma4_moe")
    wanted = target_config(dict(fields))
    fields["expert_intermediate_size"] = fields.pop("moe_intermediate_size")
    fields |= {"query_pre_attn_scalar": 256, "routed_layer_pattern": None}
    fields["layer_types"][-1] = "sliding_attention"  # the last layer is full all the same
    assert target_config(fields) == wanted


def test_tensors_of_other_parts_are_set_aside_and_the_rest_is_checked(
    oracle: Path, tmp_path: Path
) -> None:
    folder = oracle / "targets" / "gemma4_ple"
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    extra = {"model.layers.3.self_attn.k_proj.weight": np.zeros((32, 64), "f4")}
    extra["model.vision_tower.patch.weight"] = np.zeros((2, 2), "f4")
    config = read_target_config(folder)

    def load(tensors: dict[str, np.ndarray]) -> Any:
        save_file(tensors, tmp_path / "model.safetensors")
        return folder_params(tmp_path, config)

    jax.tree.map(
        np.testing.assert_array_equal, load(tensors | extra), folder_params(folder, config)
    )
    with pytest.raises(CheckpointError, match=r"left over: layers.2.self_attn.surprise"):
        load(tensors | {"model.layers.2.self_attn.surprise": np.zeros(2, "f4")})
    lacking = {k: v for k, v in tensors.items() if not k.endswith("layers.1.layer_scalar")}
    with pytest.raises(CheckpointError, match=r"missing: layers.1.layer_scalar \[1\]"):
        load(lacking)


def sources(config: Gemma4Config) -> Sequence[int]:
    return [config.source(i) for i in range(config.num_layers)]


def test_shared_layers_read_the_last_owner_of_their_kind() -> None:
    assert sources(tiny_gemma()) == [0, 1, 2, 2, 1]
    assert [tiny_gemma().own_parts(i) for i in range(5)] == [2, 1, 2, 0, 0]
    assert [tiny_gemma().mlp_size(i) for i in range(5)] == [48, 48, 48, 96, 96]
