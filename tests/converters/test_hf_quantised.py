import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from weight_files import ORACLE, raw_safetensors

from dflash_jax.converters import hf_quantised
from dflash_jax.converters.formats.safetensors import open_safetensors
from dflash_jax.converters.hf import open_directory
from dflash_jax.converters.hf_quantised import dequantised
from dflash_jax.converters.models import open_model
from dflash_jax.errors import CheckpointError, ConfigError

BLOCK = (24, 40)


def float8_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Written by hand: the safetensors package has no NumPy float8."""
    header, data = {}, b""
    kinds = {"float8_e4m3fn": "F8_E4M3", "float32": "F32", "bfloat16": "BF16", "int8": "I8"}
    for name, array in tensors.items():
        raw = array.tobytes()
        entry = {"dtype": kinds[array.dtype.name], "shape": list(array.shape)}
        header[name] = entry | {"data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    path.write_bytes(raw_safetensors(header, data))


def test_block_scales_multiply_their_block_edges_included(tmp_path):
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((50, 90)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.random((3, 3), np.float32)
    float8_file(tmp_path / "model.safetensors", {"w": codes, "w_scale_inv": scale})
    settings = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    source = dequantised(open_directory(tmp_path), settings, where="config.json")
    expected = np.empty(codes.shape, np.float32)
    for i, j in np.ndindex(*codes.shape):
        expected[i, j] = np.float32(codes[i, j]) * scale[i // BLOCK[0], j // BLOCK[1]]
    assert source.names() == ("w",)
    assert (source.kind("w"), source.dtype("w")) == ("F8_E4M3", np.float32)
    np.testing.assert_array_equal(source.read("w"), expected)
    np.testing.assert_array_equal(source.read_rows("w", np.array([49, 3])), expected[[49, 3]])


def test_as_many_blocks_as_rows_are_not_taken_for_rows(tmp_path):
    codes = np.random.default_rng(2).standard_normal((8, 64)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    float8_file(tmp_path / "model.safetensors", {"w": codes, "w_scale_inv": scale})
    settings = {"quant_method": "fp8", "weight_block_size": [4, 16]}
    source = dequantised(open_directory(tmp_path), settings, where="config.json")
    expected = codes.astype(np.float32) * np.kron(scale, np.ones((4, 16), np.float32))
    np.testing.assert_array_equal(source.read("w"), expected)


@pytest.mark.parametrize("shape", [(), (1,), (6, 1), (6,)])
def test_scales_of_the_tensor_and_of_rows(tmp_path, shape):
    rng = np.random.default_rng(1)
    codes = rng.integers(-127, 127, (6, 4)).astype(np.int8)
    scale = rng.random(shape, np.float32) if shape else np.array(0.5, np.float32)
    float8_file(tmp_path / "model.safetensors", {"w": codes, "w_scale": scale})
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    source = dequantised(open_directory(tmp_path), settings, where="config.json")
    rows = scale.reshape(-1, 1) if scale.size > 1 else scale.reshape(1, 1)
    np.testing.assert_array_equal(source.read("w"), codes.astype(np.float32) * rows)


def test_a_missing_or_misshapen_scale_is_named(tmp_path):
    codes = np.zeros((6, 4), np.int8)
    settings = {"quant_method": "fp8"}
    float8_file(tmp_path / "model.safetensors", {"w": codes})
    with pytest.raises(CheckpointError, match="without a scale"):
        dequantised(open_directory(tmp_path), settings, where="config.json")
    float8_file(tmp_path / "model.safetensors", {"w": codes, "w_scale": np.ones((5, 1), "f4")})
    with pytest.raises(CheckpointError, match=r"w_scale has the shape \[5, 1\]"):
        dequantised(open_directory(tmp_path), settings, where="config.json")


@pytest.mark.parametrize("method", ["bitsandbytes", "nvfp4", None])
def test_other_methods_are_refused_by_name(method):
    settings = {"quant_method": method}
    with pytest.raises(ConfigError, match=f"quantised by {method!r}"):
        dequantised(open_safetensors(DATA), settings, where="config.json")


ROTATION = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"location": "input"}]}}}


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8", "mxfp4", "awq", "gptq"])
@pytest.mark.parametrize("form", ["float-quantized", "int-quantized", "naive-quantized"])
def test_weights_that_were_rotated_or_thinned_are_refused_whatever_the_format(method, form):
    """Without the rotation of activations, they would be read as other weights."""
    settings = {"quant_method": method, "format": form}
    with pytest.raises(ConfigError, match="transform_config asks for rotations"):
        dequantised(open_safetensors(DATA), settings | {"transform_config": ROTATION}, where="x")
    thin = {"sparsity_config": {"format": "sparse-24-bitmask"}}
    with pytest.raises(ConfigError, match="sparse weights"):
        dequantised(open_safetensors(DATA), settings | thin, where="x")


def grouped(**weights) -> dict:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


@pytest.mark.parametrize("value", [None, {}, {"config_groups": {}}])
def test_settings_that_ask_for_nothing_are_read(tmp_path, value):
    codes = np.ones((6, 4), ml_dtypes.float8_e4m3fn)
    float8_file(tmp_path / "model.safetensors", {"w": codes, "w_scale": np.ones(1, "f4")})
    settings = grouped(strategy="tensor") | {"transform_config": value, "sparsity_config": {}}
    source = dequantised(open_directory(tmp_path), settings, where="config.json")
    np.testing.assert_array_equal(source.read("w"), np.ones((6, 4)))


def test_a_setting_that_nobody_knows_is_named(tmp_path):
    codes = np.ones((6, 4), ml_dtypes.float8_e4m3fn)
    float8_file(tmp_path / "model.safetensors", {"w": codes, "w_scale": np.ones(1, "f4")})
    for settings in (grouped() | {"a_new_idea": 2}, grouped(a_new_idea=2)):
        with pytest.warns(UserWarning, match=r"quantization_config.* ignores: a_new_idea;"):
            dequantised(open_directory(tmp_path), settings, where="config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "tensor_group"}, "strategy is 'tensor_group'"),
        ({"num_bits": 4}, "num_bits is 4; only 8"),
        ({"strategy": "block", "block_structure": [0, 4]}, "block_structure is .*; expected two"),
        ({"strategy": "block", "block_structure": "wide"}, "block_structure is 'wide'; expected"),
        ({"strategy": "block", "block_structure": 128}, "block_structure is 128; expected two"),
        ({"strategy": "block", "block_structure": [[1], None]}, "expected two positive"),
        ({"strategy": "block"}, r"block_structure is \[\]; expected two"),
    ],
)
def test_groups_that_share_scales_in_another_way_are_refused(tmp_path, change, message):
    codes = np.ones((6, 4), ml_dtypes.float8_e4m3fn)
    float8_file(tmp_path / "model.safetensors", {"w": codes, "w_scale": np.ones(1, "f4")})
    with pytest.raises(ConfigError, match=message):
        dequantised(open_directory(tmp_path), grouped(**change), where="config.json")


@pytest.mark.parametrize(
    ("weights", "block"),
    [
        ({"strategy": "block", "block_structure": [24, 40]}, (24, 40)),
        ({"strategy": "block", "block_structure": "24x40"}, (24, 40)),
        ({"strategy": "group", "group_size": 30}, (1, 30)),
    ],
)
def test_blocks_and_groups_of_compressed_tensors_are_read(tmp_path, weights, block):
    rng = np.random.default_rng(5)
    codes = rng.standard_normal((50, 90)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.random((-(-50 // block[0]), -(-90 // block[1])), np.float32)
    row = rng.random((50, 1), np.float32)
    stored = {"w": codes, "w_scale": scale, "v": codes, "v_scale": row}
    float8_file(tmp_path / "model.safetensors", stored)
    settings = grouped(**weights)
    rows = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    settings["config_groups"]["group_1"] = rows
    source = dequantised(open_directory(tmp_path), settings, where="config.json")
    spread = np.kron(scale, np.ones(block, np.float32))[:50, :90]
    expected = codes.astype(np.float32) * spread
    np.testing.assert_array_equal(source.read("w"), expected)
    np.testing.assert_array_equal(source.read_rows("w", np.array([49, 3])), expected[[49, 3]])
    np.testing.assert_array_equal(source.read("v"), codes.astype(np.float32) * row)


def test_zero_points_are_subtracted(tmp_path):
    rng = np.random.default_rng(6)
    codes = rng.integers(-128, 127, (6, 4)).astype(np.int8)
    zero, scale = rng.integers(-9, 9, (6, 1)).astype(np.int8), rng.random((6, 1), np.float32)
    stored = {"w": codes, "w_scale": scale, "w_zero_point": zero}
    float8_file(tmp_path / "model.safetensors", stored)
    settings = grouped(type="int", symmetric=False, strategy="channel")
    source = dequantised(open_directory(tmp_path), settings, where="config.json")
    expected = (codes.astype(np.float32) - zero) * scale
    assert source.names() == ("w",)
    np.testing.assert_array_equal(source.read("w"), expected)
    float8_file(tmp_path / "model.safetensors", stored | {"w_zero_point": zero[:3]})
    with pytest.raises(CheckpointError, match=r"w_zero_point has the shape \[3, 1\], expected"):
        dequantised(open_directory(tmp_path), settings, where="config.json")


def test_scales_that_are_no_floating_point_numbers_are_refused(tmp_path):
    """Exponents, as those of MXFP8, would be read as numbers of about 127."""
    codes = np.ones((6, 64), ml_dtypes.float8_e4m3fn)
    scale = np.full((6, 2), 127, np.int8)
    float8_file(tmp_path / "model.safetensors", {"w": codes, "w_scale_inv": scale})
    settings = {"quant_method": "fp8", "weight_block_size": [1, 32]}
    with pytest.raises(CheckpointError, match="w_scale_inv is I8; expected floating-point"):
        dequantised(open_directory(tmp_path), settings, where="config.json")


DATA = Path(__file__).parent / "data" / "mxfp4.safetensors"


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_mxfp4_unpacks_to_what_transformers_gives(name):
    source = dequantised(open_safetensors(DATA), {"quant_method": "mxfp4"}, where="config.json")
    expected = source.read(f"{name}_expected")  # [E, in, out]
    unpacked = source.read(name)
    np.testing.assert_array_equal(unpacked, expected)
    assert source.kind(name) == "U8"
    np.testing.assert_array_equal(source.read_rows(name, slice(1, 3)), unpacked[0, 1:3])
    last = unpacked.shape[1] + np.array([5, 0])  # of the second expert, in another order
    np.testing.assert_array_equal(source.read_rows(name, last), unpacked[1, [5, 0]])
    assert source.read_rows(name, slice(0, 0)).shape == (0, unpacked.shape[2])


def test_rows_of_experts_are_decoded_without_their_neighbours(monkeypatch):
    """Read in pieces, as a comparison does, every block is decoded once."""
    source = dequantised(open_safetensors(DATA), {"quant_method": "mxfp4"}, where="config.json")
    experts, into, out = source.shape("gate_up_proj")
    whole = source.read("gate_up_proj").reshape(-1, out)
    scales: list[int] = []
    halved_power = hf_quantised.halved_power
    monkeypatch.setattr(
        hf_quantised, "halved_power", lambda e: [scales.append(e.size), halved_power(e)][1]
    )
    for start in range(0, experts * into, 32):
        piece = slice(start, start + 32)
        np.testing.assert_array_equal(source.read_rows("gate_up_proj", piece), whole[piece])
    assert sum(scales) == experts * into // 32 * out


def test_an_fp8_target_loads_as_its_decoded_weights(tmp_path):
    folder = ORACLE / "targets" / "llama3"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = {}
    for name, array in safetensors.numpy.load_file(folder / "model.safetensors").items():
        stored[name] = array
        if "proj" in name:
            stored[name] = array.astype(ml_dtypes.float8_e4m3fn)
            shape = (-(-array.shape[0] // 16), -(-array.shape[1] // 16))
            stored[f"{name}_scale_inv"] = np.full(shape, 0.5, np.float32)
    float8_file(tmp_path / "model.safetensors", stored)
    params = open_model(tmp_path, role="target").load("float32")
    down = stored["model.layers.0.mlp.down_proj.weight"].astype(np.float32) * np.float32(0.5)
    np.testing.assert_array_equal(params["layers_0"]["mlp"]["down"], down.T)


CACHE_SCALES = (
    "kv_scale",
    "q_scale",
    "prob_scale",
    "attn.k_scale",
    "k_zero_point",
    "k_proj.output_scale",
    "k_proj.input_scale",
    "qkv_proj.v_scale",
)


def quantised_folder(place: Path, method: str, inner: bool = False) -> dict[str, np.ndarray]:
    """Write a small target whose weights and caches are quantised; return the plain weights."""
    plain = safetensors.numpy.load_file(ORACLE / "targets" / "llama3" / "model.safetensors")
    config = json.loads((ORACLE / "targets" / "llama3" / "config.json").read_text())
    settings = grouped(strategy="tensor") | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    stored = dict(plain)
    if method == "none":
        settings |= {"format": "dense", "config_groups": {}}
    else:
        for name in [n for n in plain if n.endswith("_proj.weight")]:
            stored[name] = plain[name].astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale"] = np.full(1, 0.5, np.float32)
    for name in CACHE_SCALES:
        stored[f"model.layers.0.self_attn.{name}"] = np.full(1, 0.05, np.float32)
    float8_file(place / "model.safetensors", stored)
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return plain


@pytest.mark.parametrize("method", ["fp8", "none"])
def test_scales_of_caches_are_left_out_with_one_note(tmp_path, method):
    plain = quantised_folder(tmp_path, method)
    model = open_model(tmp_path, role="target")
    model.check()
    assert model.notes == (f"{len(CACHE_SCALES)} scales of caches and activations are not used",)
    down = plain["model.layers.0.mlp.down_proj.weight"]
    if method == "fp8":
        down = down.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / 2
    np.testing.assert_array_equal(model.load("float32")["layers_0"]["mlp"]["down"], down.T)


def test_scales_that_a_model_has_are_not_taken_for_those_of_caches():
    names = ("router.scale", "router.per_expert_scale", "layer_scalar", "q_proj.weight_scale")
    assert not any(hf_quantised.UNUSED_SCALES.search(f"model.layers.0.{name}") for name in names)


def test_settings_may_be_nested_with_the_text_model(tmp_path):
    settings = grouped(strategy="tensor")
    nested = {"model_type": "gemma3", "text_config": {"quantization_config": settings}}
    assert hf_quantised.quantization(nested, tmp_path) == settings
    assert nested == {"model_type": "gemma3", "text_config": {}}
