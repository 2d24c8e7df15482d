"""Folders of AWQ, GPTQ and compressed-tensors, packed by those libraries."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from weight_files import ORACLE, pages_in_memory

from dflash_jax.converters import hf_grouped
from dflash_jax.converters.formats.safetensors import open_safetensors
from dflash_jax.converters.formats.source import trim_mapped_memory
from dflash_jax.converters.hf_grouped import WIDTHS
from dflash_jax.converters.hf_quantised import dequantised
from dflash_jax.converters.models import open_model
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.loading import open_pair
from dflash_jax.plan import Plan
from dflash_jax.quant.layouts import KINDS, Interleaved, Packed, dequantise
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import stored

DATA = Path(__file__).parent / "data" / "quantised"
MODELS = sorted(p.stem for p in DATA.glob("*.*.safetensors"))
MATRICES = sorted(p.stem for p in DATA.glob("*.safetensors") if p.stem not in MODELS)
TOKENS = 12
TOLERANCE = 2e-4  # of the oracle vectors


def fixture(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors of a file, and its quantization_config."""
    path = DATA / f"{name}.safetensors"
    with safetensors.safe_open(path, "np") as file:
        return safetensors.numpy.load_file(path), json.loads(file.metadata()["config"])


def folder(
    name: str, place: Path, *, settings: dict[str, Any] | None = None, own_file: str = ""
) -> tuple[Path, np.ndarray]:
    """Write a fixture as a folder, and return it with its expected logits.

    With `own_file`, the settings are in that file instead of config.json.
    """
    tensors, found = fixture(name)
    settings = found if settings is None else settings
    base = ORACLE / "targets" / name.split(".")[1]
    logits = tensors.pop("logits")
    weights = safetensors.numpy.load_file(base / "model.safetensors")
    for key in tensors:
        weights.pop(f"{key.rpartition('.')[0]}.weight", None)
    assert weights, "the fixture replaces everything"
    safetensors.numpy.save_file(weights | tensors, place / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    if own_file:
        (place / own_file).write_text(json.dumps(settings))
    else:
        config["quantization_config"] = settings
    (place / "config.json").write_text(json.dumps(config))
    return place, logits


def logits_of(path: Path, base: str) -> np.ndarray:
    model = open_model(path, role="target")
    vectors = safetensors.numpy.load_file(ORACLE / "targets" / base / "vectors.safetensors")
    ids = vectors["input_ids"][:1, :TOKENS]
    return np.asarray(
        TargetModel(model.config, model.load("float32"), "float32").forward(ids).logits
    )[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_folder_computes_the_logits_of_its_decoded_weights(tmp_path, name):
    path, expected = folder(name, tmp_path)
    ours = logits_of(path, name.split(".")[1])[-len(expected) :]
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=0)


def source_of(place: Path, tensors: dict[str, np.ndarray], settings: dict[str, Any]):
    safetensors.numpy.save_file(tensors, place / "model.safetensors")
    return dequantised(open_safetensors(place / "model.safetensors"), settings, where="config.json")


@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_is_decoded_bit_for_bit_in_any_order_of_rows(tmp_path, name):
    tensors, settings = fixture(name)
    expected = tensors.pop("decoded")
    source = source_of(tmp_path, tensors, settings)
    assert source.names() == ("proj.weight",)
    assert source.shape("proj.weight") == expected.shape
    bits = name.split("_")[1]
    assert source.kind("proj.weight") == f"INT{bits if bits.isdigit() else 4}"
    np.testing.assert_array_equal(source.read("proj.weight"), expected)
    for rows in (slice(5, 9), slice(0, 0), np.array([31, 0, 7])):
        np.testing.assert_array_equal(source.read_rows("proj.weight", rows), expected[rows])


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_model_matrix_are_those_of_the_whole(tmp_path, name):
    source = open_model(folder(name, tmp_path)[0]).tensors.source
    matrix = "model.layers.0.self_attn.q_proj.weight"
    whole = source.read(matrix)
    for rows in (slice(30, 41), np.array([63, 1, 40])):
        np.testing.assert_array_equal(source.read_rows(matrix, rows), whole[rows])


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells what a mapping holds there")
def test_files_below_decoded_tensors_leave_the_memory(tmp_path: Path) -> None:
    tensors = open_model(folder("gptq.llama3", tmp_path)[0]).tensors
    values = [tensors.read(name) for name in tensors.names()]
    assert pages_in_memory(tmp_path / "model.safetensors") > 0
    trim_mapped_memory(tensors)
    assert pages_in_memory(tmp_path / "model.safetensors") == 0
    assert all(map(np.array_equal, values, map(tensors.read, tensors.names())))


@pytest.mark.parametrize("bits", WIDTHS)
def test_words_hold_values_from_the_lowest_bit_on(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64))
    number = [sum(int(code) << i * bits for i, code in enumerate(row)) for row in codes]
    words = np.array(
        [[n >> 32 * i & 0xFFFFFFFF for i in range(2 * bits)] for n in number], np.uint32
    )
    np.testing.assert_array_equal(hf_grouped.unpacked(words, bits), codes)


def old_gptq(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k != "quant_method"}


def old_awq(settings: dict[str, Any]) -> dict[str, Any]:
    return {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize(
    ("name", "file", "spelt"),
    [
        ("gptq.llama3", "quantize_config.json", old_gptq),
        ("awq.llama3", "quant_config.json", old_awq),
    ],
)
def test_settings_in_a_file_of_their_own_count(tmp_path, name, file, spelt):
    settings = spelt(fixture(name)[1])
    path, expected = folder(name, tmp_path, settings=settings, own_file=file)
    ours = logits_of(path, "llama3")[-len(expected) :]
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=0)


def test_bits_of_single_modules_follow_from_their_shapes(tmp_path):
    tensors, settings = fixture("gptq_8")
    expected = tensors.pop("decoded")
    settings |= {"bits": 4, "dynamic": {r"+:.*proj": {"bits": 8}}}
    np.testing.assert_array_equal(
        source_of(tmp_path, tensors, settings).read("proj.weight"), expected
    )


def test_zero_points_that_are_not_packed_are_read(tmp_path):
    tensors, settings = fixture("compressed_4")
    expected = tensors.pop("decoded")
    codes = hf_grouped.unpacked(tensors["proj.weight_zero_point"].T.view(np.uint32), 4).T
    tensors["proj.weight_zero_point"] = codes.astype(np.int8) - np.int8(8)
    np.testing.assert_array_equal(
        source_of(tmp_path, tensors, settings).read("proj.weight"), expected
    )


# What is kept packed.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gptq.llama3", "Q4_0"),
        ("compressed.llama3", "Q4_0"),
        ("gptq_8", "Q8_0"),
        ("awq.llama3", "int4z"),
        ("awq_gemv.qwen3", "int4z"),
        ("gptq_borrowed", "int4z"),
        ("compressed_4", "int4z"),
    ],
)
def test_a_packed_format_holds_the_numbers_exactly(tmp_path, name, kind):
    if name in MODELS:
        source = open_model(folder(name, tmp_path)[0]).tensors.source
        matrix = "model.layers.0.mlp.down_proj.weight"
    else:
        tensors, settings = fixture(name)
        del tensors["decoded"]
        source, matrix = source_of(tmp_path, tensors, settings), "proj.weight"
    assert source.packed_kind(matrix) == kind
    arrays = source.packed(matrix)
    np.testing.assert_array_equal(dequantise(arrays, kind), source.read(matrix).T)
    found = {key: (len(a), str(a.dtype)) for key, a in arrays.items()}
    assert found == KINDS[kind].arrays(source.shape(matrix)[1])


@pytest.mark.parametrize("name", ["gptq_v2.qwen3", "compressed_order.qwen3"])
def test_matrices_with_mixed_groups_are_not_kept_packed(tmp_path, name):
    model = open_model(folder(name, tmp_path)[0])
    assert model.tensors.source.packed_kind("model.layers.0.mlp.down_proj.weight") == ""
    assert stored(model) == {}


def test_scales_that_float16_cannot_hold_are_not_kept_packed(tmp_path):
    tensors, settings = fixture("compressed_8")
    del tensors["decoded"]
    tensors["proj.weight_scale"] = np.full((32, 1), 1e-9, np.float32)
    assert source_of(tmp_path, tensors, settings).packed_kind("proj.weight") == ""


def test_an_engine_multiplies_by_the_stored_codes(tmp_path):
    path, expected = folder("awq.llama3", tmp_path)
    vectors = safetensors.numpy.load_file(ORACLE / "targets" / "llama3" / "vectors.safetensors")
    plan = Plan(weights="packed", dtype="float32", max_length=64)
    engine = open_pair(path, None).engine(plan)
    assert isinstance(engine.params["target"]["layers_0"]["mlp"]["down"], Packed | Interleaved)
    prompt = vectors["input_ids"][0, :TOKENS].tolist()
    assert engine.generate(prompt, max_tokens=1).token_ids == [expected[-1].argmax()]


# Bad input.
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("awq.llama3", {"version": "gemv_fast"}, "version is 'gemv_fast'.*gemm and gemv"),
        ("awq.llama3", {"version": 7}, "version is '7'"),
        ("awq.llama3", {"bits": 8}, "bits is 8; AWQ weights have 4"),
        ("gptq.llama3", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("gptq.llama3", {"is_marlin_format": True}, "checkpoint_format is 'marlin'"),
        ("gptq.llama3", {"bits": 5}, "bits is 5; supported are 2, 3, 4, 8"),
        ("gptq.llama3", {"group_size": 0}, "group_size is 0"),
        ("compressed.llama3", {"format": "marlin-24"}, "format 'marlin-24'"),
        ("compressed.llama3", {"format": ["pack-quantized"]}, r"format \["),
        ("compressed.llama3", {"transform_config": {"a": 1}}, "rotations"),
        ("compressed.llama3", {"sparsity_config": {"format": "sparse-24"}}, "sparse weights"),
        ("compressed.llama3", {"config_groups": {"a": {"format": "nvfp4"}}}, "nvfp4"),
        (
            "compressed.llama3",
            {"config_groups": {"a": {"weights": {"num_bits": 5, "type": "int"}}}},
            "num_bits is 5",
        ),
        (
            "compressed.llama3",
            {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}},
            "type is 'float'",
        ),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path, name, change, message):
    settings = fixture(name)[1] | change
    with pytest.raises(ConfigError, match=message):
        open_model(folder(name, tmp_path, settings=settings)[0])


def cut(tensors: dict[str, np.ndarray], name: str) -> None:
    tensors[name] = tensors[name][: len(tensors[name]) // 2]


def out_of_range(tensors: dict[str, np.ndarray], name: str) -> None:
    tensors[name] = tensors[name] + np.int32(1)


def removed(tensors: dict[str, np.ndarray], name: str) -> None:
    del tensors[name]


def as_float(tensors: dict[str, np.ndarray], name: str) -> None:
    tensors[name] = tensors[name].astype(np.float32)


def as_bytes(tensors: dict[str, np.ndarray], name: str) -> None:
    tensors[name] = tensors[name].astype(np.int8)


def emptied(tensors: dict[str, np.ndarray], name: str) -> None:
    tensors[name] = tensors[name][:, :0]


def doubled(tensors: dict[str, np.ndarray], name: str) -> None:
    tensors["proj.weight"] = np.zeros((32, 64), np.float32)


@pytest.mark.parametrize(
    ("name", "change", "tensor", "message"),
    [
        ("gptq_8", out_of_range, "g_idx", "names group 2, but there are scales for 2 groups"),
        ("gptq_8", cut, "g_idx", "qweight has the shape"),
        ("gptq_8", as_float, "g_idx", "expected 64 integers"),
        ("gptq_8", cut, "scales", r"scales has the shape \[1, 32\], expected \[2, 32\]"),
        ("gptq_8", cut, "qzeros", "qzeros has the shape"),
        ("gptq_8", removed, "qzeros", "lacks proj.qzeros"),
        ("gptq_8", removed, "scales", "lacks proj.scales"),
        ("gptq_8", as_float, "qweight", "expected a matrix of 32-bit words"),
        ("gptq_8", as_bytes, "qzeros", r"qzeros is I8 \[2, 8\]; expected a matrix of 32-bit words"),
        ("gptq_8", doubled, "qweight", "the same matrix; keep one"),
        ("compressed_4", removed, "weight_shape", "weight_shape is missing"),
        ("compressed_4", cut, "weight_scale", "weight_scale has the shape"),
        ("compressed_4", cut, "weight_zero_point", "weight_zero_point has the shape"),
        ("compressed_4", cut, "weight_shape", "expected the outputs and inputs"),
        ("compressed_4", as_float, "weight_shape", "expected the outputs and inputs"),
        ("gptq_3", emptied, "qweight", r"qweight \[6, 0\] is empty"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, name, change, tensor, message):
    tensors, settings = fixture(name)
    change(tensors, f"proj.{tensor}")
    with pytest.raises(CheckpointError, match=message):
        source_of(tmp_path, tensors, settings)


def test_words_with_gaps_between_codes_are_refused(tmp_path):
    """Early versions of compressed-tensors put ten 3-bit codes into a word."""
    tensors, settings = fixture("compressed_3")
    tensors["proj.weight_packed"] = np.zeros((32, 7), np.int32)
    with pytest.raises(CheckpointError, match="without gaps"):
        source_of(tmp_path, tensors, settings)


def test_scales_of_caches_beside_packed_weights_are_left_out(tmp_path):
    place, _ = folder("compressed.llama3", tmp_path)
    tensors = safetensors.numpy.load_file(place / "model.safetensors")
    for name in ("k_scale", "v_zero_point", "kv_scale", "k_proj.output_scale"):
        tensors[f"model.layers.0.self_attn.{name}"] = np.full(1, 0.05, np.float32)
    safetensors.numpy.save_file(tensors, place / "model.safetensors")
    model = open_model(place, role="target")
    model.check()
    assert model.notes == ("4 scales of caches and activations are not used",)
