"""How large each variant of the shipped pair is: corpus, models, steps and batches."""

import dataclasses

from dflash_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.errors import ConfigError

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
class Bucket:
    """Rows of one length, so many in a batch; every bucket is one compiled program."""

    length: int
    rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps, peak learning rate and how often the state is saved."""

    steps: int
    rate: float
    save_every: int = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One stretch of the target's training, on text of its own."""

    conversations: int
    agent_share: float  # of the conversations; the rest are chats
    renamed_share: float = 0.0  # of the conversations, whose people get unusual names
    code_characters: int
    given_weight: float  # of tokens that users and tools write, next to 1 for the assistant's
    buckets: tuple[Bucket, ...]
    schedule: Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Everything that decides what comes out; two runs with equal presets are equal."""

    name: str
    seed: int = 0
    vocabulary: int
    target: Shape
    phases: tuple[Phase, ...]  # formats and code first, then mostly chats, then new names
    transcripts: int  # training conversations too long to be answered anew, taken as they are
    chat_prompts: int  # conversations whose answers the target writes anew
    code_prompts: int
    chat_tokens: int  # most tokens of one such answer
    code_tokens: int
    answer_buckets: tuple[Bucket, ...]
    drafter_layers: int
    drafter_inner: int
    taps: tuple[int, ...]  # output of target layer i, counted from 0
    block: int
    decay: float
    anchors: int  # in a row of the first bucket; longer rows have more in proportion
    drafter_buckets: tuple[Bucket, ...]
    drafter_schedule: Schedule
    held_out_chat: int
    held_out_code: int

    @property
    def mask_id(self) -> int:
        """The mask token is the last of the vocabulary."""
        return self.vocabulary - 1

    def target_config(self, ends: tuple[int, ...]) -> TargetConfig:
        """The target, with the tokens that end its answers."""
        return TargetConfig(
            model_type="qwen3",
            vocab_size=self.vocabulary,
            tie_embeddings=True,
            qk_norm=True,
            max_length=LONGEST,
            eos_token_ids=ends,
            dtype="bfloat16",
            num_layers=self.target.layers,
            intermediate_size=self.target.inner,
            **self._attention(),
        )

    def drafter_config(self) -> DrafterConfig:
        """The drafter: full bidirectional attention in every layer."""
        return DrafterConfig(
            vocab_size=self.vocabulary,
            block_size=self.block,
            mask_token_id=self.mask_id,
            target_layer_ids=self.taps,
            num_target_layers=self.target.layers,
            windows=(None,) * self.drafter_layers,
            causal=(False,) * self.drafter_layers,
            dtype="bfloat16",
            num_layers=self.drafter_layers,
            intermediate_size=self.drafter_inner,
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
    target=Shape(width=32, layers=3, heads=2, kv_heads=1, head_dim=16, inner=64),
    phases=(
        Phase(
            conversations=80,
            agent_share=0.4,
            code_characters=20_000,
            given_weight=0.1,
            buckets=(Bucket(length=256, rows=4),),
            schedule=Schedule(steps=4, rate=3e-3, save_every=3),
        ),
        Phase(
            conversations=40,
            agent_share=0.2,
            code_characters=5_000,
            given_weight=0.3,
            buckets=(Bucket(length=256, rows=4),),
            schedule=Schedule(steps=3, rate=3e-3, save_every=3),
        ),
    ),
    transcripts=2,
    chat_prompts=12,
    code_prompts=4,
    chat_tokens=16,
    code_tokens=16,
    answer_buckets=(Bucket(length=256, rows=4),),
    drafter_layers=1,
    drafter_inner=64,
    taps=(0, 1),
    block=4,
    decay=2.0,
    anchors=4,
    drafter_buckets=(Bucket(length=256, rows=4),),
    drafter_schedule=Schedule(steps=6, rate=2e-3, save_every=3),
    held_out_chat=4,
    held_out_code=2,
)

TINY_CPU = Preset(
    name="tiny-cpu",
    vocabulary=2048,
    target=Shape(width=192, layers=4, heads=3, kv_heads=1, head_dim=64, inner=512),
    phases=(
        Phase(
            conversations=16_000,
            agent_share=0.3,
            renamed_share=0.4,
            code_characters=1_500_000,
            given_weight=0.2,
            buckets=(
                Bucket(length=160, rows=16),
                Bucket(length=448, rows=6),
                Bucket(length=1280, rows=2),
            ),
            schedule=Schedule(steps=1400, rate=3e-3),
        ),
        Phase(
            conversations=16_000,
            agent_share=0.15,
            renamed_share=0.4,
            code_characters=300_000,
            given_weight=0.2,
            buckets=(
                Bucket(length=160, rows=16),
                Bucket(length=448, rows=6),
                Bucket(length=1280, rows=2),
            ),
            schedule=Schedule(steps=1200, rate=3e-3),
        ),
        Phase(
            conversations=16_000,
            agent_share=0.25,
            renamed_share=0.6,
            code_characters=200_000,
            given_weight=0.3,
            buckets=(
                Bucket(length=160, rows=16),
                Bucket(length=448, rows=6),
                Bucket(length=1280, rows=2),
            ),
            schedule=Schedule(steps=1200, rate=3e-3),
        ),
    ),
    transcripts=200,
    chat_prompts=9_000,
    code_prompts=1_200,
    chat_tokens=128,
    code_tokens=64,
    answer_buckets=(
        Bucket(length=160, rows=64),
        Bucket(length=256, rows=48),
        Bucket(length=448, rows=24),
    ),
    drafter_layers=3,
    drafter_inner=512,
    taps=(0, 1, 2),
    block=8,
    decay=4.0,
    anchors=12,
    drafter_buckets=(
        Bucket(length=160, rows=16),
        Bucket(length=448, rows=6),
        Bucket(length=1280, rows=1),
    ),
    drafter_schedule=Schedule(steps=3000, rate=2e-3),
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
            conversations=120_000,
            code_characters=5_000_000,
            buckets=LARGE_BUCKETS,
            schedule=Schedule(steps=1500, rate=2e-3),
        ),
        dataclasses.replace(
            TINY_CPU.phases[1],
            conversations=60_000,
            buckets=LARGE_BUCKETS,
            schedule=Schedule(steps=500, rate=2e-3),
        ),
    ),
    transcripts=2_000,
    chat_prompts=40_000,
    code_prompts=8_000,
    chat_tokens=160,
    code_tokens=96,
    answer_buckets=(
        Bucket(length=256, rows=1024),
        Bucket(length=512, rows=512),
        Bucket(length=1280, rows=192),
    ),
    drafter_layers=4,
    drafter_inner=1408,
    taps=(1, 3, 5, 6),
    anchors=32,
    drafter_buckets=(
        Bucket(length=256, rows=128),
        Bucket(length=512, rows=64),
        Bucket(length=1280, rows=24),
    ),
    drafter_schedule=Schedule(steps=2500, rate=1e-3),
)

PRESETS = {preset.name: preset for preset in (SMOKE, TINY_CPU, TINY_H200)}


def preset(name: str) -> Preset:
    """The preset of that name; ConfigError lists the known ones."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not known; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
