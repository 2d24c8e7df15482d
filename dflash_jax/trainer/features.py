"""Features of the frozen target for token rows: computed in each step, or once and kept on disk."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.graph import Graph
from dflash_jax.graph.abstract import PlanCacheMaker
from dflash_jax.graph.build import jit
from dflash_jax.graph.memory import gibi
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.kernels.vocabulary import argmax
from dflash_jax.plan import LEAST, Plan, Weights
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer.decoding import packed_params, parallel_calls
from dflash_jax.trainer.feature_store import FeatureStore, digest
from dflash_jax.trainer.groups import StageProgress
from dflash_jax.trainer.recipes import FLOAT
from dflash_jax.trainer.rows import TokenRows

CHUNK = 512  # tokens of a row that the target reads at a time
HEAD_TOKENS = 1024  # places whose logits exist at a time
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
        out = pair.target_call(
            {"target": params},
            chunk[0],
            caches,
            start,
            taps=pair.taps,
            taps_at=pair.options.taps_at,
            chunked=True,
        )
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
        return argmax(logits, pair.options.kernels)

    tokens = best(parts[0])[None] if count == 1 else jax.lax.map(best, parts)
    return jnp.moveaxis(tokens, 0, 1).reshape(rows, -1)[:, :length]


def reader(pair: Pair, model: TargetModel, weights: Weights) -> tuple[Pair, dict[str, Any]]:
    """Return the pair and the target's parameters by which rows are read.

    Rounded matrices are multiplied by the native kernels where there are any, as by the engines
    that decode answers: on a CPU in less than half the time of XLA's float products.

    Args:
      model: the target, whose matrices have been rounded to `weights` already.
    """
    if weights == FLOAT:
        return pair, model.params
    graph = Graph(Pair(model.module), Plan(dtype=model.dtype, weights=weights, exact=False))
    plan = graph.plan
    if plan.kernels != "native":
        return pair, model.params
    native = pair.with_options(dataclasses.replace(pair.options, kernels=plan.kernels))
    return native, packed_params({"target": model.params}, graph)["target"]


class FeatureCache:
    """Features of all rows of a run, read from a store."""

    def __init__(self, store: FeatureStore, buckets: Sequence[TokenRows]):
        self._store = store
        self._lengths = [rows.tokens.shape[1] for rows in buckets]
        self._names = [_names(rows) for rows in buckets]

    def at(self, bucket: int, rows: np.ndarray) -> TargetFeatures:
        """Return the features of the given rows of a bucket."""
        names = [self._names[bucket][i] for i in rows.tolist()]
        values, best = self._store.read(names, self._lengths[bucket])
        streams = [np.ascontiguousarray(x) for x in np.moveaxis(values, 2, 0)]
        hidden: Any = streams.pop() if self._store.origin.final else None
        taps: Any = tuple(streams)
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
    chosen: Sequence[np.ndarray],
    together: Sequence[int],
    dtype: Any,
    report: Callable[[str], None],
) -> FeatureCache:
    """Return the cache of all rows, computing those that training reads and the store lacks.

    A call has the shape of a step's, so that a row's features have the bits that a step would
    compute. An interrupted call can be repeated.

    Args:
      chosen: the rows of each bucket that training reads.
      together: rows of each bucket that a step computes together.
      report: called with progress lines.

    Raises:
      CheckpointError: the disk is full, or the store is damaged.
    """
    store.open()
    parts = [
        (part, size)
        for rows, numbers, size in zip(buckets, chosen, together, strict=True)
        for part in _missing(store, rows, numbers, size)
    ]
    if parts:
        total = sum(len(rows.tokens) for rows, _ in parts)
        tokens = sum(int(rows.real.sum()) for rows, _ in parts)
        report(
            f"features of {total:,} rows, {tokens:,} tokens: {gibi(tokens * store.bytes_per_token)}"
        )
        progress = StageProgress("features", total, "rows", report)
        pair, params = reader(pair, model, store.origin.weights)
        read = functools.partial(target_features, pair, dtype=dtype, keep=store.origin.final)
        call = functools.partial(jit(read), params)

        def fill(part: tuple[TokenRows, int]) -> None:
            _fill(store, *part, call, progress)

        fill(parts[0])  # compiles before the threads start
        with ThreadPoolExecutor(parallel_calls(READERS, model)) as pool:
            for _ in pool.map(fill, parts[1:]):
                pass
        store.open()
    return FeatureCache(store, buckets)


def _missing(
    store: FeatureStore, rows: TokenRows, chosen: np.ndarray, size: int
) -> Iterator[TokenRows]:
    """Yield the chosen rows that the store lacks, as many as a part holds at a time."""
    wanted: dict[bytes, int] = {}
    names = _names(rows)
    for i in chosen.tolist():
        if names[i] not in store:
            wanted.setdefault(names[i], i)
    part = max(PART_TOKENS // (size * rows.tokens.shape[1]), 1) * size
    every = [*wanted.values()]
    for start in range(0, len(every), part):
        some = every[start : start + part]
        yield TokenRows(rows.tokens[some], rows.wanted[some], rows.real[some])


def _fill(
    store: FeatureStore,
    rows: TokenRows,
    size: int,
    read: Callable[[np.ndarray], TargetFeatures],
    progress: StageProgress,
) -> None:
    """Compute the features of rows, `size` at a time, and save them as a part."""
    values: list[np.ndarray] = []
    best: list[np.ndarray] = []
    for start in range(0, len(rows.tokens), size):
        tokens = rows.tokens[start : start + size].astype(np.int32)
        real = rows.real[start : start + size]
        padded = np.pad(tokens, ((0, size - len(tokens)), (0, 0)))
        computed: TargetFeatures = jax.device_get(read(padded))
        streams = [*computed.taps]
        if computed.hidden is not None:
            streams.append(computed.hidden)
        each = [store.bits(np.asarray(x)[: len(tokens)][real]) for x in streams]
        values.append(np.stack(each, axis=1))
        best.append(np.asarray(computed.best)[: len(tokens)][real])
        progress(len(tokens))
    ids = [row[real] for row, real in zip(rows.tokens, rows.real, strict=True)]
    store.add(PASS, ids, np.concatenate(values), np.concatenate(best))
