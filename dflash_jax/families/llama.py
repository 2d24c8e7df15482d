"""Llama 3.x: decoder layers with two norms, grouped attention and a gated MLP.

Families that differ from it in their configuration alone share its tensors and its network. In
GGUF files, rotation pairs neighbouring rows of queries and keys, and divisors replace the rotary
scaling.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dflash_jax.config.base import AttentionConfig, TargetConfig, dense_config
from dflash_jax.config.fields import Fields
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.canonical import Origin
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.rope import llama3_divisors, llama3_scaling
from dflash_jax.converters.formats.gguf.tensors import fused_name, half_split_rows, stored_name
from dflash_jax.converters.formats.slots import (
    Keys,
    Slot,
    TensorPart,
    by_head,
    linear,
    paired,
    same,
)
from dflash_jax.families.entry import Family, TargetGguf


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a dense Llama, with full attention in all layers.

    Windows, which some files converted from other families have, are ignored as in transformers.
    """
    config = dense_config(f)
    return dataclasses.replace(
        config,
        mlp_bias=f.flag("mlp_bias", False),
        windows=(None,) * config.num_layers,
    )


def slots(config: TargetConfig) -> list[Slot]:
    """Return every parameter of the target."""
    slots = [
        *tables(config),
        same(("norm",), "norm.weight", config.hidden_size),
    ]
    for i in range(config.num_layers):
        slots += layer(config, i)
    return slots


def tables(config: TargetConfig) -> list[Slot]:
    """Return the embedding table and the head; a tied head is both."""
    width = config.hidden_size
    vocab = config.vocab_size
    if config.tie_embeddings:
        return [linear(("head",), "embed_tokens.weight", vocab, width)]
    return [
        linear(("embed",), "embed_tokens.weight", vocab, width),
        linear(("head",), "lm_head.weight", vocab, width),
    ]


def layer(config: AttentionConfig, i: int) -> list[Slot]:
    """Return the parameters of decoder layer `i`."""
    at = (f"layers_{i}",)
    source = f"layers.{i}."
    width = config.hidden_size
    return [
        same((*at, "input_norm"), f"{source}input_layernorm.weight", width),
        *attention(config, (*at, "attention"), f"{source}self_attn."),
        *norm_and_mlp(config, at, source),
    ]


def layers(
    config: TargetConfig,
    names: Mapping[str, str],
    mlp: Callable[[TargetConfig, Keys, str], list[Slot]] | None = None,
) -> list[Slot]:
    """Return every parameter of a target whose layers have other norms.

    Args:
      names: names of the norms, by parameter.
      mlp: makes the parameters of a layer's MLP; None is `gated_mlp`.
    """
    width = config.hidden_size
    slots = [*tables(config), same(("norm",), "norm.weight", width)]
    for i in range(config.num_layers):
        at = (f"layers_{i}",)
        source = f"layers.{i}."
        slots += [same((*at, x), f"{source}{name}.weight", width) for x, name in names.items()]
        slots += attention(config, (*at, "attention"), f"{source}self_attn.")
        slots += (mlp or gated_mlp)(config, (*at, "mlp"), f"{source}mlp.")
    return slots


def attention(config: AttentionConfig, at: Keys, source: str) -> list[Slot]:
    """Return fused query, key and value, and the output projection."""
    width = config.hidden_size
    groups = config.num_kv_heads
    head = config.head_dim
    count = (config.num_heads // groups, 1, 1)
    names = [f"{source}{x}_proj" for x in "qkv"]
    weights = tuple(f"{n}.weight" for n in names)
    slots = [
        by_head((*at, "qkv"), weights, count, groups, head, width),
        linear((*at, "o"), f"{source}o_proj.weight", width, config.num_heads * head),
    ]
    if config.attention_bias or (isinstance(config, TargetConfig) and config.qkv_bias):
        biases = tuple(f"{n}.bias" for n in names)
        slots.append(by_head((*at, "qkv_bias"), biases, count, groups, head))
    if config.attention_bias:
        slots.append(same((*at, "o_bias"), f"{source}o_proj.bias", width))
    return slots


def norm_and_mlp(config: AttentionConfig, at: Keys, source: str) -> list[Slot]:
    """Return the second norm of a layer and its gated MLP."""
    norm = f"{source}post_attention_layernorm.weight"
    return [
        same((*at, "post_attention_norm"), norm, config.hidden_size),
        *gated_mlp(config, (*at, "mlp"), f"{source}mlp."),
    ]


def gated_mlp(config: AttentionConfig, at: Keys, source: str) -> list[Slot]:
    """Return the gated MLP of a layer."""
    width = config.hidden_size
    inner = config.intermediate_size
    gate_up = (f"{source}gate_proj.weight", f"{source}up_proj.weight")
    slots = [
        paired((*at, "gate_up"), gate_up, inner, width),
        linear((*at, "down"), f"{source}down_proj.weight", width, inner),
    ]
    if isinstance(config, TargetConfig) and config.mlp_bias:
        names = (f"{source}gate_proj.bias", f"{source}up_proj.bias")
        parts = tuple(TensorPart(name, (inner,), (0, 1), (i,)) for i, name in enumerate(names))
        slots.append(Slot((*at, "gate_up_bias"), (2, inner), parts))
        slots.append(same((*at, "down_bias"), f"{source}down_proj.bias", width))
    return slots


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return config_json.decoder_fields(config, dtype, "LlamaForCausalLM")


# GGUF
ROPE_FREQS = "rope_freqs.weight"
UNAPPLIED = {
    "expert_count": None,
    "attention.sliding_window": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "nextn_predict_layers": None,
}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Llama."""
    fields.refuse_unless(UNAPPLIED)
    present = source.names()
    hf_fields = keys.geometry(fields) | {
        "model_type": "llama",
        "attention_bias": tensors.biased(source),
    }
    hf_fields["mlp_bias"] = "blk.0.ffn_gate.bias" in present
    if ROPE_FREQS in present:
        divisors = source.read(ROPE_FREQS)
        theta = hf_fields["rope_theta"]
        hf_fields["rope_scaling"] = llama3_scaling(divisors, theta, where=fields.where)
    return hf_fields


def gguf_origin(name: str, config: TargetConfig, shapes: tensors.Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one; rows are reordered if their number fits."""
    origin = tensors.origin(name, config, shapes)
    fused = fused_name(name)
    if origin is None or fused is None or fused[1] == "v":
        return origin
    count = len(tensors.rows_in_fused(config, fused[1]))
    if origin.rows is None and shapes[origin.name][0] != count:
        return origin
    order = half_split_rows(count // config.head_dim, config.head_dim)
    return tensors.reordered(origin, order, "rotary rows: pairs to halves")


def to_gguf(config: TargetConfig) -> keys.Metadata:
    """Return the metadata that is specific to Llama.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    keys.refuse(config, {"a sliding window": any(config.windows)})
    return {} if config.rope.kind == "llama3" else keys.rope(config.rope)


def gguf_stored(name: str, config: TargetConfig) -> dict[str, Origin]:
    """Return a canonical tensor in its stored form; the inverse of `gguf_origin`."""
    fused = fused_name(name)
    if fused is None or fused[1] == "v":
        return {stored_name(name): Origin(name)}
    count = len(tensors.rows_in_fused(config, fused[1]))
    order = half_split_rows(count // config.head_dim, config.head_dim)
    return {stored_name(name): Origin(name, np.argsort(order), "rotary rows: halves to pairs")}


def gguf_computed(config: TargetConfig) -> dict[str, np.ndarray]:
    """Return tensors that files hold instead of settings: rotary divisors."""
    if config.rope.kind != "llama3":
        return {}
    return {ROPE_FREQS: llama3_divisors(config.rope, config.head_dim)}


def gguf_ignored(name: str, config: TargetConfig) -> str | None:
    """Return why a tensor is not needed, or None if it is unexpected."""
    if name == ROPE_FREQS:
        return "its divisors became the rotary scaling of the configuration"
    return None


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    model_types=("llama",),
    defaults={"llama": {"max_position_embeddings": 2048}},
    slots=slots,
    to_hf=to_hf,
    gguf=TargetGguf(
        architectures=("llama",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
        origin=gguf_origin,
        stored=gguf_stored,
        computed=gguf_computed,
        ignored=gguf_ignored,
    ),
)
