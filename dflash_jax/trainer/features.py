"""Features of the frozen target for token rows: computed in each step, or once and cached on disk.

Cached features are in parts that are complete or absent. A part is an array of all tokens' taps,
`NAME.npy`, and an index of its rows, `NAME.npz`, which is written last. Rows are found by a digest
of their tokens, so the order of rows does not matter.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.errors import CheckpointError
from dflash_jax.graph import Graph
from dflash_jax.graph.abstract import PlanCacheMaker
from dflash_jax.graph.build import jit
from dflash_jax.graph.memory import gibi
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.kernels.vocabulary import argmax
from dflash_jax.plan import LEAST, Plan, Weights
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer.decoding import packed_params, parallel_calls
from dflash_jax.trainer.files import saved_as, sound
from dflash_jax.trainer.groups import StageProgress
from dflash_jax.trainer.recipes import FLOAT
from dflash_jax.trainer.rows import TokenRows

ABOUT = "about.json"
DECODED = "decoded"  # first word of the names of parts of `add_decoded`
Place = tuple[int, int, int]  # part, first token, tokens


def digest(ids: np.ndarray) -> bytes:
    """Return the name of a row: a hash of its token ids."""
    return hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=16).digest()


class FeatureStore:
    """The parts in a folder, which is made if it does not exist.

    Values are bfloat16 for a bfloat16 target, otherwise float16. Threads may add parts.

    Args:
      streams: arrays of width `width` for each token: the taps, and the final hidden state if
        the objective needs it.

    Raises:
      CheckpointError: the folder is damaged or of another shape.
    """

    def __init__(self, folder: Path, *, dtype: str, streams: int, width: int):
        self.folder, self.streams, self.width = folder, streams, width
        kind = "bfloat16" if dtype == "bfloat16" else "float16"
        self._dtype = np.dtype(getattr(ml_dtypes, kind, kind))
        about: dict[str, int | str] = {"dtype": kind, "streams": streams, "width": width}
        if not folder.is_dir():
            self._written(lambda: self._begin(about))
        with sound(folder):
            recorded = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            if recorded != about:
                raise ValueError(f"it holds {recorded}, expected {about}")
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []  # values, best
        self._places: dict[bytes, Place] = {}
        self._decoded: set[bytes] = set()

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk for each token of a row."""
        return self.streams * self.width * 2 + 4

    def _begin(self, about: dict[str, int | str]) -> None:
        with saved_as(self.folder, folder=True) as partial:
            (partial / ABOUT).write_text(json.dumps(about), encoding="utf-8")

    def has(self, name: str) -> bool:
        """Return whether a part is complete."""
        return (self.folder / f"{name}.npz").is_file()

    def add(
        self, name: str, ids: Sequence[np.ndarray], values: np.ndarray, best: np.ndarray
    ) -> None:
        """Write a part.

        Args:
          ids: token ids of each row.
          values: uint16 [tokens of all rows, streams, width], from `rounded`.
          best: int32 [tokens of all rows], the target's argmax token after each.

        Raises:
          CheckpointError: the disk is full; other parts stay.
        """
        self._written(lambda: self._add(name, ids, values, best))

    def add_decoded(self, name: str, found: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Write a part of rows that the target decoded greedily.

        The token after each decoded one is the target's argmax, and the taps of the last token,
        which no block reads, are zero.

        Args:
          found: token ids [n] of each row, and its taps [streams, n or n-1, width].

        Raises:
          CheckpointError: the disk is full; other parts stay.
        """
        sizes = [len(ids) for ids, _ in found]
        values = np.zeros((sum(sizes), self.streams, self.width), np.uint16)
        best = np.zeros(sum(sizes), np.int32)
        starts = np.cumsum([0, *sizes[:-1]])
        for start, (ids, taps) in zip(starts.tolist(), found, strict=True):
            values[start : start + taps.shape[1]] = np.moveaxis(taps, 0, 1)
            best[start : start + len(ids) - 1] = ids[1:]
        self.add(f"{DECODED}.{name}", [ids for ids, _ in found], values, best)

    def _add(
        self, name: str, ids: Sequence[np.ndarray], values: np.ndarray, best: np.ndarray
    ) -> None:
        with saved_as(self.folder / f"{name}.npy") as partial, partial.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is found out at once
                os.posix_fallocate(file.fileno(), 0, values.nbytes)
            np.save(file, values)
        sizes = np.asarray([len(row) for row in ids], np.int64)
        digests = np.frombuffer(b"".join(map(digest, ids)), np.uint8).reshape(-1, 16)
        with saved_as(self.folder / f"{name}.npz") as partial, partial.open("wb") as file:
            np.savez(file, sizes=sizes, digests=digests, best=np.asarray(best, np.int32))

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Return floats in the stored type, as uint16.

        Raises:
          CheckpointError: a number overflows float16.
        """
        with np.errstate(over="ignore"):
            rounded = np.asarray(values).astype(self._dtype)
        if self._dtype == np.float16 and not np.isfinite(rounded).all():
            raise CheckpointError(
                "hidden states of this target do not fit float16; choose features=online, or"
                " dtype=bfloat16"
            )
        return rounded.view(np.uint16)

    def open(self) -> "FeatureStore":
        """Read the indices of all complete parts; return the store itself.

        Raises:
          CheckpointError: a part is damaged.
        """
        self._parts, self._places, self._decoded = [], {}, set()
        for path in sorted(self.folder.glob("*.npz")):
            with sound(path), np.load(path) as index:
                sizes, best = index["sizes"], index["best"]
                digests = [bytes(row) for row in index["digests"]]
            with sound(path.with_suffix(".npy")):
                values = np.load(path.with_suffix(".npy"), mmap_mode="r")
                if values.shape != (len(best), self.streams, self.width):
                    raise ValueError(f"it has shape {values.shape}")
            starts = np.cumsum([0, *sizes[:-1]])
            self._parts.append((values, best))
            for name, start, size in zip(digests, starts.tolist(), sizes.tolist(), strict=True):
                self._places.setdefault(name, (len(self._parts) - 1, start, size))
            if path.name.startswith(DECODED):
                self._decoded.update(digests)
        return self

    def was_decoded(self, name: bytes) -> bool:
        """Return whether a row was recorded while it was decoded; `open` first."""
        return name in self._decoded

    def read(self, names: Sequence[bytes], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return values [rows, length, streams, width] and best tokens [rows, length].

        Rows are padded with zeros at the end.
        """
        values = np.zeros((len(names), length, self.streams, self.width), np.uint16)
        best = np.zeros((len(names), length), np.int32)
        for i, name in enumerate(names):
            part, start, size = self._places[name]
            stored, stored_best = self._parts[part]
            values[i, :size] = stored[start : start + size]
            best[i, :size] = stored_best[start : start + size]
        return values.view(self._dtype), best

    def _written(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            raise CheckpointError(
                f"the feature cache {self.folder} could not be written"
                f" ({error.strerror or error}); every token needs {self.bytes_per_token:,} bytes:"
                " free some space and run the same command to resume, or choose features=online,"
                " which needs none, into another folder"
            ) from error


CHUNK = 512  # tokens of a row that the target reads at a time
HEAD_TOKENS = 1024  # places whose logits exist at a time
CACHED_TOKENS = 4096  # of all rows of one call, when the cache is filled
READERS = 4  # concurrent calls, at most
PART_TOKENS = 16384  # places of the rows of one saved part
PASS = "pass"  # first word of the names of parts that are computed here


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
    plan = dataclasses.replace(LEAST, rows=rows, max_length=count * width, chunk=width, dtype=dtype)
    chunks = jnp.pad(tokens, ((0, 0), (0, count * width - length)))
    chunks = jnp.moveaxis(chunks.reshape(rows, count, width), 1, 0)
    caches = pair.target.empty_caches(PlanCacheMaker(plan))

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
        return argmax(logits, "xla")

    tokens = best(parts[0])[None] if count == 1 else jax.lax.map(best, parts)
    return jnp.moveaxis(tokens, 0, 1).reshape(rows, -1)[:, :length]


def reader(pair: Pair, model: TargetModel, weights: Weights) -> tuple[Pair, dict[str, Any]]:
    """Return the pair and the target's parameters by which rows are read.

    Rounded matrices are multiplied by the native kernels where there are any, as by the engines
    that decode answers: on a CPU in less than half the time of XLA's float products.

    Args:
      model: its matrices have been rounded to `weights` already.
    """
    if weights == FLOAT:
        return pair, model.params
    graph = Graph(Pair(model.module), Plan(dtype=model.dtype, weights=weights, exact=False))
    plan = graph.plan
    if plan.kernels != "native":
        return pair, model.params
    native = dataclasses.replace(pair, kernels=plan.kernels)
    return native, packed_params({"target": model.params}, graph)["target"]


class FeatureCache:
    """Features of all rows of a run, read from a store."""

    def __init__(self, store: FeatureStore, buckets: Sequence[TokenRows], taps: int):
        self._store, self._taps = store, taps
        self._lengths = [rows.tokens.shape[1] for rows in buckets]
        self._names = [_names(rows) for rows in buckets]

    def at(self, bucket: int, rows: np.ndarray) -> TargetFeatures:
        """Return the features of the given rows of a bucket."""
        names = [self._names[bucket][i] for i in rows.tolist()]
        values, best = self._store.read(names, self._lengths[bucket])
        streams = [np.ascontiguousarray(x) for x in np.moveaxis(values, 2, 0)]
        hidden: Any = streams[self._taps] if len(streams) > self._taps else None
        taps: Any = tuple(streams[: self._taps])
        return TargetFeatures(taps, best, hidden)  # pyrefly: ignore


@dataclasses.dataclass(frozen=True)
class FeatureReader:
    """Computes features of the rows of a run when they are asked for, in a program of its own."""

    rows: Sequence[TokenRows]
    read: Callable[[Array], TargetFeatures]

    def at(self, bucket: int, rows: np.ndarray) -> TargetFeatures:
        """Return the features of the given rows of a bucket."""
        return self.read(jnp.asarray(self.rows[bucket].tokens[rows], jnp.int32))


def quantised_reader(
    pair: Pair,
    model: TargetModel,
    buckets: Sequence[TokenRows],
    *,
    weights: Weights,
    dtype: Any,
    keep: bool,
) -> FeatureReader | None:
    """Return a reader by native kernels; None where there are none for the weights.

    The step, which has XLA's products, then computes the features itself.

    Args:
      weights: see `reader`.
      keep: whether `TargetFeatures.hidden` is wanted.
    """
    native, params = reader(pair, model, weights)
    if native is pair:
        return None
    call = jit(functools.partial(target_features, native, dtype=dtype, keep=keep))
    return FeatureReader(buckets, functools.partial(call, params))


def _names(rows: TokenRows) -> list[bytes]:
    return [digest(ids[real]) for ids, real in zip(rows.tokens, rows.real, strict=True)]


def fill_cache(
    store: FeatureStore,
    pair: Pair,
    model: TargetModel,
    buckets: Sequence[TokenRows],
    *,
    weights: Weights = FLOAT,
    dtype: Any,
    keep: bool,
    report: Callable[[str], None],
) -> FeatureCache:
    """Return the cache of all rows, computing those that the store does not have.

    Rows are computed in parts of fixed content, so that an interrupted call can be repeated.

    Args:
      weights: see `reader`.
      keep: whether the store keeps `TargetFeatures.hidden`.
      report: called with progress lines.

    Raises:
      CheckpointError: the disk is full, hidden states overflow float16, or the store is damaged.
    """
    store.open()
    parts = [
        (f"{PASS}.{bucket}.{start}", rows)
        for bucket, every in enumerate(buckets)
        for start, rows in _missing(store, every)
    ]
    todo = [(name, rows) for name, rows in parts if not store.has(name)]
    if todo:
        total, count = (sum(len(rows.tokens) for _, rows in x) for x in (parts, todo))
        tokens = sum(int(rows.real.sum()) for _, rows in parts)
        report(
            f"features of {total:,} rows, {tokens:,} tokens: {gibi(tokens * store.bytes_per_token)}"
        )
        progress = StageProgress("features", total, "rows", report, done=total - count)
        pair, params = reader(pair, model, weights)
        read = functools.partial(target_features, pair, dtype=dtype, keep=keep)
        call = functools.partial(jit(read), params)

        def fill(part: tuple[str, TokenRows]) -> None:
            _fill(store, *part, call, progress)

        fill(todo[0])  # compiles before the threads start
        with ThreadPoolExecutor(parallel_calls(READERS, model)) as pool:
            for _ in pool.map(fill, todo[1:]):
                pass
        store.open()
    return FeatureCache(store, buckets, len(pair.taps))


def _missing(store: FeatureStore, rows: TokenRows) -> Iterator[tuple[int, TokenRows]]:
    """Yield rows that were not recorded while decoding, by part, each part with its number."""
    names = dict.fromkeys(_names(rows))
    first = {name: i for i, name in reversed([*enumerate(_names(rows))])}
    wanted = [first[name] for name in names if not store.was_decoded(name)]
    size = max(PART_TOKENS // rows.tokens.shape[1], 1)
    for start in range(0, len(wanted), size):
        chosen = wanted[start : start + size]
        yield start, TokenRows(rows.tokens[chosen], rows.wanted[chosen], rows.real[chosen])


def _fill(
    store: FeatureStore,
    name: str,
    rows: TokenRows,
    read: Callable[[np.ndarray], TargetFeatures],
    progress: StageProgress,
) -> None:
    """Compute the features of rows and save them as a part."""
    count, length = rows.tokens.shape
    step = max(CACHED_TOKENS // length, 1)
    values: list[np.ndarray] = []
    best: list[np.ndarray] = []
    for start in range(0, count, step):
        tokens = rows.tokens[start : start + step].astype(np.int32)
        real = rows.real[start : start + step]
        padded = np.pad(tokens, ((0, step - len(tokens)), (0, 0)))
        found: TargetFeatures = jax.device_get(read(padded))
        streams = [*found.taps, *([] if found.hidden is None else [found.hidden])]
        each = [store.rounded(np.asarray(x)[: len(tokens)][real]) for x in streams]
        values.append(np.stack(each, axis=1))
        best.append(np.asarray(found.best)[: len(tokens)][real])
        progress(len(tokens))
    ids = [row[real] for row, real in zip(rows.tokens, rows.real, strict=True)]
    store.add(name, ids, np.concatenate(values), np.concatenate(best))
