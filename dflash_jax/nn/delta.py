"""Gated delta rule: a linear recurrence over tokens, in two forms (Yang et al. 2024).

For each token, the state S [P, Q] of a head decays, is corrected towards the value at its key,
and is read at the query:  S = exp(g) S;  d = beta (v - S'k);  S = S + k d';  o = S'q.

* Token by token: a step has the same bits wherever a block begins and ends, so exact decode steps
  use this form. `commit` repeats the first n steps from their keys, corrections and decays; only
  the state before the block is stored.
* Chunked: the corrections d of a chunk are the solution of one triangular system. Prefill, which
  always cuts prompts on the same grid, uses this form. The state after any n tokens follows from
  the same factors by one product.

All computations are in float32. Key heads serve groups of value heads, as in grouped attention.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.caches import RecurrentCache

CHUNK = 64  # tokens per triangular system
HIGHEST = jax.lax.Precision.HIGHEST


@struct.dataclass
class DeltaInputs:
    """Inputs of the rule for T tokens, float32."""

    q: Float[Array, "B T N P"]
    k: Float[Array, "B T N P"]
    v: Float[Array, "B T N Q"]
    g: Float[Array, "B T N"]  # log of the decay, at most 0
    beta: Float[Array, "B T N"]


@struct.dataclass
class DeltaUpdate:
    """Result of a forward pass over T tokens: the factors of the state after each of them."""

    cache: RecurrentCache
    inputs: Float[Array, "B W+T C"]  # inputs of the cache, then of the tokens
    k: Float[Array, "B T K P"]  # per key head
    d: Float[Array, "B T N Q"]
    g: Float[Array, "B T N"]
    chunked: bool = struct.field(pytree_node=False)

    def commit(self, n: Int[Array, " B"]) -> RecurrentCache:
        """Return the cache after n tokens, computed in the form of the forward pass.

        Tokens past n become zeros, which neither decay nor correct the state.
        """
        kept = (jnp.arange(self.g.shape[1])[None, :] < n[:, None])[:, :, None]
        g = jnp.where(kept, self.g, 0.0)
        k = jnp.where(kept[..., None], spread(self.k, g.shape[2]), 0.0)
        d = jnp.where(kept[..., None], self.d, 0.0)
        after = (self._chunked_state if self.chunked else self._step_by_step)(k, d, g)
        return RecurrentCache(
            state=jnp.where((n > 0)[:, None, None, None], after, self.cache.state),
            inputs=window(self.inputs, n, self.cache.inputs.shape[1]),
        )

    def _step_by_step(
        self, k: Float[Array, "B T N P"], d: Float[Array, "B T N Q"], g: Float[Array, "B T N"]
    ) -> Float[Array, "B N P Q"]:
        """Repeat the steps of `by_token`, with the same bits."""
        factors = tuple(jnp.moveaxis(x, 1, 0) for x in (k, d, g))
        return jax.lax.scan(lambda state, x: (step(state, *x), None), self.cache.state, factors)[0]

    def _chunked_state(
        self, k: Float[Array, "B T N P"], d: Float[Array, "B T N Q"], g: Float[Array, "B T N"]
    ) -> Float[Array, "B N P Q"]:
        """Return exp(g_1 + .. + g_n) S + sum over j <= n of exp(g_j+1 + .. + g_n) k_j d_j'."""
        decay = jax.lax.cumsum(g, axis=1, reverse=True)  # from token j on, itself included
        later = jnp.pad(decay[:, 1:], ((0, 0), (0, 1), (0, 0)))
        state = jnp.exp(decay[:, 0])[:, :, None, None] * self.cache.state
        k = k * jnp.exp(later)[..., None]
        return state + jnp.einsum("btnp,btnq->bnpq", k, d, precision=HIGHEST)


def window(
    inputs: Float[Array, "B W+T C"], n: Int[Array, " B"], width: int
) -> Float[Array, "B W C"]:
    """Return the last W inputs of each row after n of its T tokens."""
    take = jax.vmap(lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, width, axis=0))
    return take(inputs, n)


def spread(heads: Float[Array, "B T K P"], count: int) -> Float[Array, "B T N P"]:
    """Return key heads, each repeated for the adjacent value heads it serves."""
    return jnp.repeat(heads, count // heads.shape[2], axis=2)


def unit(x: Float[Array, "... P"]) -> Float[Array, "... P"]:
    """Return x / sqrt(|x|² + 1e-6) in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(1e-6))


def causal_conv(
    inputs: Float[Array, "B W+T C"], kernel: Float[Array, "W+1 C"]
) -> Float[Array, "B T C"]:
    """Return a depthwise causal convolution over each token and the W before it, in float32."""
    taps = kernel.shape[0]
    width = inputs.shape[1] - taps + 1
    kernel = kernel.astype(jnp.float32)
    total = sum(
        inputs[:, i : i + width].astype(jnp.float32) * kernel[i][None, None] for i in range(taps)
    )
    return jnp.asarray(total)


def step(
    state: Float[Array, "B N P Q"],
    k: Float[Array, "B N P"],
    d: Float[Array, "B N Q"],
    g: Float[Array, "B N"],
) -> Float[Array, "B N P Q"]:
    """Return the state after a token with a known correction: exp(g) S + k d'.

    `commit` has to round as the forward pass did, and operations that XLA fuses with this one,
    such as an unrolled neighbour, change the rounding. Hence the barriers; call it only as the
    body of a loop.
    """
    state, k, d, g = jax.lax.optimization_barrier((state, k, d, g))
    after = state * jnp.exp(g)[:, :, None, None] + k[..., None] * d[:, :, None]
    return jax.lax.optimization_barrier(after)


def by_token(
    state: Float[Array, "B N P Q"], x: DeltaInputs
) -> tuple[Float[Array, "B T N Q"], Float[Array, "B T N Q"]]:
    """Return outputs and corrections d, one token after the other.

    Products and sums instead of contractions let XLA make one pass over the state.
    """

    def advance(state: Array, x: DeltaInputs) -> tuple[Array, tuple[Array, Array]]:
        read = (state * jnp.exp(x.g)[:, :, None, None] * x.k[..., None]).sum(axis=2)  # [B, N, Q]
        d = x.beta[..., None] * (x.v - read)
        state = step(state, x.k, d, x.g)
        return state, ((state * x.q[..., None]).sum(axis=2), d)

    tokens_first = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), x)
    _, (out, d) = jax.lax.scan(advance, state, tokens_first)
    return jnp.moveaxis(out, 0, 1), jnp.moveaxis(d, 0, 1)


def by_chunk(
    state: Float[Array, "B N P Q"], x: DeltaInputs
) -> tuple[Float[Array, "B T N Q"], Float[Array, "B T N Q"]]:
    """Return outputs and corrections d, with a triangular system per chunk."""
    tokens = x.g.shape[1]
    size = min(CHUNK, tokens)
    count = -(-tokens // size)

    def cut(a: Array) -> Array:
        """Return [B, T, N, ...] as [chunks, B, N, size, ...], padded with zeros (no effect)."""
        a = jnp.pad(a, ((0, 0), (0, count * size - tokens), *((0, 0),) * (a.ndim - 2)))
        return jnp.moveaxis(a.reshape(a.shape[0], count, size, *a.shape[2:]), (1, 3), (0, 2))

    def join(a: Array) -> Array:
        a = jnp.moveaxis(a, (0, 2), (1, 3))  # [B, chunks, size, N, Q]
        return a.reshape(a.shape[0], count * size, *a.shape[3:])[:, :tokens]

    _, (out, d) = jax.lax.scan(_chunk, state, jax.tree.map(cut, x))
    return join(out), join(d)


def _chunk(
    state: Float[Array, "B N P Q"], x: DeltaInputs
) -> tuple[Float[Array, "B N P Q"], tuple[Float[Array, "B N C Q"], Float[Array, "B N C Q"]]]:
    """Process one chunk of C tokens, with inputs laid out as [B, N, C, ...]."""

    def dot(spec: str, a: Array, b: Array) -> Array:
        return jnp.einsum(spec, a, b, precision=HIGHEST)

    total = jnp.cumsum(x.g, axis=2)
    index = jnp.arange(total.shape[2])
    row = index[None, None, :, None]
    column = index[None, None, None, :]
    exponent = jnp.where(column <= row, total[..., :, None] - total[..., None, :], -jnp.inf)
    decay = jnp.exp(exponent)  # at most 1
    entered = jnp.exp(total)[..., None]
    system = jnp.where(column < row, dot("bnip,bnjp->bnij", x.k, x.k) * decay, 0.0)
    right = x.v - entered * dot("bncp,bnpq->bncq", x.k, state)
    d = jax.lax.linalg.triangular_solve(
        x.beta[..., None] * system,
        x.beta[..., None] * right,
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    # A token with non-finite numbers, such as a rejected draft, must not affect the tokens before
    # it: zero times NaN is NaN.
    scores = jnp.where(column <= row, dot("bnip,bnjp->bnij", x.q, x.k) * decay, 0.0)
    fine = jnp.isfinite(d)
    out = entered * dot("bncp,bnpq->bncq", x.q, state)
    out += dot("bnij,bnjq->bniq", scores, jnp.where(fine, d, 0.0))
    out = jnp.where(jnp.cumsum(~fine, axis=2) > 0, jnp.nan, out)
    k = x.k * decay[..., -1, :, None]
    state = entered[..., -1:, :] * state + dot("bncp,bncq->bnpq", k, d)
    return state, (out, d)
