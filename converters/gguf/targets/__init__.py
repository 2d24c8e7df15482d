"""What each architecture's GGUF files hold: its metadata, its tensors, and how they differ."""

from types import ModuleType

from dflash_jax.converters.gguf.targets import gemma4, gpt_oss, llama, qwen3, qwen3_5, qwen3_moe

# GGUF architecture: the file of its family
FAMILIES: dict[str, ModuleType] = {
    "gemma4": gemma4,
    "gpt-oss": gpt_oss,
    "llama": llama,
    "qwen3": qwen3,
    "qwen35": qwen3_5,
    "qwen35moe": qwen3_5,
    "qwen3moe": qwen3_moe,
}
# model_type of a config: the same
OF_TYPE: dict[str, ModuleType] = {
    "gemma4_text": gemma4,
    "gpt_oss": gpt_oss,
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "qwen3_moe": qwen3_moe,
}
