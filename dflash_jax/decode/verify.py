"""How many tokens of a block are kept: the acceptance rules and the device's own cuts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.state import RowRules


def accept_greedy(
    block: Int[Array, "B T"], best: Int[Array, "B T"], count: Int[Array, " B"] | None = None
) -> Int[Array, " B"]:
    """Length of the verified prefix, the anchor included: always at least 1.

    Args:
      block: [anchor, drafts ...] as fed to the target.
      best: the target's choice after each of them.
      count: only this many drafts may be accepted.
    """
    return _prefix(block[:, 1:] == best[:, :-1], count)


def _prefix(passed: Bool[Array, "B R"], count: Int[Array, " B"] | None) -> Int[Array, " B"]:
    """1 + the number of drafts before the first that failed or does not count."""
    if count is not None:
        passed &= jnp.arange(passed.shape[1])[None, :] < count[:, None]
    return 1 + jnp.cumprod(passed.astype(jnp.int32), axis=1).sum(axis=1)


def accept_sampled(
    drafts: Int[Array, "B R"],
    q: Float[Array, "B R V"],
    p: Float[Array, "B T V"],
    uniforms: Float[Array, "B R"],
    count: Int[Array, " B"] | None = None,
) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
    """Rejection sampling (Leviathan et al. 2023), R = T - 1 drafts.

    Draft i passes while u_i q_i(d_i) < p_i(d_i). The token after the passed ones is drawn from
    the residual max(p - q, 0), or from p where nothing is left of it or every draft passed.

    Args:
      count: only this many drafts count, the rest is as if never drawn. It must not hang on a
        draft that it leaves out.

    Returns:
      The verified prefix's length, anchor included, and the distribution of the next token.
    """
    q_drafted, p_drafted = (
        jnp.take_along_axis(d[:, : drafts.shape[1]], drafts[:, :, None], axis=2)[:, :, 0]
        for d in (q, p)
    )
    n = _prefix(uniforms * q_drafted < p_drafted, count)
    if count is not None:
        q = jnp.where((jnp.arange(q.shape[1])[None, :] < count[:, None])[:, :, None], q, 0.0)
    at = (n - 1)[:, None, None]
    p_next = jnp.take_along_axis(p, at, axis=1)[:, 0]
    # The row after the last draft that counts has no proposal: q = 0, and the residual is p
    # itself, to the bit, so that a row without drafts draws what plain decoding draws.
    q_next = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), at, axis=1)[:, 0]
    residual = jnp.maximum(p_next - q_next, 0.0)
    mass = residual.sum(axis=-1, keepdims=True)
    some = (mass > 0) & (q_next > 0).any(axis=-1, keepdims=True)
    some = jnp.broadcast_to(some, residual.shape)
    return n, jnp.where(some, residual / jnp.where(mass > 0, mass, 1.0), p_next)


def is_stop(tokens: Int[Array, "B T"], rules: RowRules) -> Bool[Array, "B T"]:
    """Which tokens are in their row's stop set."""
    return (tokens[:, :, None] == rules.stop_ids[:, None, :]).any(axis=-1)


def cut(
    n: Int[Array, " B"],
    tokens: Int[Array, "B T"],
    anchor: Int[Array, " B"],
    position: Int[Array, " B"],
    rules: RowRules,
) -> Int[Array, " B"]:
    """n shortened so that nothing follows a stop token or passes the row's limit (R5).

    A stop token becomes the next anchor and is never committed; a row whose anchor is one, or
    whose limit is reached, is frozen: 0 until the host speaks.

    Args:
      n: kept so far, anchor included, so that `n` new tokens are decided.
      tokens: the newly decided tokens; the first n count.
    """
    stops = is_stop(tokens, rules)
    first_stop = jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1) + 1, tokens.shape[1])
    most = jnp.minimum(jnp.minimum(n, first_stop), rules.limit - position - 1)
    return jnp.where(frozen(anchor, position, rules), 0, most)


def frozen(
    anchor: Int[Array, " B"], position: Int[Array, " B"], rules: RowRules
) -> Bool[Array, " B"]:
    """Which rows decide nothing until the host speaks: at a stop token, or at their limit."""
    return is_stop(anchor[:, None], rules)[:, 0] | (position + 1 >= rules.limit)


def best_choice(logits: Float[Array, "B V"], choices: Int[Array, "B N"]) -> Int[Array, " B"]:
    """Return each row's choice with the largest logit, the first of equal ones.

    Args:
      choices: token ids, padded with -1.
    """
    scores = jnp.take_along_axis(logits, jnp.maximum(choices, 0), axis=1)
    scores = jnp.where(choices >= 0, scores, -jnp.inf)
    return jnp.take_along_axis(choices, jnp.argmax(scores, axis=1)[:, None], axis=1)[:, 0]


def without_stops(logits: Float[Array, "B T V"], rules: RowRules) -> Float[Array, "B T V"]:
    """Logits with every row's stop set at minus infinity (R6)."""
    outside = jnp.where(rules.stop_ids < 0, logits.shape[2], rules.stop_ids)
    mask = jax.vmap(lambda row, ids: row.at[:, ids].set(-jnp.inf, mode="drop"))
    return mask(logits, outside)
