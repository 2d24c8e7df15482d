"""Llama: decoder layers with two norms, grouped attention and a gated MLP.

In GGUF files, rotation pairs neighbouring rows of queries and keys, and divisors replace the
rotary scaling.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dflash_jax.config import AttentionConfig, TargetConfig
from dflash_jax.converters.canonical import Origin
from dflash_jax.converters.gguf import keys, tensors
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.gguf.rope import llama3_divisors, llama3_scaling
from dflash_jax.converters.gguf.tensors import fused_name, half_split_rows, stored_name
from dflash_jax.converters.names import published
from dflash_jax.converters.names.slots import Keys, Slot, TensorPart, by_head, linear, paired, same


def slots(config: TargetConfig) -> list[Slot]:
    """Return every parameter of the target."""
    found = [
        *tables(config),
        same(("norm",), "norm.weight", config.hidden_size),
    ]
    for i in range(config.num_layers):
        found += layer(config, i)
    return found


def tables(config: TargetConfig) -> list[Slot]:
    """Return the embedding table and the head; a tied head is both."""
    width, vocab = config.hidden_size, config.vocab_size
    if config.tie_embeddings:
        return [linear(("head",), "embed_tokens.weight", vocab, width)]
    return [
        linear(("embed",), "embed_tokens.weight", vocab, width),
        linear(("head",), "lm_head.weight", vocab, width),
    ]


def layer(config: AttentionConfig, i: int) -> list[Slot]:
    """Return the parameters of decoder layer `i`."""
    at, source = (f"layers_{i}",), f"layers.{i}."
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
      names: of the norms, by parameter.
      mlp: makes the parameters of a layer's MLP; None is `gated_mlp`.
    """
    width = config.hidden_size
    found = [*tables(config), same(("norm",), "norm.weight", width)]
    for i in range(config.num_layers):
        at, source = (f"layers_{i}",), f"layers.{i}."
        found += [same((*at, x), f"{source}{name}.weight", width) for x, name in names.items()]
        found += attention(config, (*at, "attention"), f"{source}self_attn.")
        found += (mlp or gated_mlp)(config, (*at, "mlp"), f"{source}mlp.")
    return found


def attention(config: AttentionConfig, at: Keys, source: str) -> list[Slot]:
    """Return fused query, key and value, and the output projection."""
    width, groups, head = config.hidden_size, config.num_kv_heads, config.head_dim
    count = (config.num_heads // groups, 1, 1)
    names = [f"{source}{x}_proj" for x in "qkv"]
    weights = tuple(f"{n}.weight" for n in names)
    found = [
        by_head((*at, "qkv"), weights, count, groups, head, width),
        linear((*at, "o"), f"{source}o_proj.weight", width, config.num_heads * head),
    ]
    if config.attention_bias or (isinstance(config, TargetConfig) and config.qkv_bias):
        biases = tuple(f"{n}.bias" for n in names)
        found.append(by_head((*at, "qkv_bias"), biases, count, groups, head))
    if config.attention_bias:
        found.append(same((*at, "o_bias"), f"{source}o_proj.bias", width))
    return found


def norm_and_mlp(config: AttentionConfig, at: Keys, source: str) -> list[Slot]:
    """Return the second norm of a layer and its gated MLP."""
    norm = f"{source}post_attention_layernorm.weight"
    return [
        same((*at, "post_attention_norm"), norm, config.hidden_size),
        *gated_mlp(config, (*at, "mlp"), f"{source}mlp."),
    ]


def gated_mlp(config: AttentionConfig, at: Keys, source: str) -> list[Slot]:
    """Return the gated MLP of a layer."""
    width, inner = config.hidden_size, config.intermediate_size
    gate_up = (f"{source}gate_proj.weight", f"{source}up_proj.weight")
    found = [
        paired((*at, "gate_up"), gate_up, inner, width),
        linear((*at, "down"), f"{source}down_proj.weight", width, inner),
    ]
    if isinstance(config, TargetConfig) and config.mlp_bias:
        names = (f"{source}gate_proj.bias", f"{source}up_proj.bias")
        parts = tuple(TensorPart(name, (inner,), (0, 1), (i,)) for i, name in enumerate(names))
        found.append(Slot((*at, "gate_up_bias"), (2, inner), parts))
        found.append(same((*at, "down_bias"), f"{source}down_proj.bias", width))
    return found


def to_hf(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    return published.decoder_fields(config, dtype, "LlamaForCausalLM")


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
    found = geometry(fields) | {"model_type": "llama", "attention_bias": tensors.biased(source)}
    found["mlp_bias"] = "blk.0.ffn_gate.bias" in present
    if ROPE_FREQS in present:
        divisors, theta = source.read(ROPE_FREQS), found["rope_theta"]
        found["rope_scaling"] = llama3_scaling(divisors, theta, where=fields.where)
    return found


def gguf_origin(name: str, config: TargetConfig, shapes: tensors.Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one; rows are reordered if their number fits."""
    found, fused = tensors.origin(name, config, shapes), fused_name(name)
    if found is None or fused is None or fused[1] == "v":
        return found
    count = len(tensors.rows_in_fused(config, fused[1]))
    if found.rows is None and shapes[found.name][0] != count:
        return found
    order = half_split_rows(count // config.head_dim, config.head_dim)
    return tensors.reordered(found, order, "rotary rows: pairs to halves")


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
