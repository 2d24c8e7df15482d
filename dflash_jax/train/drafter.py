"""Training of the drafter: the engine's own modules, called on many anchored blocks at once."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.models.dflash import DFlash
from dflash_jax.nn.layers import rms_norm
from dflash_jax.train import anchors as anchoring
from dflash_jax.train.attention import split_attention
from dflash_jax.train.target import TrainState, blank_caches


def anchored(
    module: DFlash,
    taps: Sequence[Float[Array, "B S D"]],
    blocks: Float[Array, "B N T D"],
    anchors: Int[Array, "B N"],
) -> Float[Array, "B N T D"]:
    """The hidden states of N blocks, each as the cached call would draft it at its anchor.

    Args:
      taps: the target's hidden states of the whole row.
      blocks: target embeddings of [anchor, mask, mask, ...].
    """
    c = module.config
    rows, count, width, depth = blocks.shape
    context = module.fuse(taps)
    places = jnp.broadcast_to(jnp.arange(context.shape[1])[None, :], context.shape[:2])
    positions = (anchors[:, :, None] + jnp.arange(width)[None, None, :]).reshape(
        rows, count * width
    )
    x = module.scaled(blocks.reshape(rows, count * width, depth))

    def by_block(y: Array) -> Array:
        return y.reshape(rows, count, width, *y.shape[2:])

    for layer, window, causal in zip(module.layers, c.windows, c.causal, strict=True):
        h = rms_norm(x, layer.input_norm, c.rms_norm_eps)
        keys, values = layer.attention.keys_values(h, positions)
        heads = split_attention(
            by_block(layer.attention.queries(h, positions)),
            layer.attention.keys_values(context, places),
            (by_block(keys), by_block(values)),
            anchors,
            causal=causal,
            window=window,
        )
        x = x + layer.attention.output(heads.reshape(rows, count * width, -1))
        x = x + layer.mlp(rms_norm(x, layer.post_attention_norm, c.rms_norm_eps))
    return by_block(rms_norm(x, module.norm, c.rms_norm_eps))


@struct.dataclass
class Reading:
    """What the frozen target says about rows: worth keeping, it is the same in every epoch."""

    taps: tuple[Float[Array, "B S D"], ...]
    best: Int[Array, "B S"]  # its greedy next token behind each place


@struct.dataclass
class Lesson:
    """A reading with the embeddings that blocks are made of."""

    taps: tuple[Float[Array, "B S D"], ...]
    best: Int[Array, "B S"]
    embedded: Float[Array, "B S D"]
    mask: Float[Array, " D"]  # embedding of the mask token


@struct.dataclass
class Blocks:
    """Anchors of a batch with the labels of their slots 1 .. T-1."""

    anchors: Int[Array, "B N"]
    labels: Int[Array, "B N T-1"]
    counts: Bool[Array, "B N T-1"]


def reading(
    target: nn.Module, config: TargetConfig, drafter: DrafterConfig, params: dict, tokens: Array
) -> Reading:
    """One forward pass of the target over whole rows [B, S]."""
    rows, length = tokens.shape
    read = tuple(i + 1 for i in drafter.target_layer_ids)
    variables = {"params": params}
    caches = blank_caches(config, rows, length)
    out: Any = target.apply(variables, tokens, caches, jnp.zeros(rows, jnp.int32), taps=read)
    logits: Any = target.apply(variables, out.hidden, method=target.logits)
    return Reading(taps=out.taps, best=jnp.argmax(logits, axis=-1).astype(jnp.int32))


def lesson(
    target: nn.Module, drafter: DrafterConfig, params: dict, tokens: Array, read: Reading
) -> Lesson:
    """A reading completed: its taps in float32, its rows and the mask token embedded."""
    variables = {"params": params}
    mask = jnp.full((1, 1), drafter.mask_token_id)
    embedded: Any = target.apply(variables, tokens, method=target.embed)
    masked: Any = target.apply(variables, mask, method=target.embed)
    return Lesson(
        taps=tuple(tap.astype(jnp.float32) for tap in read.taps),
        best=read.best,
        embedded=embedded,
        mask=masked[0, 0],
    )


def choose(
    key: Key[Array, ""],
    drafter: DrafterConfig,
    taught: Lesson,
    tokens: Int[Array, "B S"],
    wanted: Bool[Array, "B S"],
    count: int,
) -> Blocks:
    """Random blocks of a batch."""
    block = drafter.block_size
    anchors, alive = anchoring.sample(key, anchoring.startable(wanted), count)
    labels, counts = anchoring.trained(tokens, wanted, taught.best, anchors, alive, block)
    return Blocks(anchors=anchors, labels=labels, counts=counts)


def block_embeddings(
    taught: Lesson, anchors: Int[Array, "B N"], block: int
) -> Float[Array, "B N T D"]:
    """[anchor, mask, mask, ...] of every block."""
    first = jnp.take_along_axis(taught.embedded, anchors[:, :, None], axis=1)[:, :, None]
    rest = (*first.shape[:2], block - 1, first.shape[3])
    return jnp.concatenate(
        [first, jnp.broadcast_to(taught.mask[None, None, None, :], rest)], axis=2
    )


def objective(
    logits: Float[Array, "B N T-1 V"], blocks: Blocks, decay: float
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Cross entropy, early slots first; divided by the sum of the weights of all slots."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, blocks.labels)
    slots = anchoring.decay_weights(blocks.labels.shape[2] + 1, decay)
    weights = jnp.where(blocks.counts, slots[None, None], 0.0)
    right = (jnp.argmax(logits, axis=-1) == blocks.labels) & blocks.counts
    run = jnp.cumprod(right.astype(jnp.int32), axis=2).sum(axis=2)  # [B, N]
    whole = blocks.counts.all(axis=2)
    simulated = 1.0 + jnp.where(whole, run, 0).sum() / jnp.maximum(whole.sum(), 1)
    loss = (losses * weights).sum() / jnp.maximum(weights.sum(), 1e-6)
    return loss, {"loss": loss, "simulated": simulated}


def step(
    models: tuple[nn.Module, DFlash],
    config: DrafterConfig,
    optimizer: optax.GradientTransformation,
    *,
    decay: float,
    seed: int,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """The function of one step: (state, target parameters, rows, reading, step, N) -> ..."""
    target, drafter = models

    def loss(params: dict, head: dict, taught: Lesson, blocks: Blocks) -> tuple[Array, dict]:
        variables = {"params": params}
        noise = block_embeddings(taught, blocks.anchors, config.block_size)
        x: Any = drafter.apply(variables, taught.taps, noise, blocks.anchors, method=anchored)
        plain: Any = target.apply({"params": head}, x[:, :, 1:], method=target.logits)
        logits: Any = drafter.apply(variables, plain, method=drafter.adjust)
        return objective(logits, blocks, decay)

    def advance(
        state: TrainState,
        frozen: dict,
        rows: tuple[Array, Array],  # tokens, wanted
        read: Reading,
        number: Array,
        count: int,
    ) -> tuple[TrainState, dict[str, Array]]:
        tokens, wanted = rows[0].astype(jnp.int32), rows[1]
        taught = lesson(target, config, frozen, tokens, read)
        key = jax.random.fold_in(jax.random.key(seed), number)
        blocks = choose(key, config, taught, tokens, wanted, count)
        grad = jax.value_and_grad(loss, has_aux=True)
        (_, metrics), gradient = grad(state.params, frozen, taught, blocks)
        updates, memory = optimizer.update(gradient, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(params=params, optimizer=memory), metrics

    return advance


def initial(model: DFlash, config: DrafterConfig, seed: int) -> dict:
    """Fresh parameters."""
    width = config.hidden_size
    taps = [jnp.zeros((1, 1, width))] * len(config.target_layer_ids)
    blocks = jnp.zeros((1, 1, config.block_size, width))
    where = jnp.zeros((1, 1), jnp.int32)
    made: Any = model.init(jax.random.key(seed), taps, blocks, where, method=anchored)
    return made["params"]
