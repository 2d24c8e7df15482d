"""Resolve model names to local files, without importing JAX."""

import importlib.resources
import os
from pathlib import Path

from dflash_jax.errors import CheckpointError

Source = str | os.PathLike[str]
SHIPPED = "tiny"


def find_local(source: Source, role: str) -> Path | None:
    """Return the directory or .gguf file of a source; None for a Hugging Face id.

    Args:
      role: "target", "drafter" or "tokenizer", for messages and for the folder of the shipped pair.

    Raises:
      CheckpointError: the source does not exist locally and is no Hugging Face id.
    """
    if not isinstance(source, str | os.PathLike):
        raise CheckpointError(f"the {role} is {source!r}; expected a path or a name")
    if str(source) == SHIPPED:
        return Path(str(importlib.resources.files("dflash_jax"))) / "data" / SHIPPED / role
    try:
        path = Path(source).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"the {role} {source} cannot be read: {error}") from error
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the {role}'s directory or a .gguf file")
    parts = str(source).split("/")
    local = path.suffix == ".gguf" or parts[0][:1] in (".", "~", "")
    if len(parts) != 2 or local:
        raise CheckpointError(
            f"there is no {role} at {path}; give a directory, a .gguf file, a hub id like"
            f" 'Qwen/Qwen3-8B', or '{SHIPPED}'"
        )
    return None
