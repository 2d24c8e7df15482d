"""GGUF tensor names, and the row order for rotation."""

import re
from collections.abc import Mapping

import numpy as np

OUTER = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


def stored_name(canonical: str) -> str:
    """Return the GGUF name of a tensor of a dense decoder; other tensors keep their name."""
    match = _IN_LAYER.fullmatch(canonical)
    if match and match[2] in LAYER:
        layer, stem, suffix = match.groups()
        return f"blk.{layer}.{LAYER[stem]}.{suffix}"
    return OUTER.get(canonical, canonical)


def stored_by(name: str, own: Mapping[str, str]) -> str:
    """Return the GGUF name of a tensor; `own` has stems and suffixes that differ, in a layer."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return f"blk.{match[1]}.{own[match[2]]}" if match and match[2] in own else stored_name(name)


def fused_name(canonical: str) -> tuple[str, str] | None:
    """Return the name of the fused tensor, and which part it is, for q, k and v; else None."""
    match = re.fullmatch(r"layers\.(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)", canonical)
    if match is None:
        return None
    layer, which, suffix = match.groups()
    return f"blk.{layer}.attn_qkv.{suffix}", which


def half_split_rows(heads: int, width: int) -> np.ndarray:
    """Return the row order of a file that rotates neighbours (2m, 2m + 1) in pairs.

    dflash_jax rotates pairs (m, m + width / 2): for each head, even rows come first.
    """
    order = np.arange(width).reshape(-1, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * width + order).reshape(-1)
