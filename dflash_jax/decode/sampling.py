"""Distributions, draws, and random keys that depend on nothing but the request.

Where no row of a step is sampled, nothing is drawn, even in programs that could.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dflash_jax.decode.filters import filtered, is_filtered
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


def any_sampled(rules: RowRules) -> Bool[Array, ""]:
    """Whether any row draws its tokens."""
    return (rules.temperature > 0).any()


def row_keys(rules: RowRules, position: Int[Array, " B"], purpose: int) -> Key[Array, " B"]:
    """One key per row from (request seed, position, purpose): no neighbour can change it (R11)."""

    def key(seed: Array, at: Array) -> Array:
        start = jax.random.key(seed, impl="threefry2x32")  # others draw by neighbours, too
        return jax.random.fold_in(jax.random.fold_in(start, at), purpose)

    return jax.vmap(key)(rules.seed, position)


def probabilities(logits: Float[Array, "B T V"], rules: RowRules) -> Float[Array, "B T V"]:
    """The filtered distribution of each place, float32; temperature 0 gives a one-hot.

    A row without filters has the same bits whether or not others filter.
    """
    greedy = rules.temperature[:, None, None] <= 0
    scaled = logits / jnp.where(greedy, 1.0, rules.temperature[:, None, None])
    scaled = jax.lax.cond(
        is_filtered(rules).any(), filtered, lambda scaled, _: scaled, scaled, rules
    )
    p = jax.nn.softmax(scaled, axis=-1)
    return jnp.where(greedy, one_hot(likeliest(logits), logits.shape[-1]), p)


def one_hot(tokens: Int[Array, "*places"], vocab: int) -> Float[Array, "*places V"]:
    """The distribution that is sure of a token."""
    return jax.nn.one_hot(tokens, vocab, dtype=jnp.float32)


def draw(keys: Key[Array, " B"], p: Float[Array, "B *places V"]) -> Int[Array, "B *places"]:
    """One token per place from its distribution, each row by its own key (Gumbel's maximum)."""
    tiny = jnp.finfo(p.dtype).tiny
    log_p = jnp.where(p > 0, jnp.log(jnp.maximum(p, tiny)), -jnp.inf)
    return likeliest(log_p + gumbel(keys, p.shape[1:]))


def gumbel(keys: Key[Array, " B"], shape: tuple[int, ...]) -> Float[Array, "B *shape"]:
    """Gumbel noise, float32, each row by its own key."""
    return jax.vmap(lambda key: jax.random.gumbel(key, shape, jnp.float32))(keys)


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

        def drawn() -> tuple[Int[Array, "B R"], Float[Array, "B R N"]]:
            q = probabilities(logits, self.rules)
            return draw(row_keys(self.rules, self.position, DRAFT), q), q

        def best() -> tuple[Int[Array, "B R"], Float[Array, "B R N"]]:
            tokens = likeliest(logits)
            return tokens, one_hot(tokens, logits.shape[-1])

        index, q = jax.lax.cond(any_sampled(self.rules), drawn, best)
        return Choice(index, q, finite)

    def noise(self, places: int, size: int) -> Float[Array, "B R N"] | None:
        """Gumbel noise for a walk, one key for each row."""
        if not self.sampled:
            return None

        def drawn() -> Float[Array, "B R N"]:
            return gumbel(row_keys(self.rules, self.position, DRAFT), (places, size))

        rows = len(self.rules.temperature)
        return jax.lax.cond(
            any_sampled(self.rules), drawn, lambda: jnp.zeros((rows, places, size), jnp.float32)
        )

    def one(self, scores: Float[Array, "B N"], noise: Float[Array, "B N"] | None) -> Choice:
        """One place: the largest score, or the largest of scores / temperature + noise."""
        finite = jnp.isfinite(scores).all(axis=-1)
        scores = jnp.where(finite[:, None], scores, 0.0)
        best = likeliest(scores)
        if noise is None:
            return Choice(best, None, finite)
        greedy, sure = self.rules.temperature <= 0, one_hot(best, scores.shape[-1])

        def drawn() -> tuple[Int[Array, " B"], Float[Array, "B N"]]:
            scaled = scores / jnp.where(greedy, 1.0, self.rules.temperature)[:, None]
            q = jnp.where(greedy[:, None], sure, jax.nn.softmax(scaled, axis=-1))
            return jnp.where(greedy, best, likeliest(scaled + noise)), q

        index, q = jax.lax.cond(any_sampled(self.rules), drawn, lambda: (best, sure))
        return Choice(index, q, finite)
