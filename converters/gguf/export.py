"""Models as GGUF: metadata, stored names and forms of tensors, and the type of each."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dflash_jax import families
from dflash_jax.config import AttentionConfig, DrafterConfig, TargetConfig
from dflash_jax.converters.formats.canonical import Canonical, Computed, Origin
from dflash_jax.converters.formats.gguf import keys
from dflash_jax.converters.formats.gguf.file import STRING
from dflash_jax.converters.formats.gguf.tensors import stored_name
from dflash_jax.converters.formats.gguf.writer import U32, PlannedBlocks, Typed, typed
from dflash_jax.converters.formats.source import TensorSource
from dflash_jax.converters.forms import FILE_TYPES
from dflash_jax.converters.gguf import drafter
from dflash_jax.converters.gguf.drafter import UPSTREAM
from dflash_jax.converters.gguf.importance import Importance
from dflash_jax.converters.gguf.mixtures import Choice, choose, fallbacks
from dflash_jax.converters.gguf.tokenizer import STOP_TEXTS
from dflash_jax.errors import ConfigError
from dflash_jax.families import gguf_architectures
from dflash_jax.families.entry import TargetGguf

QUANTISATION_VERSION = 2
SECTIONS = ".rope.dimension_sections"  # key of targets with several position rows (M-RoPE)


@dataclass(frozen=True)
class GgufForm:
    """A model as the content of a GGUF file."""

    metadata: Mapping[str, Typed]
    tensors: Canonical  # under stored names
    planned: tuple[PlannedBlocks, ...]
    fallbacks: Mapping[str, str]  # tensors that have another type than their rows fit, and why
    importance: Mapping[str, np.ndarray]  # by matrix, float32 [experts, inputs]

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.planned)


def as_gguf(
    config: AttentionConfig,
    tensors: TensorSource,
    kind: str | Choice,
    kept: Mapping[str, Any] | None = None,
    importance: Importance | None = None,
) -> GgufForm:
    """Return a target or drafter in the form of llama.cpp's files.

    Args:
      tensors: its tensors under canonical names.
      kind: a type of `GGUF_TYPES`, a dtype, or more choices.
      kept: metadata of the tokenizer, which for a drafter is its target's, and of the model's own
        file, of which those are kept that are not written anew.
      importance: what steers the errors of quantised matrices.

    Raises:
      CheckpointError: the importance matrix is that of another model.
      ConfigError: the model has no form in GGUF, or the type is unknown.
    """
    choice = kind if isinstance(kind, Choice) else Choice(kind)
    choice = dataclasses.replace(choice, steered=importance is not None)
    kept = kept or {}
    own: Mapping[str, Typed | None]
    if isinstance(config, DrafterConfig):
        mrope = any(key.endswith(SECTIONS) for key in kept)
        architecture = UPSTREAM
        own = drafter.metadata(config, mrope=mrope)
        origins = drafter.origins(config)
    else:
        architecture, own = _target_keys(config)
        origins = _target_origins(config)
    stored = Canonical(tensors, origins, {})
    shapes = {name: stored.shape(name) for name in stored.names()}
    chosen = choose(shapes, config, choice)
    quantised = any(each.kind.dtype is None for each in chosen.values())
    stated = {f"{architecture}.{key}": value for key, value in own.items()}
    metadata = _general(architecture, FILE_TYPES[choice.name], kept, quantised=quantised)
    metadata |= {key: value for key, value in stated.items() if value is not None}
    metadata |= _tokenizer(config, architecture, kept)
    metadata |= {
        key: typed(value)
        for key, value in kept.items()
        if key not in metadata and key not in stated and _is_other(key, architecture)
    }
    return GgufForm(
        metadata,
        stored,
        tuple(PlannedBlocks(name, chosen[name].kind, shape) for name, shape in shapes.items()),
        fallbacks(chosen, shapes),
        importance.of(shapes) if importance else {},
    )


def _general(
    architecture: str, file_type: int, kept: Mapping[str, Any], *, quantised: bool
) -> dict[str, Typed]:
    own: dict[str, Typed] = {
        "general.architecture": Typed(STRING, architecture),
        "general.type": Typed(STRING, "model"),
        "general.file_type": Typed(U32, file_type),
    }
    if quantised:
        own["general.quantization_version"] = Typed(U32, QUANTISATION_VERSION)
    ours = {*own, "general.alignment", "general.quantization_version"}
    about = {k: typed(v) for k, v in kept.items() if k.startswith("general.") and k not in ours}
    return own | about


def _is_other(key: str, architecture: str) -> bool:
    """Return whether a key is of no other architecture, and is not written by `as_gguf`."""
    namespace = key.partition(".")[0]
    others = {*gguf_architectures(), *drafter.DRAFTER_ARCHITECTURES} - {architecture}
    sections = key.endswith(SECTIONS) and namespace != architecture  # of a drafter's target
    written = namespace in ("general", "tokenizer", "split")
    return not (written or sections or namespace in others)


def _tokenizer(
    config: AttentionConfig, architecture: str, kept: Mapping[str, Any]
) -> dict[str, Typed]:
    """Return the tokenizer's keys, with end tokens that readers would not find by their text."""
    metadata = {key: typed(v) for key, v in kept.items() if key.startswith("tokenizer.")}
    if isinstance(config, DrafterConfig):
        return metadata | {"tokenizer.ggml.mask_token_id": Typed(U32, config.mask_token_id)}
    ends = config.eos_token_ids if isinstance(config, TargetConfig) else ()
    named = [f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom")]
    known = {metadata[key].value for key in named if key in metadata}
    texts = metadata["tokenizer.ggml.tokens"].value if "tokenizer.ggml.tokens" in metadata else []
    known |= {i for i, text in enumerate(texts) if text in STOP_TEXTS.get(architecture, ())}
    free = [key for key in named if key not in metadata]
    rest = [i for i in ends if i not in known]
    return metadata | {key: Typed(U32, i) for key, i in zip(free, rest, strict=False)}


def _target_keys(config: AttentionConfig) -> tuple[str, dict[str, Typed | None]]:
    """Return the architecture of a target, and its keys below that prefix; None is left out."""
    if not isinstance(config, TargetConfig):
        raise ConfigError(f"{type(config).__name__} has no form in GGUF; targets and drafters do")
    gguf = families.family(config.model_type).gguf
    if gguf is None or gguf.to_gguf is None:
        all_families = families.target_families().items()
        written = [name for name, other in all_families if other.gguf and other.gguf.to_gguf]
        raise ConfigError(
            f"a {config.model_type} target has no form in GGUF; {', '.join(written)} have. Write a"
            " folder instead"
        )
    architecture = gguf.written.get(config.model_type) or gguf.architectures[0]
    own: dict[str, Typed | None] = {
        **keys.shared(config),
        "context_length": Typed(U32, config.max_length),
        "vocab_size": Typed(U32, config.vocab_size),
    }
    return architecture, own | gguf.to_gguf(config)


def _target_origins(config: AttentionConfig) -> dict[str, Origin]:
    assert isinstance(config, TargetConfig)
    gguf = families.family(config.model_type).gguf or TargetGguf()
    stored = gguf.stored or partial(same_form, own=gguf.layer_names)
    origins: dict[str, Origin] = {}
    for slot in families.slots(config):
        for part in slot.parts:
            origins |= stored(part.name, config)
    return origins | {
        name: Computed(name, array=np.asarray(array, np.float32))
        for name, array in gguf.computed(config).items()
    }


def same_form(name: str, config: TargetConfig, own: Mapping[str, str]) -> dict[str, Origin]:
    """Return a tensor that files hold in the canonical form, by its stored name."""
    return {stored_name(name, own): Origin(name)}
