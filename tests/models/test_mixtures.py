"""Qwen3-MoE and gpt-oss: their configs, their file layouts, and C1 with experts and sinks.

Their oracle vectors are checked with those of the other targets.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import Plan
from dflash_jax.config import SLIDING
from dflash_jax.converters.models import open_model
from dflash_jax.converters.names.published import fields
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families.configs import read_target_config, target_config
from dflash_jax.families.gpt_oss import GptOssConfig
from dflash_jax.families.gpt_oss_net import clamped
from dflash_jax.families.qwen3_moe import Qwen3MoeConfig
from dflash_jax.networks import build_pair
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import (
    folder_params,
    random_engine,
    random_params,
    scripted_engine,
    set_script,
    tiny_drafter,
    tiny_gpt_oss,
    tiny_moe,
)

BLOCK, NEW = 4, 40
FAMILIES = {"qwen3_moe": (tiny_moe, Qwen3MoeConfig), "gpt_oss": (tiny_gpt_oss, GptOssConfig)}


def published(oracle: Path, family: str) -> dict[str, Any]:
    return json.loads((oracle / "targets" / family / "config.hub.json").read_text())


# -- configs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_of_a_config_mean_the_same(oracle: Path, family: str) -> None:
    config = read_target_config(oracle / "targets" / family)
    assert target_config(published(oracle, family)) == config
    assert target_config(fields(config, config.dtype)) == config
    kind = FAMILIES[family][1]
    assert type(config) is kind
    assert kind.from_json(config.to_json()) == config
    assert (config.num_experts, config.experts_per_token) == (8, 2)


def test_layers_without_experts_follow_list_and_step(oracle: Path) -> None:
    given = published(oracle, "qwen3_moe")

    def sparse(**changes: Any) -> tuple[bool, ...]:
        config = target_config(given | changes)
        assert isinstance(config, Qwen3MoeConfig)
        return config.sparse

    assert sparse() == (True, False, True)
    assert sparse(mlp_only_layers=[]) == (True,) * 3
    assert sparse(mlp_only_layers=[], decoder_sparse_step=2) == (False, True, False)


def test_even_layers_slide_where_the_kinds_are_not_listed(oracle: Path) -> None:
    given = published(oracle, "gpt_oss")
    listed = target_config(given)
    del given["layer_types"]
    assert target_config(given) == listed
    assert listed.windows == (12, None, 12)
    assert listed.attention_bias
    assert not listed.rope.truncate
    assert listed.rope.attention_factor == pytest.approx(0.1 * np.log(8) + 1)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts": None}, "lacks 'num_experts'"),
        ("qwen3_moe", {"num_experts": 1}, "2 of 1 experts"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "lacks 'num_experts_per_tok'"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "of width 0 cannot"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "layers from 0 to 2"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 0}, "expected a positive"),
        ("qwen3_moe", {"n_group": 2}, "does not apply to .*: n_group 2"),
        ("gpt_oss", {"attention_bias": 1}, "attention_bias is 1; expected true or false"),
        ("gpt_oss", {"rope_scaling": None}, "initial_context_length is 128; only 4096"),
        ("gpt_oss", {"sliding_window": None}, "lacks 'sliding_window'"),
        ("gpt_oss", {"layer_types": [SLIDING]}, "expected 3 entries"),
        ("gpt_oss", {"experts_per_token": 4}, "experts_per_token is 4; only 2"),
        ("gpt_oss", {"initial_context_length": 64}, "initial_context_length is 64; only 128"),
        ("gpt_oss", {"swiglu_limit": -1.0}, "expected a positive number"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_configs_that_cannot_be_run_name_the_field(
    oracle: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        target_config(published(oracle, family) | changes)


# -- files -------------------------------------------------------------------------------------


def copy_config(path: Path, to: Path, **changes: Any) -> None:
    given = json.loads((path / "config.hub.json").read_text())
    (to / "config.json").write_text(json.dumps(given | changes))


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            same(value, other[key])
        else:
            np.testing.assert_array_equal(value, other[key], err_msg=key)


def test_stacked_experts_load_like_single_ones(oracle: Path, tmp_path: Path) -> None:
    path = oracle / "targets" / "qwen3_moe"
    stored = load_file(path / "model.safetensors")
    for i in (0, 2):
        at = f"model.layers.{i}.mlp.experts"
        gate, up, down = (
            np.stack([stored.pop(f"{at}.{e}.{name}_proj.weight") for e in range(8)])
            for name in ("gate", "up", "down")
        )
        stored |= {f"{at}.gate_up_proj": np.concatenate([gate, up], 1), f"{at}.down_proj": down}
    copy_config(path, tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    config = read_target_config(path)
    same(folder_params(tmp_path, config), folder_params(path, config))
    open_model(tmp_path, role="target").check()
    stored["model.layers.0.mlp.experts.gate_up_proj"] = np.zeros((8, 65, 64), np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected \[experts, 2 x out, in\]"):
        folder_params(tmp_path, config)


def packed(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return experts [E, in, out] as MXFP4 blocks and scales, and their values."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    by_block = weights.transpose(0, 2, 1).reshape(len(weights), weights.shape[2], -1, 32)
    power = np.ceil(np.log2(np.abs(by_block).max(-1, keepdims=True) / 6))
    scaled = by_block / 2.0**power
    codes = np.abs(np.abs(scaled)[..., None] - table).argmin(-1).astype(np.uint8)
    meant = table[codes] * np.sign(scaled) * 2.0**power
    codes |= np.where(scaled < 0, 8, 0).astype(np.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    scales = (power[..., 0] + 127).astype(np.uint8)
    return blocks, scales, meant.reshape(len(weights), weights.shape[2], -1).transpose(0, 2, 1)


def test_mxfp4_experts_load_as_their_values(oracle: Path, tmp_path: Path) -> None:
    path = oracle / "targets" / "gpt_oss"
    rng = np.random.default_rng(0)
    dense = load_file(path / "model.safetensors")
    wider = {"intermediate_size": 64}  # a multiple of 32, as blocks need
    mxfp4 = dict(dense)
    for i in range(3):
        at = f"model.layers.{i}.mlp.experts."
        dense[f"{at}gate_up_proj_bias"] = mxfp4[f"{at}gate_up_proj_bias"] = np.zeros((8, 128), "f4")
        for name, shape in (("gate_up_proj", (8, 64, 128)), ("down_proj", (8, 64, 64))):
            blocks, scales, meant = packed(rng.standard_normal(shape))
            dense[at + name] = meant.astype(np.float32)
            del mxfp4[at + name]
            mxfp4 |= {f"{at}{name}_blocks": blocks, f"{at}{name}_scales": scales}
    folders = tmp_path / "dense", tmp_path / "mxfp4"
    for folder, stored in zip(folders, (dense, mxfp4), strict=True):
        folder.mkdir()
        copy_config(path, folder, **wider)
        save_file(
            {k: np.ascontiguousarray(v) for k, v in stored.items()}, folder / "model.safetensors"
        )
    copy_config(path, folders[1], **wider, quantization_config={"quant_method": "mxfp4"})
    config = read_target_config(folders[1])
    assert config == read_target_config(folders[0])
    plain = folder_params(folders[0], config)
    same(folder_params(folders[1], config), plain)
    model = open_model(folders[1], role="target")
    model.check()
    same(model.load("bfloat16"), folder_params(folders[0], config, "bfloat16"))
    stored = dense["model.layers.1.mlp.experts.gate_up_proj"]
    gates = plain["layers_1"]["mlp"]["experts_gate_up"][:, :, 0]
    np.testing.assert_array_equal(gates, stored[..., ::2])


def test_the_clamps_act_before_gate_and_up_meet() -> None:
    gate, up = jnp.asarray([9.0, -9.0, 1.0]), jnp.asarray([-9.0, 9.0, 0.5])
    wanted = [-6 * 7 / (1 + np.exp(-1.702 * 7)), 8 * -9 / (1 + np.exp(1.702 * 9))]
    wanted.append(1.5 / (1 + np.exp(-1.702)))
    np.testing.assert_allclose(clamped(gate, up, limit=7.0, alpha=1.702), wanted, rtol=1e-6)
    other = clamped(gate[2:], up[2:], limit=7.0, alpha=1.5)
    np.testing.assert_allclose(other, [1.5 / (1 + np.exp(-1.5))], rtol=1e-6)


def test_the_factor_of_the_gate_that_transformers_writes_is_kept(oracle: Path) -> None:
    base = published(oracle, "gpt_oss")
    assert target_config(base | {"swiglu_alpha": 1.702}) == target_config(base)
    other = target_config(base | {"swiglu_alpha": 1.5})
    assert target_config(fields(other, "float32")) == other


# -- lossless ----------------------------------------------------------------------------------


WIDE = {"qwen3_moe": 64, "gpt_oss": 512}  # prompt tokens of a call that fills many tiles
ENGINES = [
    ("gpt_oss", "bfloat16", 64),
    *(
        pytest.param((family, dtype, WIDE[family]), marks=pytest.mark.soak)
        for family in FAMILIES
        for dtype in ("bfloat16", "float32")
    ),
]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Three rows with a scripted drafter."""
    family, dtype, chunk = request.param
    target = FAMILIES[family][0]()
    plan = Plan(rows=3, max_length=192, chunk=chunk, block=BLOCK, dtype=dtype)
    return scripted_engine(random_engine(target, tiny_drafter(target), plan))


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 97, length).tolist()


@pytest.mark.exhaustive
def test_every_accept_pattern_prompt_length_and_row_gives_plain_tokens(engine: Engine) -> None:
    lengths = (1, 64, 65, 90) if engine.plan.chunk == 64 else (1, 65, 90)
    rng = np.random.default_rng(0)
    texts: dict[int, list[int]] = {}
    for length in lengths:
        prompt = prompt_of(length)
        plain = engine.generate(prompt, max_tokens=NEW, speculative=False).token_ids
        assert len(set(plain)) > 4  # not only repetitions
        truth = [*prompt, *plain]
        noise = {share: rng.random(len(truth)) < share for share in (0.0, 0.7, 1.0)}
        for share, right in noise.items():
            script = [t if ok else (t + 1) % 97 for t, ok in zip(truth, right, strict=True)]
            set_script(engine, script)
            result = engine.generate(prompt, max_tokens=NEW)
            assert result.token_ids == plain, (length, share)
            if share == 1.0:
                assert max(result.stats.acceptance_lengths) == BLOCK
        texts[length] = plain
    together = engine.generate_many([prompt_of(n) for n in lengths], max_tokens=NEW)
    assert [r.token_ids for r in together] == list(texts.values())


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_finite_and_near_those_of_float32(family: str) -> None:
    target = FAMILIES[family][0]()
    exact, rounded = (
        np.asarray(
            TargetModel(
                target, random_params(build_pair(target, None), dtype=dtype)["target"], dtype
            )
            .forward([prompt_of(40)])
            .logits
        )
        for dtype in ("float32", "bfloat16")
    )
    assert np.isfinite(rounded).all()
    assert np.median(np.abs(exact - rounded)) < 0.1 * exact.std()
