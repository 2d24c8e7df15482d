"""Weights in and out: safetensors and GGUF files, name tables, reports. Never imports jax."""
