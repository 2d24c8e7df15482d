"""DFlash drafters: Qwen3-like layers, and the encoder of the target's features.

Every kind of drafter has these parameters; the file of a kind adds the others.
"""

from typing import Any

from dflash_jax.config import DrafterConfig
from dflash_jax.converters.families.llama import norm_and_mlp
from dflash_jax.converters.families.qwen3 import head_norms
from dflash_jax.converters.gguf.keys import GgufFields
from dflash_jax.converters.gguf.tensors import Shapes
from dflash_jax.converters.gguf.writer import BOOL, Typed
from dflash_jax.converters.names.slots import Keys, Slot, by_head, integers, linear, same

SPECULATOR = "DFlashSpeculator"
# GGUF spellings of the tensors that all kinds have; exactly one must be present, exports write
# the first.
GGUF_NAMES = {
    "fc.weight": ("fc.weight", "dflash_fc.weight", "dflash.fc.weight"),
    "hidden_norm.weight": (
        "enc.output_norm.weight",
        "hidden_norm.weight",
        "dflash_hidden_norm.weight",
        "dflash.hidden_norm.weight",
    ),
    "norm.weight": ("output_norm.weight",),
    "d2t": ("d2t",),
    "embed_tokens.weight": ("token_embd.weight",),
    "lm_head.weight": ("output.weight",),
}
GGUF_LAYER_NAMES = {
    "post_attention_layernorm.weight": ("ffn_norm.weight", "post_attention_norm.weight"),
}


def slots(config: DrafterConfig) -> list[Slot]:
    """Return every parameter of a version 1 drafter, including its own embedding and head."""
    width = config.hidden_size
    found = [
        linear(("fc",), "fc.weight", width, len(config.target_layer_ids) * width),
        same(("hidden_norm",), "hidden_norm.weight", width),
        same(("norm",), "norm.weight", width),
    ]
    for i in range(config.num_layers):
        at, source = (f"layers_{i}",), f"layers.{i}."
        found.append(same((*at, "input_norm"), f"{source}input_layernorm.weight", width))
        found += _attention(config, (*at, "attention"), f"{source}self_attn.")
        found += norm_and_mlp(config, at, source)
    return found + _own(config)


def to_hf(config: DrafterConfig) -> dict[str, Any]:
    """Return the kind's own fields of `dflash_config`: none."""
    return {}


def from_gguf(fields: GgufFields, shapes: Shapes) -> dict[str, Any]:
    """Return the kind's own fields of `dflash_config` that GGUF metadata holds."""
    anchored = fields.get("sample_from_anchor")
    return {} if anchored is None else {"sample_from_anchor": bool(anchored)}


def to_gguf(config: DrafterConfig) -> dict[str, Typed]:
    """Return the kind's own metadata of a GGUF file."""
    anchored = config.sample_from_anchor
    return {"sample_from_anchor": Typed(BOOL, anchored)} if anchored else {}


def _own(config: DrafterConfig) -> list[Slot]:
    """Return embedding, head and token ids that the drafter does not share with the target."""
    width, found = config.hidden_size, []
    if config.own_embedding:
        found.append(linear(("embed",), "embed_tokens.weight", config.vocab_size, width))
    if config.own_head:
        found.append(linear(("head",), "lm_head.weight", config.choices, width))
    if config.draft_vocab_size:
        found.append(integers(("d2t",), "d2t", config.draft_vocab_size))
    return found


def _attention(config: DrafterConfig, at: Keys, source: str) -> list[Slot]:
    """Return attention, with queries separate: the context needs only keys and values."""
    width, groups, head = config.hidden_size, config.num_kv_heads, config.head_dim
    queries = config.num_heads * head
    weights = (f"{source}k_proj.weight", f"{source}v_proj.weight")
    found = [
        linear((*at, "q"), f"{source}q_proj.weight", queries, width),
        by_head((*at, "kv"), weights, (1, 1), groups, head, width),
        *head_norms(config, at, source),
        linear((*at, "o"), f"{source}o_proj.weight", width, queries),
    ]
    if config.attention_bias:
        biases = (f"{source}k_proj.bias", f"{source}v_proj.bias")
        found += [
            same((*at, "q_bias"), f"{source}q_proj.bias", queries),
            by_head((*at, "kv_bias"), biases, (1, 1), groups, head),
            same((*at, "o_bias"), f"{source}o_proj.bias", width),
        ]
    return found
