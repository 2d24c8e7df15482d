"""Targets and drafters as GGUF: the files of an independent writer, and round trips."""

import dataclasses
import errno
import json
import os
import tracemalloc

import gguf
import numpy as np
import pytest
import safetensors.numpy
from gguf_families import write_family
from gguf_models import Q, write_target
from test_gguf_families import NAMES, TARGETS, comparable, leaves
from weight_files import ORACLE

from dflash_jax import families
from dflash_jax.config import RopeConfig
from dflash_jax.converters.cli import main
from dflash_jax.converters.compare import compare
from dflash_jax.converters.convert import convert, lines
from dflash_jax.converters.export import Weights, export, write_form
from dflash_jax.converters.formats.gguf.file import open_gguf
from dflash_jax.converters.gguf.export import as_gguf
from dflash_jax.converters.load import CHUNK_BYTES
from dflash_jax.converters.models import open_model
from dflash_jax.converters.target_tokenizer import of_model
from dflash_jax.converters.tree_source import TreeSource
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families.qwen3_5_gguf import mrope_sections
from dflash_jax.networks import build_pair
from dflash_jax.testing import random_params, tiny_target

FAMILIES = ["llama3", "qwen3", *NAMES]
SAME_BITS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")  # types that encode again to the same
# Left out by the independent writer, or other values of the same meaning.
LENIENT = ("tokenizer.ggml", "feed_forward_length", "rope.dimension_sections", "head_count_kv")


def values(reader: gguf.GGUFReader) -> dict:
    found = {name: field.contents() for name, field in reader.fields.items()}
    return {k: v for k, v in found.items() if not k.startswith(("general.", "GGUF."))}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_target_is_written_as_by_an_independent_writer(tmp_path, name):
    folder = TARGETS / name
    write = write_target if name in ("llama3", "qwen3") else write_family
    theirs = gguf.GGUFReader(write(folder, tmp_path / "theirs.gguf"))
    convert(open_model(folder), tmp_path / "ours.gguf", to="gguf", dtype="f32")
    ours = gguf.GGUFReader(tmp_path / "ours.gguf")
    expected = {tensor.name: tensor for tensor in theirs.tensors}
    assert {tensor.name for tensor in ours.tensors} == expected.keys()
    for tensor in ours.tensors:
        other = expected[tensor.name]
        assert list(tensor.shape) == list(other.shape), tensor.name
        close = 2e-7 if tensor.name.endswith("ssm_a") else 0  # an exponential of another library
        np.testing.assert_allclose(tensor.data, other.data, close, 0, err_msg=tensor.name)
    keys, found = values(theirs), values(ours)
    assert keys.keys() <= found.keys()
    unlike = {k for k in keys if found[k] != keys[k] and not any(x in k for x in LENIENT)}
    assert not unlike


@pytest.mark.parametrize("name", FAMILIES)
def test_a_round_trip_through_a_folder_changes_no_byte(tmp_path, name):
    kind = SAME_BITS[FAMILIES.index(name) % len(SAME_BITS)]
    there_and_back(tmp_path, name, kind)


@pytest.mark.soak
@pytest.mark.parametrize("kind", SAME_BITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_type_survives_a_round_trip(tmp_path, name, kind):
    there_and_back(tmp_path, name, kind)


def there_and_back(place, name: str, kind: str) -> None:
    """Convert a folder to GGUF, that to a folder, and that to GGUF."""
    folder = open_model(TARGETS / name)
    report = convert(folder, place / "a.gguf", to="gguf", dtype=kind)
    file = open_model(place / "a.gguf", role="target")
    assert comparable(file.config) == comparable(folder.config)
    assert compare(folder, file).agree
    assert kind.upper() in report["written"]
    convert(file, place / "b", dtype="float32")
    again = open_model(place / "b")
    params = leaves(file.load("float32"))
    for path, array in leaves(again.load("float32")).items():
        np.testing.assert_array_equal(array, params[path], path)
    convert(again, place / "b.gguf", to="gguf", dtype=kind)
    assert (place / "b.gguf").read_bytes() == (place / "a.gguf").read_bytes()


def test_values_of_types_that_are_not_written_survive_as_float32(tmp_path):
    """The bits of every readable type are those of its decoded values."""
    coarse = open_model(write_target(TARGETS / "llama3", tmp_path / "x.gguf", Q.MXFP4))
    convert(coarse, tmp_path / "f", dtype="float32")
    convert(open_model(tmp_path / "f"), tmp_path / "y.gguf", to="gguf", dtype="f32")
    ours, theirs = open_gguf(tmp_path / "y.gguf"), open_gguf(tmp_path / "x.gguf")
    for name in theirs.names():
        np.testing.assert_array_equal(ours.read(name), theirs.read(name), name)


def test_a_written_file_computes_the_oracle_logits_within_the_error_of_its_type(tmp_path):
    from dflash_jax.target_model import TargetModel

    folder = TARGETS / "qwen3"
    vectors = safetensors.numpy.load_file(folder / "vectors.safetensors")
    exact, model = open_model(folder), None
    for kind in SAME_BITS:
        convert(exact, tmp_path / f"{kind}.gguf", to="gguf", dtype=kind)
        file = open_model(tmp_path / f"{kind}.gguf")
        model = model or TargetModel(file.config, {}, "float32")
        model.params = file.load("float32")
        difference = np.asarray(model.forward(vectors["input_ids"]).logits) - vectors["logits"]
        error = np.linalg.norm(difference) / np.linalg.norm(vectors["logits"])
        allowed = np.linalg.norm([d.rms for d in compare(exact, file).tensors])
        assert error < 2 * allowed + 1e-5, kind


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("gemma4")])
def test_gemma_is_written_as_its_published_folder(tmp_path, name):
    """From its GGUF file: tensors by their published names, and the same configuration."""
    theirs = open_model(TARGETS / name)
    convert(open_model(write_family(TARGETS / name, tmp_path / "x.gguf")), tmp_path / "x")
    ours = open_model(tmp_path / "x")
    assert comparable(ours.config) == comparable(theirs.config)
    ours.check()
    names = {n for n in theirs.tensors.source.names() if n not in theirs.tensors.ignored}
    assert set(ours.tensors.source.names()) == names
    assert json.loads((tmp_path / "x" / "config.json").read_text())["architectures"]


def test_rows_that_blocks_do_not_divide_are_listed(tmp_path):
    report = convert(open_model(TARGETS / "gpt_oss"), tmp_path / "x.gguf", to="gguf", dtype="q4_0")
    assert report["written"] == {"Q4_0": 18, "Q8_0": 2, "F32": 37, "F16": 3}
    assert "blk.0.ffn_down_exps.weight and 2 more are F16: rows of 48" in "\n".join(lines(report))


class Generated:
    """Tensors of any size, of which only the rows that are read exist."""

    def __init__(self, config):
        self.shapes = {p.name: p.shape for slot in families.slots(config) for p in slot.parts}

    def names(self):
        return tuple(self.shapes)

    def shape(self, name):
        return self.shapes[name]

    def dtype(self, name):
        return np.dtype(np.float32)

    def kind(self, name):
        return "F32"

    def read_rows(self, name, rows):
        width = self.shapes[name][-1] if len(self.shapes[name]) > 1 else 1
        count = len(range(*rows.indices(1 << 30))) if isinstance(rows, slice) else len(rows)
        return np.ones((count, width), np.float32)


@pytest.mark.sample("q4_0")
@pytest.mark.parametrize("kind", ["f32", "q4_0"])
def test_memory_is_bounded_by_the_largest_tensor(tmp_path, kind):
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_layers": 24, "head_dim": 64}
    config = tiny_target(**sizes)
    form = as_gguf(config, Generated(config), kind)
    largest = max(tensor.nbytes for tensor in form.planned)
    tracemalloc.start()
    write_form(form, tmp_path / "x.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    parts = 16 * CHUNK_BYTES * (os.cpu_count() or 1)  # read and encoded at the same time
    assert peak < largest + parts
    assert kind == "q4_0" or largest + parts < form.nbytes / 2


def test_metadata_of_a_file_goes_with_it(tmp_path):
    source = write_target(TARGETS / "qwen3", tmp_path / "x.gguf")
    assert main(["edit", str(source), "--name", "Some Model", "--set", "general.file_type=32"]) == 0
    convert(open_model(source), tmp_path / "y.gguf", to="gguf", dtype="q8_0")
    found = open_gguf(tmp_path / "y.gguf").metadata
    assert (found["general.name"], found["general.file_type"]) == ("Some Model", 7)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama3", {"windows": (8, None)}, "a sliding window of this llama target"),
        ("qwen3", {"mlp_bias": True}, "biases of MLPs of this qwen3 target"),
        ("qwen3", {"rope": RopeConfig(kind="llama3", factor=8.0)}, "rotary scaling llama3"),
        ("qwen3_moe", {"normalise_shares": False}, "shares of experts that are not normalised"),
        ("qwen3_5", {"attention_bias": True}, "biases of attention"),
        ("gpt_oss", {"rope": RopeConfig()}, "a rotary embedding without yarn"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "experts clamped at 5"),
        ("gemma4", {"full_rope": RopeConfig(kind="linear", factor=2.0)}, "embedding linear of"),
    ],
)
def test_settings_that_files_cannot_hold_are_refused(tmp_path, name, changes, message):
    model = open_model(TARGETS / name)
    config = dataclasses.replace(model.config, **changes)
    with pytest.raises(ConfigError, match=message):
        export(Weights(config, model.tensors), tmp_path / "x.gguf", layout="gguf", dtype="f32")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (np.nan, "q8_0", r"blk\.0\.ffn_down\.weight holds 1 values that are NaN"),
        (np.inf, "f32", r"holds 1 values that are NaN or infinite"),
        (1e9, "q4_0", r"has weights as large as .*; choose bf16 or f32"),
        (1e9, "f16", r"has values outside float16"),
    ],
)
def test_weights_that_a_type_cannot_hold_are_refused(tmp_path, value, kind, message):
    config = tiny_target(hidden_size=64, intermediate_size=64)
    params = random_params(build_pair(config, None))["target"]
    down = np.array(params["layers_0"]["mlp"]["down"])
    down[3, 5] = value
    params["layers_0"]["mlp"]["down"] = down
    tree = TreeSource(params, config)
    with pytest.raises(CheckpointError, match=message):
        export(Weights(config, tree), tmp_path / "x.gguf", layout="gguf", dtype=kind)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(file, *_):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dflash_jax.converters.export.write_gguf", full)
    with pytest.raises(CheckpointError, match="disk is full; nothing was left"):
        convert(open_model(TARGETS / "qwen3"), tmp_path / "x.gguf", to="gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_drafter_of_a_target_with_several_position_rows_has_sections(tmp_path):
    """llama.cpp passes four positions a token then; the drafter rotates by the first."""
    drafter = open_model(ORACLE / "drafters" / "v1_full")
    target = open_model(TARGETS / "qwen3_5")
    for source in (target, open_model(write_family(target.path, tmp_path / "t.gguf"))):
        weights = Weights(drafter.config, drafter.tensors, tokenizer=of_model(source))
        export(weights, tmp_path / "d.gguf", layout="gguf", dtype="f32", overwrite=True)
        found = open_gguf(tmp_path / "d.gguf").metadata["dflash.rope.dimension_sections"]
        assert found.tolist() == [drafter.config.head_dim // 2, 0, 0, 0]
    plain = as_gguf(drafter.config, drafter.tensors, "f32")
    assert "dflash.rope.dimension_sections" not in plain.metadata


@pytest.mark.parametrize(("rotated", "sections"), [(64, [11, 11, 10, 0]), (8, [2, 1, 1, 0])])
def test_every_rotated_pair_belongs_to_a_position_row_of_text(rotated, sections):
    config = dataclasses.replace(
        open_model(TARGETS / "qwen3_5").config, head_dim=64, rotary_dim=rotated
    )
    assert mrope_sections(config).value == sections
    assert sum(sections) == rotated // 2
