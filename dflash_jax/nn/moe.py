"""Mixture of experts with static shapes: routing, and the experts' gated MLPs.

A token's result never depends on other tokens: its experts follow from its own logits, no
expert has a capacity, and its experts are summed in an order given by their numbers or ranks.

Letters: N tokens, E experts, X chosen experts per token, D width, F expert width, S rows of tiles,
R rows that are choices of tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.native.layers import gate, route
from dflash_jax.kernels.native.products import multiply_by_experts
from dflash_jax.nn.layers import Watched, gelu_tanh, matrix, product, weight
from dflash_jax.quant.layouts import STACK, Interleaved

Activation = Callable[[Array, Array], Array]  # (gate, up)


@struct.dataclass
class ExpertWeights:
    """Stacked MLPs of a layer's experts. Gate and up are one weight, as in `GatedMLP`.

    With native kernels both are in strips.
    """

    gate_up: Float[Array, "E D 2 F"] | Interleaved
    down: Float[Array, "E F D"] | Interleaved
    gate_up_bias: Float[Array, "E 2 F"] | None = None
    down_bias: Float[Array, "E D"] | None = None

    @property
    def native(self) -> bool:
        """Whether native kernels choose and multiply the experts."""
        return isinstance(self.gate_up, Interleaved)


def expert_weights(
    module: nn.Module, experts: int, width: int, hidden: int, *, bias: bool = False
) -> ExpertWeights:
    """Declare the experts of a module: `experts_gate_up`, `experts_down` and their biases."""
    gate_up_bias = None
    if bias:
        gate_up_bias = weight(module, "experts_gate_up_bias", (experts, 2, hidden), split=2)
    return ExpertWeights(
        gate_up=matrix(module, "experts_gate_up", (experts, width, 2, hidden), split=3, form=STACK),
        down=matrix(module, "experts_down", (experts, hidden, width), split=1, form=STACK),
        gate_up_bias=gate_up_bias,
        down_bias=weight(module, "experts_down_bias", (experts, width)) if bias else None,
    )


def swiglu(gate: Array, up: Array) -> Array:
    """Return silu(gate) · up, the activation of the Qwen families."""
    return nn.silu(gate) * up


def gelu_gated(gate: Array, up: Array) -> Array:
    """Return gelu(gate) · up, the activation of Gemma 4."""
    return gelu_tanh(gate) * up


def softmax_then_top(
    logits: Float[Array, "B T E"], count: int, *, normalise: bool, native: bool
) -> tuple[Int[Array, "B T X"], Float[Array, "B T X"]]:
    """Return the `count` most probable experts and their float32 probabilities.

    Of equal probabilities, the lowest expert comes first.

    Args:
      normalise: divide by the sum of the chosen probabilities.
      native: by a native kernel, as the experts.
    """
    if native:
        return route(logits, count, chosen_only=normalise)
    chosen, ids = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), count)
    return ids, chosen / chosen.sum(axis=-1, keepdims=True) if normalise else chosen


def top_then_softmax(
    logits: Float[Array, "B T E"], count: int, *, native: bool
) -> tuple[Int[Array, "B T X"], Float[Array, "B T X"]]:
    """Return the experts with the largest logits, and a float32 softmax over these logits.

    Args:
      native: by a native kernel, as the experts.
    """
    if native:
        return route(logits, count, chosen_only=True)
    chosen, ids = jax.lax.top_k(logits.astype(jnp.float32), count)
    return ids, jax.nn.softmax(chosen, axis=-1)


def experts(
    x: Float[Array, "B T D"],
    weights: ExpertWeights,
    ids: Int[Array, "B T X"],
    probabilities: Float[Array, "B T X"],
    activation: Activation,
) -> Float[Array, "B T D"]:
    """Return Σ p_e · expert_e(x) over the experts `ids` of each token, in x's dtype.

    Contractions and the sum accumulate in float32; the bias of an expert's output is weighted as
    well. A CPU multiplies chosen experts only, by native kernels if weights are in strips. Other
    devices run all experts in two products: for a block of tokens that reads hardly more weights.
    Not differentiable.

    Args:
      activation: function of (gate, up) between the two products of an expert.
    """
    with jax.named_scope("experts"):
        tokens = x.reshape(-1, x.shape[-1])
        ids, probabilities = (t.reshape(len(tokens), -1) for t in (ids, probabilities))
        if isinstance(weights.gate_up, Watched) and isinstance(weights.down, Watched):
            both = weights.gate_up, weights.down
            weights = watch_experts(tokens, weights, ids, activation, *both)
        if weights.native:
            shares = probabilities.astype(jnp.float32)
            return by_row(tokens, weights, ids, shares, activation=activation).reshape(x.shape)
        out = jax.lax.platform_dependent(
            tokens,
            weights,
            ids,
            probabilities.astype(jnp.float32),
            cpu=functools.partial(by_tile, activation=activation),
            default=functools.partial(by_all, activation=activation),
        )
        return out.reshape(x.shape)


def watch_experts(
    x: Float[Array, "N D"],
    w: ExpertWeights,
    ids: Int[Array, "N X"],
    activation: Activation,
    first: Watched,
    second: Watched,
) -> ExpertWeights:
    """Sum up the inputs of experts over the tokens that chose them; return the weights.

    Args:
      first, second: the watched products of the experts.
    """
    plain = dataclasses.replace(w, gate_up=first.weight, down=second.weight)
    chosen = jax.nn.one_hot(ids, plain.down.shape[0], dtype=jnp.float32).sum(axis=1)  # [N, E]
    each = jnp.broadcast_to(x[None], (plain.down.shape[0], *x.shape))
    gate_up = _dot("end,edgf->engf", each, plain.gate_up)
    if plain.gate_up_bias is not None:
        gate_up += plain.gate_up_bias[:, None]
    hidden = activation(gate_up[:, :, 0], gate_up[:, :, 1]).astype(jnp.float32)
    counts = chosen.sum(axis=0)
    first.watch(jnp.einsum("ne,nd->ed", chosen, jnp.square(x.astype(jnp.float32))), counts)
    second.watch(jnp.einsum("ne,enf->ef", chosen, jnp.square(hidden)), counts)
    return plain


def by_all(
    x: Float[Array, "N D"],
    w: ExpertWeights,
    ids: Int[Array, "N X"],
    probabilities: Float[Array, "N X"],
    *,
    activation: Activation,
) -> Float[Array, "N D"]:
    """Run every expert on every token, then contract over experts and their width at once.

    Shapes do not depend on the routing; experts that were not chosen are zero in the product.
    """
    chosen = jax.nn.one_hot(ids, w.down.shape[0], dtype=jnp.float32)  # [N, X, E]
    share = jnp.einsum("nx,nxe->en", probabilities, chosen, precision=jax.lax.Precision.HIGHEST)
    each = jnp.broadcast_to(x[None], (w.down.shape[0], *x.shape))
    gate_up = _dot("end,edgf->engf", each, w.gate_up)
    if w.gate_up_bias is not None:
        gate_up += w.gate_up_bias[:, None]
    h = activation(gate_up[:, :, 0], gate_up[:, :, 1]).astype(jnp.float32)  # [E, N, F]
    h = jnp.where(chosen.any(axis=1).T[:, :, None], h * share[:, :, None], 0.0)
    out = _dot("enf,efd->nd", h.astype(x.dtype), w.down)
    if w.down_bias is None:
        return out
    return out + _dot("en,ed->nd", share.astype(x.dtype), w.down_bias)


def by_row(
    x: Float[Array, "N D"],
    w: ExpertWeights,
    ids: Int[Array, "N X"],
    probabilities: Float[Array, "N X"],
    *,
    activation: Activation,
) -> Float[Array, "N D"]:
    """Multiply a row for each choice of each token with its expert by native kernels.

    A row has the same bits in any company. Rows of zeros, which are those of dead tokens, are
    skipped, and their results are zeros.
    """
    assert isinstance(w.gate_up, Interleaved)
    assert isinstance(w.down, Interleaved)
    count = ids.shape[1]
    expert = ids.reshape(-1)
    rows = jnp.repeat(x, count, axis=0)  # [R, D]
    live = (rows != 0).any(axis=1)[:, None]

    def biased(products: Float[Array, "R ..."], bias: Float[Array, "E ..."] | None) -> Array:
        products = products.astype(x.dtype)
        return products if bias is None else products + jnp.take(bias, expert, axis=0, mode="clip")

    gate_up = biased(multiply_by_experts(rows, expert, w.gate_up), w.gate_up_bias)
    if activation in (swiglu, gelu_gated):
        h = gate(gate_up, gelu=activation is gelu_gated).astype(x.dtype)
    else:
        h = activation(gate_up[:, 0], gate_up[:, 1])
    h = jnp.where(live, h, 0)  # biases made others of zeros
    out = jnp.where(live, biased(multiply_by_experts(h, expert, w.down), w.down_bias), 0)
    parts = out.astype(jnp.float32).reshape(len(x), count, -1)  # [N, X, D]
    shares = (parts[:, i] * probabilities[:, i : i + 1] for i in range(count))
    return functools.reduce(jnp.add, shares).astype(x.dtype)


def by_tile(
    x: Float[Array, "N D"],
    w: ExpertWeights,
    ids: Int[Array, "N X"],
    probabilities: Float[Array, "N X"],
    *,
    activation: Activation,
) -> Float[Array, "N D"]:
    """Sort tokens by expert into tiles of one height, and multiply each tile with its expert.

    Every tile is a product of the same shape, so a token's bits do not depend on the other rows.
    (On a CPU, `jax.lax.ragged_dot` multiplies every expert with every chosen row: X times the
    work of `by_all`.)
    """
    tiles = sort_into_tiles(ids, w.down.shape[0])

    def multiply(i: Int[Array, ""], done: Float[Array, "S D"]) -> Float[Array, "S D"]:
        expert = jnp.searchsorted(tiles.ends, i, side="right")
        at = i * tiles.height
        rows = jnp.take(x, jax.lax.dynamic_slice_in_dim(tiles.tokens, at, tiles.height), axis=0)
        one = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, expert, keepdims=False), w)
        one = jax.tree.map(lambda a: a.astype(x.dtype), one)
        gate_up = _dot("nd,dgf->ngf", rows, one.gate_up)
        if one.gate_up_bias is not None:
            gate_up += one.gate_up_bias[None]
        out = _dot("nf,fd->nd", activation(gate_up[:, 0], gate_up[:, 1]), one.down)
        if one.down_bias is not None:
            out += one.down_bias[None]
        return jax.lax.dynamic_update_slice_in_dim(done, out, at, axis=0)

    empty = jnp.zeros((len(tiles.tokens), x.shape[1]), x.dtype)
    done = jax.lax.fori_loop(0, tiles.ends[-1], multiply, empty)
    parts = jnp.take(done, tiles.places, axis=0).astype(jnp.float32)  # [N, X, D]
    return (parts * probabilities[:, :, None]).sum(axis=1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The token of each of S rows, tile after tile; unused rows repeat token 0."""

    height: int
    tokens: Int[Array, " S"]
    places: Int[Array, "N X"]  # row of each token's choices
    ends: Int[Array, " E"]  # number of tiles up to and including each expert's


def sort_into_tiles(ids: Int[Array, "N X"], experts: int) -> Tiles:
    """Return tiles for the choices `ids`, each of one expert, with room for any routing."""
    choices = ids.size
    height = 8 if choices < 8 * experts else 16
    flat = ids.reshape(-1)
    counts = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    ends = jnp.cumsum(-(-counts // height))
    order = jnp.argsort(flat, stable=True)
    rank = jnp.zeros(choices, jnp.int32).at[order].set(jnp.arange(choices, dtype=jnp.int32))
    rank -= (jnp.cumsum(counts) - counts)[flat]  # within its expert
    places = (ends - -(-counts // height))[flat] * height + rank
    most = min(choices, choices // height + experts)
    tokens = jnp.arange(choices, dtype=jnp.int32) // ids.shape[1]
    rows = jnp.zeros(most * height, jnp.int32).at[places].set(tokens, unique_indices=True)
    return Tiles(height, rows, places.reshape(ids.shape), ends)


def _dot(letters: str, x: Array, w: Any) -> Array:
    """Compute `layers.dot` for any contraction."""
    return product(letters, x, w).astype(x.dtype)
