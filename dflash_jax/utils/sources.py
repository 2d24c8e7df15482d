"""Resolve model names to local files, fetched from the hub where needed, without importing JAX."""

import importlib.resources
import os
from pathlib import Path

from dflash_jax.config.fields import is_gguf
from dflash_jax.errors import CheckpointError, install_hint
from dflash_jax.utils import smollm2

Source = str | os.PathLike[str]
SHIPPED = "tiny"
# Drafters that are no files, or are found by the target.
DRAFTER_NAMES = ("own", "auto", "ngram", "none")


def find_local(source: Source, role: str) -> Path | None:
    """Return the directory or GGUF file of a source; None for a Hugging Face id.

    Args:
      role: "target", "drafter" or "tokenizer", for messages and for the folder of the shipped pair.

    Raises:
      CheckpointError: the source does not exist locally and is no Hugging Face id.
    """
    if not isinstance(source, str | os.PathLike):
        raise CheckpointError(f"the {role} is {source!r}; expected a path or a name")
    if str(source) == SHIPPED:
        return _shipped(SHIPPED, role)
    if str(source) in (f"{SHIPPED}/target", f"{SHIPPED}/drafter"):
        return _shipped(*str(source).split("/"))
    if str(source) == smollm2.NAME:
        return _smollm2(role)
    try:
        path = Path(source).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"the {role} {source} cannot be read: {error}") from error
    if path.is_dir() or (path.is_file() and is_gguf(path)):
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the {role}'s directory or a GGUF file")
    parts = str(source).split("/")
    local = path.suffix.lower() == ".gguf" or parts[0][:1] in (".", "~", "")
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


def check_exists(source: Source | None, role: str) -> None:
    """Check that a source on this machine exists, before models are opened.

    Raises:
      CheckpointError: it does not.
    """
    if source is not None and not (role == "drafter" and source in DRAFTER_NAMES):
        find_local(source, role)


def locate(source: Source, role: str) -> Path:
    """Return the directory or GGUF file of a source; hub ids are downloaded.

    Raises:
      CheckpointError: it does not exist or cannot be downloaded.
    """
    return find_local(source, role) or _download(str(source), role)


def _download(repository: str, role: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        if cached := _cached(repository):
            return cached
        raise CheckpointError(
            f"{repository} is no directory here; to fetch the {role} from the hub"
            f" {install_hint('hub')}"
        ) from error
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                ignore_patterns=["*/*"],  # gpt-oss has its weights in original/ as well
            )
        )
    except Exception as error:  # network, authorisation, unknown repository
        raise CheckpointError(
            f"the {role} {repository} could not be fetched from the hub: {error}"
        ) from error


def _cached(repository: str) -> Path | None:
    """Return the folder of a hub id that Hugging Face's tools downloaded before, if any."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or base)
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    folder = hub / f"models--{repository.replace('/', '--')}"
    try:
        found = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
        return found if found.is_dir() else None
    except (OSError, ValueError):
        return None
