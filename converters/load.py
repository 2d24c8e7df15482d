"""Read weight files into parameter trees: check first, then fill tensors in parallel."""

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_jax import families
from dflash_jax.checkpoint import FLOATS, LazyArray
from dflash_jax.config import (
    ALWAYS_FLOAT32,
    AttentionConfig,
    DrafterConfig,
)
from dflash_jax.converters import packed
from dflash_jax.converters.formats.canonical import Canonical, check
from dflash_jax.converters.formats.quants.encode import encode
from dflash_jax.converters.formats.quants.types import GgmlType
from dflash_jax.converters.formats.slots import Slot
from dflash_jax.converters.formats.source import TensorSource, trim_mapped_memory
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.quant.layouts import Spec
from dflash_jax.utils.progress import ShownCount

_EXPONENTS = {FLOATS["float16"]: np.uint16(0x7C00), FLOATS["bfloat16"]: np.uint16(0x7F80)}
CHUNK_BYTES = 1 << 19  # float32 numbers that are read and placed at a time: fits a core's cache

Params = dict[str, Any]
Progress = Callable[[str, int], None]  # a tensor's name, and how many of its weights are done


def load(
    tensors: Canonical,
    config: AttentionConfig,
    dtype: str,
    *,
    where: str,
    specs: Mapping[str, Spec] | None = None,
    native: bool = False,
    progress: Progress = lambda name, weights: None,
) -> Params:
    """Return the parameter tree of `config`.

    Integers stay integers, and parameters in `ALWAYS_FLOAT32` stay float32.

    Args:
      tensors: the canonical tensors, which must be exactly those of `config`.
      dtype: float32, bfloat16 or float16.
      where: the model's place, for error messages.
      specs: how parameters are packed, by path; their float parts have `dtype`.
      native: whether packed parameters are in strips, for the native kernels.
      progress: called with a tensor's name and the number of its weights that were read.

    Raises:
      CheckpointError: the tensors do not fit the configuration, or hold non-finite values.
      ConfigError: the dtype is unknown.
    """
    slots = families.slots(config)
    specs = specs or {}
    check(slots, tensors, where=where)
    kind = float_dtype(dtype)
    packing = [slot for slot in slots if "/".join(slot.path) in specs]
    slots = [slot for slot in slots if "/".join(slot.path) not in specs]
    arrays = [np.empty(slot.shape, kept_as(slot, kind)) for slot in slots]
    filled = zip(slots, arrays, strict=True)
    jobs = [job for slot, array in filled for job in _slot_jobs(slot, array)]

    count = ShownCount(sum(job.view.size for job in jobs))

    def run(job: "_ReadJob") -> None:
        job.place(tensors)
        progress(job.name, job.view.size)
        count(job.view.size)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for _ in pool.map(run, jobs):
            pass
    for slot, array in zip(slots, arrays, strict=True):
        if slot.integer and isinstance(config, DrafterConfig):
            _check_ids(array, config, where)

    def fill(slot: Slot, dtype: Any) -> np.ndarray:
        array = np.empty(slot.shape, dtype or kind)
        for job in _slot_jobs(slot, array):
            run(job)
        return array

    leaves: dict[tuple[str, ...], Any] = dict(
        packed.read(tensors, packing, specs, fill, native=native)
    )
    return tree(leaves | {slot.path: a for slot, a in zip(slots, arrays, strict=True)})


def lazily(
    tensors: Canonical,
    config: AttentionConfig,
    dtype: str,
    *,
    where: str,
    progress: Progress = lambda name, weights: None,
) -> Params:
    """Return the parameter tree of `config` as arrays that are read when they are needed.

    Raises:
      CheckpointError: the tensors do not fit the configuration; `make` raises it for values.
      ConfigError: the dtype is unknown.
    """
    slots = families.slots(config)
    kind = float_dtype(dtype)
    check(slots, tensors, where=where)

    def make(slot: Slot) -> np.ndarray:
        array = np.empty(slot.shape, kept_as(slot, kind))

        def run(job: "_ReadJob") -> None:
            job.place(tensors)
            progress(job.name, job.view.size)

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            for _ in pool.map(run, _slot_jobs(slot, array)):
                pass
        if slot.integer and isinstance(config, DrafterConfig):
            _check_ids(array, config, where)
        trim_mapped_memory(tensors)
        return array

    return tree({
        slot.path: LazyArray(slot.shape, kept_as(slot, kind), functools.partial(make, slot))
        for slot in slots
    })  # fmt: skip


def _check_ids(offsets: np.ndarray, config: DrafterConfig, where: str) -> None:
    """Check that a reduced vocabulary lists ascending ids of the whole one."""
    ids = np.arange(len(offsets)) + offsets
    if ids[0] < 0 or ids[-1] >= config.vocab_size or (np.diff(ids) < 1).any():
        raise CheckpointError(
            f"{where}: d2t does not name {len(ids)} ascending tokens below {config.vocab_size};"
            " fetch or export the drafter again"
        )


def kept_as(slot: Slot, dtype: np.dtype) -> np.dtype:
    """Return the dtype of a parameter in a model whose weights have `dtype`."""
    if slot.integer:
        return np.dtype(np.int32)
    return FLOATS["float32"] if slot.path[-1] in ALWAYS_FLOAT32 else dtype


def read_as(source: TensorSource, name: str, dtype: np.dtype, pool: Executor) -> np.ndarray:
    """Return one tensor cast to `dtype`, decoded in parallel."""
    array = np.empty(source.shape(name), dtype)
    read_into(source, name, array, pool)
    return array


def read_into(
    source: TensorSource,
    name: str,
    view: np.ndarray,
    pool: Executor,
    change: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """Read one tensor into a view of an array, cast to its dtype, a few rows at a time.

    Args:
      view: has the tensor's elements when it is flattened.
      change: returns the values of the array from those of the tensor.

    Raises:
      CheckpointError: values are not finite, or outside of the dtype.
    """
    jobs = _jobs(name, source.shape(name), view, change)
    for _ in pool.map(lambda job: job.place(source), jobs):
        pass


def read_blocks(
    source: TensorSource,
    name: str,
    kind: GgmlType,
    pool: Executor,
    importance: np.ndarray | None = None,
) -> np.ndarray:
    """Return one tensor encoded in blocks, uint8 [rows, bytes of a row], made in parallel.

    Args:
      importance: how much errors of each column count, float32 [E, columns] of E stacked matrices.

    Raises:
      CheckpointError: values are not finite, or too large for the type.
    """
    shape = source.shape(name)
    row = shape[-1] // kind.block_size * kind.block_bytes
    out = np.empty((math.prod(shape[:-1]), row), np.uint8)

    def counted(rows: slice) -> np.ndarray | None:
        if importance is None:
            return None
        each = len(out) // len(importance)
        return importance[np.arange(rows.start, rows.stop) // each]

    def run(rows: slice) -> None:
        values = source.read_rows(name, rows)
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(np.float32, copy=False)
        if not _finite(values):
            raise _not_finite(name, source, FLOATS["float32"])
        try:
            out[rows] = encode(kind, values, counted(rows))
        except OverflowError:
            raise CheckpointError(
                f"{name} has weights as large as {np.abs(values).max():g}, and the scales of"
                f" {kind.name} are float16; choose bf16 or f32"
            ) from None

    for _ in pool.map(run, (rows for _, rows in _steps(shape[0], len(out), shape[-1]))):
        pass
    return out


def float_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a parameter dtype's name.

    Raises:
      ConfigError: the name is unknown.
    """
    try:
        return FLOATS[name]
    except (KeyError, TypeError):
        raise ConfigError(f"dtype {name!r} is not one of {', '.join(FLOATS)}") from None


@dataclass(frozen=True)
class _ReadJob:
    """Rows of a tensor to read, cast and copy into a parameter."""

    name: str
    view: np.ndarray  # the destination
    rows: slice
    change: Callable[[np.ndarray], np.ndarray] | None = None  # of values

    def place(self, source: TensorSource) -> None:
        stored = source.read_rows(self.name, self.rows)
        with np.errstate(over="ignore", invalid="ignore"):
            values = stored.astype(self.view.dtype, copy=False)
            if self.change is not None:
                values = self.change(values).astype(self.view.dtype, copy=False)
            finite = _finite(values)
        if not finite:
            raise _not_finite(self.name, source, self.view.dtype)
        self.view[...] = values.reshape(self.view.shape)
        trim_mapped_memory(stored)


def _slot_jobs(slot: Slot, parameter: np.ndarray) -> Iterator[_ReadJob]:
    for part in slot.parts:
        yield from _jobs(part.name, part.shape, part.view(parameter))


def _jobs(
    name: str,
    shape: tuple[int, ...],
    view: np.ndarray,
    change: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Iterator[_ReadJob]:
    width = shape[-1] if len(shape) > 1 else 1
    for steps, rows in _steps(view.shape[0], view.size // max(width, 1), width):
        yield _ReadJob(name, view[steps], rows, change)


def _steps(steps: int, rows: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield parts of a tensor: steps along its first axis, and the rows in these.

    Args:
      steps: the length of the first axis.
      rows, width: rows of the whole tensor, and their length.
    """
    each = rows // max(steps, 1)
    stride = max(1, CHUNK_BYTES // max(4 * each * width, 1))
    for start in range(0, steps, stride):
        stop = min(start + stride, steps)
        yield slice(start, stop), slice(start * each, stop * each)


def _finite(values: np.ndarray) -> bool:
    """Return whether all values are finite; two-byte floats by their bits, which is faster."""
    mask = _EXPONENTS.get(values.dtype)
    if mask is None:
        return bool(np.isfinite(values).all())
    return not bool((values.view(np.uint16) & mask == mask).any())


def _not_finite(name: str, source: TensorSource, dtype: np.dtype) -> CheckpointError:
    stored = source.read(name)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        bad = int(stored.size - np.isfinite(stored).sum())
    if bad:
        return CheckpointError(
            f"{name} holds {bad} values that are NaN or infinite (NaN marks a tensor that"
            " was never loaded); fetch or export the weights again"
        )
    return CheckpointError(f"{name} has values outside {dtype}; choose bfloat16 or float32")


def tree(leaves: dict[tuple[str, ...], Any]) -> Params:
    """Return nested dicts from paths."""
    root: Params = {}
    for path, leaf in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return root
