import dataclasses
import errno
import json
import resource
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from weight_files import ORACLE

from dflash_jax.config import RopeConfig
from dflash_jax.converters import export
from dflash_jax.converters.cli import main
from dflash_jax.converters.convert import convert
from dflash_jax.converters.export import Weights
from dflash_jax.converters.models import open_model
from dflash_jax.converters.names import published
from dflash_jax.converters.tree_source import TreeSource
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families.configs import (
    drafter_config,
    read_drafter_config,
    read_target_config,
    target_config,
)
from dflash_jax.networks import build_pair
from dflash_jax.testing import random_params, tiny_drafter, tiny_target
from dflash_jax.utils import atomic

DRAFTERS = sorted(p for p in (ORACLE / "drafters").glob("v[12]*"))
DRAFTER = ORACLE / "drafters" / "v1_sliding"
NEW = ("qwen2", "mistral", "smollm3", "gemma3", "olmo2", "granite", "glm4", "phi3")
NEW += ("ministral3", "qwen3_next", "lfm2")
UNLIKE_SPECULATORS = ("v1_full_causal", "v1_gemma_target", "v1_sliding_bidirectional")


def write(source, path: Path, layout="huggingface", dtype="float32", **options) -> Path:
    model = open_model(source)
    export.export(Weights(model.config, model.tensors), path, layout=layout, dtype=dtype, **options)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("folder", DRAFTERS, ids=lambda p: p.name)
def test_a_published_drafter_config_survives_being_written(folder):
    config = read_drafter_config(folder)
    assert drafter_config(published.fields(config, config.dtype)) == config


@pytest.mark.parametrize(
    "name",
    [
        "targets/llama3",
        "targets/qwen3",
        *(f"targets/{name}" for name in NEW),
        "targets/gemma4",
        "targets/gemma4_moe",
        "targets/gemma4_ple",
        "targets/gemma4_unified",
        "variants/gemma4_biases_ropes",
        "variants/gemma3_scale",
        "variants/gpt_oss_no_bias",
        "variants/granite_biases",
        "variants/ministral_windows",
        "variants/mistral_windows",
        "variants/qwen2_windows",
        "variants/smollm3_windows",
        "variants/llama_biases_dynamic",
        "variants/qwen3_moe_windows_longrope",
    ],
)
def test_a_target_config_survives_being_written(name):
    config = read_target_config(ORACLE / name)
    assert target_config(published.fields(config, config.dtype)) == config


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_a_target_without_end_tokens_has_no_empty_list_of_them(name):
    config = dataclasses.replace(
        read_target_config(ORACLE / "targets" / name), eos_token_ids=(), dtype="float32"
    )
    fields = published.fields(config, "float32")  # transformers takes the first of a list
    assert fields["eos_token_id"] is None
    assert target_config(fields) == config


def test_a_target_without_listed_windows_sees_everything():
    config = dataclasses.replace(read_target_config(ORACLE / "targets" / "qwen3"), windows=())
    again = target_config(published.fields(config, config.dtype))
    assert again.windows == (None,) * config.num_layers


@pytest.mark.parametrize(
    "name",
    [
        "targets/llama3",
        "targets/qwen3",
        "targets/ministral3",
        "targets/qwen3_next",
        "targets/lfm2",
        "drafters/v1_full",
    ],
)
def test_a_folder_written_again_holds_the_same_tensors(tmp_path, name):
    folder = ORACLE / name
    theirs = safetensors.numpy.load_file(folder / "model.safetensors")
    ours = safetensors.numpy.load_file(write(folder, tmp_path / "x") / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for tensor, array in theirs.items():
        np.testing.assert_array_equal(ours[tensor], array)


@pytest.mark.parametrize("layout", ["speculators", "gguf"])
@pytest.mark.parametrize("folder", DRAFTERS, ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trips_are_byte_stable(tmp_path, folder, layout, dtype):
    first = write(folder, tmp_path / "first", dtype=dtype)
    other = tmp_path / ("x.gguf" if layout == "gguf" else "x")
    unlike = folder.name in UNLIKE_SPECULATORS or folder.name.startswith("v2")
    if layout == "speculators" and unlike:
        with pytest.raises(ConfigError, match="has no"):
            write(first, other, layout, dtype)
        return
    write(first, other, layout, dtype)
    again = write(other, tmp_path / "again", dtype=dtype)
    known = {"num_target_layers": 0}  # neither layout has a place for it
    expected = dataclasses.replace(open_model(first).config, **known)
    assert dataclasses.replace(open_model(again).config, **known) == expected
    tensors = "model.safetensors"
    assert (again / tensors).read_bytes() == (first / tensors).read_bytes()
    write(again, other, layout, dtype, overwrite=True)
    before = contents(again)
    write(other, again, dtype=dtype, overwrite=True)
    assert contents(again) == before


@pytest.mark.parametrize("layout", ["huggingface", "speculators", "gguf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("own", [False, True])
def test_a_dspark_round_trip_is_byte_stable(tmp_path, layout, dtype, own):
    target = tiny_target()
    config = tiny_drafter(target, "dspark", own_embedding=own, own_head=own, dtype=dtype)
    tree = TreeSource(random_params(build_pair(target, config))["drafter"], config)
    name = "x.gguf" if layout == "gguf" else "x"
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    options = {"layout": layout, "dtype": dtype}
    export.export(Weights(config, tree), tmp_path / "a" / name, **options)
    again = write(tmp_path / "a" / name, tmp_path / "b" / name, **options)
    first = tmp_path / "a" / name
    if layout == "gguf":
        assert again.read_bytes() == first.read_bytes()
    else:
        assert contents(again) == contents(first)


def test_heads_that_a_layout_does_not_know_are_refused(tmp_path):
    target = tiny_target()
    config = tiny_drafter(target, "dspark", markov_head="rnn")
    tree = TreeSource(random_params(build_pair(target, config))["drafter"], config)
    with pytest.raises(ConfigError, match="a rnn Markov head has no place in a drafter GGUF"):
        export.export(Weights(config, tree), tmp_path / "x.gguf", layout="gguf", dtype="float32")


def test_the_gguf_package_reads_what_we_write(tmp_path):
    path = write(DRAFTER, tmp_path / "x.gguf", "gguf", "bfloat16")
    reader = gguf.GGUFReader(path)
    config = read_drafter_config(DRAFTER)
    taps = reader.get_field("dflash.target_layers").contents()
    assert taps == [i + 1 for i in config.target_layer_ids]
    tensors = {t.name: t for t in reader.tensors}
    assert tensors["enc.output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    stored = safetensors.numpy.load_file(DRAFTER / "model.safetensors")["fc.weight"]
    fc = tensors["fc.weight"]
    assert list(fc.shape) == list(stored.shape[::-1])
    values = gguf.quants.dequantize(fc.data, fc.tensor_type)
    np.testing.assert_array_equal(values, stored.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_float32_parameters_are_written_as_float32(tmp_path):
    folder = ORACLE / "targets" / "qwen3_5"
    written = write(folder, tmp_path / "out", dtype="bfloat16")
    ours, theirs = (safetensors.numpy.load_file(p / "model.safetensors") for p in (written, folder))
    kept = {name for name, array in ours.items() if array.dtype == np.float32}
    assert kept == {name for name in ours if name.endswith("A_log")} != set()
    for name in kept:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_parameters_in_memory_are_exported_as_their_folder(tmp_path):
    model = open_model(DRAFTER)
    tree = TreeSource(model.load("float32"), model.config)
    path = tmp_path / "x"
    export.export(Weights(model.config, tree), path, layout="huggingface", dtype="float32")
    assert contents(path) == contents(write(DRAFTER, tmp_path / "y"))


def test_parameters_that_do_not_fit_are_named():
    model = open_model(DRAFTER)
    params = model.load("float32")
    del params["fc"]
    params["norm"] = params["norm"][:3]
    with pytest.raises(CheckpointError, match="fc is missing") as error:
        TreeSource(params, model.config)
    assert "norm is of shape [3], expected [64]" in str(error.value)


def test_models_that_a_layout_cannot_hold_are_refused(tmp_path):
    target = ORACLE / "targets" / "qwen3"
    with pytest.raises(ConfigError, match="is for drafters"):
        write(target, tmp_path / "x", "speculators")
    with pytest.raises(ConfigError, match="GGUF type 'q4_k' is not one of f32"):
        write(target, tmp_path / "x.gguf", "gguf", "q4_k")
    with pytest.raises(ConfigError, match="'onnx' is not one of"):
        write(target, tmp_path / "x", "onnx")
    model = open_model(DRAFTER)
    for kind in ("llama3", "yarn"):  # with yarn's usual attention factor it would be 1.2079
        rope = RopeConfig(kind=kind, factor=8.0, original_length=64, attention_factor=1.0)
        weights = Weights(dataclasses.replace(model.config, rope=rope), model.tensors)
        with pytest.raises(ConfigError, match="has no place in this GGUF file"):
            export.export(weights, tmp_path / "x.gguf", layout="gguf", dtype="float32")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_destination_is_kept_without_overwrite(tmp_path):
    path = write(DRAFTER, tmp_path / "x")
    before = contents(path)
    with pytest.raises(CheckpointError, match="give --overwrite"):
        write(ORACLE / "drafters" / "v1_full", path)
    assert contents(path) == before
    write(ORACLE / "drafters" / "v1_full", path, overwrite=True)
    assert contents(path) != before
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(folder, *_):
        (folder / "half.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    path = write(DRAFTER, tmp_path / "x")
    before = contents(path)
    monkeypatch.setattr(export, "write_shards", full)
    with pytest.raises(CheckpointError, match="disk is full; nothing was left"):
        write(ORACLE / "drafters" / "v1_full", path, overwrite=True)
    assert contents(path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_limit_of_file_sizes_is_seen_before_anything_is_written(tmp_path):
    """orbax would go on writing in the background, and print a traceback for every array."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for to in "safetensors", "orbax":
            with pytest.raises(CheckpointError, match=r"files of at most 0\.0 MB; raise the limit"):
                convert(open_model(DRAFTER), tmp_path / "x", to=to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*tmp_path.iterdir()]


def test_too_little_space_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(CheckpointError, match=r"needs 0\.\d MB and .* has 0\.0 MB free"):
        write(DRAFTER, tmp_path / "x")
    with pytest.raises(CheckpointError, match="is not a folder; create it first"):
        write(DRAFTER, tmp_path / "nowhere" / "x")


def test_a_write_cut_short_leaves_nothing_that_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "remove", lambda path: None)  # as if the process had been killed

    def killed(name, nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(DRAFTER, tmp_path / "x", progress=killed)
    assert not (tmp_path / "x").exists()
    (left,) = tmp_path.iterdir()
    with pytest.raises(CheckpointError):
        open_model(left)


def test_weights_are_divided_into_files_with_an_index_where_a_size_is_given(capsys, tmp_path):
    command = ["convert", "tiny", str(tmp_path / "s"), "--shard-size"]
    assert main([*command, "1MB"]) == 0
    index = json.loads((tmp_path / "s" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "s").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert sorted({*index["weight_map"].values()}) == files
    tensors = {}
    for file in files:
        own = safetensors.numpy.load_file(tmp_path / "s" / file)
        assert len(own) == 1 or sum(a.nbytes for a in own.values()) <= 1_000_000
        assert {index["weight_map"][name] for name in own} == {file}
        tensors |= own
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in tensors.values())
    assert main(["compare", "tiny", str(tmp_path / "s")]) == 0
    assert main(["export", str(tmp_path / "s"), str(tmp_path / "one"), "--shard-size", "1G"]) == 0
    whole = safetensors.numpy.load_file(tmp_path / "one" / "model.safetensors")
    assert whole.keys() == tensors.keys()
    assert all((whole[name] == tensors[name]).all() for name in whole)
    capsys.readouterr()
    for options, message in {
        ("x.gguf",): "`split` divides a GGUF file",
        ("x", "--to", "orbax"): "--shard-size is for safetensors",
    }.items():
        wrong = ["convert", "tiny", str(tmp_path / options[0]), *options[1:]]
        assert main([*wrong, "--shard-size", "1G"]) == 1
        assert message in capsys.readouterr().err
