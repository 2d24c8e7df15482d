"""LFM2: short convolutions, and attention in some layers, under names of its own."""

import re
from typing import Any

from dflash_jax.config import FULL
from dflash_jax.config.lfm2 import CONV, Lfm2Config
from dflash_jax.converters.canonical import Origin
from dflash_jax.converters.families import llama
from dflash_jax.converters.gguf import keys, tensors
from dflash_jax.converters.gguf.file import GgufArray, GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.gguf.writer import I32, U32, Typed
from dflash_jax.converters.names import published
from dflash_jax.converters.names.slots import (
    Keys,
    Slot,
    TensorPart,
    by_head,
    linear,
    paired,
    same,
)
from dflash_jax.errors import ConfigError


def slots(config: Lfm2Config) -> list[Slot]:
    """Return every parameter of the target."""
    width, inner = config.hidden_size, config.intermediate_size
    found = [*llama.tables(config), same(("norm",), "embedding_norm.weight", width)]
    for i, recurrent in enumerate(config.recurrent):
        at, source = (f"layers_{i}",), f"layers.{i}."
        mlp = f"{source}feed_forward."
        found += [
            same((*at, "input_norm"), f"{source}operator_norm.weight", width),
            same((*at, "post_attention_norm"), f"{source}ffn_norm.weight", width),
            paired((*at, "mlp", "gate_up"), (f"{mlp}w1.weight", f"{mlp}w3.weight"), inner, width),
            linear((*at, "mlp", "down"), f"{mlp}w2.weight", width, inner),
        ]
        if recurrent:
            found += _conv(config, (*at, "conv"), f"{source}conv.")
        else:
            found += _attention(config, (*at, "attention"), f"{source}self_attn.")
    return found


def _attention(config: Lfm2Config, at: Keys, source: str) -> list[Slot]:
    width, groups, head = config.hidden_size, config.num_kv_heads, config.head_dim
    names = tuple(f"{source}{x}_proj.weight" for x in "qkv")
    count = (config.num_heads // groups, 1, 1)
    return [
        by_head((*at, "qkv"), names, count, groups, head, width),
        linear((*at, "o"), f"{source}out_proj.weight", width, config.num_heads * head),
        *(same((*at, f"{x}_norm"), f"{source}{x}_layernorm.weight", head) for x in "qk"),
    ]


def _conv(config: Lfm2Config, at: Keys, source: str) -> list[Slot]:
    width, kernel = config.hidden_size, config.conv_kernel
    conv = TensorPart(f"{source}conv.weight", (width, 1, kernel), (1, 0))
    found = [
        linear((*at, "in_proj"), f"{source}in_proj.weight", 3 * width, width),
        Slot((*at, "conv"), (kernel, width), (conv,)),
        linear((*at, "out"), f"{source}out_proj.weight", width, width),
    ]
    if config.conv_bias:
        found += [
            same((*at, "in_bias"), f"{source}in_proj.bias", 3 * width),
            same((*at, "conv_bias"), f"{source}conv.bias", width),
            same((*at, "out_bias"), f"{source}out_proj.bias", width),
        ]
    return found


def to_hf(config: Lfm2Config, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    found = published.shared_fields(config, dtype, "Lfm2ForCausalLM")
    del found["rms_norm_eps"]
    return found | {
        "norm_eps": config.rms_norm_eps,
        "intermediate_size": config.intermediate_size,
        "block_auto_adjust_ff_dim": False,
        "rope_parameters": published.rope_parameters(config.rope),
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
    found = geometry(fields, inner=inner, kv_heads=heads[0])
    return found | {
        "model_type": "lfm2",
        "norm_eps": found.pop("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": [FULL if count else CONV for count in counts],
        "conv_L_cache": fields.count("shortconv.l_cache", 64),
    }


def gguf_origin(name: str, config: Lfm2Config, shapes: tensors.Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one."""
    if name == NORM:
        return next((Origin(stored) for stored in IN_GGUF if stored in shapes), None)
    found = tensors.origin(name, config, shapes, GGUF_LAYER_NAMES)
    if found is None or not _KERNEL.fullmatch(name):
        return found
    return Origin(found.name, reshaped=(config.hidden_size, 1, config.conv_kernel))


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
