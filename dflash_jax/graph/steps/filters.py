"""Top-k, top-p and min-p without sorting the vocabulary.

Every filter keeps a prefix of the tokens in one order: largest first, equal ones by index. A prefix
is determined by its last token, so filtering is a search for that token, then a comparison.

The search looks at the 64 largest tokens first, which is enough for most distributions. Otherwise
it bisects a threshold by the weight above it, one pass over the vocabulary each time, until the
last token is among the 64 below the threshold.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.graph.state import RowRules
from dflash_jax.kernels.native.layers import last_kept
from dflash_jax.kernels.vocabulary import CHUNK, top_k

LISTED = 64  # tokens sorted at a time
BISECTIONS = 4  # between two sorted lists
NEGLIGIBLE = 104.0  # softmax is 0 in float32 for a logit this far below the largest

Numbers = Float[Array, " B"]  # one for each row


class Threshold(NamedTuple):
    """The last token that each row keeps; it need not exist."""

    value: Numbers
    index: Int[Array, " B"]

    def keeps(self, x: Float[Array, "B V"]) -> Bool[Array, "B V"]:
        """Return which tokens are not after it in the order."""
        ids = jnp.arange(x.shape[-1], dtype=jnp.int32)[None]
        value = self.value[:, None]
        return (x > value) | ((x == value) & (ids <= self.index[:, None]))

    def earlier(self, other: "Threshold") -> "Threshold":
        """Return, for each row, the threshold that keeps fewer tokens."""
        value = jnp.maximum(self.value, other.value)
        last = jnp.iinfo(jnp.int32).max
        indices = (jnp.where(cut.value == value, cut.index, last) for cut in (self, other))
        return Threshold(value, jnp.minimum(*indices))


def is_filtered(rules: RowRules) -> Bool[Array, " B"]:
    """Return which rows have a filter."""
    filters = (rules.top_k > 0) | (rules.top_p < 1) | (rules.min_p > 0)
    return filters & (rules.temperature > 0)


def native_threshold(
    logits: Float[Array, "B V"], rules: RowRules, live: Bool[Array, " B"]
) -> Threshold:
    """Return the last token that each row keeps of logits over temperature, as `filtered` does.

    Sums of native kernels round otherwise than XLA's, which decides only where the mass before a
    token is top_p but for rounding.

    Args:
      live: rows that count; the others keep all.
    """
    filters = (rules.top_k, rules.top_p, rules.min_p)
    some = is_filtered(rules) & live
    kept_all = Threshold(
        jnp.full(len(logits), -jnp.inf, jnp.float32),
        jnp.full(len(logits), jnp.iinfo(jnp.int32).max, jnp.int32),
    )
    return jax.lax.cond(
        some.any(),
        lambda: Threshold(*last_kept(logits, some, rules.temperature, *filters)),
        lambda: kept_all,
    )


def filtered(x: Float[Array, "B V"], rules: RowRules) -> Float[Array, "B V"]:
    """Return logits over temperature with -inf for the tokens that top-k, min-p or top-p drop.

    In the order of the `dflash` 0.1.0 reference: the top_k largest, then tokens while the mass
    before them is below top_p. min_p, as in vLLM, applies together with top_k. Logits of rows
    without a filter, and of greedy rows, are unchanged.
    """
    vocab = x.shape[1]
    sampled = rules.temperature > 0
    k = rules.top_k
    top_p = rules.top_p
    min_p = rules.min_p
    largest = x.max(axis=-1)
    cut = Threshold(
        jnp.where(sampled & (min_p > 0), largest + jnp.log(min_p), -jnp.inf),
        jnp.full(largest.shape, vocab, jnp.int32),
    )
    ranked = sampled & (k > 0) & (k < vocab)
    massed = sampled & (top_p < 1)

    def by_rank(_: Threshold) -> tuple[Float[Array, "B V"], Numbers]:
        return jnp.ones_like(x), k.astype(x.dtype)

    def by_mass(cut: Threshold) -> tuple[Float[Array, "B V"], Numbers]:
        mass = jnp.where(cut.keeps(x), jnp.exp(x - largest[:, None]), 0.0)
        return mass, jnp.maximum(top_p * mass.sum(axis=-1), jnp.finfo(x.dtype).tiny)

    def shorten(stage: Int[Array, ""], cut: Threshold) -> Threshold:
        active = jnp.stack([ranked, massed])[stage]

        def search() -> Threshold:
            weights, budget = jax.lax.cond(stage == 0, by_rank, by_mass, cut)
            return _last_within(x, weights, budget, cut, active)

        return jax.lax.cond(active.any(), search, lambda: cut)

    # A loop, since the search takes long to compile.
    cut = jax.lax.fori_loop(0, 2, shorten, cut)
    return jnp.where(cut.keeps(x), x, -jnp.inf)


class _Search(NamedTuple):
    """Bounds of each row's last token: `low` <= that token < `top`, until it is found."""

    top: Numbers
    before: Numbers  # weight of all tokens not below `top`
    low: Numbers
    done: Bool[Array, " B"]
    cut: Threshold

    def ending_at(
        self, here: Bool[Array, " B"], value: Numbers, index: Int[Array, " B"]
    ) -> "_Search":
        """Return the search with the last token of more rows."""
        new = here & ~self.done
        cut = Threshold(*(jnp.where(new, *x) for x in zip((value, index), self.cut, strict=True)))
        return self._replace(done=self.done | new, cut=cut)


def _last_within(
    x: Float[Array, "B V"],
    weights: Float[Array, "B V"],
    budget: Numbers,
    cut: Threshold,
    active: Bool[Array, " B"],
) -> Threshold:
    """Return the last token that `cut` keeps and before which others weigh less than `budget`.

    Rows that are not active keep their threshold. No row's result depends on others.
    """

    def weight_from(value: Numbers) -> Numbers:
        return jnp.where(x >= value[:, None], weights, 0.0).sum(axis=-1)

    def step(search: _Search) -> _Search:
        # The order's zeros are equal, those of top_k are not.
        below = jnp.where(x < search.top[:, None], jnp.where(x == 0, 0.0, x), -jnp.inf)
        values, ids = top_k(below, LISTED)
        real = values >= search.low[:, None]
        own = jnp.where(real, jnp.take_along_axis(weights, ids, axis=1), 0.0)
        through = search.before[:, None] + jnp.cumsum(own, axis=1)
        kept = real & (through - own < budget[:, None])
        last = jnp.maximum(kept.sum(axis=1, keepdims=True) - 1, 0)
        least = values[:, -1]
        listed = (through[:, -1] >= budget) | (least < search.low)
        search = search.ending_at(
            listed, *(jnp.take_along_axis(a, last, axis=1)[:, 0] for a in (values, ids))
        )
        above = search.before + jnp.where(values > least[:, None], own, 0.0).sum(axis=1)
        rest = (budget - above) / own[:, -1]  # tokens equal to the least, if those reach it
        return jax.lax.cond(
            search.done.all(), lambda *_: search, narrow, search, least, jnp.ceil(rest)
        )

    def narrow(search: _Search, least: Numbers, rest: Numbers) -> _Search:
        """Bisect, first at the least listed value: it may have more tokens than are listed."""
        weight = weight_from(least)
        tied = ~search.done & (weight >= budget)
        index = jax.lax.cond(
            tied.any(),
            lambda: _index_of_nth(x == least[:, None], rest.astype(jnp.int32)),
            lambda: search.cut.index,
        )
        search = search._replace(top=least, before=weight).ending_at(tied, least, index)
        return jax.lax.fori_loop(0, BISECTIONS, bisect, search)

    def bisect(_: int, search: _Search) -> _Search:
        middle = search.low + (search.top - search.low) / 2
        weight = weight_from(middle)
        enough = weight >= budget
        return search._replace(
            top=jnp.where(enough, search.top, middle),
            before=jnp.where(enough, search.before, weight),
            low=jnp.where(enough, middle, search.low),
        )

    low = jnp.maximum(cut.value, x.max(axis=-1) - NEGLIGIBLE)
    active &= weight_from(low) >= budget  # false also where numbers are not finite
    start = _Search(jnp.full_like(budget, jnp.inf), jnp.zeros_like(budget), low, ~active, cut)
    return jax.lax.while_loop(lambda search: ~search.done.all(), step, start).cut.earlier(cut)


def _index_of_nth(marks: Bool[Array, "B V"], count: Int[Array, " B"]) -> Int[Array, " B"]:
    """Return the index of each row's count-th mark, or of the last one if there are fewer."""
    rows, vocab = marks.shape
    chunks = -(-vocab // CHUNK)
    parts = jnp.pad(marks, ((0, 0), (0, chunks * CHUNK - vocab))).reshape(rows, chunks, CHUNK)
    through = jnp.cumsum(parts.sum(axis=-1, dtype=jnp.int32), axis=-1)  # [B, chunks]
    count = jnp.minimum(count, through[:, -1])[:, None]
    chunk = (through < count).sum(axis=-1, keepdims=True)
    part = jnp.take_along_axis(parts, chunk[..., None], axis=1)[:, 0].astype(jnp.int32)
    through = jnp.take_along_axis(through, chunk, axis=1) - part.sum(axis=-1, keepdims=True)
    inside = through + jnp.cumsum(part, axis=-1) < count
    return chunk[:, 0] * CHUNK + inside.sum(axis=-1)
