"""Qwen3, dense: everything lies as Hugging Face has it."""

from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.converters.canonical import Origin
from dflash_jax.converters.gguf.fields import Fields, geometry
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.targets import dense
from dflash_jax.converters.gguf.targets.llama import UNAPPLIED


def hf_fields(fields: Fields, source: GgufFile) -> dict[str, Any]:
    """The fields of config.json that are Qwen3's own."""
    fields.refuse_unless(UNAPPLIED)
    present = set(source.names())
    bias = "blk.0.attn_q.bias" in present or "blk.0.attn_qkv.bias" in present
    return geometry(fields) | {"model_type": "qwen3", "attention_bias": bias}


def origin(name: str, config: TargetConfig, shapes: dense.Shapes) -> Origin | None:
    """Where a canonical tensor lies."""
    return dense.origin(name, config, shapes)


def ignored(name: str, config: TargetConfig) -> str | None:
    """No tensor is superfluous."""
    return None
