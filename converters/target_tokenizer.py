"""The tokenizer of a target as GGUF metadata, whatever files it comes from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.config import AttentionConfig, TargetConfig, is_gguf
from dflash_jax.config.family import family_of
from dflash_jax.converters import families
from dflash_jax.converters.gguf import GgufFile, open_gguf
from dflash_jax.converters.gguf.export import SECTIONS
from dflash_jax.converters.gguf.tokenizer_export import tokenizer_metadata
from dflash_jax.converters.models import StoredModel, companions
from dflash_jax.errors import CheckpointError, ConfigError

GEMMA4 = "gemma4"  # the family whose tokenizer merges characters in its own way


def of_model(model: StoredModel) -> dict[str, Any]:
    """Return tokenizer, chat template and general metadata of a target; empty without any.

    Raises:
      ConfigError: the model is no target.
      TokenizerError: its tokenizer has no form in GGUF.
    """
    config, source = model.config, model.tensors.source
    if not isinstance(config, TargetConfig):
        raise ConfigError(f"{model.path} is a drafter; its target has the tokenizer")
    if isinstance(source, GgufFile):
        return {key: v for key, v in source.metadata.items() if _kept(key)}
    files = companions(model.path)
    found: dict[str, Any] = dict(_of_files(files, config)) if "tokenizer.json" in files else {}
    if sections := families.provided(family_of(config.model_type), "mrope_sections"):
        found[f"{config.model_type}{SECTIONS}"] = sections(config)
    return found


def for_drafter(config: AttentionConfig, target: StoredModel) -> dict[str, Any]:
    """Return the metadata of the tokenizer of a drafter's target.

    Raises:
      CheckpointError: the target has no tokenizer.
      ConfigError: it has another vocabulary than the drafter.
      TokenizerError: its tokenizer has no form in GGUF.
    """
    sizes = [getattr(one, "vocab_size", 0) for one in (config, target.config)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the drafter has {sizes[0]} tokens and {target.path} {sizes[1]}; give its target"
        )
    found = of_model(target)
    if "tokenizer.ggml.model" not in found:
        raise CheckpointError(f"{target.path} holds no tokenizer; give a target that does")
    return found


def of_path(path: Path, config: TargetConfig) -> dict[str, Any]:
    """Return the metadata of a tokenizer in a folder or a .gguf file, for a target.

    Raises:
      CheckpointError: there is none.
      TokenizerError: it has no form in GGUF.
    """
    if is_gguf(path):
        found = open_gguf(path).metadata
        if "tokenizer.ggml.model" in found:
            return {key: value for key, value in found.items() if key.startswith("tokenizer.")}
    elif "tokenizer.json" in (files := companions(path)):
        return dict(_of_files(files, config))
    raise CheckpointError(f"{path} holds no tokenizer; give a folder or .gguf file that does")


def _of_files(files: Mapping[str, str | Path], config: TargetConfig) -> Mapping[str, Any]:
    gemma4 = family_of(config.model_type) == GEMMA4
    return tokenizer_metadata(files, config.vocab_size, gemma4=gemma4)


def _kept(key: str) -> bool:
    return key.startswith(("tokenizer.", "general.")) or key.endswith(SECTIONS)
