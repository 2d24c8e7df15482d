"""What a request adds to the target's logits: biases, penalties on what was said, and masks.

Applied to every verified place with exactly the tokens that stand before it, drafts included,
so that a block says what one token after the other would have said.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.decode.filters import leading
from dflash_jax.state import Logprobs, StepOutput

TOP = 20  # most alternatives reported beside a token


@struct.dataclass
class Shaping:
    """Per row, what changes the logits; lives on the device beside the state."""

    bias: Float[Array, "B V"]
    prompted: Bool[Array, "B V"]  # tokens of the prompt
    said: Int[Array, "B V"]  # how often each token was said, the pending anchor included
    repetition: Float[Array, " B"]  # 1 is off
    frequency: Float[Array, " B"]
    presence: Float[Array, " B"]
    reports: Bool[Array, " B"]  # whether the request asks for log-probabilities
    masks: UInt32[Array, "B T W"] | None = None  # a bit for every token a place may say

    def applied(
        self, logits: Float[Array, "B T V"], drafts: Int[Array, "B R"]
    ) -> Float[Array, "B T V"]:
        """Logits of R + 1 places, of which place i follows the first i drafts.

        Bias first; then tokens seen anywhere lose by `repetition` (positive logits are divided
        by it, others multiplied), then said ones `frequency` for each time and `presence` once;
        masks last.
        """
        vocab = logits.shape[-1]
        new = jax.nn.one_hot(drafts, vocab, dtype=jnp.int32)  # [B, R, V]
        said = self.said[:, None] + jnp.pad(jnp.cumsum(new, axis=1), ((0, 0), (1, 0), (0, 0)))
        repetition, frequency, presence = (
            x[:, None, None] for x in (self.repetition, self.frequency, self.presence)
        )
        logits = logits + self.bias[:, None]
        scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(self.prompted[:, None] | (said > 0), scaled, logits)
        logits = logits - frequency * said.astype(logits.dtype)
        logits = logits - presence * (said > 0).astype(logits.dtype)
        if self.masks is None:
            return logits
        bits = jnp.arange(32, dtype=jnp.uint32)[None, None, None]
        allowed = jnp.right_shift(self.masks[..., None], bits) & jnp.uint32(1)  # [B, T, W, 32]
        allowed = allowed.reshape(*allowed.shape[:2], -1)[:, :, :vocab]
        return jnp.where(allowed > 0, logits, -jnp.inf)

    def logprobs(self, logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Logprobs:
        """Log-probabilities of the tokens; zeros, at no cost, where no request asks for any."""
        return jax.lax.cond(
            self.reports.any(), logprobs, lambda *_: no_logprobs(*logits.shape), logits, tokens
        )

    def after(self, out: StepOutput) -> "Shaping":
        """The same once a step's tokens are said."""
        tokens, count = out.tokens, out.count
        kept = (jnp.arange(tokens.shape[1])[None, :] < count[:, None]).astype(jnp.int32)
        add = jax.vmap(lambda said, ids, n: said.at[ids].add(n))
        return dataclasses.replace(self, said=add(self.said, tokens, kept))


def set_row(
    shaping: Shaping,
    row: Int[Array, ""],
    bias: Float[Array, " V"],
    prompted: Bool[Array, " V"],
    said: Int[Array, " V"],
    penalties: Float[Array, " 3"],
    reports: Bool[Array, ""],
) -> Shaping:
    """The shaping with one row replaced; penalties are repetition, frequency, presence."""
    values = (bias, prompted, said, *penalties, reports)
    fields = [field.name for field in dataclasses.fields(Shaping)][: len(values)]
    return Shaping(
        **{
            name: getattr(shaping, name).at[row].set(value)
            for name, value in zip(fields, values, strict=True)
        }
    )


def neutral_shaping(rows: int, vocab: int) -> Shaping:
    """Shaping that leaves all logits as they are, on the host."""
    tables: dict[str, Any] = {
        "bias": np.zeros((rows, vocab), np.float32),
        "prompted": np.zeros((rows, vocab), np.bool_),
        "said": np.zeros((rows, vocab), np.int32),
        "repetition": np.ones((rows,), np.float32),
        "frequency": np.zeros((rows,), np.float32),
        "presence": np.zeros((rows,), np.float32),
        "reports": np.zeros((rows,), np.bool_),
    }
    return Shaping(**tables)


def logprobs(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Logprobs:
    """Log-probabilities of one token at each place, and of the `TOP` most probable ones there."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, :, None], axis=2) - total
    top, ids = leading(logits, TOP)
    return Logprobs(chosen[:, :, 0], ids, top - total)


def no_logprobs(rows: int, places: int, vocab: int) -> Logprobs:
    """In the shapes of `logprobs`, zeros."""
    one, top = (rows, places), (rows, places, min(TOP, vocab))
    return Logprobs(jnp.zeros(one), jnp.zeros(top, jnp.int32), jnp.zeros(top))
