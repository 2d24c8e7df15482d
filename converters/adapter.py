"""Low-rank adapters of PEFT, added to a model's weights as they are read.

An adapted weight is W + scale * B · A, with the scale lora_alpha / r, or lora_alpha / sqrt(r) for
rank-stabilised adapters. Facts: `LoraConfig` and `get_delta_weight` of peft 0.21.2.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflash_jax.config.fields import Fields, has_file, read_json
from dflash_jax.converters.formats.canonical import Canonical, Origin
from dflash_jax.converters.formats.safetensors import open_safetensors
from dflash_jax.converters.formats.source import Rows, TensorSource, as_rows
from dflash_jax.converters.hf import ADAPTER
from dflash_jax.converters.names import huggingface
from dflash_jax.errors import CheckpointError, ConfigError

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<table>embedding_)?(?P<which>[AB])(\.default)?(\.weight)?"
)
TABLES = ("embed_tokens.weight", "lm_head.weight")
# Fields that change the result in ways not supported here.
UNSUPPORTED = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
# Fields that choose what is trained and how, which the tensors show. `fan_in_fan_out` has no effect
# on linear layers.
TRAINING = frozenset([
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "modules_to_save", "monteclora_config", "peft_type", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    "velora_config",
])  # fmt: skip
REBASING = ("pissa", "corda", "olora", "loftq", "lora_ga")  # initialisations that change W
MOST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Adapted(Origin):
    """A matrix [out, in] with a low-rank update: base + scale * up · down."""

    base: Origin
    up: np.ndarray  # [out, r]
    down: np.ndarray  # [r, in]
    scale: float

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors it is made of."""
        return self.base.names

    @property
    def as_stored(self) -> bool:
        """False: its values are not those of the file."""
        return False

    def shape(self, source: TensorSource) -> tuple[int, ...]:
        """Return the canonical shape."""
        return self.base.shape(source)

    def dtype(self, source: TensorSource) -> np.dtype:
        """Return the dtype of `read_rows`."""
        return np.dtype(np.float32)

    def read_rows(self, source: TensorSource, rows: Rows) -> np.ndarray:
        """Return chosen canonical rows as [rows, last axis]."""
        update = self.up[rows].astype(np.float32) @ self.down.astype(np.float32)
        update *= np.float32(self.scale)
        update += self.base.read_rows(source, rows).astype(np.float32)
        return update


@dataclass(frozen=True, kw_only=True)
class Replaced(Origin):
    """A tensor that an adapter holds in full, instead of the file's."""

    value: np.ndarray

    @property
    def as_stored(self) -> bool:
        """False: its values are not those of the file."""
        return False

    def shape(self, source: TensorSource) -> tuple[int, ...]:
        """Return the canonical shape."""
        return self.value.shape

    def dtype(self, source: TensorSource) -> np.dtype:
        """Return the dtype of `read_rows`."""
        return self.value.dtype

    def read_rows(self, source: TensorSource, rows: Rows) -> np.ndarray:
        """Return chosen canonical rows as [rows, last axis]."""
        return as_rows(self.value)[rows]


def merged(tensors: Canonical, folder: Path) -> tuple[Canonical, str]:
    """Return a model's tensors with an adapter applied, and a note that describes it.

    Args:
      tensors: the model's own tensors.
      folder: a PEFT folder: adapter_config.json and adapter_model.safetensors.

    Raises:
      CheckpointError: the folder is incomplete, or is an adapter of another model.
      ConfigError: the adapter is of a kind that is not supported.
    """
    if not folder.is_dir() or not has_file(folder / ADAPTER):
        raise CheckpointError(f"{folder} holds no {ADAPTER}; give the folder of a PEFT adapter")
    path = folder / ADAPTER
    scales = _Scales(read_json(path), str(path))
    if not has_file(folder / WEIGHTS):
        pickle = " (its .bin file is a pickle, which is never opened)"
        note = pickle if list(folder.glob("adapter_model.bin")) else ""
        raise CheckpointError(f"{folder} holds no {WEIGHTS}{note}; save the adapter as safetensors")
    return _Merge(tensors, open_safetensors(folder / WEIGHTS), scales).result()


def merged_arrays(
    tensors: Canonical, fields: Mapping[str, Any], factors: "Factors"
) -> tuple[Canonical, str]:
    """Return a model's tensors with an adapter in memory applied, and a note that describes it.

    Args:
      tensors: the model's own tensors.
      fields: the fields of the adapter's adapter_config.json.
      factors: the adapter's tensors by PEFT's names.

    Raises:
      CheckpointError, ConfigError: as for `merged`.
    """
    if not isinstance(fields, Mapping):
        raise ConfigError(f"the adapter's config is {fields!r}; expected its fields as a dict")
    return _Merge(tensors, factors, _Scales(fields, "the adapter's config")).result()


class Factors(Protocol):
    """The tensors of an adapter."""

    @property
    def path(self) -> Any:
        """Where the tensors are, for error messages."""

    def names(self) -> Sequence[str]:
        """Return all names."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return a tensor."""
        ...


class _Scales:
    """The checked adapter_config.json: ranks and scales of modules."""

    def __init__(self, values: Mapping[str, Any], path: str):
        # Options that are off are left out: every version of peft adds some.
        fields = Fields({name: value for name, value in values.items() if value}, path)
        self._fields = fields
        self.base = fields.get("base_model_name_or_path", "unknown")
        fields.must_be("peft_type", "LORA")
        for name in UNSUPPORTED:
            if fields.get(name):
                raise ConfigError(
                    f"{path}: {name} is {fields.get(name)!r}; adapters with it are not supported:"
                    " merge it with peft (merge_and_unload), and load the merged model"
                )
        start = fields.get("init_lora_weights", True)
        if str(start).lower().startswith(REBASING):
            raise ConfigError(
                f"{path}: init_lora_weights is {start!r}, which also changes the base weights;"
                " convert the adapter to a plain one when saving it (peft's"
                " path_initial_model_for_weight_conversion)"
            )
        self._rank = fields.integer("r")
        self._alpha = fields.number("lora_alpha", 8)
        self._stabilised = fields.flag("use_rslora", False)
        self._patterns = {name: self._pattern(name) for name in ("rank_pattern", "alpha_pattern")}
        fields.used |= TRAINING
        fields.refuse_rest()

    def of(self, module: str, rank: int) -> float:
        """Return the scale of a module whose matrices have this rank.

        Raises:
          CheckpointError: the config gives it another rank.
        """
        expected = self._chosen("rank_pattern", module, self._rank)
        if rank != expected:
            raise CheckpointError(
                f"{self._fields.where}: {module} has rank {expected}, but its tensors have {rank};"
                " the two files do not belong together"
            )
        alpha = self._chosen("alpha_pattern", module, self._alpha)
        return alpha / (math.sqrt(rank) if self._stabilised else rank)

    def _chosen(self, name: str, module: str, default: Any) -> Any:
        for pattern, value in self._patterns[name].items():
            if pattern.match(module):
                return value
        return default

    def _pattern(self, name: str) -> dict[re.Pattern[str], float]:
        """Return values by pattern; the first that matches the end of a module's name counts."""
        inner = self._fields.inner(name)
        values = {}
        for key in inner.values:
            # Repetitions of groups, and many repetitions, can take exponential time.
            if len(key) > 200 or len(re.findall(r"[*+{]", key)) > 2 or re.search(r"\)[*+{]", key):
                raise ConfigError(f"{inner.where}: {key!r} is too complex; give plain module names")
            try:
                pattern = re.compile(rf"(.*\.)?({key})$")
            except (re.error, OverflowError, RecursionError) as error:
                raise ConfigError(f"{inner.where}: {key!r} is no pattern ({error})") from None
            values[pattern] = inner.number(key, 0)
        return values


class _Merge:
    """Applies the tensors of an adapter to those of a model."""

    def __init__(self, tensors: Canonical, source: Factors, scales: _Scales):
        self._tensors = tensors
        self._source = source
        self._scales = scales
        self._origins: dict[str, Origin] = dict(tensors.origins)
        self._unknown: list[str] = []
        self._skipped = 0

    def result(self) -> tuple[Canonical, str]:
        factors: dict[tuple[str, bool], dict[str, str]] = {}
        saved = 0
        for name in self._source.names():
            short = name.removeprefix(PREFIX)
            if match := FACTOR.fullmatch(short):
                key = match["module"], bool(match["table"])
                factors.setdefault(key, {})[match["which"]] = name
            else:
                saved += self._replace(short, name)
        if not factors:
            raise CheckpointError(f"{self._source.path} holds no lora_A and lora_B; save it again")
        added = sum(self._add(*key, pair) for key, pair in factors.items())
        self._refuse_unknown()
        note = f"adapter of {self._scales.base}: {added} matrices updated, {saved} tensors replaced"
        if self._skipped:
            note += f", {self._skipped} of parts that are not loaded"
        return Canonical(self._tensors.source, self._origins, self._tensors.ignored), note

    def _replace(self, short: str, name: str) -> bool:
        """Take a whole tensor; return whether that changes the model."""
        canonical = huggingface.strip(short.replace(".base_layer.", "."))
        value = self._source.read(name)
        if canonical in TABLES and "lm_head.weight" not in self._origins:
            table = self._tensors.read(TABLES[0])
            if table.shape != value.shape or not np.array_equal(table, value):
                raise CheckpointError(
                    f"{name} of the adapter is a changed {canonical}, which the model shares"
                    " between embedding and head; merge the adapter with peft instead"
                )
            return False
        if not self._known(canonical, short):
            return False
        self._expect(name, value.shape, canonical)
        base = self._origins[canonical]
        self._origins[canonical] = Replaced(base.name, change="the adapter's", value=value)
        return True

    def _add(self, module: str, table: bool, pair: Mapping[str, str]) -> bool:
        """Add a low-rank update; return whether the module is part of the model."""
        short = f"{module}.weight"
        canonical = huggingface.strip(short)
        if not self._known(canonical, short):
            return False
        if len(pair) != 2:
            raise CheckpointError(
                f"{self._source.path}: {module} has lora_{next(iter(pair))} only; save it again"
            )
        down, up = (self._source.read(pair[which]) for which in "AB")
        if down.ndim != 2 or up.ndim != 2 or not 0 < len(down) == up.shape[1]:
            raise CheckpointError(
                f"{self._source.path}: {module} has matrices {list(down.shape)} and"
                f" {list(up.shape)}; expected [r, in] and [out, r]"
            )
        scale = self._scales.of(module, len(down))
        if table:  # an embedding [tokens, width] is updated by the transposed product
            up, down = down.T, up.T
        self._expect(module, (len(up), down.shape[1]), canonical)
        base = self._origins[canonical]
        change = f"adapter of rank {len(down)} added"
        self._origins[canonical] = Adapted(
            base.name, change=change, base=base, up=up, down=down, scale=scale
        )
        return True

    def _known(self, canonical: str, short: str) -> bool:
        """Return whether the model has a tensor; others are unknown, or of parts not loaded."""
        if canonical in self._origins:
            return True
        if short in self._tensors.ignored and canonical not in TABLES:
            self._skipped += 1
        else:
            self._unknown.append(short)
        return False

    def _expect(self, name: str, shape: tuple[int, ...], canonical: str) -> None:
        wanted = self._origins[canonical].shape(self._tensors.source)
        if shape != wanted:
            raise CheckpointError(
                f"{self._source.path}: {name} is for a tensor {list(shape)}, the model's is"
                f" {list(wanted)}; the adapter belongs to another model ({self._scales.base})"
            )

    def _refuse_unknown(self) -> None:
        if not self._unknown:
            return
        shown = self._unknown[:MOST_LINES]
        lines = [*shown]
        if len(self._unknown) > len(shown):
            lines.append(f"and {len(self._unknown) - len(shown)} more")
        tied = "lm_head.weight" in self._unknown
        raise CheckpointError(
            f"{self._source.path} changes {len(self._unknown)} tensors that the model does not"
            f" have; the adapter belongs to another model ({self._scales.base})"
            + (", or to one whose head is not its embedding table" if tied else "")
            + "\n  "
            + "\n  ".join(lines)
        )
