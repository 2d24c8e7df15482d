"""How many tokens of a block are committed: the acceptance rules, stop tokens and length limits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.graph.state import COMMITS_NOTHING, Logits, RowInts, RowRules
from dflash_jax.kernels.vocabulary import all_finite


def accept(
    block: Int[Array, "B T"], chosen: Int[Array, "B T"], num_drafts: RowInts | None = None
) -> RowInts:
    """Return the length of the accepted prefix, the anchor included: at least 1.

    Args:
      block: [anchor, drafts ...] as fed to the target, whose choices after them are `chosen`.
      num_drafts: number of drafts to consider; None considers all.
    """
    right = block[:, 1:] == chosen[:, :-1]
    if num_drafts is not None:
        right &= jnp.arange(right.shape[1])[None, :] < num_drafts[:, None]
    return 1 + jnp.cumprod(right.astype(jnp.int32), axis=1).sum(axis=1)


def is_stop(tokens: Int[Array, "B T"], rules: RowRules) -> Bool[Array, "B T"]:
    """Return which tokens are in their row's stop set."""
    return (tokens[:, :, None] == rules.stop_ids[:, None, :]).any(axis=-1)


def cut(
    n: RowInts, tokens: Int[Array, "B T"], anchor: RowInts, position: RowInts, rules: RowRules
) -> RowInts:
    """Return n so that nothing of n decided tokens follows a stop token or exceeds a limit.

    A stop token becomes the next anchor and is never committed. Frozen rows get 0.
    """
    stops = is_stop(tokens, rules)
    first_stop = jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1) + 1, tokens.shape[1])
    most = jnp.minimum(jnp.minimum(n, first_stop), rules.limit - position - 1)
    none = frozen(anchor, position, rules) | (rules.limit == COMMITS_NOTHING)
    return jnp.where(none, 0, most)


def frozen(anchor: RowInts, position: RowInts, rules: RowRules) -> Bool[Array, " B"]:
    """Return which rows decide nothing until the host acts: at a stop token or the limit."""
    ended = (position + 1 >= rules.limit) & (rules.limit != COMMITS_NOTHING)
    return is_stop(anchor[:, None], rules)[:, 0] | ended


def stops_masked(logits: Logits, rules: RowRules) -> Logits:
    """Return logits with every row's stop set at minus infinity."""
    outside = jnp.where(rules.stop_ids < 0, logits.shape[2], rules.stop_ids)
    mask = jax.vmap(lambda row, ids: row.at[:, ids].set(-jnp.inf, mode="drop"))
    return mask(logits, outside)


def finite_positions(
    logits: Logits, kernels: str, live: Bool[Array, "B T"] | None = None
) -> RowInts:
    """Return the number of leading positions of each row whose logits are finite.

    Args:
      live: positions whose logits are not known to be zeros; all by default.
    """
    num_positions = logits.shape[1]
    good = all_finite(logits, kernels, live)
    return jnp.where(good, num_positions, jnp.arange(num_positions)[None, :]).min(axis=1)
