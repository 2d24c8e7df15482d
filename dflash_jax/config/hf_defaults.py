"""What transformers takes where a file does not name a field.

Sizes that decide the shape of most weights have to be said.
"""

from dflash_jax.config.fields import Fields

_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
_HYBRID = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_GEMMA = {"num_key_value_heads": 4, "head_dim": 256}
UNSAID: dict[str, dict[str, int]] = {
    "gemma4_text": _GEMMA
    | {
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    "gemma4_unified_text": _GEMMA | {"max_position_embeddings": 262144, "sliding_window": 1024},
    "gpt_oss": {
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    "llama": {"max_position_embeddings": 2048},
    "qwen3": _QWEN | {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_5_text": _HYBRID | {"num_key_value_heads": 4},
    "qwen3_5_moe_text": _HYBRID
    | {
        "num_key_value_heads": 2,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3_moe": _QWEN
    | {
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}


def integer(f: Fields, name: str, null: int | None = None) -> int:
    """A field, or what its absence means to the file's model_type.

    Args:
      null: what null means, or absence to a model_type that has no entry; None refuses both.
    """
    usual = UNSAID.get(str(f.values.get("model_type")), {})
    return f.integer(name, null if name in f.values else usual.get(name, null))
