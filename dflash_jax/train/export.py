"""Writes models as Hugging Face folders: config.json and model.safetensors in bfloat16."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from dflash_jax.config import FULL, AttentionConfig, DrafterConfig, TargetConfig
from dflash_jax.train.vocabulary import write_json


def target(directory: Path, config: TargetConfig, params: dict, *, pad: int) -> None:
    """A folder that transformers loads as Qwen3ForCausalLM; the head is tied to the table."""
    ends = list(config.eos_token_ids)
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        **shared_fields(config, config.max_length),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_layers,
        "bos_token_id": None,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": pad,
    }
    write_json(directory / "config.json", fields)
    write_weights(directory, config, params, prefix="model.")


def drafter(directory: Path, config: DrafterConfig, params: dict, *, longest: int) -> None:
    """A folder as published DFlash drafters are spelt; embedding and head are the target's."""
    fields = {
        "architectures": ["DFlashDraftModel"],
        **shared_fields(config, longest),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "num_target_layers": config.num_target_layers,
        "layer_types": [FULL] * config.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "block_size": config.block_size,
        },
    }
    write_json(directory / "config.json", fields)
    write_weights(directory, config, params, prefix="")


def shared_fields(config: AttentionConfig, longest: int) -> dict[str, Any]:
    """The fields that both kinds of config spell alike, the rotary base in both ways."""
    return {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": longest,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "use_cache": True,
        "dtype": "bfloat16",
    }


def write_weights(directory: Path, config: AttentionConfig, params: dict, *, prefix: str) -> None:
    """The tensors under their published names, [out, in], rounded to bfloat16."""
    from converters.names import slots

    tensors = {}
    for slot in slots(config):
        leaf: Any = params
        for key in slot.path:
            leaf = leaf[key]
        for part in slot.parts:
            view = part.view(np.asarray(leaf)).reshape(part.shape)
            tensors[prefix + part.name] = np.ascontiguousarray(view).astype(ml_dtypes.bfloat16)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
