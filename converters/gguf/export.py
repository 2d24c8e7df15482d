"""Models as GGUF: metadata, stored names and forms of tensors, and the type of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dflash_jax.config import AttentionConfig, DrafterConfig, TargetConfig
from dflash_jax.config.family import family_of, target_families
from dflash_jax.converters import families
from dflash_jax.converters.canonical import Canonical, Computed, Origin
from dflash_jax.converters.forms import FILE_TYPES, GGUF_TYPES
from dflash_jax.converters.gguf import drafter, keys
from dflash_jax.converters.gguf.drafter import UPSTREAM
from dflash_jax.converters.gguf.file import STRING
from dflash_jax.converters.gguf.tensors import stored_name
from dflash_jax.converters.gguf.tokenizer import STOP_TEXTS
from dflash_jax.converters.gguf.writer import U32, PlannedBlocks, Typed, typed
from dflash_jax.converters.quants.types import BY_NAME, GgmlType
from dflash_jax.converters.source import TensorSource
from dflash_jax.errors import ConfigError

QUANTISATION_VERSION = 2
SECTIONS = ".rope.dimension_sections"  # of targets with several position rows (M-RoPE)
_OF_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Matrices that llama.cpp expects in float32.
FLOAT32 = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv")
# Matrices that llama-quantize leaves as they are; its converter writes them as Q8_0, too.
BARELY_QUANTISED = ("per_layer_model_proj",)


@dataclass(frozen=True)
class GgufForm:
    """A model as the content of a GGUF file."""

    metadata: Mapping[str, Typed]
    tensors: Canonical  # under stored names
    planned: tuple[PlannedBlocks, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.planned)


def as_gguf(
    config: AttentionConfig,
    tensors: TensorSource,
    kind: str,
    tokenizer: Mapping[str, Any] | None = None,
) -> GgufForm:
    """Return a target or drafter in the form of llama.cpp's files.

    Args:
      tensors: its tensors under canonical names.
      kind: a type or dtype, as `type_named` takes it.
      tokenizer: metadata with the tokenizer. A drafter's is its target's; of a target's own
        file, general information is kept.

    Raises:
      ConfigError: the model has no form in GGUF, or the type is unknown.
    """
    chosen = type_named(kind)
    if isinstance(config, DrafterConfig):
        mrope = any(key.endswith(SECTIONS) for key in tokenizer or {})
        architecture, own = UPSTREAM, drafter.metadata(config, mrope=mrope)
        origins, kept = drafter.origins(config), {}
    else:
        architecture, own = _target_keys(config)
        origins, kept = _target_origins(config), tokenizer or {}
    found = _general(architecture, chosen, kept)
    found |= {f"{architecture}.{key}": value for key, value in own.items()}
    found |= _tokenizer(config, architecture, tokenizer or {})
    stored = Canonical(tensors, origins, {})
    planned = [
        PlannedBlocks(name, stored_type(name, stored.shape(name), chosen), stored.shape(name))
        for name in stored.names()
    ]
    return GgufForm(found, stored, tuple(planned))


def type_named(kind: str) -> GgmlType:
    """Return the stored type for a name of `GGUF_TYPES` or a dtype's name.

    Raises:
      ConfigError: the name is unknown.
    """
    if kind in GGUF_TYPES:
        return BY_NAME[kind.upper()]
    if kind in _OF_DTYPES:
        return BY_NAME[_OF_DTYPES[kind]]
    raise ConfigError(f"the GGUF type {kind!r} is not one of {', '.join(GGUF_TYPES)}")


def stored_type(name: str, shape: tuple[int, ...], chosen: GgmlType) -> GgmlType:
    """Return the type of one tensor, as llama.cpp's converter chooses it for all-`chosen` files.

    Vectors, norms and tensors that are no weights stay F32; rows that blocks do not divide, F16.
    """
    if name == "d2t":
        return BY_NAME["I64"]
    norm = name.endswith("_norm.weight")
    if len(shape) == 1 or norm or not name.endswith(".weight") or any(x in name for x in FLOAT32):
        return BY_NAME["F32"]
    if chosen.name.startswith("Q4") and any(x in name for x in BARELY_QUANTISED):
        return BY_NAME["F16"]
    return BY_NAME["F16"] if shape[-1] % chosen.block_size else chosen


def fallbacks(form: GgufForm, chosen: GgmlType) -> dict[str, str]:
    """Return tensors whose rows the blocks of `chosen` do not divide, with the reason."""
    return {
        tensor.name: f"{tensor.kind.name}: rows of {tensor.shape[-1]} weights are not divided by"
        f" the {chosen.block_size} of a {chosen.name} block"
        for tensor in form.planned
        if tensor.kind.name == "F16" and tensor.shape[-1] % chosen.block_size
    }


def _general(architecture: str, chosen: GgmlType, kept: Mapping[str, Any]) -> dict[str, Typed]:
    own: dict[str, Typed] = {
        "general.architecture": Typed(STRING, architecture),
        "general.type": Typed(STRING, "model"),
        "general.file_type": Typed(U32, FILE_TYPES[chosen.name.lower()]),
    }
    if chosen.dtype is None:
        own["general.quantization_version"] = Typed(U32, QUANTISATION_VERSION)
    ours = {*own, "general.alignment", "general.quantization_version"}
    about = {k: typed(v) for k, v in kept.items() if k.startswith("general.") and k not in ours}
    return own | about


def _tokenizer(
    config: AttentionConfig, architecture: str, kept: Mapping[str, Any]
) -> dict[str, Typed]:
    """Return the tokenizer's keys, with end tokens that readers would not find by their text."""
    found = {key: typed(v) for key, v in kept.items() if key.startswith("tokenizer.")}
    if isinstance(config, DrafterConfig):
        return found | {"tokenizer.ggml.mask_token_id": Typed(U32, config.mask_token_id)}
    ends = config.eos_token_ids if isinstance(config, TargetConfig) else ()
    named = [f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom")]
    known = {found[key].value for key in named if key in found}
    texts = found["tokenizer.ggml.tokens"].value if "tokenizer.ggml.tokens" in found else []
    known |= {i for i, text in enumerate(texts) if text in STOP_TEXTS.get(architecture, ())}
    free = [key for key in named if key not in found]
    rest = [i for i in ends if i not in known]
    return found | {key: Typed(U32, i) for key, i in zip(free, rest, strict=False)}


def _target_keys(config: AttentionConfig) -> tuple[str, dict[str, Typed]]:
    """Return the architecture of a target, and its keys below that prefix."""
    if not isinstance(config, TargetConfig):
        raise ConfigError(f"{type(config).__name__} has no form in GGUF; targets and drafters do")
    family = family_of(config.model_type)
    to_gguf = families.provided(family, "to_gguf")
    if to_gguf is None:
        raise ConfigError(
            f"a {config.model_type} target has no form in GGUF;"
            f" {', '.join(families.providing('to_gguf'))} have. Write a folder instead"
        )
    named = families.provided(family, "GGUF_ARCHITECTURES", {})
    architecture = named.get(config.model_type) or target_families()[family].gguf[0]
    own = keys.shared(config) | {
        "context_length": Typed(U32, config.max_length),
        "vocab_size": Typed(U32, config.vocab_size),
    }
    changed = own | to_gguf(config)
    return architecture, {key: value for key, value in changed.items() if value is not None}


def _target_origins(config: AttentionConfig) -> dict[str, Origin]:
    assert isinstance(config, TargetConfig)
    family = family_of(config.model_type)
    own = families.provided(family, "GGUF_LAYER_NAMES", {})
    stored = families.provided(family, "gguf_stored", partial(same_form, own=own))
    computed = families.provided(family, "gguf_computed", lambda config: {})(config)
    found: dict[str, Origin] = {}
    for slot in families.slots(config):
        for part in slot.parts:
            found |= stored(part.name, config)
    return found | {
        name: Computed(name, array=np.asarray(array, np.float32))
        for name, array in computed.items()
    }


def same_form(name: str, config: TargetConfig, own: Mapping[str, str]) -> dict[str, Origin]:
    """Return a tensor that files hold in the canonical form, by its stored name."""
    return {stored_name(name, own): Origin(name)}
