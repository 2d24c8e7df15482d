"""Log-probabilities of a prompt, by an extra pass over each of its chunks."""

import dataclasses

import jax
import jax.numpy as jnp

from dflash_jax.decode.inputs import PromptLogprobsInputs
from dflash_jax.decode.logits_processing import logprobs
from dflash_jax.decode.pair import Pair, Params, forward, logits_of
from dflash_jax.state import DecodeState, Logprobs, commit, restart_rows, take_row


def prompt_logprobs(
    pair: Pair,
    params: Params,
    state: DecodeState,
    logits_state: None,
    inputs: PromptLogprobsInputs,
) -> tuple[DecodeState, None, Logprobs]:
    """Return the log-probability of the token after each token of a prompt chunk.

    Logits are computed for as many places at once as in a decode step.

    Returns:
      The state, in which no row has moved, and log-probabilities [1, C]. Those after the prompt's
      last token are undefined.
    """
    alone = state.position.shape[0] == 1
    one = restart_rows(state if alone else take_row(state, inputs.row), inputs.fresh)
    pair = dataclasses.replace(pair, drafter=None)
    target, _, hidden = forward(pair, params, one, inputs.tokens, chunked=True)
    chunk, width = inputs.tokens.shape[1], pair.block
    parts = -(-chunk // width)
    ends = ((0, 0), (0, parts * width - chunk))
    places = jnp.pad(hidden, (*ends, (0, 0))).reshape(parts, 1, width, -1)
    following = jnp.pad(inputs.following, ends).reshape(parts, 1, width)
    found = jax.lax.map(
        lambda x: logprobs(logits_of(pair, params, x[0]), x[1]), (places, following)
    )
    found = jax.tree.map(lambda x: x.reshape(1, parts * width, *x.shape[3:]), found)
    found = jax.tree.map(lambda x: x[:, :chunk], found)
    if alone:  # the donated caches were written past the row's position
        state = commit(state, target, state.draft, jnp.zeros_like(state.position), state.anchor)
    return state, None, found
