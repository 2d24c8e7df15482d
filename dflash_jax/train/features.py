"""Features of the frozen target for token rows: computed in each step, or once and cached."""

import functools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.compiler import jit
from dflash_jax.compiler.models import CacheMaker
from dflash_jax.decode.pair import Pair
from dflash_jax.decode.sampling import argmax
from dflash_jax.errors import CheckpointError
from dflash_jax.models import target_caches
from dflash_jax.plan import Plan
from dflash_jax.train.files import remove, saved_as, sound
from dflash_jax.train.rows import TokenRows
from dflash_jax.train.threads import parallel_calls

CHUNK = 512  # tokens of a row that the target reads at a time
HEAD_TOKENS = 1024  # places whose logits exist at a time
CACHED_TOKENS = 4096  # of all rows of one call, when the cache is filled
READERS = 4  # concurrent calls, at most
REPORT_EVERY = 10.0  # seconds


@struct.dataclass
class TargetFeatures:
    """The target's outputs for token rows, the same in every epoch."""

    taps: tuple[Float[Array, "B S D"], ...]
    best: Int[Array, "B S"]  # argmax next token after each position
    hidden: Float[Array, "B S D"] | None = None  # after its final norm; for distributions


def target_features(
    pair: Pair, params: dict[str, Any], tokens: Int[Array, "B S"], *, dtype: Any, keep: bool
) -> TargetFeatures:
    """Run the target over whole rows, in chunks as in a prefill.

    Args:
      params: parameters of the target.
      keep: whether to return `hidden`.
    """
    rows, length = tokens.shape
    width = min(length, CHUNK)
    count = -(-length // width)
    plan = Plan(rows=rows, max_length=count * width, block=2, chunk=width, dtype=dtype, rings=False)
    chunks = jnp.pad(tokens, ((0, 0), (0, count * width - length)))
    chunks = jnp.moveaxis(chunks.reshape(rows, count, width), 1, 0)
    caches = target_caches(pair.target.config, CacheMaker(plan))

    def read(caches: Any, chunk: tuple[Array, Array]) -> Any:
        start = jnp.full(rows, chunk[1] * width, jnp.int32)
        where = {"taps": pair.taps, "taps_at": pair.taps_at, "chunked": True}
        out = pair.target_call({"target": params}, chunk[0], caches, start, **where)
        every = jnp.full(rows, width, jnp.int32)
        return tuple(update.commit(every) for update in out.caches), (out.taps, out.hidden)

    numbers = jnp.arange(count, dtype=jnp.int32)
    if count == 1:
        outputs = jax.tree.map(lambda x: x[None], read(caches, (chunks[0], numbers[0]))[1])
    else:
        outputs = jax.lax.scan(read, caches, (chunks, numbers))[1]
    taps, hidden = jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, count * width, -1)[:, :length], outputs
    )
    return TargetFeatures(taps, _best(pair, params, hidden), hidden if keep else None)


def _best(pair: Pair, params: dict[str, Any], hidden: Float[Array, "B S D"]) -> Int[Array, "B S"]:
    """Return the argmax next token after each position, `HEAD_TOKENS` logits at a time."""
    rows, length, width = hidden.shape
    count = math.ceil(rows * length / HEAD_TOKENS)
    part = -(-length // count)
    padded = jnp.pad(hidden, ((0, 0), (0, count * part - length), (0, 0)))
    parts = jnp.moveaxis(padded.reshape(rows, count, part, width), 1, 0)

    def best(x: Array) -> Array:
        logits = pair.target_call({"target": params}, x, method="logits")
        return argmax(logits)

    tokens = best(parts[0])[None] if count == 1 else jax.lax.map(best, parts)
    return jnp.moveaxis(tokens, 0, 1).reshape(rows, -1)[:, :length]


class FeatureCache:
    """Features of all rows on disk, one memory-mapped array per bucket and tensor.

    Stored as bfloat16 for a bfloat16 target, otherwise as float16.

    Raises:
      CheckpointError: the folder is damaged.
    """

    def __init__(self, folder: Path):
        with sound(folder):
            about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
            self._dtype = np.dtype(getattr(ml_dtypes, about["dtype"], about["dtype"]))
            self._buckets = [
                [self._open(folder / f"{i}.{name}.npy") for name in about["names"]]
                for i in range(about["buckets"])
            ]
            self._names: list[str] = about["names"]

    def _open(self, path: Path) -> np.ndarray:
        return np.load(path, mmap_mode="r")

    def at(self, bucket: int, rows: np.ndarray) -> TargetFeatures:
        """Return the features of the given rows of a bucket."""
        arrays = dict(zip(self._names, self._buckets[bucket], strict=True))
        best = np.asarray(arrays.pop("best")[rows])
        floats = {name: np.asarray(x[rows]).view(self._dtype) for name, x in arrays.items()}
        hidden: Any = floats.pop("hidden", None)
        taps: Any = tuple(floats[name] for name in sorted(floats, key=int))
        return TargetFeatures(taps, best, hidden)  # pyrefly: ignore


def fill_cache(
    folder: Path,
    pair: Pair,
    params: dict[str, Any],
    buckets: Sequence[TokenRows],
    *,
    dtype: Any,
    keep: bool,
    report: Callable[[str], None],
) -> FeatureCache:
    """Return the cache in `folder`, filling it if it does not exist.

    Args:
      report: called with progress lines.

    Raises:
      CheckpointError: the disk is full, hidden states overflow float16, or `folder` is damaged.
    """
    if folder.is_dir():
        return FeatureCache(folder)
    stored = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(np.float16)
    read = jit(lambda params, tokens: target_features(pair, params, tokens, dtype=dtype, keep=keep))
    names = [*map(str, range(len(pair.taps))), "best", *(["hidden"] if keep else [])]
    progress = RowProgress(sum(len(rows.tokens) for rows in buckets), report)
    try:
        with saved_as(folder, folder=True) as partial:
            for i, rows in enumerate(buckets):
                _fill_bucket(partial, i, rows, functools.partial(read, params), stored, progress)
            about = {"dtype": stored.name, "buckets": len(buckets), "names": names}
            (partial / "about.json").write_text(json.dumps(about), encoding="utf-8")
    except OSError as error:
        remove(folder)
        raise CheckpointError(
            f"the feature cache {folder} could not be written ({error}); free some space, or"
            " choose features=online, which needs none"
        ) from error
    return FeatureCache(folder)


class RowProgress:
    """Counts rows and reports the count every few seconds."""

    def __init__(self, total: int, report: Callable[[str], None]):
        self._done, self._total, self._report = 0, total, report
        self._next = time.monotonic() + REPORT_EVERY

    def __call__(self, rows: int) -> None:
        self._done += rows
        if time.monotonic() >= self._next:
            self._report(f"features {self._done}/{self._total} rows")
            self._next = time.monotonic() + REPORT_EVERY


def _fill_bucket(
    folder: Path, i: int, rows: TokenRows, read: Any, stored: np.dtype, progress: RowProgress
) -> None:
    count, length = rows.tokens.shape
    step = max(CACHED_TOKENS // length, 1)
    files: dict[str, np.ndarray] = {}

    def fill(start: int) -> int:
        tokens = rows.tokens[start : start + step].astype(np.int32)
        padded = np.pad(tokens, ((0, step - len(tokens)), (0, 0)))
        features: TargetFeatures = jax.device_get(read(padded))
        arrays = {str(j): tap for j, tap in enumerate(features.taps)} | {"best": features.best}
        arrays |= {} if features.hidden is None else {"hidden": features.hidden}
        for name, array in arrays.items():
            values = np.asarray(array)[: len(tokens)]
            if name != "best":
                values = _two_bytes(values, stored)
            if name not in files:  # created by the first call, before the threads start
                shape = (count, *values.shape[1:])
                path = folder / f"{i}.{name}.npy"
                files[name] = _mapped(path, values.dtype, shape)
            files[name][start : start + len(tokens)] = values
        return len(tokens)

    with ThreadPoolExecutor(parallel_calls(READERS)) as pool:
        starts = range(0, count, step)
        for start in starts[:1]:
            progress(fill(start))
        for filled in pool.map(fill, starts[1:]):
            progress(filled)
    for array in files.values():
        array.flush()  # pyrefly: ignore


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Create an array on disk with its space allocated.

    Without the allocation a full disk would kill the process when pages are written back.

    Raises:
      OSError: the disk is full.
    """
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):  # macOS has none
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _two_bytes(values: np.ndarray, stored: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded = values.astype(stored)
    if stored == np.float16 and not np.isfinite(rounded.astype(np.float32)).all():
        raise CheckpointError(
            "hidden states of this target do not fit float16; choose features=online, or"
            " dtype=bfloat16"
        )
    return rounded.view(np.uint16)
