"""DFlash drafters, version 1: Qwen3-like layers, and the encoder of the target's features.

JetSpec's are causal. Every kind of drafter has these parameters; the file of a kind adds the
others.
"""

from typing import Any

from dflash_jax.config.drafter import DrafterConfig, DrafterFields, common_config
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.tensors import Shapes
from dflash_jax.converters.formats.gguf.writer import BOOL, Typed
from dflash_jax.converters.formats.slots import Keys, Slot, by_head, integers, linear, same
from dflash_jax.families.entry import DrafterGguf, DrafterKind, Speculator
from dflash_jax.families.llama import norm_and_mlp
from dflash_jax.families.qwen3 import head_norms


def from_hf(fields: DrafterFields) -> DrafterConfig:
    """Return the config of a v1 drafter."""
    return common_config(fields, DrafterConfig)


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
    slots = [
        linear(("fc",), "fc.weight", width, len(config.target_layer_ids) * width),
        same(("hidden_norm",), "hidden_norm.weight", width),
        same(("norm",), "norm.weight", width),
    ]
    for i in range(config.num_layers):
        at = (f"layers_{i}",)
        source = f"layers.{i}."
        slots.append(same((*at, "input_norm"), f"{source}input_layernorm.weight", width))
        slots += _attention(config, (*at, "attention"), f"{source}self_attn.")
        slots += norm_and_mlp(config, at, source)
    return slots + _own(config)


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
    width = config.hidden_size
    slots = []
    if config.own_embedding:
        slots.append(linear(("embed",), "embed_tokens.weight", config.vocab_size, width))
    if config.own_head:
        slots.append(linear(("head",), "lm_head.weight", config.choices, width))
    if config.draft_vocab_size:
        slots.append(integers(("d2t",), "d2t", config.draft_vocab_size))
    return slots


def _attention(config: DrafterConfig, at: Keys, source: str) -> list[Slot]:
    """Return attention, with queries separate: the context needs only keys and values."""
    width = config.hidden_size
    groups = config.num_kv_heads
    head = config.head_dim
    queries = config.num_heads * head
    weights = (f"{source}k_proj.weight", f"{source}v_proj.weight")
    slots = [
        linear((*at, "q"), f"{source}q_proj.weight", queries, width),
        by_head((*at, "kv"), weights, (1, 1), groups, head, width),
        *head_norms(config, at, source),
        linear((*at, "o"), f"{source}o_proj.weight", width, queries),
    ]
    if config.attention_bias:
        biases = (f"{source}k_proj.bias", f"{source}v_proj.bias")
        slots += [
            same((*at, "q_bias"), f"{source}q_proj.bias", queries),
            by_head((*at, "kv_bias"), biases, (1, 1), groups, head),
            same((*at, "o_bias"), f"{source}o_proj.bias", width),
        ]
    return slots


DRAFTER = DrafterKind(
    config=DrafterConfig,
    from_hf=from_hf,
    architectures=("DFlashDraftModel", "Qwen3DFlashDraftModel"),
    projector_types=("dflash",),
    net="dflash_jax.families.dflash_net",
    slots=slots,
    speculator=Speculator(name="DFlashSpeculator"),
    gguf=DrafterGguf(
        names=GGUF_NAMES,
        layer_names=GGUF_LAYER_NAMES,
        from_gguf=from_gguf,
        to_gguf=to_gguf,
    ),
)
