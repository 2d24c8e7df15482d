"""Weight files into parameter trees: checked first, then filled tensor by tensor, in parallel."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from converters import names
from converters.canonical import Canonical, check
from converters.hf import open_directory
from converters.names import huggingface
from converters.names.slots import Part, Slot
from converters.source import TensorSource
from dflash_jax.config import AttentionConfig, DrafterConfig, TargetConfig
from dflash_jax.errors import CheckpointError, ConfigError

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
CHUNK_BYTES = 4 << 20  # of float32, read and placed at a time: about one core's cache

Params = dict[str, Any]
Progress = Callable[[str, int], None]


def load_target(directory: str | Path, config: TargetConfig, dtype: str = "float32") -> Params:
    """A target's parameters from a Hugging Face folder, as NumPy arrays of `dtype`."""
    source = open_directory(directory)
    found = huggingface.target(source, tied=config.tie_embeddings)
    return load(found, config, dtype, where=str(directory))


def load_drafter(directory: str | Path, config: DrafterConfig, dtype: str = "float32") -> Params:
    """A drafter's parameters from a Hugging Face folder, as NumPy arrays of `dtype`."""
    found = huggingface.drafter(open_directory(directory))
    return load(found, config, dtype, where=str(directory))


def load(
    found: Canonical,
    config: AttentionConfig,
    dtype: str,
    *,
    where: str,
    progress: Progress = lambda name, nbytes: None,
) -> Params:
    """The parameter tree of `config`; CheckpointError names everything that does not fit it."""
    slots = names.slots(config)
    check(slots, found, where=where)
    kind = float_dtype(dtype)

    def fill_and_tell(slot: Slot) -> np.ndarray:
        array = fill(slot, found, kind)
        progress("/".join(slot.path), array.nbytes)
        return array

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        arrays = list(pool.map(fill_and_tell, slots))
    return tree({slot.path: array for slot, array in zip(slots, arrays, strict=True)})


def float_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a parameter dtype's name."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise ConfigError(f"dtype {name!r} is not one of {', '.join(DTYPES)}") from None


def fill(slot: Slot, source: TensorSource, dtype: np.dtype) -> np.ndarray:
    """One parameter, read and placed a few MiB at a time."""
    parameter = np.empty(slot.shape, dtype)
    for part in slot.parts:
        _place(part, part.view(parameter), source)
    return parameter


def _place(part: Part, view: np.ndarray, source: TensorSource) -> None:
    steps = view.shape[0]
    width = part.shape[-1] if len(part.shape) > 1 else 1
    rows = view.size // max(width, 1) // max(steps, 1)  # rows for each step of the first axis
    stride = max(1, CHUNK_BYTES // max(4 * rows * width, 1))
    for start in range(0, steps, stride):
        stop = min(start + stride, steps)
        values = source.read_rows(part.name, slice(start * rows, stop * rows))
        with np.errstate(over="ignore"):
            values = values.astype(view.dtype, copy=False)
        if not np.isfinite(values).all():
            raise _not_finite(part, source, view.dtype)
        view[start:stop] = values.reshape(view[start:stop].shape)


def _not_finite(part: Part, source: TensorSource, dtype: np.dtype) -> CheckpointError:
    stored = source.read(part.name)
    bad = int(stored.size - np.isfinite(stored).sum())
    if bad:
        return CheckpointError(
            f"{part.name} holds {bad} values that are NaN or infinite (NaN marks a tensor that"
            " was never loaded); fetch or export the weights again"
        )
    return CheckpointError(f"{part.name} has values outside {dtype}; choose bfloat16 or float32")


def tree(leaves: dict[tuple[str, ...], Any]) -> Params:
    """Nested dicts from paths."""
    root: Params = {}
    for path, leaf in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return root
