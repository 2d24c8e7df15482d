"""Weights, norms and the gated MLP.

Contractions and norms accumulate in float32, whatever the dtype of weights and activations;
results have the activations' dtype. Weights may be packed (`dflash_jax.quant`).
"""

import dataclasses
import functools
import string
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.graph.protocols import WEIGHTS, WeightInfo
from dflash_jax.kernels.native.interleaved import WIDTH
from dflash_jax.kernels.native.layers import gate, normalise
from dflash_jax.kernels.native.layers import softcap as native_softcap
from dflash_jax.kernels.native.products import multiply
from dflash_jax.kernels.products import Weight, contract, gather
from dflash_jax.quant.layouts import FLOAT, MATRIX, Interleaved, StructuredWeight


def weight(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    scale: float = 0.02,
    *,
    split: int | None = None,
    form: str = FLOAT,
) -> Any:
    """Declare a weight of a module, normally distributed at initialisation.

    Args:
      split: the axis that the devices of a mesh may split; None keeps the weight whole. `init`
        records it in the collection `WEIGHTS`, and the form; other calls ignore them.
      form: what it may be stored as, see `quant.layouts`.
    """
    if module.is_mutable_collection(WEIGHTS):
        module.put_variable(WEIGHTS, name, WeightInfo(split, form))
    return declare(module, name, nn.initializers.normal(scale), shape)


def matrix(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    *,
    split: int | None = None,
    form: str = MATRIX,
) -> Any:
    """Declare a weight that is only multiplied by `dot`, or gathered from; it may be quantised."""
    return weight(module, name, shape, split=split, form=form)


def norm_weight(module: nn.Module, name: str, width: int) -> Float[Array, " D"]:
    """Declare the weight of a norm, initialised with ones."""
    return declare(module, name, nn.initializers.ones, (width,))


def declare(
    module: nn.Module,
    name: str,
    initial: Callable[[jax.Array, tuple[int, ...], Any], Array],
    shape: tuple[int, ...],
    dtype: Any = jnp.float32,
) -> Any:
    """Declare a parameter of a module and return it, or its packed form if that is loaded.

    Flax's own `param` traces the initialiser on each access, a tenth of the time it takes to trace
    a program.

    Raises:
      flax.errors.ScopeParamShapeError: the parameter has another shape.
    """
    if module.has_variable("params", name):
        stored = module.get_variable("params", name)
        if isinstance(stored, StructuredWeight) or stored.shape == shape:
            return stored
    return module.param(name, initial, shape, dtype)


@dataclasses.dataclass(frozen=True)
class Watched:
    """A weight whose inputs are summed up while the products with it are traced.

    Attributes:
      weight: what is multiplied, [D, ...], or a stack of experts [E, D, ...].
      watch: takes the sums of squares of inputs over tokens, [D] or [E, D], and the numbers of
        tokens, [] or [E].
    """

    weight: Any
    watch: Callable[[Float[Array, "*E D"], Float[Array, "*E"]], None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape


def dot(
    x: Float[Array, "*positions D"], w: Weight, live: Bool[Array, "*positions"] | None = None
) -> Float[Array, "..."]:
    """Return x · w over the last axis of x and the first of w, accumulated in float32.

    Args:
      live: as for `project`.
    """
    return project(x, w, live).astype(x.dtype)


def add_dot(
    onto: Float[Array, "*positions N"],
    x: Float[Array, "*positions D"],
    w: Weight,
    live: Bool[Array, "*positions"] | None = None,
) -> Float[Array, "*positions N"]:
    """Return onto + dot(x, w); a native product adds in the memory of `onto`.

    Args:
      live: as for `project`; with native products, the others have the numbers of `onto`.
    """
    if isinstance(w, Interleaved) and x.dtype == onto.dtype == jnp.float32:
        return multiply(x, w, live=live, onto=onto)
    return onto + dot(x, w)


def project(
    x: Float[Array, "*positions D"], w: Weight, live: Bool[Array, "*positions"] | None = None
) -> Float[Array, "..."]:
    """Compute `dot` with a float32 result, as for logits.

    Args:
      live: positions that count; results of the others are undefined. By default all do.
    """
    if isinstance(w, StructuredWeight):
        return contract(x, w, live)
    if isinstance(w, Watched):
        rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
        w.watch(jnp.square(rows).sum(axis=0), jnp.float32(len(rows)))
        return project(x, w.weight, live)
    if w.shape[1:] == (1,):  # a CPU's matrix-vector product orders its sums by row
        both = x.astype(jnp.float32) * w[:, 0].astype(jnp.float32).reshape(
            (1,) * (x.ndim - 1) + (-1,)
        )
        return jnp.expand_dims(jax.lax.reduce_sum(both, (x.ndim - 1,)), -1)
    over = string.ascii_lowercase[: x.ndim]
    kept = string.ascii_uppercase[: w.ndim - 1]
    return product(f"{over},{over[-1]}{kept}->{over[:-1]}{kept}", x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(letters: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the einsum of two arrays of one dtype in float32.

    Gradients are rounded to that dtype before their products: with a float32 gradient, products
    with 16-bit weights would run at the speed of float32.

    Args:
      letters: einsum subscripts. A summed letter must be in both arrays.
    """
    left, right, out = letters.replace("->", ",").split(",")
    both = [c for c in left if c in right]
    over, along = ([c for c in both if (c in out) == kept] for kept in (False, True))

    def axes(letters: list[str]) -> tuple[list[int], list[int]]:
        return [left.index(c) for c in letters], [right.index(c) for c in letters]

    result = jax.lax.dot_general(
        x,
        y,
        (axes(over), axes(along)),
        precision=precision(x),
        preferred_element_type=jnp.float32,
    )
    order = [*along, *(c for c in left + right if c not in both)]
    return jnp.transpose(result, [order.index(c) for c in out])


def _keep_factors(letters: str, x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(letters, x, y), (x, y)


def _product_slopes(
    letters: str, factors: tuple[Array, Array], slope: Array
) -> tuple[Array, Array]:
    x, y = factors
    left, right, out = letters.replace("->", ",").split(",")
    slope = slope.astype(x.dtype)
    return (
        product(f"{out},{right}->{left}", slope, y).astype(x.dtype),
        product(f"{left},{out}->{right}", x, slope).astype(y.dtype),
    )


product.defvjp(_keep_factors, _product_slopes)


@jax.custom_vjp
def halves(both: Float[Array, "... 2 F"]) -> tuple[Float[Array, "... F"], Float[Array, "... F"]]:
    """Return the two halves of a joined product, such as gate and up.

    Their gradients are computed before they are joined: fused into one loop they took 8 ns per
    number on a CPU, an eighth of a drafter's training step.
    """
    return both[..., 0, :], both[..., 1, :]


def _join_slopes(_: None, slopes: tuple[Array, Array]) -> tuple[Array]:
    return (jnp.stack(jax.lax.optimization_barrier(slopes), axis=-2),)


halves.defvjp(lambda both: (halves(both), None), _join_slopes)


def columns_of(
    w: Weight, ids: Int[Array, "*positions"], dtype: Any
) -> Float[Array, "*positions D"]:
    """Return columns of a table [D, V], the embeddings of tokens."""
    return gather(w, ids, dtype)


def precision(x: Array) -> jax.lax.Precision:
    """Return full precision for float32 inputs (no TF32), the default for 16-bit ones."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def rms_norm(
    x: Float[Array, "*positions D"],
    w: Float[Array, "*over D"],
    eps: float,
    kernels: str,
    live: Bool[Array, "*positions"] | None = None,
) -> Float[Array, "*positions D"]:
    """Return x / rms(x), rounded to x's dtype, times w, as Llama, Qwen3 and DFlash round.

    Args:
      live: positions that count; native kernels leave the others undefined. By default all do.
    """
    if x.dtype == jnp.float32:
        return _normalised(x, w, eps, kernels, live)
    return _normalised(x, None, eps, kernels).astype(x.dtype) * _beside(w, x)


def rms_norm_from_one(
    x: Float[Array, "*positions D"],
    w: Float[Array, "*over D"],
    eps: float,
    kernels: str,
    live: Bool[Array, "*positions"] | None = None,
) -> Float[Array, "*positions D"]:
    """Return x / rms(x) times 1 + w, computed in float32 and rounded once, as in Qwen3.5.

    Args:
      live: as for `rms_norm`.
    """
    return _normalised(x, 1.0 + w.astype(jnp.float32), eps, kernels, live).astype(x.dtype)


def rms_norm_wide(
    x: Float[Array, "*positions D"],
    w: Float[Array, "*over D"] | None,
    eps: float,
    kernels: str,
    live: Bool[Array, "*positions"] | None = None,
) -> Float[Array, "*positions D"]:
    """Return x / rms(x) times w, computed in float32 and rounded once, as in Gemma 4.

    Args:
      live: as for `rms_norm`.
    """
    return _normalised(x, w, eps, kernels, live).astype(x.dtype)


def _normalised(
    x: Float[Array, "*positions D"],
    w: Float[Array, "*over D"] | None,
    eps: float,
    kernels: str,
    live: Bool[Array, "*positions"] | None = None,
) -> Float[Array, "*positions D"]:
    """Return x / rms(x) times w in float32."""
    if kernels == "native":
        return normalise(x, jnp.ones(x.shape[-1:]) if w is None else w, eps, live)
    x32 = x.astype(jnp.float32)
    sums = jnp.expand_dims(jax.lax.reduce_sum(x32 * x32, (x.ndim - 1,)), -1)
    normed = x32 * jax.lax.rsqrt(sums / jnp.float32(x.shape[-1]) + jnp.float32(eps))
    return normed if w is None else normed * _beside(w, x).astype(jnp.float32)


def _beside(w: Float[Array, "*over D"], x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    return w.reshape((1,) * (x.ndim - w.ndim) + w.shape)


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the tanh approximation of GELU, computed in float32."""
    return nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def times(x: Float[Array, "..."], scale: float) -> Float[Array, "..."]:
    """Return x times a number that is not rounded to x's dtype first."""
    return (x.astype(jnp.float32) * jnp.float32(scale)).astype(x.dtype)


def softcap(
    logits: Float[Array, "..."], cap: float | None, kernels: str = "xla"
) -> Float[Array, "..."]:
    """Return cap tanh(logits / cap), or the logits unchanged if the cap is None or 0.

    Args:
      kernels: as in `Plan.kernels`; XLA rounds tanh by where a number lies in the array.
    """
    if cap is None or cap <= 0:
        return logits
    if kernels == "native":
        return native_softcap(logits, cap)
    return jnp.float32(cap) * jnp.tanh(logits / jnp.float32(cap))


def gated(
    gate_up: Float[Array, "... 2 F"], activation: Callable[[Array], Array], *, native: bool
) -> Float[Array, "... F"]:
    """Return activation(gate) · up.

    Args:
      native: by a native kernel, as the next product; it knows SiLU and `gelu_tanh`.
    """
    if native and activation in (nn.silu, gelu_tanh):
        return gate(gate_up, gelu=activation is gelu_tanh).astype(gate_up.dtype)
    first, up = halves(gate_up)
    return activation(first) * up


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)); gate and up are one weight [D, 2, F].

    Attributes:
      bias: whether all three have biases.
    """

    width: int
    hidden: int
    activation: Callable[[Array], Array] = nn.silu
    bias: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        onto: Float[Array, "B T D"] | None = None,
        live: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the output, added to `onto` if that is given.

        Args:
          live: tokens that count; what is computed for the others is undefined. By default all do.
        """
        both = matrix(self, "gate_up", (self.width, 2, self.hidden), split=2)
        down = matrix(self, "down", (self.hidden, self.width), split=0)
        if not self.bias and (name := _gate_of_product(x, both, self.activation)):
            hidden = multiply(x, both, live=live, activation=name)
        else:
            gate_up = dot(x, both, live)  # [B, T, 2, F]
            if self.bias:
                gate_up += weight(self, "gate_up_bias", (2, self.hidden), split=1)[None, None]
            hidden = gated(gate_up, self.activation, native=isinstance(down, Interleaved))
        if not self.bias:
            return dot(hidden, down, live) if onto is None else add_dot(onto, hidden, down, live)
        out = dot(hidden, down, live) + weight(self, "down_bias", (self.width,))[None, None]
        return out if onto is None else onto + out


def _gate_of_product(x: Array, w: Weight, activation: Callable[[Array], Array]) -> str:
    """Return the name of an activation that a native product of gate and up applies; else ""."""
    if not isinstance(w, Interleaved) or w.shape[2] % WIDTH or x.dtype != jnp.float32:
        return ""
    if activation is gelu_tanh:
        return "gelu_tanh"
    return "silu" if activation is nn.silu else ""
