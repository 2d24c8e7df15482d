"""Presets of the shipped pair: corpus, models, steps and batches. Their values: `presets.toml`."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.trainer.recipes import Bucket, Recipe, Schedule, buckets, recipe

ROPE = RopeConfig(theta=10000.0)
RMS_EPS = 1e-6
LONGEST = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3-shaped model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPhase:
    """One phase of the target's training, with its own text.

    Attributes:
      agent_share: share of the conversations that are agents'; the others are chats.
      renamed_share: share of the conversations whose people get unusual names.
      given_weight: weight of tokens that users and tools write, next to 1 for the assistant's.
      layers: layers of the target in this phase; 0 is all of them. Added layers start as copies
        that do not change the function.
    """

    conversations: int
    agent_share: float
    renamed_share: float = 0.0
    code_characters: int
    given_weight: float
    buckets: tuple[Bucket, ...]
    schedule: Schedule
    layers: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Everything that determines the result; runs with equal presets are equal.

    Attributes:
      phases: phases of the target: formats and code, chats, new names, then more layers.
      transcripts: training conversations that are too long to be answered, and are used as they
        are.
    """

    name: str
    seed: int = 0
    vocabulary: int
    target: Shape
    phases: tuple[TrainingPhase, ...]
    transcripts: int
    drafter: Recipe
    held_out_chat: int
    held_out_code: int

    @property
    def mask_id(self) -> int:
        """Return the mask token, the last one of the vocabulary."""
        return self.vocabulary - 1

    def target_config(self, ends: tuple[int, ...], layers: int = 0) -> TargetConfig:
        """Return the target's config, with its end tokens and optionally fewer layers."""
        return TargetConfig(
            model_type="qwen3",
            vocab_size=self.vocabulary,
            tie_embeddings=True,
            qk_norm=True,
            max_length=LONGEST,
            eos_token_ids=ends,
            dtype="bfloat16",
            num_layers=layers or self.target.layers,
            intermediate_size=self.target.inner,
            hidden_size=self.target.width,
            num_heads=self.target.heads,
            num_kv_heads=self.target.kv_heads,
            head_dim=self.target.head_dim,
            rms_norm_eps=RMS_EPS,
            attention_bias=False,
            rope=ROPE,
        )


def _preset(name: str, table: dict[str, Any]) -> Preset:
    drafter, *changes = table["drafter"]
    fields = dict(table)
    fields["target"] = Shape(**table["target"])
    fields["drafter"] = recipe(drafter, changes)
    fields["phases"] = tuple(map(_phase, table["phases"]))
    return Preset(name=name, **fields)


def _phase(table: dict[str, Any]) -> TrainingPhase:
    fields = dict(table)
    fields["buckets"] = buckets(table["buckets"])
    fields["schedule"] = Schedule(**table["schedule"])
    return TrainingPhase(**fields)


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PRESETS = {name: _preset(name, table) for name, table in TABLES.items()}


def preset(name: str) -> Preset:
    """Return the preset of this name.

    Raises:
      ConfigError: the name is unknown; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not known; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
