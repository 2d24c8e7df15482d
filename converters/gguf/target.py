"""Targets in GGUF files: configuration from metadata, tensors under canonical names."""

from functools import partial
from typing import Any

from dflash_jax.config import TargetConfig, target_config
from dflash_jax.config.family import family_of, gguf_architectures
from dflash_jax.converters import families
from dflash_jax.converters.canonical import Canonical, Origin
from dflash_jax.converters.gguf import tensors
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, weight_dtype
from dflash_jax.errors import ConfigError


def read_config(source: GgufFile, eos_token_ids: tuple[int, ...] = ()) -> TargetConfig:
    """Return the configuration of the target in a file.

    Raises:
      ConfigError: the architecture or a setting is not supported.
    """
    return target_config(hf_fields(source, eos_token_ids), str(source.path))


def hf_fields(source: GgufFile, eos_token_ids: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the config.json that describes a file's target.

    Raises:
      ConfigError: the architecture or a setting is not supported.
    """
    fields = GgufFields(source)
    if fields.architecture not in (known := gguf_architectures()):
        raise ConfigError(
            f"{fields.where} holds the architecture {fields.architecture!r}; as a target this"
            f" version reads {', '.join(known)}"
        )
    if fields.get("attention.causal") is False:
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.attention.causal is false; a model that looks"
            " ahead cannot decode"
        )
    present = set(source.names())
    if "token_embd.weight" not in present:
        raise ConfigError(f"{fields.where} has no token_embd.weight; it is not a whole target")
    from_gguf = families.provided(known[fields.architecture], "from_gguf")
    return from_gguf(fields, source) | {
        "vocab_size": source.shape("token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in present,
        "eos_token_id": list(eos_token_ids),
        "bos_token_id": _token_id(source, "bos_token_id"),
        "pad_token_id": _token_id(source, "padding_token_id"),
        "dtype": weight_dtype(source),
    }


def _token_id(source: GgufFile, name: str) -> int | None:
    value = source.metadata.get(f"tokenizer.ggml.{name}")
    return value if type(value) is int else None


def canonical(source: GgufFile, config: TargetConfig) -> Canonical:
    """Return the file under canonical names; tensors that fill no parameter keep their own."""
    family = family_of(config.model_type)
    own = families.provided(family, "GGUF_LAYER_NAMES", {})
    origin_of = families.provided(family, "gguf_origin", partial(tensors.origin, own=own))
    reason_of = families.provided(family, "gguf_ignored", lambda name, config: None)
    shapes = {name: source.shape(name) for name in source.names()}
    parts = [part.name for slot in families.slots(config) for part in slot.parts]
    found = {name: origin_of(name, config, shapes) for name in parts}
    origins = {name: origin for name, origin in found.items() if origin}
    used = {stored for origin in origins.values() for stored in origin.names}
    rest = [name for name in source.names() if name not in used]
    reasons = {name: reason_of(name, config) for name in rest}
    left_over = {name: Origin(name) for name in rest if not reasons[name]}
    return Canonical(source, origins | left_over, {n: why for n, why in reasons.items() if why})
