"""Damaged adapters and quantised folders are read, or refused by name."""

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from dflash_jax.converters.hf_quantised import dequantised
from dflash_jax.converters.models import open_model
from dflash_jax.converters.safetensors import open_safetensors
from dflash_jax.errors import DFlashError

TESTS = Path(__file__).parents[1]
DATA = TESTS / "converters" / "data"
COUNT = 5_000
DTYPES = ("f2", "f4", "i1", "i4", "i8", "u1", "?")
VALUES = (
    None, 0, -1, 1, 3, 4, 8, 33, 2**40, 1.5, float("nan"), True, "x", "gemm", "gptq_v2",
    "pack-quantized", [], {}, [1], {"a": 1},
)  # fmt: skip
Tensors = dict[str, np.ndarray]


def damaged(rng: random.Random, array: np.ndarray) -> np.ndarray:
    """Return a tensor of another shape, dtype or content."""
    half = len(array) // 2 if array.ndim else 0
    changes: list[Callable[[], np.ndarray]] = [
        lambda: array[:half],
        lambda: array[..., :half],
        lambda: array.T,
        lambda: array.reshape(-1),
        lambda: array[None],
        lambda: array.astype(rng.choice(DTYPES)),
        lambda: np.concatenate([array, array]),
        lambda: np.full_like(array, rng.choice([-1, 0, 1, 127])),
    ]
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(rng.choice(changes)())


def changed(rng: random.Random, value: Any) -> Any:
    """Return JSON with one value replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return value | {key: changed(rng, value[key])}
    return rng.choice(VALUES)


def damage(rng: random.Random, tensors: Tensors, settings: Any) -> tuple[Tensors, Any]:
    for _ in range(rng.randrange(3)):
        settings = changed(rng, settings)
    for name in rng.sample(list(tensors), rng.randrange(3)):
        if rng.random() < 0.1:
            del tensors[name]
        else:
            tensors[name] = damaged(rng, tensors[name])
    return tensors, settings


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
        own, settings = damage(rng, own, settings)
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
        tensors, config = damage(rng, tensors, config)
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
        base = TESTS / "oracle" / "targets" / folder.name.split(".")[1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                open_model(base, lora=tmp_path).load("float32")
            except DFlashError:
                continue
