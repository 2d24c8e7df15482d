"""How many tokens of a block are committed: the acceptance rules, stop tokens and length limits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.graph.state import Logits, RowInts, RowRules
from dflash_jax.kernels.vocabulary import all_finite


def accept_greedy(
    block: Int[Array, "B T"], best: Int[Array, "B T"], num_drafts: RowInts | None = None
) -> RowInts:
    """Return the length of the accepted prefix, the anchor included: at least 1.

    Args:
      block: [anchor, drafts ...] as fed to the target, whose choices after them are `best`.
      num_drafts: number of drafts to consider; None considers all.
    """
    return _prefix(block[:, 1:] == best[:, :-1], num_drafts)


def _prefix(passed: Bool[Array, "B R"], num_drafts: RowInts | None) -> RowInts:
    """Return 1 + the number of drafts before the first that failed or is not considered."""
    if num_drafts is not None:
        passed &= jnp.arange(passed.shape[1])[None, :] < num_drafts[:, None]
    return 1 + jnp.cumprod(passed.astype(jnp.int32), axis=1).sum(axis=1)


def accept_sampled(
    drafts: Int[Array, "B R"],
    q: Float[Array, "B R V"],
    p: Logits,
    uniforms: Float[Array, "B R"],
    num_drafts: RowInts | None = None,
) -> tuple[RowInts, Float[Array, "B V"]]:
    """Accept drafts by rejection sampling (Leviathan et al. 2023), R = T - 1.

    Draft i is accepted while u_i q_i(d_i) < p_i(d_i). The next token is drawn from the residual
    max(p - q, 0), or from p where the residual is empty or every draft was accepted.

    Args:
      num_drafts: number of drafts to consider. Must not depend on the dropped drafts.

    Returns:
      The length of the accepted prefix, anchor included, and the distribution of the next token.
    """
    q_drafted, p_drafted = (
        jnp.take_along_axis(d[:, : drafts.shape[1]], drafts[:, :, None], axis=2)[:, :, 0]
        for d in (q, p)
    )
    n = _prefix(uniforms * q_drafted < p_drafted, num_drafts)
    if num_drafts is not None:
        q = jnp.where((jnp.arange(q.shape[1])[None, :] < num_drafts[:, None])[:, :, None], q, 0.0)
    at = (n - 1)[:, None, None]
    p_next = jnp.take_along_axis(p, at, axis=1)[:, 0]
    # The place after the last considered draft has no proposal: q = 0, and the residual is p
    # itself, to the bit, so that a row without drafts draws what plain decoding draws.
    q_next = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), at, axis=1)[:, 0]
    residual = jnp.maximum(p_next - q_next, 0.0)
    mass = residual.sum(axis=-1, keepdims=True)
    some = (mass > 0) & (q_next > 0).any(axis=-1, keepdims=True)
    some = jnp.broadcast_to(some, residual.shape)
    return n, jnp.where(some, residual / jnp.where(mass > 0, mass, 1.0), p_next)


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
    return jnp.where(frozen(anchor, position, rules), 0, most)


def frozen(anchor: RowInts, position: RowInts, rules: RowRules) -> Bool[Array, " B"]:
    """Return which rows decide nothing until the host acts: at a stop token or the limit."""
    return is_stop(anchor[:, None], rules)[:, 0] | (position + 1 >= rules.limit)


def stops_masked(logits: Logits, rules: RowRules) -> Logits:
    """Return logits with every row's stop set at minus infinity."""
    outside = jnp.where(rules.stop_ids < 0, logits.shape[2], rules.stop_ids)
    mask = jax.vmap(lambda row, ids: row.at[:, ids].set(-jnp.inf, mode="drop"))
    return mask(logits, outside)


def finite_places(logits: Logits) -> RowInts:
    """Return the number of leading places of each row whose logits are finite."""
    places = logits.shape[1]
    good = all_finite(logits)
    return jnp.where(good, places, jnp.arange(places)[None, :]).min(axis=1)
