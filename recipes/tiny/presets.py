"""Presets of the shipped pair: corpus, models, steps and batches."""

import dataclasses

from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.train import recipes
from dflash_jax.train.recipe import Bucket, Recipe, Schedule

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


SMOKE = Preset(
    name="smoke",
    vocabulary=320,
    target=Shape(width=32, layers=2, heads=2, kv_heads=1, head_dim=16, inner=64),
    phases=(
        TrainingPhase(
            conversations=80,
            agent_share=0.4,
            code_characters=20_000,
            given_weight=0.1,
            buckets=(Bucket(length=256, rows=4),),
            schedule=Schedule(steps=4, rate=3e-3, save_every=3),
        ),
    ),
    transcripts=2,
    drafter=dataclasses.replace(recipes.SMOKE, taps=(0,)),
    held_out_chat=4,
    held_out_code=2,
)

TINY_BUCKETS = (
    Bucket(length=160, rows=16),
    Bucket(length=448, rows=6),
    Bucket(length=1280, rows=2),
)

TINY_CPU = Preset(
    name="tiny-cpu",
    vocabulary=2048,
    target=Shape(width=192, layers=6, heads=3, kv_heads=1, head_dim=64, inner=512),
    phases=(
        TrainingPhase(
            layers=4,
            conversations=16_000,
            agent_share=0.3,
            renamed_share=0.4,
            code_characters=1_500_000,
            given_weight=0.2,
            buckets=TINY_BUCKETS,
            schedule=Schedule(steps=1400, rate=3e-3),
        ),
        TrainingPhase(
            layers=4,
            conversations=16_000,
            agent_share=0.15,
            renamed_share=0.4,
            code_characters=300_000,
            given_weight=0.2,
            buckets=TINY_BUCKETS,
            schedule=Schedule(steps=1200, rate=3e-3),
        ),
        TrainingPhase(
            layers=4,
            conversations=16_000,
            agent_share=0.25,
            renamed_share=0.6,
            code_characters=200_000,
            given_weight=0.3,
            buckets=TINY_BUCKETS,
            schedule=Schedule(steps=1200, rate=3e-3),
        ),
        TrainingPhase(
            conversations=16_000,
            agent_share=0.2,
            renamed_share=0.5,
            code_characters=600_000,
            given_weight=0.2,
            buckets=TINY_BUCKETS,
            schedule=Schedule(steps=1000, rate=2e-3),
        ),
    ),
    transcripts=200,
    drafter=recipes.TINY_PAIR,
    held_out_chat=200,
    held_out_code=60,
)

LARGE_BUCKETS = (
    Bucket(length=256, rows=256),
    Bucket(length=512, rows=128),
    Bucket(length=1280, rows=48),
)

TINY_H200 = dataclasses.replace(
    TINY_CPU,
    name="tiny-h200",
    vocabulary=4096,
    target=Shape(width=512, layers=8, heads=8, kv_heads=4, head_dim=64, inner=1408),
    phases=(
        dataclasses.replace(
            TINY_CPU.phases[0],
            layers=0,
            conversations=120_000,
            code_characters=5_000_000,
            buckets=LARGE_BUCKETS,
            schedule=Schedule(steps=1500, rate=2e-3),
        ),
        dataclasses.replace(
            TINY_CPU.phases[1],
            layers=0,
            conversations=60_000,
            buckets=LARGE_BUCKETS,
            schedule=Schedule(steps=500, rate=2e-3),
        ),
    ),
    transcripts=2_000,
    drafter=recipes.TINY_H200,
)

PRESETS = {preset.name: preset for preset in (SMOKE, TINY_CPU, TINY_H200)}


def preset(name: str) -> Preset:
    """Return the preset of this name.

    Raises:
      ConfigError: the name is unknown; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not known; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
