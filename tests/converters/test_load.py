import dataclasses
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from weight_files import ORACLE

from dflash_jax.converters.models import open_model
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families.configs import read_drafter_config, read_target_config
from dflash_jax.testing import folder_params

DRAFTERS = sorted(p.name for p in (ORACLE / "drafters").glob("v1_*"))


def count(node) -> int:
    return sum(count(v) for v in node.values()) if isinstance(node, dict) else 1


def target_folder(tmp_path, name="llama3", **changes):
    """A copy of an oracle target whose tensors are replaced (or, with None, removed)."""
    shutil.copy(ORACLE / "targets" / name / "config.json", tmp_path)
    tensors = safetensors.numpy.load_file(ORACLE / "targets" / name / "model.safetensors")
    tensors |= {k.replace("__", "."): v for k, v in changes.items()}
    kept = {k: v for k, v in tensors.items() if v is not None}
    safetensors.numpy.save_file(kept, tmp_path / "model.safetensors")
    return tmp_path, read_target_config(tmp_path)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_every_head_of_a_target_lands_in_its_group(name):
    folder = ORACLE / "targets" / name
    config = read_target_config(folder)
    params = folder_params(folder, config)
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    group, width = config.num_heads // config.num_kv_heads, config.head_dim
    for i in range(config.num_layers):
        qkv = params[f"layers_{i}"]["attention"]["qkv"]
        assert qkv.shape == (config.hidden_size, config.num_kv_heads, group + 2, width)
        at = f"model.layers.{i}.self_attn."
        for h in range(config.num_heads):
            rows = stored[f"{at}q_proj.weight"][h * width : (h + 1) * width]
            np.testing.assert_array_equal(qkv[:, h // group, h % group], rows.T)
        for k in range(config.num_kv_heads):
            for offset, x in enumerate("kv"):
                rows = stored[f"{at}{x}_proj.weight"][k * width : (k + 1) * width]
                np.testing.assert_array_equal(qkv[:, k, group + offset], rows.T)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_the_rest_of_a_target_is_transposed_or_copied(name):
    folder = ORACLE / "targets" / name
    config = read_target_config(folder)
    params = folder_params(folder, config)
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    layer, at = params["layers_1"], "model.layers.1."
    expected = {
        "gate": (layer["mlp"]["gate_up"][:, 0], stored[f"{at}mlp.gate_proj.weight"].T),
        "up": (layer["mlp"]["gate_up"][:, 1], stored[f"{at}mlp.up_proj.weight"].T),
        "down": (layer["mlp"]["down"], stored[f"{at}mlp.down_proj.weight"].T),
        "o": (layer["attention"]["o"], stored[f"{at}self_attn.o_proj.weight"].T),
        "norm": (layer["input_norm"], stored[f"{at}input_layernorm.weight"]),
        "second": (layer["post_attention_norm"], stored[f"{at}post_attention_layernorm.weight"]),
        "final": (params["norm"], stored["model.norm.weight"]),
    }
    table = stored["model.embed_tokens.weight"]
    if config.tie_embeddings:
        expected["head"] = (params["head"], table.T)
    else:
        expected["embed"] = (params["embed"], table.T)
        expected["head"] = (params["head"], stored["lm_head.weight"].T)
    for ours, theirs in expected.values():
        np.testing.assert_array_equal(ours, theirs)
    assert ("embed" in params) is not config.tie_embeddings
    leaves = sum(v.size for v in stored.values())
    assert leaves == sum(size(params))


def size(node):
    if isinstance(node, dict):
        return [s for v in node.values() for s in size(v)]
    return [node.size]


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_tensor_of_a_drafter_is_used(name):
    folder = ORACLE / "drafters" / name
    config = read_drafter_config(folder)
    params = folder_params(folder, config, "bfloat16")
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    assert sum(size(params)) == sum(v.size for v in stored.values())
    kv = params["layers_0"]["attention"]["kv"]
    assert kv.dtype == ml_dtypes.bfloat16
    keys = stored["layers.0.self_attn.k_proj.weight"].astype(ml_dtypes.bfloat16)
    second = keys.reshape(config.num_kv_heads, config.head_dim, -1)[1]
    np.testing.assert_array_equal(kv[:, 1, 0], second.T)


def test_biases_are_grouped_as_their_weights(tmp_path):
    rng = np.random.default_rng(1)
    biases = {
        f"model__layers__{i}__self_attn__{x}_proj__bias": rng.random(n).astype("f4")
        for i in range(3)
        for x, n in {"q": 64, "k": 32, "v": 32, "o": 64}.items()
    }
    folder, config = target_folder(tmp_path, **biases)
    config = dataclasses.replace(config, attention_bias=True)
    attention = folder_params(folder, config)["layers_2"]["attention"]
    q = biases["model__layers__2__self_attn__q_proj__bias"].reshape(2, 2, 16)
    v = biases["model__layers__2__self_attn__v_proj__bias"].reshape(2, 16)
    np.testing.assert_array_equal(attention["qkv_bias"][:, :2], q)
    np.testing.assert_array_equal(attention["qkv_bias"][:, 3], v)
    assert attention["o_bias"].shape == (64,)


def test_all_differences_are_named_at_once(tmp_path):
    changes = {
        "model__norm__weight": None,
        "model__layers__0__mlp__up_proj__weight": np.zeros((127, 64), "f4"),
        "model__surprise": np.zeros(3, "f4"),
        "model__layers__1__input_layernorm__weight": np.zeros(64, "i4"),
    }
    folder, config = target_folder(tmp_path, **changes)
    with pytest.raises(CheckpointError) as error:
        folder_params(folder, config)
    for line in (
        "4 differences",
        "missing: norm.weight [64]",
        "left over: surprise [3]",
        "wrong shape: layers.0.mlp.up_proj.weight is [127, 64]",
        "wrong type: layers.1.input_layernorm.weight holds I32",
    ):
        assert line in str(error.value)


def test_a_tied_head_is_dropped_when_equal_and_kept_when_not(tmp_path):
    stored = safetensors.numpy.load_file(ORACLE / "targets/qwen3/model.safetensors")
    table = stored["model.embed_tokens.weight"]
    folder, config = target_folder(tmp_path, "qwen3", lm_head__weight=table)
    assert "embed" not in folder_params(folder, config)
    folder, _ = target_folder(tmp_path, "qwen3", lm_head__weight=table + 1)
    model = open_model(folder)
    assert not model.config.tie_embeddings
    assert "they differ" in model.notes[-1]
    params = model.load("float32")
    np.testing.assert_array_equal(params["head"], params["embed"] + 1)


def test_values_that_are_not_finite_are_refused(tmp_path):
    folder, config = target_folder(tmp_path, model__norm__weight=np.full(64, np.nan, "f4"))
    with pytest.raises(CheckpointError, match=r"norm\.weight holds 64 values"):
        folder_params(folder, config)
    folder, config = target_folder(tmp_path, model__norm__weight=np.full(64, 1e6, "f4"))
    with pytest.raises(CheckpointError, match="choose bfloat16"):
        folder_params(folder, config, "float16")


def test_signalling_nans_are_refused_without_a_warning(tmp_path):
    bad = np.full(64, 0x7F81, np.uint16).view(ml_dtypes.bfloat16)
    folder, config = target_folder(tmp_path, model__norm__weight=bad)
    with pytest.raises(CheckpointError, match=r"norm\.weight holds 64 values"):
        folder_params(folder, config, "bfloat16")


def test_an_unknown_dtype_is_named():
    folder = ORACLE / "targets" / "qwen3"
    with pytest.raises(ConfigError, match="'int8' is not one of"):
        folder_params(folder, read_target_config(folder), "int8")
