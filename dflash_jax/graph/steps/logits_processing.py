"""Logits processing: biases, penalties on earlier tokens, and masks.

Applied to every position of a block with exactly the tokens before it, drafts included, so that a
block decides what single tokens would have decided.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.graph.state import Logits, Logprobs, StepOutput
from dflash_jax.graph.steps.inputs import SetLogitsStateInputs
from dflash_jax.kernels.vocabulary import top_k
from dflash_jax.plan import MAX_LOGPROBS


@struct.dataclass
class LogitsState:
    """Per row, how logits are processed. Lives on the device and is donated to every step."""

    bias: Float[Array, "B V"]
    prompt: Bool[Array, "B V"]  # tokens of the prompt
    counts: Int[Array, "B V"]  # occurrences in the output, the pending anchor included
    repetition: Float[Array, " B"]  # 1 is off
    frequency: Float[Array, " B"]
    presence: Float[Array, " B"]
    reports: Bool[Array, " B"]  # whether the request asks for log-probabilities

    def process(
        self, logits: Logits, drafts: Int[Array, "B R"], masks: UInt32[Array, "B T W"] | None
    ) -> Logits:
        """Return processed logits of R + 1 positions; position i follows the first i drafts.

        In this order: the bias is added; for tokens of prompt or output, positive logits are
        divided by `repetition` and others multiplied; tokens of the output lose `frequency` per
        occurrence and `presence` once; tokens outside a mask, whose bits are 0, get minus infinity.
        """
        vocab = logits.shape[-1]
        new = jax.nn.one_hot(drafts, vocab, dtype=jnp.int32)  # [B, R, V]
        counts = self.counts[:, None] + jnp.pad(jnp.cumsum(new, axis=1), ((0, 0), (1, 0), (0, 0)))
        columns = (self.repetition, self.frequency, self.presence)
        repetition, frequency, presence = (x[:, None, None] for x in columns)
        logits = logits + self.bias[:, None]
        scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(self.prompt[:, None] | (counts > 0), scaled, logits)
        logits = logits - frequency * counts.astype(logits.dtype)
        logits = logits - presence * (counts > 0).astype(logits.dtype)
        if masks is None:
            return logits
        bits = jnp.arange(32, dtype=jnp.uint32)[None, None, None]
        allowed = jnp.right_shift(masks[..., None], bits) & jnp.uint32(1)  # [B, T, W, 32]
        allowed = allowed.reshape(*allowed.shape[:2], -1)[:, :, :vocab]
        return jnp.where(allowed > 0, logits, -jnp.inf)

    def logprobs(self, logits: Logits, tokens: Int[Array, "B T"]) -> Logprobs:
        """Return log-probabilities of the tokens; zeros, at no cost, if no request asks for any."""
        return jax.lax.cond(
            self.reports.any(), logprobs, lambda *_: no_logprobs(*logits.shape), logits, tokens
        )

    def count(self, out: StepOutput) -> "LogitsState":
        """Return the state after the tokens of a step."""
        tokens = out.tokens
        num_tokens = out.num_tokens
        decided = jnp.arange(tokens.shape[1])[None, :] < num_tokens[:, None]
        add = jax.vmap(lambda counts, ids, n: counts.at[ids].add(n))
        counts = add(self.counts, tokens, decided.astype(jnp.int32))
        return dataclasses.replace(self, counts=counts)

    def set_row(self, inputs: SetLogitsStateInputs) -> "LogitsState":
        """Return the state with one row replaced."""
        values = (inputs.bias, inputs.prompt, inputs.counts, *inputs.penalties, inputs.reports)
        return jax.tree.map(lambda x, row: x.at[inputs.row].set(row), self, LogitsState(*values))


def neutral_logits_state(rows: int, vocab: int) -> LogitsState:
    """Return a state that leaves all logits unchanged, on the host."""
    bias: Any = np.zeros((rows, vocab), np.float32)
    prompt: Any = np.zeros((rows, vocab), np.bool_)
    counts: Any = np.zeros((rows, vocab), np.int32)
    ones: Any = np.ones((rows,), np.float32)
    reports: Any = np.zeros((rows,), np.bool_)
    return LogitsState(
        bias=bias,
        prompt=prompt,
        counts=counts,
        repetition=ones,
        frequency=np.zeros_like(ones),
        presence=np.zeros_like(ones),
        reports=reports,
    )


def mask_words(vocab: int) -> int:
    """Return the number of 32-bit words that hold a bit for every token."""
    return -(-vocab // 32)


def logprobs(logits: Logits, tokens: Int[Array, "B T"]) -> Logprobs:
    """Return log-probabilities of one token at each position, and of the most probable ones."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, :, None], axis=2) - total
    top, ids = top_k(logits, MAX_LOGPROBS)
    return Logprobs(chosen[:, :, 0], ids, top - total)


def no_logprobs(rows: int, num_positions: int, vocab: int) -> Logprobs:
    """Return zeros in the shapes of `logprobs`."""
    one = (rows, num_positions)
    top = (rows, num_positions, min(MAX_LOGPROBS, vocab))
    return Logprobs(jnp.zeros(one), jnp.zeros(top, jnp.int32), jnp.zeros(top))
