"""Damaged adapters and quantised folders are read, or refused by name."""

import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from dflash_jax.converters.formats.safetensors import open_safetensors
from dflash_jax.converters.hf_quantised import dequantised
from dflash_jax.converters.models import open_model
from dflash_jax.errors import DFlashError
from tests.damage import damaged_tensors

TESTS = Path(__file__).parents[1]
DATA = TESTS / "converters" / "data"
COUNT = 5_000


@pytest.mark.soak
def test_damaged_quantised_folders_are_refused_by_name(tmp_path: Path) -> None:
    rng = random.Random(1)
    files = sorted((DATA / "quantised").glob("*.safetensors"))
    path = tmp_path / "model.safetensors"
    for _ in range(COUNT):
        file = rng.choice(files)
        tensors = safetensors.numpy.load_file(file)
        with safetensors.safe_open(file, "np") as opened:
            settings = json.loads(opened.metadata()["config"])
        own = {name: a for name, a in tensors.items() if name not in ("logits", "decoded")}
        own, settings = damaged_tensors(rng, own, settings)
        safetensors.numpy.save_file(own, path)
        try:
            source = dequantised(open_safetensors(path), settings, where="config.json")
        except DFlashError:
            continue
        with np.errstate(all="ignore"):
            for name in source.names():
                assert source.read(name).shape == source.shape(name)
                if getattr(source, "packed_kind", lambda name: "")(name):
                    source.packed(name)


@pytest.mark.soak
def test_damaged_adapters_are_refused_by_name(tmp_path: Path) -> None:
    rng = random.Random(2)
    folders = sorted((DATA / "adapters").iterdir())
    for _ in range(COUNT):
        folder = rng.choice(folders)
        tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors, config = damaged_tensors(rng, tensors, config)
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
        base = TESTS / "oracle" / "targets" / folder.name.split(".")[1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                open_model(base, lora=tmp_path).load("float32")
            except DFlashError:
                continue
