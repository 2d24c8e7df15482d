"""Writes trained models as Hugging Face folders, rounded to bfloat16."""

from pathlib import Path
from typing import Any

from dflash_jax.config import AttentionConfig, DrafterConfig, TargetConfig

DTYPE = "bfloat16"


def target(directory: Path, config: TargetConfig, params: dict, *, pad: int) -> None:
    """Write a folder that transformers loads as Qwen3ForCausalLM."""
    _write(directory, config, params, {"bos_token_id": None, "pad_token_id": pad})


def drafter(directory: Path, config: DrafterConfig, params: dict, *, longest: int) -> None:
    """Write a folder in the layout of published DFlash drafters, without embedding and head."""
    own = {"max_position_embeddings": longest, "tie_word_embeddings": False}
    _write(directory, config, params, own)


def _write(directory: Path, config: AttentionConfig, params: dict, fields: dict[str, Any]) -> None:
    from dflash_jax.converters import export
    from dflash_jax.converters.tree_source import TreeSource

    weights = export.Weights(config, TreeSource(params, config), fields=fields)
    export.write_huggingface(weights, directory, DTYPE)
