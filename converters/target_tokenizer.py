"""The tokenizer of a target as GGUF metadata, whatever files it comes from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax import families
from dflash_jax.config import AttentionConfig, TargetConfig, is_gguf
from dflash_jax.converters import kept_metadata
from dflash_jax.converters.formats.gguf.file import GgufArray, GgufFile, open_gguf
from dflash_jax.converters.formats.gguf.writer import stored_keys
from dflash_jax.converters.gguf.export import SECTIONS
from dflash_jax.converters.gguf.tokenizer import SPACE
from dflash_jax.converters.gguf.tokenizer_export import tokenizer_metadata
from dflash_jax.converters.models import StoredModel, companions
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families import family_of
from dflash_jax.tokenizer import Tokenizer

GEMMA4 = "gemma4"  # the family whose tokenizer merges characters in its own way


def of_model(model: StoredModel) -> dict[str, Any]:
    """Return the metadata of tokenizer and chat template of a target; empty without any.

    Raises:
      ConfigError: the model is no target.
      TokenizerError: its tokenizer has no form in GGUF.
    """
    config = model.config
    source = model.tensors.source
    if not isinstance(config, TargetConfig):
        raise ConfigError(f"{model.path} is a drafter; its target has the tokenizer")
    if isinstance(source, GgufFile):
        stored = stored_keys(source.shards[0].header)
        return {key: value for key, value in stored.items() if _kept(key)}
    files = companions(model.path)
    metadata = _of_files(files, config, model.path) if "tokenizer.json" in files else {}
    gguf = families.family(config.model_type).gguf
    if gguf is not None and gguf.mrope_sections is not None:
        metadata[f"{config.model_type}{SECTIONS}"] = gguf.mrope_sections(config)
    return metadata


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
    metadata = of_model(target)
    if "tokenizer.ggml.model" not in metadata:
        raise CheckpointError(f"{target.path} holds no tokenizer; give a target that does")
    return metadata


def of_path(path: Path, config: TargetConfig) -> dict[str, Any]:
    """Return the metadata of a tokenizer in a folder or a .gguf file, for a target.

    Raises:
      CheckpointError: there is none.
      ConfigError: it is that of another model.
      TokenizerError: it has no form in GGUF.
    """
    if is_gguf(path):
        source = open_gguf(path)
        if "tokenizer.ggml.model" in source.metadata:
            tokens = source.metadata.get("tokenizer.ggml.tokens")
            count = len(tokens) if isinstance(tokens, GgufArray) else 0
            if count != config.vocab_size:
                raise ConfigError(
                    f"{path} has {count} tokens, and the model {config.vocab_size}; give the"
                    " tokenizer that belongs to it"
                )
            stored = stored_keys(source.shards[0].header)
            return {key: value for key, value in stored.items() if key.startswith("tokenizer.")}
    elif "tokenizer.json" in (files := companions(path)):
        return _of_files(files, config, path)
    raise CheckpointError(f"{path} holds no tokenizer; give a folder or .gguf file that does")


def check_belongs(tokenizer: Tokenizer | None, model: StoredModel, *, where: Path) -> None:
    """Check that a tokenizer is not that of another model.

    Its ids must be tokens of the model, except those of added tokens, such as Gemma 3's mark of an
    image, for which text models have no row; texts begin and end with tokens of the model, though.
    Where the model has texts for its ids, nine of ten must be the same; else it must have texts for
    half of the model's tokens.

    Raises:
      ConfigError: it belongs to another model.
    """
    size = getattr(model.config, "vocab_size", None)
    if size is None or tokenizer is None:
        return
    texts = tokenizer.core.get_vocab(with_added_tokens=False)
    advice = "give the tokenizer that belongs to it"
    for name in ("bos_token", "eos_token"):
        at = tokenizer.core.token_to_id(tokenizer.specials.get(name, ""))
        if at is not None and at >= size:
            raise ConfigError(
                f"the {name} of {where}, {tokenizer.specials[name]!r}, has the id {at}, and"
                f" {model.path} {size} tokens; {advice}"
            )
    if beyond := [text for text, i in texts.items() if i >= size]:
        raise ConfigError(
            f"the tokenizer of {where} is that of another model: {beyond[0]!r} has the id"
            f" {texts[beyond[0]]}, and {model.path} {size} tokens; {advice}"
        )
    own = _own_texts(model)
    if not own and 2 * len(texts) < size:
        raise ConfigError(
            f"the tokenizer of {where} has {len(texts)} tokens, {model.path} has {size}; {advice}"
        )
    same = sum(own.get(i) == spelt(text) for text, i in texts.items() if i in own)
    shared = sum(i in own for i in texts.values())
    if own and same < 0.9 * max(shared, min(len(texts), len(own))):
        raise ConfigError(
            f"the tokenizer of {where} is that of another model: of {shared} ids that both have,"
            f" {same} stand for the same text as in {model.path}; {advice}"
        )


def _own_texts(model: StoredModel) -> dict[int, str]:
    """Return the texts of a model's own tokens, also of a tokenizer that cannot be rebuilt."""
    source = model.tensors.source
    if isinstance(source, GgufFile):
        listed = source.metadata.get("tokenizer.ggml.tokens")
        every = listed.tolist() if isinstance(listed, GgufArray) else []
        return {i: spelt(text) for i, text in enumerate(every) if isinstance(text, str)}
    try:
        own = Tokenizer.from_files(model.companions(), where=str(model.path))
    except CheckpointError:  # damaged, which may be why the user names another
        return {}
    return {i: spelt(text) for text, i in own.core.get_vocab().items()} if own else {}


def spelt(token: str) -> str:
    """Return a token with the spaces of SentencePiece's vocabularies, as files spell some."""
    return token.replace(SPACE, " ")


def _of_files(
    files: Mapping[str, str | Path], config: TargetConfig, folder: Path
) -> dict[str, Any]:
    gemma4 = family_of(config.model_type) == GEMMA4
    fresh = tokenizer_metadata(files, config.vocab_size, gemma4=gemma4)
    return kept_metadata.with_flags(fresh, folder, files)


def _kept(key: str) -> bool:
    return key.startswith("tokenizer.") or key.endswith(SECTIONS)
