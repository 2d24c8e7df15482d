"""Muon for matrices and AdamW for the rest, with warm-up, cosine decay and clipping.

Orthogonalised updates (Muon, K. Jordan 2024, github.com/KellerJordan/Muon) reach a given loss in
about half the steps that AdamW needs at these sizes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dflash_jax.trainer.recipes import ADAMW, MUON, Schedule

WARM_UP_SHARE = 0.05
LAST_RATE_SHARE = 0.05
MATRIX_FACTOR = 5.0  # Muon's rate over AdamW's
UPDATE_RMS = 0.2
MOMENTUM = 0.95
ITERATIONS = 5
# Factors of x, x^3 and x^5, by Jordan: the polynomial is steep at 0, and near 1 above.
QUINTIC = (3.4445, -4.7750, 2.0315)
TINY = 1e-8

TABLES = (
    "embed",
    "head",
    "predecessor",
    "successor",
    "markov_w1",
    "markov_w2",
    "correction_out",
)  # fmt: skip  (one entry per token)
KERNELS = ("base",)  # kernels of convolutions
EMBEDDING = "embedding"  # a table of Flax's layers


def build(
    schedule: Schedule,
    *,
    decay: float,
    kind: str = MUON,
    matrices: Callable[[Any], Any] | None = None,
) -> optax.GradientTransformation:
    """Return the optimizer: `schedule.rate` for tables and norms, 5x that for matrices.

    Args:
      matrices: returns which weights of a tree are matrices; `are_matrices` by default.
    """
    rate = ramp(schedule, schedule.rate)
    adamw = functools.partial(optax.adamw, rate, b1=0.9, b2=0.95)
    clipped = optax.clip_by_global_norm(1.0)
    if kind == ADAMW:
        return optax.chain(clipped, adamw(weight_decay=decay))
    muon = optax.chain(
        orthogonal_momentum(),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(ramp(schedule, MATRIX_FACTOR * schedule.rate)),
    )
    others = adamw(weight_decay=0.0, nesterov=True)
    which = are_matrices if matrices is None else matrices
    return optax.chain(clipped, optax.partition({True: muon, False: others}, which))


def ramp(schedule: Schedule, peak: float) -> optax.Schedule:
    """Return a linear warm-up to the peak, then a cosine decay to a twentieth of it."""
    warm_up = max(1, round(WARM_UP_SHARE * schedule.steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak,
        warmup_steps=warm_up,
        decay_steps=max(schedule.steps, warm_up + 1),  # a single step is all warm-up
        end_value=LAST_RATE_SHARE * peak,
    )


def are_matrices(params: Any) -> Any:
    """Return a tree of booleans: which weights are matrices [in, out...]."""

    def one(path: tuple, leaf: jax.Array) -> bool:
        return leaf.ndim >= 2 and path[-1].key not in (*TABLES, *KERNELS)

    return jax.tree_util.tree_map_with_path(one, params)


def of_two_axes(params: Any) -> Any:
    """Return which weights of a module of one's own are matrices, whose names say nothing.

    Of more axes it is not known which are the inputs.
    """

    def one(path: tuple, leaf: jax.Array) -> bool:
        return leaf.ndim == 2 and getattr(path[-1], "key", "") not in (*TABLES, EMBEDDING)

    return jax.tree_util.tree_map_with_path(one, params)


class Momentum(NamedTuple):
    """Running mean of gradients, and the number of updates."""

    count: Int[Array, ""]
    mean: Any


def orthogonal_momentum() -> optax.GradientTransformation:
    """Return Muon: Nesterov momentum, orthogonalised and scaled to the size of AdamW's updates.

    Equal to `optax.contrib.muon`, but with two products of the wide matrix instead of ten, which
    takes half the time on a CPU.
    """

    def start(params: Any) -> Momentum:
        return Momentum(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Momentum]:
        mean = optax.tree.update_moment(updates, state.mean, MOMENTUM, 1)
        count = state.count + 1
        ahead = optax.tree.bias_correction(mean, MOMENTUM, count + 1)
        now = optax.tree.bias_correction(updates, MOMENTUM, count)
        looked = jax.tree.map(lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, ahead, now)
        return jax.tree.map(_scaled, looked), Momentum(count, mean)

    return optax.GradientTransformation(start, update)


def _scaled(update: Float[Array, "I ..."]) -> Float[Array, "I ..."]:
    """Orthogonalise the update as a matrix [first axis, other axes].

    The root mean square of the result is that of AdamW (arXiv 2502.16982).
    """
    matrix = update.reshape(len(update), -1)
    return (UPDATE_RMS * math.sqrt(max(matrix.shape)) * orthogonal(matrix)).reshape(update.shape)


def orthogonal(matrix: Float[Array, "M N"]) -> Float[Array, "M N"]:
    """Return the matrix with singular values near 1: p(p(..p(X)..)) with Muon's quintic p.

    A step is X <- Q X with Q = a + b G + c G^2 and G = X X^T, so that G <- Q G Q; X itself is
    needed only at the start and the end. Products use full float32: a step multiplies errors
    along small singular values by 12, which TF32 cannot afford.
    """
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    x = matrix / (jnp.linalg.norm(matrix) + TINY)
    a, b, c = QUINTIC
    times = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    eye = jnp.eye(len(x), dtype=x.dtype)
    gram = times(x, x.T)
    steps = step = a * eye + b * gram + c * times(gram, gram)
    for _ in range(1, ITERATIONS):
        gram = times(times(step, gram), step)
        step = a * eye + b * gram + c * times(gram, gram)
        steps = times(step, steps)
    return times(steps, x)
