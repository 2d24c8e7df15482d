"""Configs of the models whose vectors Tunix wrote, in `oracle/tunix`."""

from dflash_jax import TargetConfig
from dflash_jax.config.rope import RopeConfig

CONFIGS = {
    name: TargetConfig(
        model_type=name,
        vocab_size=61,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=24,
        windows=(None, None),
        rms_norm_eps=1e-5,
        qk_norm=name == "qwen3",
        tie_embeddings=name == "llama",
        rope=RopeConfig(theta=1e6),  # whatever Tunix's configs say
    )
    for name in ("qwen3", "llama")
}
