"""Training of the target: next-token cross entropy over packed rows."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import TargetConfig
from dflash_jax.graph.build import jit
from dflash_jax.kernels.caches import LayerCache, empty_cache

LAYER = "layers_"
OUTPUTS = (("attention", "o"), ("mlp", "down"))  # projections of a layer that add to its input


@struct.dataclass
class TrainState:
    """Parameters, optimizer state, and the average of the parameters over steps if one is kept."""

    params: dict
    optimizer: optax.OptState
    average: dict | None = None


def blank_caches(config: TargetConfig, rows: int, slots: int) -> tuple[LayerCache, ...]:
    """Return empty float32 caches for a forward pass over whole rows."""
    return tuple(
        empty_cache(rows, config.num_kv_heads, slots, config.head_dim, dtype=jnp.float32)
        for _ in range(config.num_layers)
    )


def initial(model: nn.Module, config: TargetConfig, seed: int) -> dict:
    """Return fresh parameters."""

    def touch(module: nn.Module) -> Array:
        tokens = jnp.zeros((1, 1), jnp.int32)
        out = module(tokens, blank_caches(config, 1, 2), jnp.zeros(1, jnp.int32))
        return module.logits(out.hidden)

    variables: Any = jit(functools.partial(model.init, method=touch))(jax.random.key(seed))
    return variables["params"]


def deepened(params: dict, layers: int) -> dict:
    """Return parameters of a deeper model that computes the same function.

    A layer may be followed by a copy of itself whose output projections are zero
    (function-preserving growth: Net2Net, Chen et al. 2016).

    Args:
      layers: at least the present number.
    """
    old = [name for name in params if name.startswith(LAYER)]
    grown = {name: x for name, x in params.items() if name not in old}
    sources = [i * len(old) // layers for i in range(layers)]
    for i, source in enumerate(sources):
        layer = params[f"{LAYER}{source}"]
        grown[f"{LAYER}{i}"] = _zero_output_copy(layer) if source in sources[:i] else layer
    return grown


def _zero_output_copy(layer: dict) -> dict:
    """Return a copy of the layer whose output projections are zero."""
    copy = jax.tree.map(jnp.copy, layer)  # not shared: training donates its state
    for part, out in OUTPUTS:
        copy[part][out] = jnp.zeros_like(copy[part][out])
    return copy


def token_losses(
    model: nn.Module, config: TargetConfig, params: dict, tokens: Int[Array, "B S"]
) -> Float[Array, "B S-1"]:
    """Return -log p of every token but the first, given those before it."""
    rows, length = tokens.shape
    caches = blank_caches(config, rows, length)
    start = jnp.zeros(rows, jnp.int32)
    out: Any = model.apply({"params": params}, tokens, caches, start)
    logits: Any = model.apply({"params": params}, out.hidden[:, :-1], method=model.logits)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def objective(
    losses: Float[Array, "B S-1"],
    wanted: Bool[Array, "B S"],
    real: Bool[Array, "B S"],
    given_weight: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the weighted mean loss, and the mean over wanted tokens for the log."""
    weights = jnp.where(wanted, 1.0, jnp.where(real, given_weight, 0.0))[:, 1:]
    answers = wanted[:, 1:].astype(jnp.float32)
    mean = (losses * weights).sum() / jnp.maximum(weights.sum(), 1e-6)
    return mean, (losses * answers).sum() / jnp.maximum(answers.sum(), 1.0)


def step(
    model: nn.Module,
    config: TargetConfig,
    optimizer: optax.GradientTransformation,
    given_weight: float,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Return one optimizer step: (state, tokens, wanted, real) -> (state, metrics)."""

    def loss(params: dict, tokens: Array, wanted: Array, real: Array) -> tuple[Array, Array]:
        return objective(token_losses(model, config, params, tokens), wanted, real, given_weight)

    def advance(
        state: TrainState, tokens: Array, wanted: Array, real: Array
    ) -> tuple[TrainState, dict[str, Array]]:
        tokens = tokens.astype(jnp.int32)
        grad = jax.value_and_grad(loss, has_aux=True)
        (_, answer), gradient = grad(state.params, tokens, wanted, real)
        updates, memory = optimizer.update(gradient, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(params=params, optimizer=memory), {"nats": answer}

    return advance
