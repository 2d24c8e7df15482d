"""Resolve model names to local files, without importing JAX."""

import importlib.resources
import os
from pathlib import Path

from dflash_jax.errors import CheckpointError
from dflash_jax.utils import smollm2

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
        return _shipped(SHIPPED, role)
    if str(source) == smollm2.NAME:
        return _smollm2(role)
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
            f" 'Qwen/Qwen3-8B', '{SHIPPED}' or '{smollm2.NAME}'"
        )
    return None


def own_drafter(target: Source) -> str | None:
    """Return the name of the drafter that is shipped for a target, or None."""
    name = str(target)
    named = name in (SHIPPED, smollm2.NAME)
    return name if named and _shipped(name, "drafter").is_dir() else None


def _shipped(name: str, role: str) -> Path:
    return Path(str(importlib.resources.files("dflash_jax"))) / "data" / name / role


def _smollm2(role: str) -> Path:
    if role != "drafter":
        return smollm2.find()
    folder = _shipped(smollm2.NAME, role)
    if not folder.is_dir():
        raise CheckpointError(
            f"no drafter is shipped for {smollm2.NAME!r}; leave the drafter out, or give a"
            " directory, a .gguf file or a hub id"
        )
    return folder
