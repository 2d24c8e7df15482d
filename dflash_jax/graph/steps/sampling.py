"""Choosing tokens, by random numbers that depend on a request's seed and the position alone.

A sampled token is the best one after Gumbel noise was added to the logits, which draws from their
distribution. The noise of a position is the same in every step, so that the token is, too: drafts
are verified by comparing tokens, as greedy ones are, and drafters that draw by the same noise guess
them. Steps without a sampled row draw nothing, even in programs that can.

A chunk of the vocabulary is drawn by the mass of its tokens, then a token in it, so that a draw
needs noise for some hundred numbers, not for every token.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dflash_jax.graph.state import Logits, RowInts, RowRules
from dflash_jax.graph.steps.acceptance import is_stop, stops_masked
from dflash_jax.graph.steps.filters import filtered, is_filtered, native_threshold
from dflash_jax.kernels.native.layers import drawn
from dflash_jax.kernels.vocabulary import CHUNK, argmax

TOKEN, REPLACEMENT_TOKEN, ACCEPTANCE = range(3)  # purposes of a random number


def choose_token(
    logits: Logits, at: RowInts, position: RowInts, rules: RowRules, *, sampled: bool, kernels: str
) -> RowInts:
    """Return the token that the logits choose at index `at`, for the given position."""
    chosen_from = _at_index(logits, at)
    return choose_tokens(chosen_from, position, rules, sampled=sampled, kernels=kernels)[:, 0]


def choose_tokens(
    logits: Logits,
    position: RowInts,
    rules: RowRules,
    *,
    sampled: bool,
    kernels: str,
    live: Bool[Array, "B T"] | None = None,
) -> Int[Array, "B T"]:
    """Return the token that each position chooses.

    Args:
      position: position of each row's first token.
      live: positions whose logits are not known to be zeros; all by default.
    """
    best = argmax(logits, kernels, live)
    if not sampled:
        return best

    def drawn() -> Int[Array, "B T"]:
        one = functools.partial(draw, kernels=kernels)
        tokens = at_positions(one, logits, position, rules, kernels, live)
        return jnp.where(rules.temperature[:, None] > 0, tokens, best)

    return jax.lax.cond(any_sampled(rules), drawn, lambda: best)


Draw = Callable[..., RowInts]  # by keys [M], from logits [M, N] by rules of M rows


def at_positions(
    draw: Draw,
    logits: Float[Array, "B T N"],
    position: RowInts,
    rules: RowRules,
    kernels: str,
    live: Bool[Array, "B T"] | None = None,
) -> Int[Array, "B T"]:
    """Return the draws at all positions of rows, by the same computation however many there are.

    XLA's sums round differently for several positions, so that they are computed one after the
    other; native kernels draw at all of them together.

    Args:
      position: position of each row's first token.
      live: positions that count; all by default. Native kernels draw at no others.
    """
    rows, count, choices = logits.shape
    if kernels != "native":

        def one(logits_and_position: tuple[Float[Array, "B N"], RowInts]) -> RowInts:
            one_logits, one_position = logits_and_position
            return draw(row_keys(rules, one_position, TOKEN), one_logits, rules)

        positions = position[None, :] + jnp.arange(count)[:, None]
        return jax.lax.map(one, (logits.swapaxes(0, 1), positions)).T
    wide = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), rules)
    keys = row_keys(wide, (position[:, None] + jnp.arange(count)[None]).ravel(), TOKEN)
    each_live = None if live is None else live.ravel()
    each = logits.reshape(rows * count, choices)
    return draw(keys, each, wide, live=each_live).reshape(rows, count)


def replacement_token(
    logits: Logits,
    token: RowInts,
    at: RowInts,
    position: RowInts,
    rules: RowRules,
    *,
    sampled: bool,
    kernels: str,
) -> RowInts:
    """Return the token to use instead of `token` where that is a stop token.

    Chosen as by `choose_token`, among tokens that are no stop tokens. It has a random key of its
    own: given that the key of `token` drew a stop token, the others would not have their
    probabilities under that key. A row with `RowRules.choices` gets the best of those, sampled or
    not. Rows whose token is no stop token get some token, which is unused.
    """
    stopped = is_stop(token[:, None], rules)[:, 0]

    def replacement() -> RowInts:
        row = _at_index(logits, at)
        free = stops_masked(row, rules)[:, 0]
        best = argmax(free, kernels)
        if sampled:
            needed = stopped & (rules.temperature > 0)
            best = _draw_where(needed, free, best, position, rules, REPLACEMENT_TOKEN, kernels)
        if rules.choices is None:
            return best
        return jnp.where(rules.choices[:, 0] >= 0, _best_choice(row[:, 0], rules.choices), best)

    if kernels != "native":
        return replacement()
    wanted = stopped if rules.choices is None else stopped | (rules.choices[:, 0] >= 0)
    return jax.lax.cond(wanted.any(), replacement, lambda: token)


def tool_call_margin(
    logits: Logits, token: RowInts, at: RowInts, rules: RowRules, kernels: str
) -> Float[Array, " B"] | None:
    """Return the log-ratio of the probabilities of `RowRules.opening` and of the decided token.

    The decided token is `token`, or in a row with `RowRules.choices` the best one at index `at`.

    Returns:
      None if the rules have no `opening`; undefined in rows whose `opening` is -1.
    """
    if rules.opening is None:
        return None
    pair = jnp.stack([rules.opening, token], axis=1)
    rows = jnp.arange(len(token))[:, None]
    both = logits.at[rows, at[:, None], jnp.maximum(pair, 0)].get(mode="clip")
    opening, other = jnp.moveaxis(both.astype(jnp.float32), 1, 0)
    if rules.choices is None:
        return opening - other
    among = rules.choices[:, 0] >= 0

    def of_choices() -> Float[Array, " B"]:
        largest = _at_index(logits, at)[:, 0].astype(jnp.float32).max(axis=1)
        return jnp.where(among, largest, other)

    if kernels == "native":  # a pass over the vocabulary is a part of a step's time there
        return opening - jax.lax.cond(among.any(), of_choices, lambda: other)
    return opening - of_choices()


def _at_index(logits: Logits, at: RowInts) -> Float[Array, "B 1 V"]:
    return jnp.take_along_axis(logits, at[:, None, None], axis=1, mode="clip")


def _draw_where(
    rows: Bool[Array, " B"],
    logits: Float[Array, "B V"],
    best: RowInts,
    position: RowInts,
    rules: RowRules,
    purpose: int,
    kernels: str,
) -> RowInts:
    """Return drawn tokens for some rows and the best ones for others."""

    def drawn() -> RowInts:
        keys = row_keys(rules, position, purpose)
        return jnp.where(rows, draw(keys, logits, rules, kernels), best)

    return jax.lax.cond(rows.any(), drawn, lambda: best)


def _best_choice(logits: Float[Array, "B V"], choices: Int[Array, "B N"]) -> RowInts:
    """Return each row's choice with the largest logit, the first of equal ones."""
    scores = jnp.take_along_axis(logits, jnp.maximum(choices, 0), axis=1)
    scores = jnp.where(choices >= 0, scores, -jnp.inf)
    return jnp.take_along_axis(choices, jnp.argmax(scores, axis=1)[:, None], axis=1)[:, 0]


def any_sampled(rules: RowRules) -> Bool[Array, ""]:
    """Return whether any row draws its tokens."""
    return (rules.temperature > 0).any()


def row_keys(rules: RowRules, position: RowInts, purpose: int) -> Key[Array, " B"]:
    """Return a key per row from (request seed, position, purpose), whatever other rows do."""

    def key(seed: Array, at: Array) -> Array:
        # Other implementations draw depending on neighbouring rows.
        start = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(start, at), purpose)

    return jax.vmap(key)(rules.seed, position)


def scaled(logits: Float[Array, "B V"], rules: RowRules) -> Float[Array, "B V"]:
    """Return logits over temperature, -inf for what filters drop; those of greedy rows as they are.

    A row without filters has the same bits whether or not others filter.
    """
    some = is_filtered(rules).any()
    by_row = logits / jnp.where(rules.temperature > 0, rules.temperature, 1.0)[:, None]
    return jax.lax.cond(some, filtered, lambda scaled, _: scaled, by_row, rules)


def draw(
    keys: Key[Array, " B"],
    logits: Float[Array, "B N"],
    rules: RowRules,
    kernels: str,
    live: Bool[Array, " B"] | None = None,
    spread: Callable[[Float[Array, "B N"]], Float[Array, "B V"]] | None = None,
) -> Int[Array, " B"]:
    """Draw a token per row by its rules, each by its own key.

    Args:
      live: rows that count; all by default. Native kernels draw for no others.
      spread: puts numbers of some tokens among those of all, where there are others.
    """
    if kernels != "native":
        x = scaled(logits, rules)
        return _draw(keys, x if spread is None else spread(x), kernels)
    whole = logits if spread is None else spread(logits)
    sampled = rules.temperature > 0
    some = sampled if live is None else sampled & live
    cut = native_threshold(whole, rules, some)
    return drawn(whole, jax.random.key_data(keys), some, rules.temperature, *cut)


def _draw(keys: Key[Array, " B"], x: Float[Array, "B V"], kernels: str) -> Int[Array, " B"]:
    """Draw a token per row from softmax(x)."""
    rows, vocab = x.shape
    chunks = -(-vocab // CHUNK)
    x = jnp.minimum(x, jnp.finfo(x.dtype).max)  # logits over a tiny temperature may be infinite
    x = jnp.pad(x, ((0, 0), (0, chunks * CHUNK - vocab)), constant_values=-jnp.inf)
    parts = x.reshape(rows, chunks, CHUNK)
    top = parts.max(axis=-1)
    top = jnp.where(top > -jnp.inf, top, 0.0)
    mass = top + jnp.log(jnp.exp(parts - top[:, :, None]).sum(axis=-1))
    chunk = argmax(mass + _gumbel(keys, jnp.zeros((rows,), jnp.int32), chunks), kernels)
    part = jnp.take_along_axis(parts, chunk[:, None, None], axis=1)[:, 0]
    return chunk * CHUNK + argmax(part + _gumbel(keys, 1 + chunk, CHUNK), kernels)


def _gumbel(keys: Key[Array, " B"], of: Int[Array, " B"], size: int) -> Float[Array, "B N"]:
    """Return Gumbel noise, float32, each row by its own key and number."""

    def noise(key: Key[Array, ""], of: Int[Array, ""]) -> Float[Array, " N"]:
        return jax.random.gumbel(jax.random.fold_in(key, of), (size,), jnp.float32)

    return jax.vmap(noise)(keys, of)
