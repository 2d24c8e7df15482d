"""Models in GGUF files: targets, drafters and tokenizers, read and written."""
