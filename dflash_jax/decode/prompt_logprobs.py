"""How likely a prompt is: a pass over each of its chunks that moves no row."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.decode.block import Pair, Params, forward, logits_of
from dflash_jax.decode.logits_processing import logprobs
from dflash_jax.state import DecodeState, Logprobs, commit, take_row


def score(
    pair: Pair,
    params: Params,
    state: DecodeState,
    row: Int[Array, ""],
    tokens: Int[Array, "1 C"],
    following: Int[Array, "1 C"],
    fresh: Bool[Array, " 1"],
    *,
    width: int,
) -> tuple[DecodeState, Logprobs]:
    """How likely the target finds a row's prompt chunk that is about to be fed.

    Args:
      following: the token behind each of them; what stands behind the prompt means nothing.
      fresh: whether the chunk begins the prompt, whatever the row holds.
      width: places of which the head makes logits at once.

    Returns:
      The state, where no row has moved, and the log-probabilities [1, C] of `following`.
    """
    alone = state.position.shape[0] == 1
    one = state if alone else take_row(state, row)
    one = dataclasses.replace(
        one,
        target=tuple(cache.restart(fresh) for cache in one.target),
        position=jnp.where(fresh, 0, one.position),
    )
    pair = dataclasses.replace(pair, drafter=None)
    target, _, hidden = forward(pair, params, one, tokens, chunked=True)
    parts = -(-tokens.shape[1] // width)
    ends = ((0, 0), (0, parts * width - tokens.shape[1]))
    places = jnp.pad(hidden, (*ends, (0, 0))).reshape(parts, 1, width, -1)
    said = jnp.pad(following, ends).reshape(parts, 1, width)
    found = jax.lax.map(lambda x: logprobs(logits_of(pair, params, x[0]), x[1]), (places, said))
    found = jax.tree.map(lambda x: x.reshape(1, parts * width, *x.shape[3:]), found)
    found = jax.tree.map(lambda x: x[:, : tokens.shape[1]], found)
    if alone:  # its caches were written, behind the row's position
        state = commit(state, target, state.draft, jnp.zeros_like(state.position), state.anchor)
    return state, found
