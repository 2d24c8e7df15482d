"""Folders in GPTQ's format are written as `hf_grouped` reads those of its libraries."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from weight_files import ORACLE

from dflash_jax.converters.cli import main
from dflash_jax.converters.formats.safetensors import open_safetensors
from dflash_jax.converters.gptq import GROUPS
from dflash_jax.converters.models import open_model

TARGET = ORACLE / "targets" / "llama3"
MATRIX = "layers.0.mlp.down_proj"


def test_folders_are_written_and_read_again(capsys, tmp_path):
    place = tmp_path / "m"
    command = ["convert", str(TARGET), str(place), "--to", "gptq", "--q-group-size", "32"]
    assert main([*command, "--dtype", "bfloat16"]) == 0
    settings = json.loads((place / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == settings["checkpoint_format"] == "gptq"
    assert (settings["bits"], settings["group_size"], settings["sym"]) == (4, 32, True)
    stored = open_safetensors(place / "model.safetensors")
    out, into = open_model(TARGET).tensors.shape(f"{MATRIX}.weight")
    kinds = {part: (stored.kind(f"model.{MATRIX}.{part}"), stored.shape(f"model.{MATRIX}.{part}"))
             for part in ("qweight", "qzeros", "scales", "g_idx")}  # fmt: skip
    assert kinds == {
        "qweight": ("I32", (into // 8, out)),
        "qzeros": ("I32", (into // 32, out // 8)),
        "scales": ("F16", (into // 32, out)),
        "g_idx": ("I32", (into,)),
    }
    assert stored.kind("model.embed_tokens.weight") == "BF16"
    assert f"model.{MATRIX}.weight" not in stored.names()
    model = open_model(place)
    assert model.tensors.kind(f"{MATRIX}.weight") == "INT4"
    assert model.tensors.source.packed_kind(f"model.{MATRIX}.weight") == "Q4_0"
    assert main(["compare", str(TARGET), str(place)]) == 0
    capsys.readouterr()


def test_matrices_have_the_searched_scales(capsys, tmp_path):
    place = tmp_path / "m"
    command = ["convert", str(TARGET), str(place), "--to", "gptq", "--q-group-size", "32"]
    assert main(command) == 0
    capsys.readouterr()
    values = open_model(TARGET).tensors.read(f"{MATRIX}.weight").astype(np.float32)
    written = open_model(place).tensors.read(f"{MATRIX}.weight")
    blocks = values.reshape(-1, 32)
    widest = np.abs(blocks).max(axis=1, keepdims=True) / 7
    rounded = np.rint(blocks / widest) * widest
    errors = [np.linalg.norm(values - x.reshape(values.shape)) for x in (written, rounded)]
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("llama3", ["--q-bits", "8"], "written are 4 bits"),
        ("llama3", ["--q-group-size", "16"], "in groups of 32, 64, 128"),
        ("llama3", [], "has no groups of 128 inputs and words of 8 outputs"),
        ("qwen3_moe", [], "GPTQ's tools read the Hugging Face folder"),
    ],
)
def test_what_is_not_written_is_named(capsys, tmp_path, source, options, message):
    command = ["convert", str(ORACLE / "targets" / source), str(tmp_path / "m"), "--to", "gptq"]
    assert main([*command, *options]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e6])
def test_weights_without_a_scale_are_named(capsys, tmp_path, value):
    source = Path(shutil.copytree(TARGET, tmp_path / "source"))
    weights = safetensors.numpy.load_file(source / "model.safetensors")
    weights[f"model.{MATRIX}.weight"][3, 5] = value
    safetensors.numpy.save_file(weights, source / "model.safetensors")
    command = ["convert", str(source), str(tmp_path / "m"), "--to", "gptq", "--q-group-size"]
    assert main([*command, str(min(GROUPS))]) == 1
    assert f"{MATRIX}.weight holds values that are NaN" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
