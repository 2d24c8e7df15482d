"""Targets in GGUF files: configuration from metadata, tensors under canonical names."""

from functools import partial
from typing import Any

from dflash_jax import families
from dflash_jax.config import TargetConfig
from dflash_jax.converters.formats.canonical import Canonical, Origin
from dflash_jax.converters.formats.gguf import tensors
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields, weight_dtype
from dflash_jax.errors import ConfigError
from dflash_jax.families import gguf_architectures
from dflash_jax.families.configs import target_config
from dflash_jax.families.entry import TargetGguf


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
    gguf = families.target_families()[known[fields.architecture]].gguf
    assert gguf is not None  # it claims the architecture
    assert gguf.from_gguf is not None
    return gguf.from_gguf(fields, source) | {
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
    gguf = families.family(config.model_type).gguf or TargetGguf()
    origin_of = gguf.origin or partial(tensors.origin, own=gguf.layer_names)
    shapes = {name: source.shape(name) for name in source.names()}
    parts = [part.name for slot in families.slots(config) for part in slot.parts]
    origins = {}
    for name in parts:
        origin = origin_of(name, config, shapes)
        if origin is not None:
            origins[name] = origin
    used = {stored for origin in origins.values() for stored in origin.names}
    rest = [name for name in source.names() if name not in used]
    reasons = {name: gguf.ignored(name, config) for name in rest}
    left_over = {name: Origin(name) for name in rest if not reasons[name]}
    return Canonical(source, origins | left_over, {n: why for n, why in reasons.items() if why})
