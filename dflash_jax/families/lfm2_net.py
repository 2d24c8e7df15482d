"""LFM2: short convolutions, gated before and after, in the place of most attention layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.families.lfm2 import Lfm2Config
from dflash_jax.graph.protocols import CacheMaker
from dflash_jax.kernels.caches import Cache, ConvCache, Update
from dflash_jax.nn.attention import Positions
from dflash_jax.nn.decoder import Decoder, Layer, dense_layer
from dflash_jax.nn.delta import causal_conv, window
from dflash_jax.nn.layers import dot, matrix, weight


@struct.dataclass
class ConvUpdate:
    """Result of a convolution over T tokens: its inputs."""

    inputs: Float[Array, "B W+T D"]  # inputs of the cache, then of the tokens
    kept: int = struct.field(pytree_node=False)

    def commit(self, n: Int[Array, " B"]) -> ConvCache:
        """Return the cache after n tokens."""
        return ConvCache(window(self.inputs, n, self.kept))


class ShortConv(nn.Module):
    """W_out (C * conv(B * x)), with B, C and x projected from the input."""

    config: Lfm2Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: ConvCache
    ) -> tuple[Float[Array, "B T D"], ConvUpdate]:
        c = self.config
        width = self.config.hidden_size
        projected = dot(x, matrix(self, "in_proj", (width, 3 * width)))
        if c.conv_bias:
            projected += weight(self, "in_bias", (3 * width,))[None, None]
        before, after, h = jnp.split(projected, 3, axis=-1)
        inputs = jnp.concatenate([cache.inputs, before * h], axis=1)
        mixed = causal_conv(inputs, weight(self, "conv", (c.conv_kernel, width), 0.5))
        if c.conv_bias:
            mixed += weight(self, "conv_bias", (width,)).astype(jnp.float32)[None, None]
        out = dot(after * mixed.astype(x.dtype), matrix(self, "out", (width, width)))
        if c.conv_bias:
            out += weight(self, "out_bias", (width,))[None, None]
        return out, ConvUpdate(inputs, c.conv_kernel - 1)


class ConvLayer(Layer):
    """x + conv(norm(x)), then x + mlp(norm(x))."""

    config: Lfm2Config  # pyrefly: ignore[bad-override-mutable-attribute]  (Linen fields are frozen)

    @nn.compact
    def __call__(  # pyrefly: ignore[bad-override]
        self,
        x: Float[Array, "B T D"],
        cache: ConvCache,
        positions: Positions,
        *,
        chunked: bool,  # the same in both forms
    ) -> tuple[Float[Array, "B T D"], Update]:
        with jax.named_scope("conv"):
            h, update = ShortConv(self.config, name="conv")(
                self.normed("input_norm", x, None), cache
            )
            x = x + h
        with jax.named_scope("mlp"):
            h = self.normed("post_attention_norm", x, None)
            return positions.zero_dead(x + self.make_mlp(self.config)(h)), update


class ConvDecoder(Decoder):
    """The decoder with convolutions."""

    config: Lfm2Config  # pyrefly: ignore[bad-override-mutable-attribute]  (Linen fields are frozen)

    def empty_caches(self, make: CacheMaker) -> tuple[Cache, ...]:
        """Return caches: keys and values, or inputs of a convolution."""
        c = self.config
        inputs = (c.conv_kernel - 1, c.hidden_size)
        return tuple(
            make.conv(inputs) if recurrent else make(c.num_kv_heads, c.head_dim, None)
            for recurrent in c.recurrent
        )


def build(config: Lfm2Config) -> nn.Module:
    """Return the target module of an LFM2 config."""
    return ConvDecoder(config, make_layer=_layer, width_invariant=True)


def _layer(config: Lfm2Config, i: int) -> nn.Module:
    return ConvLayer(config, None) if config.recurrent[i] else dense_layer(config, i)
