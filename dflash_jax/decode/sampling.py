"""Temperature, top-k, top-p, and random keys that depend on nothing but the request.

Filters apply in the order of the `dflash` 0.1.0 reference: divide by the temperature, keep the
top_k largest, then keep sorted tokens while the mass before them is below top_p. Where the
reference has none, min_p comes after the temperature, as in vLLM.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from dflash_jax.nn.proposal import Choice
from dflash_jax.state import RowRules

DRAFT, ACCEPT, TOKEN, FLOOR = range(4)  # purposes of a random number


def likeliest(scores: Float[Array, "*places N"]) -> Int[Array, "*places"]:
    """The first of the largest scores of each place.

    As two reductions: the one of values and places together that `jnp.argmax` makes is 3 to 7
    times slower on a CPU. A place with NaN gets an index within range that means nothing. The
    barrier has both reductions read the same numbers: fused into each of them, what computes the
    scores might round differently, and no score would equal the largest.
    """
    scores = jax.lax.optimization_barrier(scores)
    last = scores.shape[-1] - 1
    is_best = scores == scores.max(axis=-1, keepdims=True)
    return jnp.where(is_best, jnp.arange(last + 1, dtype=jnp.int32), last).min(axis=-1)


def row_keys(rules: RowRules, position: Int[Array, " B"], purpose: int) -> Key[Array, " B"]:
    """One key per row from (request seed, position, purpose): no neighbour can change it (R11)."""

    def key(seed: Array, at: Array) -> Array:
        start = jax.random.key(seed, impl="threefry2x32")  # others draw by neighbours, too
        return jax.random.fold_in(jax.random.fold_in(start, at), purpose)

    return jax.vmap(key)(rules.seed, position)


def probabilities(logits: Float[Array, "B T V"], rules: RowRules) -> Float[Array, "B T V"]:
    """The filtered distribution of each place, float32; temperature 0 gives a one-hot."""
    vocab = logits.shape[-1]
    greedy = rules.temperature[:, None, None] <= 0
    scaled = logits / jnp.where(greedy, 1.0, rules.temperature[:, None, None])
    order = jnp.argsort(scaled, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(vocab)[None, None, :]
    keep = jnp.where(rules.top_k > 0, rules.top_k, vocab)[:, None, None]
    likely = ranked >= ranked[..., :1] + jnp.log(rules.min_p)[:, None, None]
    inside = likely & (rank < jnp.where(greedy, 1, keep))
    p = jax.nn.softmax(jnp.where(inside, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    p = jnp.where((before < rules.top_p[:, None, None]) | (rank == 0), p, 0.0)
    p = p / p.sum(axis=-1, keepdims=True)
    return jnp.take_along_axis(p, jnp.argsort(order, axis=-1), axis=-1)


def draw(keys: Key[Array, " B"], p: Float[Array, "B *places V"]) -> Int[Array, "B *places"]:
    """One token per place from its distribution, each row by its own key."""
    tiny = jnp.finfo(p.dtype).tiny
    log_p = jnp.where(p > 0, jnp.log(jnp.maximum(p, tiny)), -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, log_p).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How drafts are chosen: the best, or drawn with keys of the block's own (`nn.proposal`).

    Scores that are not finite are never compared (C7): their row chooses as if all were zero, and
    says so. Whoever drafts, q is exactly what was drawn from; acceptance rests on it.
    """

    rules: RowRules
    position: Int[Array, " B"]  # of the anchor
    sampled: bool

    def every(self, logits: Float[Array, "B R N"]) -> Choice:
        """All places at once, q filtered as the target's p is."""
        finite = jnp.isfinite(logits).all(axis=(1, 2))
        if not self.sampled:  # one pass over the vocabulary less than to compare zeros
            return Choice(jnp.where(finite[:, None], likeliest(logits), 0), None, finite)
        logits = jnp.where(finite[:, None, None], logits, 0.0)
        q = probabilities(logits, self.rules)
        return Choice(draw(row_keys(self.rules, self.position, DRAFT), q), q, finite)

    def noise(self, places: int, size: int) -> Float[Array, "B R N"] | None:
        """Gumbel noise for a walk, one key for each row."""
        if not self.sampled:
            return None
        keys = row_keys(self.rules, self.position, DRAFT)
        return jax.vmap(lambda key: jax.random.gumbel(key, (places, size), jnp.float32))(keys)

    def one(self, scores: Float[Array, "B N"], noise: Float[Array, "B N"] | None) -> Choice:
        """One place: the largest score, or the largest of scores / temperature + noise."""
        finite = jnp.isfinite(scores).all(axis=-1)
        scores = jnp.where(finite[:, None], scores, 0.0)
        best = likeliest(scores)
        if noise is None:
            return Choice(best, None, finite)
        greedy = self.rules.temperature <= 0
        scaled = scores / jnp.where(greedy, 1.0, self.rules.temperature)[:, None]
        drawn = likeliest(scaled + noise)
        sure = jax.nn.one_hot(best, scores.shape[-1], dtype=scores.dtype)
        q = jnp.where(greedy[:, None], sure, jax.nn.softmax(scaled, axis=-1))
        return Choice(jnp.where(greedy, best, drawn), q, finite)
