"""Tensor names as GGUF files spell them, and the row orders they differ in."""

import re

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
    """The GGUF name of a canonical tensor of a dense decoder; of any other, its own."""
    match = _IN_LAYER.fullmatch(canonical)
    if match and match[2] in LAYER:
        layer, stem, suffix = match.groups()
        return f"blk.{layer}.{LAYER[stem]}.{suffix}"
    return OUTER.get(canonical, canonical)


def fused_name(canonical: str) -> tuple[str, str] | None:
    """For q, k and v: the name of their fused tensor, and which of the three is meant."""
    match = re.fullmatch(r"layers\.(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)", canonical)
    if match is None:
        return None
    layer, which, suffix = match.groups()
    return f"blk.{layer}.attn_qkv.{suffix}", which


def half_split_rows(heads: int, width: int) -> np.ndarray:
    """Where each row lies in a file that pairs neighbours for rotation (2m, 2m + 1).

    We pair halves (m, m + width / 2): of each head first the even rows, then the odd ones.
    """
    order = np.arange(width).reshape(-1, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * width + order).reshape(-1)
