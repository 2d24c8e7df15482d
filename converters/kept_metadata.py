"""Metadata of GGUF files that folders have no place for, kept beside their weights.

A folder that was made from a GGUF file holds its metadata, but not the vocabulary, in
`gguf_metadata.json`, with digests of what they were true for: the configuration and the tokenizer's
files. A GGUF file that is made from the folder gets them back, as far as that is unchanged.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.config import AttentionConfig
from dflash_jax.converters.formats.gguf.file import SCALARS, STRING, GgufArray, GgufFile
from dflash_jax.converters.formats.gguf.writer import KIND_NAMES, KINDS, Typed, stored_keys
from dflash_jax.converters.gguf.tokenizer_export import TEMPLATE
from dflash_jax.converters.models import StoredModel
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.model_files import FILES, MORE_TEMPLATES, files_in
from dflash_jax.tokenizer import well_formed

FILE = "gguf_metadata.json"
TOKENIZER = "tokenizer."
GENERAL = "general."
VOCABULARY = tuple(f"tokenizer.ggml.{x}" for x in ("tokens", "token_type", "scores", "merges"))
# What is different in every file, and written anew.
OF_FILES = ("general.alignment", "general.file_type", "general.quantization_version", "split.")
# Keys that the settings of a tokenizer decide, besides tokenizer.json.
OF_SETTINGS = (TEMPLATE, "tokenizer.ggml.add_bos_token")
OF_SETTINGS += tuple(f"tokenizer.ggml.{x}_token_id" for x in ("bos", "eos", "unknown", "padding"))
INCIDENTAL = frozenset({"dtype", "eos_token_ids", "bos_token_id", "pad_token_id"})
Files = Mapping[str, str | Path]


def labels(*, name: str | None, license: str | None) -> dict[str, Typed]:
    """Return the GGUF keys for a model's name and license, without those that are None.

    Raises:
      ConfigError: a text has bytes that are not UTF-8.
    """
    texts = {"general.name": name, "general.license": license}
    keys = {}
    for key, text in texts.items():
        if text is None:
            continue
        if well_formed(text) != text:
            raise ConfigError(f"--{key.removeprefix(GENERAL)} is not UTF-8: {text!r}")
        keys[key] = Typed(STRING, text)
    return keys


def of_model(model: StoredModel) -> dict[str, Typed]:
    """Return what a model's GGUF file would keep, without its tokenizer's keys.

    Raises:
      CheckpointError: the file that holds it in a folder is damaged.
    """
    source = model.tensors.source
    if isinstance(source, GgufFile):
        every = stored_keys(source.shards[0].header)
        unchanged = True
    else:
        fields = _read(model.path)
        every = _keys(fields, model.path)
        unchanged = fields.get("config") == _digest(model.config)
    # Keys of the architecture may be about tensors that are ignored, or about another model.
    about = unchanged and not model.tensors.ignored
    return {
        key: value
        for key, value in every.items()
        if not key.startswith((TOKENIZER, *OF_FILES)) and (about or key.startswith(GENERAL))
    }


def with_flags(fresh: Mapping[str, Any], folder: Path, files: Files) -> dict[str, Any]:
    """Return the metadata of a folder's tokenizer with those that its files do not express.

    Args:
      fresh: what follows from the files.

    Raises:
      CheckpointError: the file that holds them is damaged.
    """
    fields = _read(folder)
    then = fields.get("tokenizer")
    now = _digests(files)
    if not fresh or not isinstance(then, dict):
        return dict(fresh)
    kept = {k: v for k, v in _keys(fields, folder).items() if k.startswith(TOKENIZER)}
    if then == now:
        return {**fresh, **kept}
    if then.get("tokenizer.json") != now.get("tokenizer.json"):
        return dict(fresh)
    return {k: v for k, v in kept.items() if not k.startswith(OF_SETTINGS)} | dict(fresh)


def beside(model: StoredModel, files: Files, labels: Mapping[str, Typed]) -> dict[str, str | Path]:
    """Return the file that keeps a model's metadata in a folder, by name; empty without any.

    Args:
      files: the tokenizer's files, which are written into that folder.
      labels: keys that replace the model's own.

    Raises:
      CheckpointError: the file in the model's own folder is damaged.
    """
    source = model.tensors.source
    if isinstance(source, GgufFile):
        keys = {
            key: value
            for key, value in stored_keys(source.shards[0].header).items()
            if key not in VOCABULARY and not key.startswith(OF_FILES)
        }
        fields: dict[str, Any] = {"config": _digest(model.config), "tokenizer": _digests(files)}
    else:
        fields = _read(model.path)
        keys = _keys(fields, model.path)
    keys |= labels
    if not keys:
        return {}
    entries = {
        key: {"type": KIND_NAMES[item.kind], "value": _plain(item.value)}
        for key, item in keys.items()
    }
    text = json.dumps(fields | {"keys": entries}, indent=1, ensure_ascii=False) + "\n"
    return {FILE: text}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, GgufArray) else value


def _read(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's file; empty if it has none."""
    path = files_in(folder, (FILE,)).get(FILE) if folder.is_dir() else None
    if not isinstance(path, Path):
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not JSON ({error}); convert again, or remove it"
        ) from None
    if not isinstance(fields, dict) or not isinstance(fields.get("keys"), dict):
        raise CheckpointError(f"{path} has no 'keys'; convert again, or remove it")
    return fields


def _keys(fields: Mapping[str, Any], folder: Path) -> dict[str, Typed]:
    """Return the keys in the content of a folder's file."""
    keys = {}
    for key, entry in fields.get("keys", {}).items():
        kind = KINDS.get(str(entry.get("type"))) if isinstance(entry, dict) else None
        value = entry.get("value") if kind is not None else None
        listed = value if isinstance(value, list) else [value]
        if kind is None or not all(_fits(kind, each) for each in listed):
            raise CheckpointError(
                f"{folder / FILE}: {key!r} is {str(entry)[:80]}; expected a type, one of"
                f" {', '.join(KINDS)}, and a value of it"
            )
        keys[key] = Typed(kind, value)
    return keys


def _fits(kind: int, value: Any) -> bool:
    """Return whether a value of JSON is one of that type."""
    if kind == STRING:
        return isinstance(value, str)
    try:
        struct.pack(SCALARS[kind], value)
    except (struct.error, TypeError, OverflowError):
        return False
    return isinstance(value, bool) == (KIND_NAMES[kind] == "bool")


def _digest(config: AttentionConfig) -> str:
    """Return the digest of a configuration without what layouts say differently."""
    fields = {k: v for k, v in config.to_json().items() if k not in INCIDENTAL}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _digests(files: Files) -> dict[str, str]:
    """Return digests of a tokenizer's files by name."""
    own = [name for name in sorted(files) if name in FILES or name.startswith(MORE_TEMPLATES)]
    contents = [(name, files[name]) for name in own]
    return {
        name: hashlib.sha256(x.read_bytes() if isinstance(x, Path) else x.encode()).hexdigest()
        for name, x in contents
    }
