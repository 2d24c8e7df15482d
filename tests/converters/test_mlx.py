"""Folders that MLX quantised are read, and written as it reads them; see tests/oracle/mlx."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from weight_files import ORACLE

from dflash_jax import families
from dflash_jax.converters import mlx
from dflash_jax.converters.cli import main
from dflash_jax.converters.formats.safetensors import open_safetensors
from dflash_jax.converters.mlx import AffineSource, MlxForm
from dflash_jax.converters.models import open_model
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.quant.layouts import dequantise

VECTORS = ORACLE / "mlx" / "vectors.safetensors"
CASES = [(d, b, g) for d in ("float32", "bfloat16") for b in mlx.WIDTHS for g in mlx.GROUPS]
TARGET = ORACLE / "targets" / "mistral"


@pytest.fixture(scope="module")
def vectors():
    return safetensors.numpy.load_file(VECTORS)


def source(tmp_path, tensors, **settings):
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors")
    return AffineSource(open_safetensors(tmp_path / "x.safetensors"), settings)


def parts(vectors, dtype, bits, group, name="a"):
    at = f"{dtype}.{bits}.{group}"
    return {f"{name}.{part}": vectors[f"{at}.{part}"] for part in ("weight", "scales", "biases")}


@pytest.mark.parametrize(("dtype", "bits", "group"), CASES)
def test_every_width_and_group_is_decoded_and_packed(tmp_path, vectors, dtype, bits, group):
    numbers = vectors[f"{dtype}.{bits}.{group}.numbers"]
    found = source(tmp_path, parts(vectors, dtype, bits, group), group_size=group)
    assert found.names() == ("a.weight",)
    assert (found.shape("a.weight"), found.kind("a.weight")) == ((3, 128), f"INT{bits}")
    assert np.array_equal(found.read("a.weight"), numbers)
    assert np.array_equal(found.read_rows("a.weight", slice(1, 2)), numbers[1:2])
    kind = found.packed_kind("a.weight")
    unpacked = dequantise(found.packed("a.weight"), kind)
    assert kind == "int8_16_low"
    assert np.allclose(unpacked.T, numbers, rtol=1e-6, atol=1e-6)


def test_scales_that_float16_holds_are_packed_in_four_bits(tmp_path, vectors):
    own = parts(vectors, "float32", 4, 32)
    own |= {name: own[name].astype(np.float16) for name in ("a.scales", "a.biases")}
    found = source(tmp_path, own, group_size=32)
    assert found.packed_kind("a.weight") == "Q4_1"
    unpacked = dequantise(found.packed("a.weight"), "Q4_1")
    assert np.array_equal(unpacked.T, found.read("a.weight"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", mlx.WRITTEN_WIDTHS)
@pytest.mark.parametrize("group", mlx.GROUPS)
def test_matrices_are_quantised_as_well_as_mlx_does(vectors, dtype, bits, group):
    stored = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    values = vectors["values"].astype(stored).astype(np.float32)
    own = mlx.quantised(values, MlxForm(bits, group), stored)
    theirs = vectors[f"{dtype}.{bits}.{group}.numbers"]
    codes = mlx.unpacked(own[0], bits).reshape(3, -1, group).astype(np.float32)
    numbers = codes * own[1].astype(np.float32)[..., None] + own[2].astype(np.float32)[..., None]
    errors = [np.linalg.norm(values - x.reshape(values.shape)) for x in (numbers, theirs)]
    assert errors[0] <= 1.001 * errors[1]
    if dtype == "float32":
        assert np.allclose(numbers.reshape(values.shape), theirs, atol=1e-6)
    assert not numbers[2].any()  # a row of zeros


def test_modules_have_widths_of_their_own(tmp_path, vectors):
    tensors = parts(vectors, "float32", 4, 64, "a") | parts(vectors, "float32", 6, 32, "b.c")
    tensors["d.weight"] = np.ones((2, 2), np.float32)
    own = {"b.c": {"group_size": 32, "bits": 6}, "d": False}
    found = source(tmp_path, tensors, group_size=64, bits=4, **own)
    assert {name: found.kind(name) for name in found.names()} == {
        "a.weight": "INT4",
        "b.c.weight": "INT6",
        "d.weight": "F32",
    }
    assert np.array_equal(found.read("b.c.weight"), vectors["float32.6.32.numbers"])


def test_stacks_of_experts_have_their_usual_names(tmp_path, vectors):
    one = parts(vectors, "float32", 4, 64, "m.switch_mlp.up_proj")
    stacked = {name: np.stack([array, array[::-1]]) for name, array in one.items()}
    found = source(tmp_path, stacked, group_size=64)
    assert found.names() == ("m.experts.0.up_proj.weight", "m.experts.1.up_proj.weight")
    assert np.array_equal(
        found.read("m.experts.1.up_proj.weight"), vectors["float32.4.64.numbers"][::-1]
    )


@pytest.mark.parametrize(
    ("change", "settings", "error", "message"),
    [
        ({"a.biases": None}, {}, CheckpointError, "lacks a.biases"),
        ({}, {"group_size": 16}, ConfigError, "supported are 32, 64, 128"),
        ({}, {"group_size": True}, ConfigError, "supported are 32, 64, 128"),
        ({}, {"group_size": 128, "bits": 4}, CheckpointError, "fetch the weights again"),
        ({}, {"mode": "mxfp4"}, ConfigError, "mode 'mxfp4' of MLX is not supported"),
        ({"a.scales": np.ones((3, 3))}, {}, CheckpointError, "fetch the weights again"),
        ({"a.weight": np.ones((3, 16))}, {}, CheckpointError, "a.weight is F64"),
    ],
)
def test_matrices_that_do_not_fit_are_named(tmp_path, vectors, change, settings, error, message):
    tensors = {**parts(vectors, "float32", 4, 64), **change}
    tensors = {name: array for name, array in tensors.items() if array is not None}
    with pytest.raises(error, match=message):
        source(tmp_path, tensors, **{"group_size": 64, **settings})


@pytest.mark.parametrize(("bits", "dtype"), [(4, "bfloat16"), (8, "float16")])
def test_folders_are_written_and_read_again(capsys, tmp_path, bits, dtype):
    command = ["convert", str(TARGET), str(tmp_path / "m"), "--to", "mlx", "--dtype", dtype]
    assert main([*command, "--q-bits", str(bits), "--q-group-size", "32"]) == 0
    fields = json.loads((tmp_path / "m" / "config.json").read_text())
    settings = {"group_size": 32, "bits": bits, "mode": "affine"}
    assert fields["quantization"] == fields["quantization_config"] == settings
    stored = open_safetensors(tmp_path / "m" / "model.safetensors")
    assert stored.metadata == {"format": "mlx"}
    head = "model.layers.0.mlp.up_proj"
    assert (stored.kind(f"{head}.weight"), stored.kind(f"{head}.scales")) == (
        "U32",
        {"bfloat16": "BF16", "float16": "F16"}[dtype],
    )
    assert "model.layers.0.input_layernorm.scales" not in stored.names()
    assert main(["compare", str(TARGET), str(tmp_path / "m")]) == 0
    model = open_model(tmp_path / "m")
    paths = {"/".join(slot.path) for slot in families.slots(model.config)}
    specs = model.stored(paths)
    assert len(specs) >= 2 * model.config.num_layers
    capsys.readouterr()


def test_configs_of_mlx_need_no_method(tmp_path):
    command = ["convert", str(TARGET), str(tmp_path / "m"), "--to", "mlx"]
    assert main([*command, "--q-group-size", "32"]) == 0
    path = tmp_path / "m" / "config.json"
    fields = json.loads(path.read_text())
    for missing in ("quantization", "quantization_config"):
        path.write_text(json.dumps({k: v for k, v in fields.items() if k != missing}))
        assert "INT4" in {open_model(tmp_path / "m").tensors.kind("embed_tokens.weight")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "mlx", "--q-bits", "3"], "written are 4 and 8 bits"),
        (["--to", "mlx", "--q-group-size", "16"], "in groups of 32, 64, 128"),
        (["--q-bits", "4"], "are for --to mlx and gptq, not for safetensors"),
    ],
)
def test_forms_that_are_not_written_are_named(capsys, tmp_path, arguments, message):
    assert main(["convert", str(TARGET), str(tmp_path / "m"), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_gemma_has_its_rotary_embeddings_and_windows_where_mlx_looks(capsys, tmp_path):
    source = Path(shutil.copytree(ORACLE / "targets" / "gemma3", tmp_path / "source"))
    command = ["convert", str(source), str(tmp_path / "m"), "--to", "mlx", "--q-group-size", "32"]
    assert main(command) == 0
    path = source / "config.json"
    fields = json.loads(path.read_text())
    ropes = fields["rope_parameters"]
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert written["rope_theta"] == ropes["full_attention"]["rope_theta"]
    assert written["rope_local_base_freq"] == ropes["sliding_attention"]["rope_theta"]
    assert written["rope_scaling"]["factor"] == ropes["full_attention"]["factor"]
    assert written["sliding_window_pattern"] == 2
    assert open_model(tmp_path / "m").config == open_model(source).config
    kinds = list(reversed(fields["layer_types"]))
    path.write_text(json.dumps(fields | {"layer_types": kinds}))
    assert main([*command, "--overwrite"]) == 1
    assert "cannot have full layers that are not each n-th" in capsys.readouterr().err


def test_models_that_mlx_names_otherwise_are_refused(capsys, tmp_path):
    for model in (ORACLE / "targets" / "qwen3_next", ORACLE / "drafters" / "v1_full"):
        assert main(["convert", str(model), str(tmp_path / "m"), "--to", "mlx"]) == 1
        assert "mlx_lm.convert reads the Hugging Face folder" in capsys.readouterr().err


# Windows.


def test_a_window_becomes_gguf_for_contexts_that_fit_it(capsys, tmp_path):
    source = Path(shutil.copytree(TARGET, tmp_path / "source"))
    fields = json.loads((source / "config.json").read_text()) | {"sliding_window": 24}
    (source / "config.json").write_text(json.dumps(fields))
    assert set(open_model(source).config.windows) == {24}
    command = ["convert", str(source), str(tmp_path / "x.gguf")]
    for length, message in {
        None: "a sliding window of this mistral target",
        25: "give at most 24",
        0: "contexts of 1 to 1024 tokens",
        1025: "contexts of 1 to 1024 tokens",
    }.items():
        options = [] if length is None else ["--max-context", str(length)]
        assert main([*command, *options]) == 1
        assert message in capsys.readouterr().err
    assert main([*command, "--max-context", "24"]) == 0
    config = open_model(tmp_path / "x.gguf").config
    assert (config.max_length, any(config.windows)) == (24, False)


def test_windows_that_decide_more_than_a_mask_stay(tmp_path):
    """Gemma's layers with a window have another rotary base."""
    gemma = ORACLE / "targets" / "gemma3"
    command = ["convert", str(gemma), str(tmp_path / "x.gguf"), "--max-context", "4"]
    assert main(command) == 0
    config = open_model(tmp_path / "x.gguf").config
    assert config.max_length == 4
    assert config.windows == open_model(gemma).config.windows
