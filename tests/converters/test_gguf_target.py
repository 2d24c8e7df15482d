import dataclasses

import gguf
import numpy as np
import pytest
from gguf_models import finish, hyperparameters, rope_divisors, write_target
from weight_files import ORACLE

from dflash_jax.converters.formats.gguf.file import open_gguf
from dflash_jax.converters.formats.gguf.rope import llama3_scaling
from dflash_jax.converters.gguf.target import canonical, hf_fields, read_config
from dflash_jax.converters.load import load
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families.configs import read_target_config
from dflash_jax.testing import folder_params

Q = gguf.GGMLQuantizationType


def leaves(node, path=()):
    if isinstance(node, dict):
        return {k: v for key, child in node.items() for k, v in leaves(child, (*path, key)).items()}
    return {path: node}


def from_gguf(path):
    source = open_gguf(path)
    config = read_config(source)
    return config, load(canonical(source, config), config, "float32", where=str(path))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_a_target_written_by_gguf_gives_the_parameters_of_its_folder(tmp_path, name, fused):
    folder = ORACLE / "targets" / name
    config, params = from_gguf(write_target(folder, tmp_path / "x.gguf", fused=fused))
    theirs = read_target_config(folder)
    assert config == dataclasses.replace(theirs, eos_token_ids=())
    expected = leaves(folder_params(folder, theirs))
    assert leaves(params).keys() == expected.keys()
    for path, array in leaves(params).items():
        np.testing.assert_array_equal(array, expected[path], str(path))


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q5_1, Q.MXFP4])
def test_quantised_rows_are_reordered_whole(tmp_path, kind):
    folder = ORACLE / "targets" / "llama3"
    config, params = from_gguf(write_target(folder, tmp_path / "x.gguf", kind))
    expected = leaves(folder_params(folder, config))
    limit = {"F16": 5e-4, "BF16": 3e-3, "Q8_0": 0.012, "Q4_0": 0.17, "Q5_1": 0.07, "MXFP4": 0.18}
    for path, array in leaves(params).items():
        error = np.linalg.norm(array - expected[path]) / np.linalg.norm(expected[path])
        assert error <= limit[kind.name], path


@pytest.mark.parametrize(
    ("theta", "width", "factor", "low", "high", "original"),
    [
        (500000.0, 128, 8.0, 1.0, 4.0, 8192),
        (500000.0, 64, 32.0, 1.0, 4.0, 8192),
        (50000.0, 128, 8.0, 2.0, 6.0, 4096),
        (50000.0, 16, 8.0, 1.0, 4.0, 64),
        (10000.0, 32, 3.0, 1.0, 2.0, 40),  # one pair between the ends
        (10000.0, 16, 3.0, 1.0, 1.2, 40),  # none
        (10000.0, 32, 5.0, 2.0, 19.0, 77),
    ],
)
def test_rotary_scaling_is_recovered_from_its_divisors(theta, width, factor, low, high, original):
    rope = {
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    divisors = rope_divisors(rope, width)
    found = llama3_scaling(divisors, theta, where="x.gguf")
    again = rope_divisors({"rope_theta": theta, **found}, width)
    np.testing.assert_allclose(again, divisors, rtol=1e-3)


def test_divisors_that_fit_no_scaling_are_refused():
    with pytest.raises(ConfigError, match="fits no llama3 scaling"):
        llama3_scaling(np.array([1.0, 9.0, 2.0, 8.0]), 10000.0, where="x.gguf")


def small(tmp_path, architecture="qwen3", **changes):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
    config = {
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    hyperparameters(writer, config | changes)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    return writer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2**31}, "block_count is 2147483648; expected an integer from 1"),
        ({"num_attention_heads": 0}, "head_count is 0"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"rms_norm_eps": float("nan")}, "expected a number"),
        (
            {"architecture": "mamba"},
            "'mamba'; as a target this version reads gemma3, gemma4",
        ),
    ],
)
def test_hostile_metadata_is_refused_by_key(tmp_path, changes, message):
    finish(small(tmp_path, **changes))
    with pytest.raises(ConfigError, match=message):
        read_config(open_gguf(tmp_path / "x.gguf"))


def test_a_file_that_is_no_model_is_refused(tmp_path):
    writer = small(tmp_path)
    writer.add_type("adapter")
    finish(writer)
    with pytest.raises(Exception, match="of type 'adapter'"):
        hf_fields(open_gguf(tmp_path / "x.gguf"))


def test_per_layer_head_counts_must_agree(tmp_path):
    writer = small(tmp_path, architecture="qwen3")
    writer.kv_data[0].pop("qwen3.attention.head_count_kv")
    writer.add_head_count_kv([1, 2])
    finish(writer)
    with pytest.raises(ConfigError, match=r"head_count_kv is \[1, 2\]|head_count_kv is"):
        read_config(open_gguf(tmp_path / "x.gguf"))


@pytest.mark.parametrize("rows", [31, 33])
def test_a_reordered_tensor_of_the_wrong_height_is_refused(tmp_path, rows):
    source = open_gguf(write_target(ORACLE / "targets" / "llama3", tmp_path / "x.gguf"))
    info, shard = source._tensors["blk.0.attn_k.weight"]
    source._tensors["blk.0.attn_k.weight"] = (dataclasses.replace(info, shape=(rows, 64)), shard)
    config = read_config(source)
    with pytest.raises(CheckpointError, match=rf"k_proj\.weight is \[{rows}, 64\]"):
        load(canonical(source, config), config, "float32", where="x.gguf")


@pytest.mark.parametrize(
    ("key", "value", "fine"),
    [
        ("attention.sliding_window", 4096, False),
        ("attention.sliding_window", 0, True),
        ("expert_count", 8, False),
        ("attention.scale", 0.25, True),
        ("attention.scale", 1.0, False),
        ("logit_scale", 0.5, False),
        ("rope.scaling.yarn_attn_factor", 1.0, True),
    ],
)
def test_keys_that_would_change_the_output_are_not_ignored(tmp_path, key, value, fine):
    finish(small(tmp_path))
    source = open_gguf(tmp_path / "x.gguf")
    source.metadata[f"qwen3.{key}"] = value
    if fine:
        assert read_config(source).head_dim == 16
        return
    with pytest.raises(ConfigError, match=f"qwen3.{key} is {value}, which this version does"):
        read_config(source)
