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
      layers: layers of the target in this phase; 0 is all of them. Added layers start as copies
        that do not change the function.
    """

    conversations: int
    agent_share: float  # of the conversations; the rest are chats
    renamed_share: float = 0.0  # of the conversations, whose people get unusual names
    code_characters: int
    given_weight: float  # of tokens that users and tools write, next to 1 for the assistant's
    buckets: tuple[Bucket, ...]
    schedule: Schedule
    layers: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Everything that determines the result; runs with equal presets are equal."""

    name: str
    seed: int = 0
    vocabulary: int
    target: Shape
    phases: tuple[TrainingPhase, ...]  # formats and code, chats, new names, then deeper
    transcripts: int  # training conversations too long to be answered again, used as given
    drafter: Recipe
    held_out_chat: int
    held_out_code: int

    @property
    def mask_id(self) -> int:
        """The mask token, the last of the vocabulary."""
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
            **self._attention(),
        )

    def _attention(self) -> dict:
        shape = self.target
        return {
            "hidden_size": shape.width,
            "num_heads": shape.heads,
            "num_kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": RMS_EPS,
            "attention_bias": False,
            "rope": ROPE,
        }


def _preset(name: str, table: dict[str, Any]) -> Preset:
    phases = [
        phase | {"buckets": buckets(phase["buckets"]), "schedule": Schedule(**phase["schedule"])}
        for phase in table["phases"]
    ]
    own, *changes = table["drafter"]
    fields = table | {"target": Shape(**table["target"]), "drafter": recipe(own, changes)}
    fields["phases"] = tuple(TrainingPhase(**phase) for phase in phases)
    return Preset(name=name, **fields)


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
