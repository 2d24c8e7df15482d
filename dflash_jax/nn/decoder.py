"""The pre-norm decoder shared by most families: attention, layer, and the whole stack."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import LATE, UPSTREAM, TargetConfig
from dflash_jax.graph.protocols import CacheMaker, TargetOutput, with_kernels
from dflash_jax.kernels.caches import Cache, LayerCache
from dflash_jax.kernels.native.layers import attend_native, prepare_heads, write_native
from dflash_jax.nn.attention import (
    Positions,
    attend,
    rope_tables,
    rotate_leading,
    scaled_queries,
    slot_positions,
    visible,
    write_keys_values,
)
from dflash_jax.nn.layers import (
    GatedMLP,
    add_dot,
    columns_of,
    dot,
    matrix,
    norm_weight,
    project,
    rms_norm,
    rms_norm_from_one,
    softcap,
    times,
    weight,
)
from dflash_jax.quant.layouts import HEAD, TABLE

# (x, weight, eps, kernels, live)
Norm = Callable[[Array, Array, float, str, Array | None], Array]


class Attention(nn.Module):
    """Grouped-query attention. Per kv head, the fused weight has G queries, a key and a value.

    Attributes:
      norm: for queries and keys.
      rotates: whether queries and keys have a rotary embedding.
    """

    config: TargetConfig
    window: int | None
    kernels: str
    sinks: bool = False
    norm: Norm = rms_norm
    rotates: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache,
        positions: Positions,
        onto: Float[Array, "B T D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        """Return the output, added to `onto` if that is given, and the cache with the tokens."""
        c = self.config
        live = positions.live
        groups = c.num_heads // c.num_kv_heads
        shape = (c.num_kv_heads, groups + 2, c.head_dim)
        qkv = dot(x, matrix(self, "qkv", (c.hidden_size, *shape), split=1), live)  # [B T K G+2 H]
        if c.attention_bias or c.qkv_bias:
            qkv += weight(self, "qkv_bias", shape, split=0)[None, None]
        sinks = weight(self, "sinks", (c.num_kv_heads, groups), split=0) if self.sinks else None
        attend = self.attend_in_place if self.works_in_place(qkv) else self.attend_apart
        heads, cache = attend(qkv, cache, positions, sinks)
        out = matrix(self, "o", (c.num_heads * c.head_dim, c.hidden_size), split=0)
        if not c.attention_bias:
            return (
                dot(heads, out, live) if onto is None else add_dot(onto, heads, out, live)
            ), cache
        bias = weight(self, "o_bias", (c.hidden_size,))[None, None]
        added = positions.zero_dead(dot(heads, out, live) + bias)
        return added if onto is None else onto + added, cache

    @nn.nowrap
    def works_in_place(self, qkv: Float[Array, "B T K G+2 H"]) -> bool:
        """Whether native kernels norm, rotate and read queries, keys and values where they are."""
        c = self.config
        apart = c.joint_norm or c.rotated_neighbours or c.query_growth
        return self.kernels == "native" and qkv.dtype == jnp.float32 and not apart

    @nn.nowrap
    def head_norms(self) -> Float[Array, "G+1 H"]:
        """Return the weights of the norms of a head's queries and key."""
        c = self.config
        q_norm = norm_weight(self, "q_norm", c.head_dim)
        k_norm = norm_weight(self, "k_norm", c.head_dim)
        return jnp.stack([*[q_norm] * (c.num_heads // c.num_kv_heads), k_norm])

    @nn.nowrap
    def rope(
        self, positions: Positions
    ) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
        """Return cos and sin of the tokens' angles."""
        c = self.config
        return rope_tables(c.window_rope(self.window), c.rotated or c.head_dim, positions.each)

    @nn.nowrap
    def visible_slots(self, cache: LayerCache, positions: Positions) -> Bool[Array, "B T S"]:
        """Return which slots each token sees."""
        keys = slot_positions(positions.end, cache.slots)
        return visible(positions.each, keys, causal=True, window=self.window)

    @nn.nowrap
    def attend_in_place(
        self,
        qkv: Float[Array, "B T K G+2 H"],
        cache: LayerCache,
        positions: Positions,
        sinks: Float[Array, "K G"] | None,
    ) -> tuple[Float[Array, "B T N*H"], LayerCache]:
        """Return what the heads read, and the cache, without copies of queries, keys and values."""
        c = self.config
        groups = c.num_heads // c.num_kv_heads
        norm = None
        if c.qk_norm:
            factors = self.head_norms()
            factors = 1.0 + factors if self.norm is rms_norm_from_one else factors
            norm = factors, c.rms_norm_eps
        angles = self.rope(positions) if self.rotates else (None, None)
        if norm is not None or self.rotates:
            qkv = prepare_heads(qkv, norm, *angles, positions.live, count=groups + 1)
        cache = write_native(cache, qkv, qkv, positions.each, key=groups, value=groups + 1)
        seen = self.visible_slots(cache, positions)
        scale = c.head_dim**-0.5 if c.score_scale is None else c.score_scale
        read = attend_native(qkv, cache, seen, sinks, positions.live, scale=scale, groups=groups)
        return read, cache

    @nn.nowrap
    def attend_apart(
        self,
        qkv: Float[Array, "B T K G+2 H"],
        cache: LayerCache,
        positions: Positions,
        sinks: Float[Array, "K G"] | None,
    ) -> tuple[Float[Array, "B T N*H"], LayerCache]:
        """Return what the heads read, and the cache, by functions of queries, keys and values."""
        c = self.config
        groups = c.num_heads // c.num_kv_heads
        qk = qkv[..., : groups + 1, :]
        v = qkv[..., groups + 1, :]
        if c.qk_norm:
            qk = self.norm(qk, self.head_norms(), c.rms_norm_eps, self.kernels, None)
        elif c.joint_norm:
            qk = self.over_heads(qk)
        if self.rotates:
            turn = self.rope(positions)
            qk = rotate_leading(qk, *turn, self.kernels, neighbours=c.rotated_neighbours)
        q = qk[..., :groups, :]
        k = qk[..., groups, :]
        if c.query_growth:
            q = scaled_queries(q, c.query_growth, c.rope, positions.each, c.max_length)
        cache = write_keys_values(cache, k, v, positions, self.kernels)
        seen = self.visible_slots(cache, positions)
        return attend(q, cache, seen, self.kernels, scale=c.score_scale, sinks=sinks), cache

    @nn.nowrap
    def over_heads(self, qk: Float[Array, "B T K G+1 H"]) -> Float[Array, "B T K G+1 H"]:
        """Normalise all queries of a token together, and all its keys."""
        c = self.config
        parts = []
        for name, x in (("q_norm", qk[..., :-1, :]), ("k_norm", qk[..., -1:, :])):
            flat = x.reshape(*x.shape[:2], -1)
            w = norm_weight(self, name, flat.shape[-1])
            normed = self.norm(flat, w, c.rms_norm_eps, self.kernels, None)
            parts.append(normed.reshape(x.shape))
        return jnp.concatenate(parts, axis=-2)


def dense_mlp(config: TargetConfig) -> nn.Module:
    """Return the MLP of Llama and Qwen3, a submodule of a layer."""
    bias = config.mlp_bias
    return GatedMLP(config.hidden_size, config.intermediate_size, bias=bias, name="mlp")


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the config may put norms after them, too.

    Attributes:
      make_mlp: makes the second half from the config; called inside the layer.
      norm: for all norms.
      sinks: whether each head has an attention sink.
      rotates: whether queries and keys have a rotary embedding.

    Layers of the same fields are the same, and are traced once where only shapes are wanted: a
    field for their number would make all of them differ.
    """

    config: TargetConfig
    window: int | None
    make_mlp: Callable[[Any], nn.Module] = dense_mlp
    norm: Norm = rms_norm
    sinks: bool = False
    rotates: bool = True
    kernels: str = "xla"

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache,
        positions: Positions,
        *,
        chunked: bool,  # for recurrent layers; attention ignores it
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        c = self.config
        live = positions.live
        adds = not c.norm_after and c.residual_scale == 1  # the products themselves, to the stream
        with jax.named_scope("attention"):
            h = self.normed("input_norm", x, live) if c.norm_before else x
            attention = Attention(
                c, self.window, self.kernels, self.sinks, self.norm, self.rotates, name="attention"
            )
            h, cache = attention(h, cache, positions, x if adds else None)
            x = h if adds else x + self.added("attention_output_norm", h, live)
        with jax.named_scope("mlp"):
            mlp = self.make_mlp(c)
            if isinstance(mlp, GatedMLP):
                h = self.normed("post_attention_norm", x, live) if c.norm_before else x
                h = mlp(h, x if adds else None, live)
                x = h if adds else x + self.added("mlp_output_norm", h, live)
            else:  # routers and experts see from zeros which tokens are dead
                x = positions.zero_dead(x)
                h = self.normed("post_attention_norm", x, None) if c.norm_before else x
                x = x + self.added("mlp_output_norm", mlp(h), None)
        # Native products add nothing to the zeros of dead tokens.
        native = self.kernels == "native" and x.dtype == jnp.float32
        plain = isinstance(mlp, GatedMLP) and not mlp.bias and not c.attention_bias
        return x if native and adds and plain else positions.zero_dead(x), cache

    @nn.nowrap
    def normed(
        self, name: str, x: Float[Array, "B T D"], live: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T D"]:
        """Apply the norm of this name; results of tokens that are not live may be undefined."""
        c = self.config
        w = norm_weight(self, name, c.hidden_size)
        return self.norm(x, w, c.rms_norm_eps, self.kernels, live)

    @nn.nowrap
    def added(
        self, name: str, h: Float[Array, "B T D"], live: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T D"]:
        """Return what the output of attention or MLP adds to the stream."""
        c = self.config
        h = self.normed(name, h, live) if c.norm_after else h
        return h if c.residual_scale == 1 else times(h, c.residual_scale)


def dense_layer(config: TargetConfig, i: int) -> nn.Module:
    """Return layer i of Llama, Qwen3 and others whose config says all that differs."""
    window = config.windows[i] if config.windows else None
    return Layer(config, window, rotates=config.rotates(i))


class Decoder(nn.Module):
    """Embedding, layers and final norm; `logits` applies the head [D, V].

    Embedding tables are [D, V] like heads, so that both can be the same array. The layout suits
    the head, which every step multiplies; the few embeddings of a step are gathered as columns.

    The layer loop is unrolled over per-layer parameters: slices of stacked weights would be copied
    in every call.

    Attributes:
      kernels: kernels of norms, rotations and attention, as in `Plan.kernels`.
      width_invariant: whether native kernels give a token the same bits in calls of any width,
        which `tests/kernels/test_widths.py` shows. XLA compiles products, sums and even rotations
        for one token otherwise than for several. Native kernels do not. What is left for XLA is
        computed number by number.
    """

    config: TargetConfig
    make_layer: Callable[[Any, int], nn.Module] = dense_layer
    final_norm: Norm = rms_norm
    kernels: str = "xla"
    width_invariant: bool = False

    def setup(self) -> None:
        """Declare the parameters and layers."""
        c = self.config
        if not c.tie_embeddings:
            self.embedding = matrix(self, "embed", (c.hidden_size, c.vocab_size), form=TABLE)
        made = (self.make_layer(c, i) for i in range(c.num_layers))
        self.layers = [with_kernels(layer, self.kernels) for layer in made]
        self.norm = norm_weight(self, "norm", c.hidden_size)
        self.head = matrix(self, "head", (c.hidden_size, c.vocab_size), split=1, form=HEAD)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        caches: Sequence[Cache],
        start: Int[Array, " B"],
        *,
        taps: tuple[int, ...] = (),
        chunked: bool = False,
        taps_at: str = LATE,
        num_live: Int[Array, " B"] | None = None,
    ) -> TargetOutput:
        """Run T tokens at positions start .. start+T-1 of each row.

        Args:
          num_live: tokens of each row that count, the first ones; all by default. Hidden states of
            the others are zeros, which native kernels do not multiply.
          chunked: recurrent layers process the tokens in chunks instead of one by one.
          taps: which hidden states to return; 0 is the input of layer 0, i+1 the output of
            layer i (the last one before the final norm).
          taps_at: UPSTREAM takes the last one after the final norm; EARLY is LATE here.
        """
        positions = Positions.of(start, tokens.shape[1], num_live)
        x = positions.zero_dead(self.first(tokens))
        states = [x]
        written = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, cache, positions, chunked=chunked)
            states.append(x)
            written.append(cache)
        hidden = self.final_norm(x, self.norm, self.config.rms_norm_eps, self.kernels, None)
        if taps_at == UPSTREAM:
            states[-1] = hidden
        tapped = tuple(states[i] for i in taps)
        return TargetOutput(hidden=hidden, taps=tapped, caches=tuple(written))

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return raw columns of the embedding table, which may be the head."""
        tied = self.config.tie_embeddings
        return columns_of(self.head if tied else self.embedding, tokens, self.norm.dtype)

    @nn.nowrap
    def shared_layers(self) -> tuple["Decoder", tuple[str, ...]]:
        """Return a module with the embedding and head alone, and the names of its parameters."""
        return Decoder(self.config), ("embed", "head", "norm")

    def empty_caches(self, make: CacheMaker) -> tuple[Cache, ...]:
        """Return the caches of the layers, which all have the same kv heads."""
        c = self.config
        windows = c.windows or (None,) * c.num_layers
        return tuple(make(c.num_kv_heads, c.head_dim, window) for window in windows)

    def first(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return the input of layer 0: embeddings, scaled if the family does so."""
        x = self.embed(tokens)
        scale = self.config.embedding_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def logits(
        self, hidden: Float[Array, "B T D"], num_live: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T V"]:
        """Return float32 logits, softcapped if the family does so.

        Args:
          num_live: tokens of each row that count, as for a call; the logits of the others are
            undefined.
        """
        live = None
        if num_live is not None:
            live = jnp.arange(hidden.shape[1])[None, :] < num_live[:, None]
        raw = self.raw_logits(hidden, live)
        return softcap(raw, self.config.final_softcap, self.kernels)

    def raw_logits(
        self, hidden: Float[Array, "B T D"], live: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Return the head's float32 output, divided if the family does so, without a cap.

        Drafters apply their own cap.

        Args:
          live: tokens that count; logits of the others are undefined. By default all do.
        """
        divisor = self.config.logit_divisor
        with jax.named_scope("head"):
            raw = project(hidden, self.head, live)
            return raw if divisor == 1 else raw / jnp.float32(divisor)
