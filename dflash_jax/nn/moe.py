"""Mixture of experts: routing, and the experts' gated MLPs, with static shapes.

A token's result never depends on the tokens beside it: its experts come from its own logits,
no expert has a capacity, and the order in which its experts are added up is fixed by their
numbers or ranks, never by who else chose them (R9).

Letters: N tokens, E experts, X chosen experts per token, D width, F expert width.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.nn.layers import precision, weight

Activation = Callable[[Array, Array], Array]  # of gate and up


@struct.dataclass
class ExpertWeights:
    """The stacked MLPs of a layer's experts; gate and up are one weight, as in `GatedMLP`."""

    gate_up: Float[Array, "E D 2 F"]
    down: Float[Array, "E F D"]
    gate_up_bias: Float[Array, "E 2 F"] | None = None
    down_bias: Float[Array, "E D"] | None = None


def expert_weights(
    module: nn.Module, experts: int, width: int, hidden: int, *, bias: bool = False
) -> ExpertWeights:
    """Declares the experts of a module: `experts_gate_up`, `experts_down` and their biases."""
    return ExpertWeights(
        gate_up=weight(module, "experts_gate_up", (experts, width, 2, hidden)),
        down=weight(module, "experts_down", (experts, hidden, width)),
        gate_up_bias=weight(module, "experts_gate_up_bias", (experts, 2, hidden)) if bias else None,
        down_bias=weight(module, "experts_down_bias", (experts, width)) if bias else None,
    )


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) · up, the activation of the Qwen families."""
    return nn.silu(gate) * up


def softmax_then_top(
    logits: Float[Array, "B T E"], count: int, *, normalise: bool
) -> tuple[Int[Array, "B T X"], Float[Array, "B T X"]]:
    """The `count` likeliest experts and their float32 probabilities; equal ones: lowest first.

    Args:
      normalise: divide by the sum of the chosen probabilities.
    """
    chosen, ids = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), count)
    return ids, chosen / chosen.sum(axis=-1, keepdims=True) if normalise else chosen


def top_then_softmax(
    logits: Float[Array, "B T E"], count: int
) -> tuple[Int[Array, "B T X"], Float[Array, "B T X"]]:
    """The experts with the largest logits, and a float32 softmax over just those."""
    chosen, ids = jax.lax.top_k(logits.astype(jnp.float32), count)
    return ids, jax.nn.softmax(chosen, axis=-1)


def experts(
    x: Float[Array, "B T D"],
    weights: ExpertWeights,
    ids: Int[Array, "B T X"],
    probabilities: Float[Array, "B T X"],
    activation: Activation,
) -> Float[Array, "B T D"]:
    """Σ p_e · expert_e(x) over the experts `ids` of each token, in x's dtype.

    Contractions and the sum accumulate in float32; a bias of an expert's output is weighted
    with it. `activation(gate, up)` is the middle of every expert.
    """
    with jax.named_scope("experts"):
        tokens = x.reshape(-1, x.shape[-1])
        ids, probabilities = (t.reshape(len(tokens), -1) for t in (ids, probabilities))
        return _dense(tokens, weights, ids, probabilities, activation).reshape(x.shape)


def _dense(
    x: Float[Array, "N D"],
    w: ExpertWeights,
    ids: Int[Array, "N X"],
    probabilities: Float[Array, "N X"],
    activation: Activation,
) -> Float[Array, "N D"]:
    """Every expert over every token; those not chosen count as zero."""
    ours = jax.nn.one_hot(ids, w.down.shape[0], dtype=jnp.float32)  # [N, X, E]
    share = jnp.einsum("nx,nxe->en", probabilities.astype(jnp.float32), ours)
    chosen = ours.any(axis=1).T[:, :, None]  # [E, N, 1]
    each = jnp.broadcast_to(x[None], (w.down.shape[0], *x.shape))
    gate_up = _dot("end,edgf->engf", each, w.gate_up)
    if w.gate_up_bias is not None:
        gate_up += w.gate_up_bias[:, None]
    h = activation(gate_up[:, :, 0], gate_up[:, :, 1])  # [E, N, F]
    out = _dot("enf,efd->end", h, w.down)
    if w.down_bias is not None:
        out += w.down_bias[:, None]
    parts = jnp.where(chosen, out.astype(jnp.float32) * share[:, :, None], 0.0)
    return parts.sum(axis=0).astype(x.dtype)


def _dot(letters: str, x: Array, w: Array) -> Array:
    """As `layers.dot`, for any contraction."""
    y = jnp.einsum(letters, x, w, precision=precision(x), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)
