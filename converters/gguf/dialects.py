"""The GGUF dialects of published DFlash drafters: their keys and tensor names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_jax.converters.gguf.header import GgufArray
from dflash_jax.converters.gguf.keys import GgufFields
from dflash_jax.converters.taps import PLUS_ONE, RAW, Taps, read_taps
from dflash_jax.errors import CheckpointError, ConfigError

UPSTREAM = "dflash"
DRAFTER_ARCHITECTURES = {
    UPSTREAM: "llama.cpp",
    "dflash-draft": "dflash-draft",
    "qwen35-dflash-draft": "lucebox",
    "gemma4-dflash-draft": "lucebox",
}

# Tap keys below the architecture's prefix, and their numbering; None if writers disagree.
UPSTREAM_TAPS = {
    "target_layers": PLUS_ONE,
    "target_layer_ids": None,
    "dflash.target_layer_ids": None,
}
OTHER_TAPS = {"dflash.target_layer_ids": RAW, "target_layer_ids": RAW}

BORROWED = {
    "token_embd.weight": "borrowed from the target",
    "output.weight": "borrowed from the target",
    "rope_freqs.weight": "recomputed from the configuration",
}
# Tensors of related drafters that are not supported, or whose form is not known.
RELATIVES = {
    "dflash.dspark": "DSpark in lucebox's layout",
    "domino": "Domino",
    "aux_hidden_norm": "Laguna",
    "attn_gate": "Laguna",
    "attn_sinks": "a drafter with attention sinks",
    "post_ffw_norm": "a drafter with Gemma's four norms",
}


@dataclass(frozen=True)
class Dialect:
    """Settings of a drafter file besides its geometry."""

    name: str
    taps: Taps
    block_size: int
    mask_token_id: int
    vocab_size: int
    is_causal: bool | None  # inside the block; None: as the reference package decides
    notes: tuple[str, ...]


def read_dialect(fields: GgufFields, choice: str) -> Dialect:
    """Return the drafter's settings.

    Raises:
      ConfigError, CheckpointError: a setting is missing, ambiguous or contradictory.
    """
    upstream = fields.architecture == UPSTREAM
    name = DRAFTER_ARCHITECTURES[fields.architecture]
    if upstream and fields.get("hyper_connection.count"):
        raise ConfigError(
            f"{fields.where} is a DeepSeek drafter (hyper-connections); not supported"
        )
    causal = fields.get("attention.causal") if upstream else None
    return Dialect(
        name=name,
        taps=_taps(fields, UPSTREAM_TAPS if upstream else OTHER_TAPS, choice),
        block_size=_number(fields, ("block_size", "dflash.block_size"), 256),
        mask_token_id=_mask(fields),
        vocab_size=_vocabulary(fields),
        is_causal=None if causal is None else bool(causal),
        notes=tuple(_notes(fields, causal)),
    )


def _notes(fields: GgufFields, causal: bool | None) -> Iterator[str]:
    """Yield notes on settings that the file leaves open."""
    if causal is None:
        ignored = " (its attention.causal is ignored: writers of this dialect always set it)"
        said = ignored if fields.get("attention.causal") is not None else ""
        yield f"inside the block sliding layers are causal, others not, as in training{said}"
    if fields.get("embedding_scale") is None and fields.architecture.startswith("gemma"):
        yield "the file has no embedding scale; the target's is used"


def _taps(fields: GgufFields, keys: Mapping[str, str | None], choice: str) -> Taps:
    present = [key for key in keys if fields.get(key) is not None]
    if not present:
        listed = " or ".join(f"{fields.architecture}.{key}" for key in keys)
        raise ConfigError(
            f"{fields.where} does not say which target layers it reads ({listed}); they cannot be"
            " guessed: use the original drafter"
        )
    readings = [
        read_taps(
            fields.ints(key),
            source=f"{fields.architecture}.{key}",
            convention=keys[key],
            choice=choice,
            where=fields.where,
        )
        for key in present
    ]
    if len({reading.ids for reading in readings}) > 1:
        raise CheckpointError(
            f"{fields.where} contradicts itself about target layers: "
            + "; ".join(reading.line() for reading in readings)
        )
    return readings[0]


def _number(fields: GgufFields, keys: tuple[str, ...], limit: int) -> int:
    key = next((k for k in keys if fields.get(k) is not None), keys[0])
    return fields.count(key, limit)


def _mask(fields: GgufFields) -> int:
    keys = ["tokenizer.ggml.mask_token_id"]
    keys += [f"{fields.architecture}.{k}" for k in ("dflash.mask_token_id", "mask_token_id")]
    found = {key: fields.metadata[key] for key in keys if key in fields.metadata}
    values: set[Any] = set(found.values())
    if len(values) != 1 or type(next(iter(values))) is not int:
        raise ConfigError(
            f"{fields.where} must name one mask token id; found {found or 'none'} under"
            f" {', '.join(keys)}. It cannot be guessed: use the original drafter"
        )
    return values.pop()


def _vocabulary(fields: GgufFields) -> int:
    tokens = fields.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, GgufArray):
        return len(tokens)
    return fields.count("vocab_size", 1 << 22)
