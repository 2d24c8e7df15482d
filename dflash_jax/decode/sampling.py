"""Temperature, top-k, top-p, and random keys that depend on nothing but the request.

Filters apply in the order of the `dflash` 0.1.0 reference: divide by the temperature, keep the
top_k largest, then keep sorted tokens while the mass before them is below top_p.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from dflash_jax.state import RowRules

DRAFT, ACCEPT, TOKEN = range(3)  # purposes of a random number


def row_keys(rules: RowRules, position: Int[Array, " B"], purpose: int) -> Key[Array, " B"]:
    """One key per row from (request seed, position, purpose): no neighbour can change it (R11)."""

    def key(seed: Array, at: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), at), purpose)

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
    p = jax.nn.softmax(jnp.where(rank < jnp.where(greedy, 1, keep), ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    p = jnp.where((before < rules.top_p[:, None, None]) | (rank == 0), p, 0.0)
    p = p / p.sum(axis=-1, keepdims=True)
    return jnp.take_along_axis(p, jnp.argsort(order, axis=-1), axis=-1)


def draw(keys: Key[Array, " B"], p: Float[Array, "B *places V"]) -> Int[Array, "B *places"]:
    """One token per place from its distribution, each row by its own key."""
    tiny = jnp.finfo(p.dtype).tiny
    log_p = jnp.where(p > 0, jnp.log(jnp.maximum(p, tiny)), -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, log_p).astype(jnp.int32)
