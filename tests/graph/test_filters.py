"""Top-k, top-p and min-p found by search, against a sort of the vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.graph.state import RowRules
from dflash_jax.graph.steps import filters as rowwise
from dflash_jax.graph.steps.filters import LISTED
from dflash_jax.graph.steps.sampling import scaled
from dflash_jax.kernels.native.build import library

FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": LISTED},
    {"top_k": 300},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 300, "top_p": 0.7},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
]
KINDS = ("normal", "sharp", "flat", "few values", "bfloat16", "zeros of both signs", "masked")


def rules(rows: int, **columns: Any) -> RowRules:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values |= {"limit": 99, "max_drafts": 99} | columns
    kinds = {"temperature": np.float32, "top_p": np.float32, "min_p": np.float32}
    arrays = {
        name: jnp.asarray(np.broadcast_to(np.asarray(value, kinds.get(name, np.int32)), (rows,)))
        for name, value in values.items()
    }
    stop_ids, seed = jnp.full((rows, 2), -1, jnp.int32), jnp.zeros((rows, 2), jnp.uint32)
    return RowRules(stop_ids=stop_ids, seed=seed, **arrays)


def filtered(logits: jax.Array, rules: RowRules) -> jax.Array:
    """Filter each place [B, T, V] for itself."""
    return jax.lax.map(lambda x: rowwise.filtered(x, rules), logits.swapaxes(0, 1)).swapaxes(0, 1)


def logits_of(kind: str, rows: int, vocab: int) -> np.ndarray:
    x = np.random.default_rng(vocab).standard_normal((rows, 2, vocab)).astype(np.float32)
    match kind:
        case "sharp":
            return x * 8
        case "flat":
            return x * 0.1
        case "few values":
            return np.round(x * 4) / 4 + 0.0
        case "bfloat16":
            return np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32)
        case "zeros of both signs":
            return x * 0
        case "masked":
            return np.where(np.arange(vocab) % 3 > 0, x, -np.inf)
    return x


def sorted_out(
    row: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[np.ndarray, int]:
    """Which tokens are kept, by definition; and how many a sum's last bits may decide."""
    order = np.argsort(-row, kind="stable")
    ranked, vocab = row[order].astype(np.float64), len(row)
    kept = np.arange(vocab) < (top_k or vocab)
    if min_p:
        kept &= row[order] >= np.float32(row.max()) + np.log(np.float32(min_p))
    mass = np.where(kept, np.exp(ranked - ranked[0]), 0.0)
    before = (np.cumsum(mass) - mass) / mass.sum()
    open_ = 0
    if top_p < 1:
        open_ = int((kept & (abs(before - np.float32(top_p)) < 2e-6)).sum())
        kept &= (before < np.float32(top_p)) | (np.arange(vocab) == 0)
    found = np.zeros(vocab, bool)
    found[order] = kept & np.isfinite(ranked)
    return found, open_


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [9, 130, 2048, 9000])
def test_filters_keep_what_a_sort_of_the_vocabulary_keeps(kind: str, vocab: int) -> None:
    """All filters as the rows of one call: a search ends in each row for itself."""
    logits = logits_of(kind, len(FILTERS), vocab)
    columns = {
        name: [x.get(name, off) for x in FILTERS]
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    got = np.asarray(jax.jit(filtered)(jnp.asarray(logits), rules(len(FILTERS), **columns)))
    for row, filters in enumerate(FILTERS):
        for place in range(2):
            kept = np.isfinite(got[row, place])
            wanted, open_ = sorted_out(logits[row, place], **filters)
            assert (kept != wanted).sum() <= open_, (filters, kept.sum(), wanted.sum())
            assert (got[row, place][kept] == logits[row, place][kept]).all()


@pytest.mark.skipif(not library(), reason=f"there are no native kernels: {library().reason}")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [9, 130, 2048, 9000])
def test_native_filters_keep_what_a_sort_of_the_vocabulary_keeps(kind: str, vocab: int) -> None:
    """Over a temperature; the last row does not count, and keeps all."""
    x = logits_of(kind, len(FILTERS) + 1, vocab)[:, 0]
    columns = {
        name: [*(each.get(name, off) for each in FILTERS), 1]
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    given = rules(len(x), temperature=0.7, **columns)
    live = jnp.arange(len(x)) < len(FILTERS)
    cut = jax.jit(rowwise.native_threshold)(jnp.asarray(x), given, live)
    scaled = x / np.float32(0.7)
    kept = np.asarray(cut.keeps(jnp.asarray(scaled))) & np.isfinite(x)
    assert kept[-1].sum() == np.isfinite(x[-1]).sum()
    for row, filters in enumerate(FILTERS):
        wanted, open_ = sorted_out(scaled[row], **filters)
        assert (kept[row] != wanted).sum() <= open_, (filters, kept[row].sum(), wanted.sum())


@pytest.mark.skipif(not library(), reason=f"there are no native kernels: {library().reason}")
def test_native_filters_keep_all_where_numbers_are_not_finite() -> None:
    x = logits_of("normal", 3, 9000)[:, 0]
    x[0, 5], x[1] = np.nan, np.inf
    given = rules(3, top_k=3, top_p=0.5)
    cut = rowwise.native_threshold(jnp.asarray(x), given, jnp.ones(3, bool))
    assert np.asarray(cut.value).tolist()[:2] == [-np.inf, -np.inf]
    assert np.asarray(cut.keeps(jnp.asarray(x)))[2].sum() <= 3


def test_a_search_in_more_ties_than_are_listed_keeps_those_of_the_lowest_index() -> None:
    logits = np.zeros((1, 1, 5_120), np.float32)
    logits[..., 7::9] = -1.0
    got = np.asarray(filtered(jnp.asarray(logits), rules(1, top_k=3 * LISTED)))[0, 0]
    assert (
        np.flatnonzero(np.isfinite(got)).tolist()
        == [i for i in range(logits.size) if i % 9 != 7][: 3 * LISTED]
    )


@pytest.mark.parametrize("filters", [{"top_k": 300}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.5}])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_search_ends_where_numbers_are_not_finite(filters: dict, broken: float) -> None:
    logits = logits_of("normal", 2, 9000)
    logits[0, 1, 5] = broken
    logits[1, 0] = broken
    got = np.asarray(jax.jit(filtered)(jnp.asarray(logits), rules(2, **filters)))
    wanted, _ = sorted_out(logits[0, 0], **filters)
    assert (np.isfinite(got[0, 0]) == wanted).all()


def test_a_row_without_filters_has_the_same_bits_whether_or_not_a_neighbour_filters() -> None:
    logits = jnp.asarray(logits_of("normal", 3, 2048))[:, 0]
    alone = jax.jit(scaled)(logits, rules(3))
    for filters in ({"top_k": 300}, {"top_p": 0.9}, {"min_p": 0.2}, {"temperature": 0.5}):
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
        columns = {name: [off[name], value, off[name]] for name, value in filters.items()}
        company = jax.jit(scaled)(logits, rules(3, **columns))
        assert (alone[0] == company[0]).all()
        assert (alone[2] == company[2]).all()
        assert (alone[1] != company[1]).any()


def test_a_filtered_row_has_the_same_bits_whatever_its_neighbours_search_for() -> None:
    logits = jnp.asarray(logits_of("normal", 2, 2048))
    own = {"top_k": 300, "top_p": 0.9, "min_p": 0.01}
    seen = []
    for theirs in ({}, {"top_k": 1}, {"top_p": 0.999}, {"top_k": 1000, "top_p": 0.1}):
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | theirs
        columns = {name: [value, off[name]] for name, value in own.items()}
        seen.append(np.asarray(jax.jit(scaled)(logits[:, 0], rules(2, **columns))[0]))
    assert all((x == seen[0]).all() for x in seen)
