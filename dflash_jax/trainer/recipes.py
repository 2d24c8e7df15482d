"""Recipes of drafters: shape, data, objective and steps. `recipes.toml` has the named ones."""

import dataclasses
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.config.family import drafter_kinds
from dflash_jax.errors import ConfigError
from dflash_jax.plan import Weights
from dflash_jax.trainer.prompt_kinds import check_mixture

DFLASH, DFLASH2, DSPARK = "dflash", "dflash2", "dspark"
CE, KL, MIX = LOSSES = ("ce", "kl", "mix")
DECAY, DPACE, UNIFORM, AUF, VAT = WEIGHTS = ("decay", "dpace", "uniform", "auf", "vat")
ONLINE, CACHE = FEATURES = ("online", "cache")
FLOAT, INT8, INT4 = TARGET_WEIGHTS = ("float", "int8", "int4")
REGENERATED, GIVEN, MIXED = ANSWERS = ("target", "given", "mixed")
FRESH, LAYERS = INITIALS = ("fresh", "layers")
SAME, *_ = DRAFTER_DTYPES = ("same", "float32", "bfloat16")
MUON, ADAMW = OPTIMIZERS = ("muon", "adamw")
LARGEST = 2**31 - 1  # int32

# Bounds of the settings.
BUCKET = {"length": (3, LARGEST), "rows": (1, LARGEST)}
SCHEDULE = {"steps": (1, LARGEST), "rate": (1e-12, 1e3), "save_every": (1, LARGEST)}
LATER: dict[str, Any] = {  # settings of later versions, and their defaults
    "confidence_head": True, "mixture": (), "follow_ups": 0.0, "greedy_share": 0.0,
    "long_share": 0.0, "long_tokens": 512, "drafter_dtype": "same", "sample_from_anchor": True,
    "chained": 0.0, "average": 0.0, "frozen_backbone": False, "measure_every": 0,
}  # fmt: skip
OF_NONE = ("seed", "inner", "heads", "kv_heads", "head_dim", "draft_vocab", "prompts",
           "text_prompts", "given", "held_out", "anchors", "measure_every")  # fmt: skip
OF_ONE = ("layers", "tap_count", "rank", "candidates", "parts", "new_tokens", "text_tokens",
          "text_prompt", "held_out_tokens", "devices", "turn_tokens", "long_tokens")  # fmt: skip
RECIPE = {
    **dict.fromkeys(OF_NONE, (0, LARGEST)),
    **dict.fromkeys(OF_ONE, (1, LARGEST)),
    "block": (2, LARGEST),
    "decay": (1e-3, 1e6),
    **dict.fromkeys(("smoothing", "chained", "follow_ups", "greedy_share", "long_share"), (0, 1)),
    "average": (0, 0.999999),
    "head_weight": (0, 1e6),
    "weight_decay": (0, 1e3),
    "temperature": (0, 1e6),
    "turn_temperature": (1e-3, 1e3),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Row length and rows per batch; each bucket is one compiled program."""

    length: int
    rows: int

    def __post_init__(self) -> None:
        check(self, BUCKET, "a bucket's ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps, peak learning rate and steps between saved states."""

    steps: int
    rate: float
    save_every: int = 100

    def __post_init__(self) -> None:
        check(self, SCHEDULE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines a training run, apart from the target and the data.

    Attributes:
      kind: dflash, dflash2, dspark, domino, or a registered kind of another package.
      inner, heads, kv_heads, head_dim: sizes of the drafter; 0 takes the target's.
      taps: target layers whose output the drafter reads, from 0; empty spreads `tap_count`.
      block: tokens per block, the anchor included.
      initial: layers (layers of the target, evenly spread, where shapes fit, and its final norm),
        or fresh (random).
      draft_vocab: tokens that the drafter chooses from, the most frequent of the answers; 0 is the
        target's whole vocabulary. The drafter gets a head of its own, which starts as the
        target's columns.
      rank, candidates: of DFlash 2's selector; `rank` also of DSpark's Markov head and Domino's
        correction.
      markov_head: vanilla, gated or rnn.
      confidence_head: whether DSpark predicts how likely drafts are to be accepted, which needs
        the target's distributions.
      sample_from_anchor: whether DSpark and Domino predict a token at every place of a block, the
        anchor's included, which then drafts `block` tokens. Without it, as in the other kinds, the
        anchor's place predicts nothing: only so can a DFlash drafter be gone on from.
      loss: ce (target's argmax token), kl (target's distribution), mix (0.1 ce + 0.9 total
        variation, as in DSpark).
      weights: weights of the places of a block: decay (early places first), dpace (by the
        probability of reaching a place), uniform, auf (places up to the first wrong draft), vat
        (later ones, too, less and less).
      decay: place k has weight exp(-k / decay) with `decay` weights; with `vat`, the k-th place
        after the first wrong one.
      smoothing: share of certainty mixed into the drafter's probabilities; with `dpace` weights.
      head_weight: weight of the second loss: of the selector, the confidence head, or Domino's
        logits before correction.
      frozen_backbone: whether what the kind has in common with DFlash stays as in the drafter that
        the run goes on from, so that only its own weights are trained.
      average: decay of an average of the weights over steps, which is the drafter in place of the
        weights after the last step; 0 for none.
      anchors: blocks per row of the first bucket; longer rows have proportionally more. 0 starts
        a block at every position that can start one.
      chained: share of the blocks of a row, all but one at most, that start where decoding would
        draft after a block at a random place, that is, after the drafts which the row confirms and
        the token that follows them. Decoding drafts at such places, and random ones are easier.
      parts: sequential parts of a batch: the same gradient in less memory.
      features: run the target in each step (online), or once over all rows (cache, on disk).
      dtype: of the target and of the drafter's computation; drafter weights stay float32.
      drafter_dtype: another dtype of the drafter's computation, or same.
      target_weights: the target's matrices in float, or rounded as `Plan.weights` int8 or int4
        rounds them; it answers with the kernels of that format, faster on a CPU.
      answers: target (it rewrites assistant turns and continues plain text), given (both are
        learnt as given), or mixed (turns as given, text continued by the target).
      prompts, text_prompts: maximum conversations and text pieces that the target answers.
      given: maximum further conversations that are learnt as given.
      new_tokens, text_tokens: maximum tokens of an answer, and of a continued text.
      text_prompt: tokens of a text piece.
      temperature: of the answers.
      greedy_share: share of the prompts answered greedily although `temperature` is above 0; each
        prompt then draws with a seed of its own.
      long_share, long_tokens: share of the prompts that may have longer answers, and their maximum.
      turn_tokens: maximum tokens of a user turn that the target writes itself (`--data self:N`).
      turn_temperature: temperature of these turns.
      turn_scripts: scripts whose letters they may have, such as latin; or any.
      mixture: kinds of these turns (`prompt_kinds.toml`) and their shares, as "chat:2,code:3";
        without it, the target writes whole turns that no kind begins.
      follow_ups: share of these turns that become conversations: the target answers, writes the
        user's next turn, and answers that.
      answer_buckets: length of prompt and answer together, and answers decoded together.
      held_out: held-out prompts for the final acceptance length.
      measure_every: steps between measurements of held-out prompts, 32 at most, by decoding; 0 to
        measure at the end alone.
      devices: data-parallel devices; rows of every bucket must be a multiple.
    """

    name: str
    seed: int = 0
    kind: str = DFLASH
    layers: int = 5
    inner: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    taps: tuple[int, ...] = ()
    tap_count: int = 5
    block: int = 16
    initial: str = LAYERS
    draft_vocab: int = 0
    rank: int = 256
    candidates: int = 16
    markov_head: str = "vanilla"
    confidence_head: bool = True
    sample_from_anchor: bool = True
    loss: str = CE
    weights: str = DECAY
    decay: float = 7.0
    smoothing: float = 0.5
    head_weight: float = 1.0
    optimizer: str = MUON
    weight_decay: float = 0.01
    frozen_backbone: bool = False
    average: float = 0.0
    schedule: Schedule
    anchors: int
    chained: float = 0.0
    buckets: tuple[Bucket, ...]
    parts: int = 1
    features: str = ONLINE
    dtype: str = "float32"
    drafter_dtype: str = SAME
    target_weights: Weights = "float"
    answers: str = REGENERATED
    prompts: int
    text_prompts: int = 0
    given: int = 0
    new_tokens: int
    text_tokens: int = 64
    text_prompt: int = 96
    temperature: float = 0.0
    turn_tokens: int = 128
    turn_temperature: float = 1.0
    turn_scripts: tuple[str, ...] = ("latin",)
    mixture: tuple[str, ...] = ()
    follow_ups: float = 0.0
    greedy_share: float = 0.0
    long_share: float = 0.0
    long_tokens: int = 512
    answer_buckets: tuple[Bucket, ...]
    held_out: int = 100
    held_out_tokens: int = 128
    measure_every: int = 0
    devices: int = 1

    def __post_init__(self) -> None:
        choices = {
            "kind": tuple(drafter_kinds()),
            "loss": LOSSES,
            "weights": WEIGHTS,
            "features": FEATURES,
            "target_weights": TARGET_WEIGHTS,
            "answers": ANSWERS,
            "optimizer": OPTIMIZERS,
            "initial": INITIALS,
            "drafter_dtype": DRAFTER_DTYPES,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}"
                )
        if self.frozen_backbone and self.kind == DFLASH:
            raise ConfigError(
                "frozen_backbone is true, but kind=dflash has no weights beyond its backbone;"
                " choose another kind, or frozen_backbone=false"
            )
        check(self, RECIPE)
        check_mixture(self.mixture)
        for name in ("buckets", "answer_buckets"):
            lengths = [bucket.length for bucket in getattr(self, name)]
            if not lengths or lengths != sorted(lengths):
                raise ConfigError(f"{name} are of lengths {lengths}; expected some, rising")
        for name in ("anchors", "block"):
            if getattr(self, name) > self.buckets[0].length:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; expected at most {self.buckets[0].length},"
                    " the places of a row of the first bucket"
                )
        uneven = [b.rows for b in self.buckets if b.rows % (self.devices * self.parts)]
        if uneven:
            raise ConfigError(
                f"buckets have {[b.rows for b in self.buckets]} rows in a batch; every number must"
                f" be a multiple of {self.devices} devices x {self.parts} parts"
            )

    @property
    def training_dtype(self) -> str:
        """The dtype of the drafter's computation."""
        return self.dtype if self.drafter_dtype == SAME else self.drafter_dtype

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as a run records them, which earlier versions resume, too.

        Settings that they did not have are left out where they have their defaults.
        """
        found = dataclasses.asdict(self)
        return {k: v for k, v in found.items() if k not in LATER or v != LATER[k]}

    def blocks(self, bucket: int) -> int:
        """Anchors in each row of a bucket; 0 for all that can start a block."""
        if not self.anchors:
            return 0
        return max(1, self.anchors * self.buckets[bucket].length // self.buckets[0].length)


def check(settings: Any, bounds: Mapping[str, tuple[float, float]], of: str = "") -> None:
    """Raise ConfigError for a setting outside its bounds."""
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        if not least <= value <= most:
            wanted = f"at most {most}" if value > most else f"at least {least}"
            raise ConfigError(f"{of}{name} is {value}; expected {wanted}")


def new_drafter(recipe: Recipe, target: TargetConfig, mask_id: int) -> DrafterConfig:
    """Return the config of the recipe's drafter for a target: full, bidirectional attention.

    Its maximum length is the target's, because other engines stop drafting there.

    Raises:
      ConfigError: the draft vocabulary is not smaller than the target's.
    """
    if recipe.draft_vocab >= target.vocab_size:
        raise ConfigError(
            f"draft_vocab is {recipe.draft_vocab}, but the target has {target.vocab_size} tokens;"
            " expected fewer, or 0 for all of them"
        )
    kind = drafter_kinds()[recipe.kind]
    return kind.config(
        hidden_size=target.hidden_size,
        num_layers=recipe.layers,
        num_heads=recipe.heads or target.num_heads,
        num_kv_heads=recipe.kv_heads or target.num_kv_heads,
        head_dim=recipe.head_dim or target.head_dim,
        intermediate_size=recipe.inner or target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        rope=RopeConfig(theta=target.rope.theta, original_length=target.max_length),
        vocab_size=target.vocab_size,
        block_size=recipe.block,
        mask_token_id=mask_id,
        target_layer_ids=recipe.taps or spread_taps(target.num_layers, recipe.tap_count),
        num_target_layers=target.num_layers,
        windows=(None,) * recipe.layers,
        causal=(False,) * recipe.layers,
        draft_vocab_size=recipe.draft_vocab,
        own_head=bool(recipe.draft_vocab),
        dtype="bfloat16",
        **kind.recipe_fields(recipe),
    )


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """Return evenly spread layers from the second to the third last, as published drafters do."""
    first, last = (1, layers - 3) if layers >= 5 else (0, max(layers - 2, 0))
    count = max(1, min(count, last - first + 1))
    steps = max(count - 1, 1)
    return tuple(first + round(i * (last - first) / steps) for i in range(count))


def recipe(name: str, settings: Sequence[str] = ()) -> Recipe:
    """Return a named recipe, changed by settings like "steps=900" or "buckets=160x16,448x6".

    Raises:
      ConfigError: the name or a setting is unknown, or a value cannot be parsed.
    """
    if name not in RECIPES:
        raise ConfigError(f"preset {name!r} is not known; choose one of {', '.join(RECIPES)}")
    changes: dict[str, str] = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in TYPES or not text:
            raise ConfigError(
                f"setting {setting!r} is not known; expected NAME=VALUE with one of"
                f" {', '.join(sorted(TYPES))}"
            )
        changes[key] = text
    return _changed(RECIPES[name], changes)


def _changed(base: Recipe | None, settings: Mapping[str, object], **fields: Any) -> Recipe:
    """Return a recipe, by default one of defaults, with settings that are read from their text."""
    found = fields | {key: _read(key, str(text), TYPES[key]) for key, text in settings.items()}
    own = {key: found.pop(key) for key in SCHEDULE.keys() & found.keys()}
    if base is None:
        return Recipe(schedule=Schedule(**own), **found)
    return dataclasses.replace(base, schedule=dataclasses.replace(base.schedule, **own), **found)


def _read(key: str, text: str, kind: Any) -> Any:
    readers: dict[Any, Callable[[str], Any]] = {
        tuple[int, ...]: lambda t: tuple(int(part) for part in t.split(",")),
        tuple[str, ...]: lambda t: tuple(part.strip().lower() for part in t.split(",")),
        tuple[Bucket, ...]: buckets,
        bool: _flag,
        Weights: str,
    }
    try:
        return readers.get(kind, kind)(text)
    except ValueError as error:
        raise ConfigError(
            f"{key}={text} cannot be read ({error}); numbers look like 900 or 1e-3, lists like"
            " 1,9,17, buckets like 160x16,448x6 (length x rows), choices like true or false"
        ) from error


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


def _bucket(text: str) -> Bucket:
    length, rows = text.split("x")
    return Bucket(length=int(length), rows=int(rows))


def buckets(text: str) -> tuple[Bucket, ...]:
    """Return buckets written like 160x16,448x6.

    Raises:
      ValueError: they are written in another way.
    """
    return tuple(map(_bucket, text.split(",")))


TYPES = typing.get_type_hints(Recipe) | typing.get_type_hints(Schedule)  # of settings
del TYPES["schedule"], TYPES["name"]
RECIPES: dict[str, Recipe] = {}
for _name, _table in tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
).items():
    RECIPES[_name] = _changed(RECIPES.get(_table.pop("base", "")), _table, name=_name)
SMOKE = RECIPES["smoke"]
