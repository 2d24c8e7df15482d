"""GGUF files: a reader that checks every bound, and a writer of targets and drafters."""

from dflash_jax.converters.gguf.file import GgufFile, open_gguf

__all__ = ["GgufFile", "open_gguf"]
