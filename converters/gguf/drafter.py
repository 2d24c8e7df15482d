"""Drafters in GGUF files, read from any dialect and written in that of llama.cpp."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_jax import families
from dflash_jax.config import FULL, SLIDING, DrafterConfig
from dflash_jax.converters.formats.canonical import Canonical, Origin
from dflash_jax.converters.formats.gguf import keys
from dflash_jax.converters.formats.gguf.file import GgufArray, GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields, geometry, weight_dtype
from dflash_jax.converters.formats.gguf.tensors import Shapes, stored_name
from dflash_jax.converters.formats.gguf.writer import BOOL, F32, I32, U32, Typed
from dflash_jax.converters.formats.slots import TensorPart
from dflash_jax.converters.names import published
from dflash_jax.converters.taps import AUTO, PLUS_ONE, RAW, Taps, read_taps
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families import drafter_kinds
from dflash_jax.families.configs import drafter_config
from dflash_jax.families.entry import DrafterGguf

# The GGUF dialects of published DFlash drafters: their keys and tensor names.


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
    "domino": "Domino in lucebox's layout",
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
    ids = {key: fields.metadata[key] for key in keys if key in fields.metadata}
    values: set[Any] = set(ids.values())
    if len(values) != 1 or type(next(iter(values))) is not int:
        raise ConfigError(
            f"{fields.where} must name one mask token id; found {ids or 'none'} under"
            f" {', '.join(keys)}. It cannot be guessed: use the original drafter"
        )
    return values.pop()


def _vocabulary(fields: GgufFields) -> int:
    tokens = fields.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, GgufArray):
        return len(tokens)
    return fields.count("vocab_size", 1 << 22)


def read_config(source: GgufFile, taps: str = AUTO) -> tuple[DrafterConfig, Dialect]:
    """Return the configuration of the drafter in a file, and its dialect's settings.

    Raises:
      ConfigError, CheckpointError: the drafter is not supported, or its metadata is incomplete.
    """
    fields = GgufFields(source)
    if fields.architecture not in DRAFTER_ARCHITECTURES:
        raise ConfigError(
            f"{fields.where} holds the architecture {fields.architecture!r}; as a drafter this"
            f" version reads {', '.join(DRAFTER_ARCHITECTURES)}"
        )
    _refuse_relatives(source)
    dialect = read_dialect(fields, taps)
    config = drafter_config(_hf_fields(source, fields, dialect), fields.where)
    _check_taps(source, config)
    return _owned(source, config), dialect


def _owned(source: GgufFile, config: DrafterConfig) -> DrafterConfig:
    """Return the config with the file's own tables; a table without a head serves as both."""
    if not drafter_kinds()[config.kind].own_tables and not config.draft_vocab_size:
        return config
    table, head = (name in source.names() for name in ("token_embd.weight", "output.weight"))
    own = head or table or bool(config.draft_vocab_size)
    return dataclasses.replace(config, own_embedding=table, own_head=own)


def _refuse_relatives(source: GgufFile) -> None:
    for name in source.names():
        if kind := next((v for k, v in RELATIVES.items() if k in name), None):
            raise ConfigError(
                f"{source.path} holds {name}, so it is {kind}; this version reads DFlash,"
                " DFlash 2 and DSpark as llama.cpp writes them"
            )


def _hf_fields(source: GgufFile, fields: GgufFields, dialect: Dialect) -> dict[str, Any]:
    shapes = {name: source.shape(name) for name in source.names()}
    kind = _kind(shapes)
    described = geometry(fields) | {
        "architectures": [drafter_kinds()[kind].architectures[0]],
        "model_type": "qwen3",
        "vocab_size": dialect.vocab_size,
        "block_size": dialect.block_size,
        "attention_bias": "blk.0.attn_q.bias" in set(source.names()),
        "is_causal": dialect.is_causal,
        "hidden_act": fields.get("hidden_activation"),
        "dflash_config": {
            "mask_token_id": dialect.mask_token_id,
            "target_layer_ids": list(dialect.taps.ids),
            "input_embedding_scale": _optional(fields, "embedding_scale"),
            "output_multiplier": _optional(fields, "logit_scale"),
            "final_logit_softcapping": _optional(fields, "final_logit_softcapping"),
            **_gguf_of(kind).from_gguf(fields, shapes),
        },
        "dtype": weight_dtype(source),
    }
    if "d2t" in source.names():
        described["draft_vocab_size"] = source.shape("d2t")[0]
    return described | _windows(fields, described["num_hidden_layers"])


def _kind(shapes: Shapes) -> str:
    """Return the kind of drafter that a file's tensors belong to."""
    for name, kind in drafter_kinds().items():
        if kind.gguf is not None and not shapes.keys().isdisjoint(kind.gguf.marks):
            return name
    return "dflash"


def _optional(fields: GgufFields, key: str) -> float | None:
    return None if fields.get(key) is None else fields.number(key, 0.0)


def _windows(fields: GgufFields, layers: int) -> dict[str, Any]:
    if fields.get("attention.sliding_window") in (None, 0):  # as llama.cpp has it
        return {}
    window = fields.count("attention.sliding_window", 1 << 24)
    key = "attention.sliding_window_pattern"
    if fields.get(key) is None:
        pattern = [1] * layers
    elif isinstance(fields.get(key), GgufArray):
        pattern = fields.ints(key)
    else:  # every n-th layer is full
        every = fields.count(key, 1024)
        pattern = [(i + 1) % every for i in range(layers)]
    if len(pattern) != layers:
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.{key} has {len(pattern)} entries;"
            f" the drafter has {layers} layers"
        )
    return {
        "sliding_window": window,
        "use_sliding_window": True,
        "layer_types": [SLIDING if sliding else FULL for sliding in pattern],
    }


def _check_taps(source: GgufFile, config: DrafterConfig) -> None:
    name = next((n for n in aliases("fc.weight") if n in set(source.names())), None)
    if name is None:
        return  # reported as missing with everything else
    into = source.shape(name)[-1]
    taps = len(config.target_layer_ids)
    if into != taps * config.hidden_size:
        raise ConfigError(
            f"{source.path}: {name} takes {into} features; {taps} taps of width"
            f" {config.hidden_size} make {taps * config.hidden_size}"
        )


def canonical(source: GgufFile, config: DrafterConfig) -> Canonical:
    """Return the file under canonical names; tensors that fill no parameter keep their own.

    Raises:
      CheckpointError: two tensors have the same canonical name.
    """
    present = set(source.names())
    origins: dict[str, Origin] = {}
    for slot in families.slots(config):
        for part in slot.parts:
            names = [name for name in aliases(part.name) if name in present]
            if len(names) > 1:
                raise CheckpointError(
                    f"{source.path}: {' and '.join(names)} both mean {part.name}; keep one"
                )
            if names:
                flat = part.name in _gguf_of(config.kind).flat
                origins[part.name] = _origin(part, names[0], flat=flat)
    if "lm_head.weight" not in origins and config.own_head:
        table = origins.get("embed_tokens.weight")
        if table and source.shape(table.name) == (config.choices, config.hidden_size):
            origins["lm_head.weight"] = Origin(table.name, change="tied to the drafter's own table")
    used = {origin.name for origin in origins.values()}
    rest = [name for name in source.names() if name not in used]
    ignored = {name: BORROWED[name] for name in rest if name in BORROWED}
    left_over = {name: Origin(name) for name in rest if name not in BORROWED}
    return Canonical(source, origins | left_over, ignored)


def _origin(part: TensorPart, stored: str, *, flat: bool) -> Origin:
    """Return the stored tensor, and its conversion to the published form."""
    if part.name == "d2t":
        return Origin(stored, change="ids to offsets", values=_offsets, reshaped=part.shape)
    return Origin(stored, reshaped=part.shape) if flat else Origin(stored)


def _offsets(ids: np.ndarray) -> np.ndarray:
    return ids - np.arange(len(ids), dtype=ids.dtype).reshape(-1, 1)


def aliases(name: str) -> tuple[str, ...]:
    """Return every GGUF spelling of a canonical drafter tensor, whatever the kind."""
    outer: dict[str, tuple[str, ...]] = {}
    layer: dict[str, tuple[str, ...]] = {}
    for kind in drafter_kinds().values():
        if kind.gguf is not None:
            outer |= kind.gguf.names
            layer |= kind.gguf.layer_names
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match and match[2] in layer:
        return tuple(f"blk.{match[1]}.{alias}" for alias in layer[match[2]])
    return outer[name] if name in outer else (stored_name(name),)


def _gguf_of(name: str) -> DrafterGguf:
    """Return the GGUF files of a kind of drafter.

    Raises:
      ConfigError: there are none.
    """
    if (gguf := drafter_kinds()[name].gguf) is None:
        raise ConfigError(
            f"a {name} drafter has no form in GGUF; export to the Hugging Face layout instead"
        )
    return gguf


# Metadata and tensor names of a drafter in llama.cpp's `dflash` architecture.


def origins(config: DrafterConfig) -> dict[str, Origin]:
    """Return the tensors of a drafter file, by their upstream names."""
    return {
        aliases(part.name)[0]: _ids(part.shape) if part.name == "d2t" else Origin(part.name)
        for slot in families.slots(config)
        for part in slot.parts
    }


def _ids(shape: tuple[int, ...]) -> Origin:
    """Return the token of each row of a reduced head, from offsets."""
    order = np.arange(shape[0], dtype=np.int64).reshape(-1, 1)
    return Origin("d2t", values=lambda offsets: offsets + order, reshaped=shape)


def metadata(config: DrafterConfig, *, mrope: bool = False) -> keys.Metadata:
    """Return the keys of a drafter file below its architecture's prefix.

    Args:
      mrope: whether the target has several position rows; the drafter rotates by the first.

    Raises:
      ConfigError: the drafter has no form in GGUF.
    """
    if config.draft_vocab_size and not config.own_head:
        raise ConfigError("a reduced vocabulary without its own head has no form in GGUF")
    own = keys.shared(config) | {
        "context_length": Typed(U32, config.rope.original_length or 4096),
        "vocab_size": Typed(U32, config.vocab_size),
        "block_size": Typed(U32, config.block_size),
        "target_layers": Typed(I32, [i + 1 for i in config.target_layer_ids]),
    }
    own |= keys.rope(config.rope) | _attention(config) | _scales(config)
    if mrope:
        own["rope.dimension_sections"] = Typed(I32, [config.head_dim // 2, 0, 0, 0])
    return own | _gguf_of(config.kind).to_gguf(config)


def _attention(config: DrafterConfig) -> keys.Metadata:
    """Return windows, and as upstream does, causality only if the layers do not imply it."""
    fields = published.drafter_fields(config, "float32")
    keys_of_layers = {}
    if fields["sliding_window"] is not None:
        pattern = [kind == SLIDING for kind in fields["layer_types"]]
        keys_of_layers["attention.sliding_window"] = Typed(U32, fields["sliding_window"])
        keys_of_layers["attention.sliding_window_pattern"] = Typed(BOOL, pattern)
    elif SLIDING in fields["layer_types"]:
        raise ConfigError("causal and other layers without a window have no form in a drafter GGUF")
    if "is_causal" in fields:
        keys_of_layers["attention.causal"] = Typed(BOOL, fields["is_causal"])
    return keys_of_layers


def _scales(config: DrafterConfig) -> keys.Metadata:
    own = published.drafter_fields(config, "float32")["dflash_config"]
    named = {
        "input_embedding_scale": "embedding_scale",
        "output_multiplier": "logit_scale",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    return {named[k]: Typed(F32, own[k]) for k in named if k in own}
