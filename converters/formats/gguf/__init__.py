"""GGUF files: a reader that checks every bound, a writer, and what metadata and names mean."""
