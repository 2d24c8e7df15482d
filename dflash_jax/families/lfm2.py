"""LFM2 and LFM2.5, dense: gated short convolutions, and attention in some layers.

Tensors have names of their own.
"""

import dataclasses
import re
from typing import Any

from dflash_jax.config.base import FULL, TargetConfig, at_least, dense_config, extended, layer_count
from dflash_jax.config.fields import Fields
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.canonical import Origin
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufArray, GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.writer import I32, U32, Typed
from dflash_jax.converters.formats.slots import (
    Keys,
    Slot,
    TensorPart,
    by_head,
    linear,
    paired,
    same,
)
from dflash_jax.errors import ConfigError
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf

CONV = "conv"  # in layer_types
# Fields of training, and others that transformers does not read.
UNUSED = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "theta",  # repeats rope_theta
    "use_pos_enc",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2Config(TargetConfig):
    """A target whose layers are short convolutions or attention."""

    recurrent: tuple[bool, ...]  # per layer: whether it is a convolution
    conv_kernel: int
    conv_bias: bool = False  # whether the convolution and its projections have biases

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.recurrent) != self.num_layers:
            raise ConfigError(
                f"{len(self.recurrent)} layer kinds for {self.num_layers} layers; give one each"
            )
        at_least(self, 2, "conv_kernel")

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Descriptions of the layers."""
        conv = f"convolution over {self.conv_kernel}"
        return tuple(conv if recurrent else "full attention" for recurrent in self.recurrent)


def from_hf(f: Fields) -> Lfm2Config:
    """Return the config of a dense LFM2.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    count = layer_count(f)
    f.must_be("attention_bias", False)
    usual: dict[str, Any] = {
        "intermediate_size": _width(f),
        "rms_norm_eps": f.number("norm_eps", 1e-5),
        "layer_types": None,
        "rope_theta": f.number("rope_theta", 1000000.0),
        "tie_word_embeddings": f.get("tie_embedding", f.flag("tie_word_embeddings", True)),
    }
    reader = f.over(f.values | usual)
    config = dense_config(reader)
    f.used.update((*reader.used - usual.keys(), *UNUSED))
    return extended(
        config,
        Lfm2Config,
        qk_norm=True,
        recurrent=_kinds(f, count),
        conv_kernel=f.integer("conv_L_cache", 3),
        conv_bias=f.flag("conv_bias", False),
    )


def _width(f: Fields) -> int:
    """Return the width of MLPs: unless it is given as such, two thirds of a field, rounded up.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    inner = f.integer("block_ff_dim", f.integer("intermediate_size", 12288))
    factor = f.number("block_ffn_dim_multiplier", 1.0)
    multiple = f.integer("block_multiple_of", 256)
    if not f.flag("block_auto_adjust_ff_dim", True):
        return inner
    if multiple < 1:
        raise ConfigError(f"{f.where}: block_multiple_of is {multiple}; expected 1 or more")
    return -(-int(factor * int(2 * inner / 3)) // multiple) * multiple


def _kinds(f: Fields, count: int) -> tuple[bool, ...]:
    """Return which layers are convolutions: by `layer_types`, or all that are not listed."""
    listed = f.get("full_attn_idxs", list(range(count)))
    if not isinstance(listed, list):
        raise ConfigError(f"{f.where}: full_attn_idxs is {listed!r}; expected a list of layers")
    kinds = f.get("layer_types", [FULL if i in listed else CONV for i in range(count)])
    known = isinstance(kinds, list) and all(kind in (FULL, CONV) for kind in kinds)
    if not known or len(kinds) != count:
        raise ConfigError(
            f"{f.where}: layer_types is {kinds}; expected {count} entries of {FULL!r} or {CONV!r}"
        )
    return tuple(kind == CONV for kind in kinds)


def slots(config: Lfm2Config) -> list[Slot]:
    """Return every parameter of the target."""
    width = config.hidden_size
    inner = config.intermediate_size
    slots = [*llama.tables(config), same(("norm",), "embedding_norm.weight", width)]
    for i, recurrent in enumerate(config.recurrent):
        at = (f"layers_{i}",)
        source = f"layers.{i}."
        mlp = f"{source}feed_forward."
        slots += [
            same((*at, "input_norm"), f"{source}operator_norm.weight", width),
            same((*at, "post_attention_norm"), f"{source}ffn_norm.weight", width),
            paired((*at, "mlp", "gate_up"), (f"{mlp}w1.weight", f"{mlp}w3.weight"), inner, width),
            linear((*at, "mlp", "down"), f"{mlp}w2.weight", width, inner),
        ]
        if recurrent:
            slots += _conv(config, (*at, "conv"), f"{source}conv.")
        else:
            slots += _attention(config, (*at, "attention"), f"{source}self_attn.")
    return slots


def _attention(config: Lfm2Config, at: Keys, source: str) -> list[Slot]:
    width = config.hidden_size
    groups = config.num_kv_heads
    head = config.head_dim
    names = tuple(f"{source}{x}_proj.weight" for x in "qkv")
    count = (config.num_heads // groups, 1, 1)
    return [
        by_head((*at, "qkv"), names, count, groups, head, width),
        linear((*at, "o"), f"{source}out_proj.weight", width, config.num_heads * head),
        *(same((*at, f"{x}_norm"), f"{source}{x}_layernorm.weight", head) for x in "qk"),
    ]


def _conv(config: Lfm2Config, at: Keys, source: str) -> list[Slot]:
    width = config.hidden_size
    kernel = config.conv_kernel
    conv = TensorPart(f"{source}conv.weight", (width, 1, kernel), (1, 0))
    slots = [
        linear((*at, "in_proj"), f"{source}in_proj.weight", 3 * width, width),
        Slot((*at, "conv"), (kernel, width), (conv,)),
        linear((*at, "out"), f"{source}out_proj.weight", width, width),
    ]
    if config.conv_bias:
        slots += [
            same((*at, "in_bias"), f"{source}in_proj.bias", 3 * width),
            same((*at, "conv_bias"), f"{source}conv.bias", width),
            same((*at, "out_bias"), f"{source}out_proj.bias", width),
        ]
    return slots


def to_hf(config: Lfm2Config, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    fields = config_json.shared_fields(config, dtype, "Lfm2ForCausalLM")
    del fields["rms_norm_eps"]
    return fields | {
        "norm_eps": config.rms_norm_eps,
        "intermediate_size": config.intermediate_size,
        "block_auto_adjust_ff_dim": False,
        "rope_parameters": config_json.rope_parameters(config.rope),
        "layer_types": [CONV if recurrent else FULL for recurrent in config.recurrent],
        "conv_L_cache": config.conv_kernel,
        "conv_bias": config.conv_bias,
    }


# GGUF
GGUF_LAYER_NAMES = {
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "conv.conv.weight": "shortconv.conv.weight",
}
KV_HEADS = "attention.head_count_kv"  # 0 in layers that are convolutions
NORM = "embedding_norm.weight"
IN_GGUF = ("token_embd_norm.weight", "output_norm.weight")  # the names of the last norm
_KERNEL = re.compile(r"layers\.\d+\.conv\.conv\.weight")


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to LFM2.

    Raises:
      ConfigError: the attention layers differ.
    """
    fields.refuse_unless(llama.UNAPPLIED)
    counts = fields.ints(KV_HEADS) if isinstance(fields.get(KV_HEADS), GgufArray) else []
    heads = sorted({*counts} - {0})
    if len(heads) != 1 or heads[0] < 1:
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.{KV_HEADS} lists {heads}; expected one number"
            " for all attention layers, and 0 for the others"
        )
    inner = source.shape("blk.0.ffn_gate.weight")[0]  # the key may hold the width before rounding
    hf_fields = keys.geometry(fields, inner=inner, kv_heads=heads[0])
    return hf_fields | {
        "model_type": "lfm2",
        "norm_eps": hf_fields.pop("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": [FULL if count else CONV for count in counts],
        "conv_L_cache": fields.count("shortconv.l_cache", 64),
    }


def gguf_origin(name: str, config: Lfm2Config, shapes: tensors.Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one."""
    if name == NORM:
        return next((Origin(stored) for stored in IN_GGUF if stored in shapes), None)
    origin = tensors.origin(name, config, shapes, GGUF_LAYER_NAMES)
    if origin is None or not _KERNEL.fullmatch(name):
        return origin
    return Origin(origin.name, reshaped=(config.hidden_size, 1, config.conv_kernel))


def to_gguf(config: Lfm2Config) -> keys.Metadata:
    """Return the metadata that is specific to LFM2.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    only = all(config.recurrent)
    keys.refuse(config, {"biases of convolutions": config.conv_bias, "no attention": only})
    counts = [0 if recurrent else config.num_kv_heads for recurrent in config.recurrent]
    own = {KV_HEADS: Typed(I32, counts), "shortconv.l_cache": Typed(U32, config.conv_kernel)}
    return keys.rope(config.rope) | own


def gguf_stored(name: str, config: Lfm2Config) -> dict[str, Origin]:
    """Return a canonical tensor in its stored form; the inverse of `gguf_origin`."""
    if name == NORM:
        return {IN_GGUF[0]: Origin(name)}
    shape = (config.hidden_size, config.conv_kernel) if _KERNEL.fullmatch(name) else None
    return {tensors.stored_name(name, GGUF_LAYER_NAMES): Origin(name, reshaped=shape)}


FAMILY = Family(
    config=Lfm2Config,
    from_hf=from_hf,
    model_types=("lfm2",),
    defaults={"lfm2": {"max_position_embeddings": 128_000, "num_key_value_heads": 8}},
    net="dflash_jax.families.lfm2_net",
    slots=slots,
    to_hf=to_hf,
    gguf=TargetGguf(
        architectures=("lfm2",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
        layer_names=GGUF_LAYER_NAMES,
        origin=gguf_origin,
        stored=gguf_stored,
    ),
)
