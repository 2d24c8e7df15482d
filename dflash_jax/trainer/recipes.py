"""Recipes of drafters: shape, data, objective and steps. `recipes.toml` has the named ones."""

import dataclasses
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from dflash_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.declared import Declared, Texts, declare, document
from dflash_jax.errors import ConfigError
from dflash_jax.families import drafter_kinds
from dflash_jax.plan import Weights
from dflash_jax.trainer.prompt_kinds import check_mixture

DFLASH = "dflash"
DFLASH2 = "dflash2"
DSPARK = "dspark"
CE = "ce"
KL = "kl"
MIX = "mix"
LOSSES = (CE, KL, MIX)
DECAY = "decay"
DPACE = "dpace"
UNIFORM = "uniform"
AUF = "auf"
VAT = "vat"
WEIGHTS = (DECAY, DPACE, UNIFORM, AUF, VAT)
ONLINE = "online"
CACHE = "cache"
FEATURES = (ONLINE, CACHE)
FLOAT = "float"
INT8 = "int8"
INT4 = "int4"
TARGET_WEIGHTS = (FLOAT, INT8, INT4)
REGENERATED = "target"
GIVEN = "given"
MIXED = "mixed"
ANSWERS = (REGENERATED, GIVEN, MIXED)
FRESH = "fresh"
LAYERS = "layers"
INITIALS = (FRESH, LAYERS)
SAME = "same"
DRAFTER_DTYPES = (SAME, "float32", "bfloat16")
MUON = "muon"
ADAMW = "adamw"
OPTIMIZERS = (MUON, ADAMW)
LARGEST = 2**31 - 1  # int32

LATER: dict[str, Any] = {  # settings of later versions, and their defaults
    "confidence_head": True, "mixture": (), "follow_ups": 0.0, "greedy_share": 0.0,
    "long_share": 0.0, "long_tokens": 512, "drafter_dtype": "same", "sample_from_anchor": True,
    "chained": 0.0, "average": 0.0, "frozen_backbone": False, "measure_every": 0, "budget": 0.0,
}  # fmt: skip


def whole(default: Any, help: str, *, least: int = 1) -> Any:
    """Return the declaration of an integer of 32 bits."""
    return declare(default, help, minimum=least, maximum=LARGEST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket(Declared):
    """Row length and rows per batch; each bucket is one compiled program."""

    length: int = whole(MISSING, "tokens of a row", least=3)
    rows: int = whole(MISSING, "rows of a batch")

    @classmethod
    def _label(cls, name: str) -> str:
        return f"a bucket's {name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(Declared):
    """Steps, peak learning rate and steps between saved states."""

    steps: int = whole(MISSING, "steps of the optimizer")
    rate: float = declare(MISSING, "peak learning rate", minimum=1e-12, maximum=1e3)
    save_every: int = whole(100, "steps between saved states")


def buckets(text: str) -> tuple[Bucket, ...]:
    """Return buckets written like 160x16,448x6.

    Raises:
      ValueError: they are written in another way.
    """
    pairs = [part.split("x") for part in text.split(",")]
    return tuple(Bucket(length=int(length), rows=int(rows)) for length, rows in pairs)


def words(text: str) -> tuple[str, ...]:
    """Return texts with commas between them."""
    return tuple(part.strip().lower() for part in text.split(","))


def hours(text: str) -> float:
    """Return the hours in a text like 3h, 90min or 1.5.

    Raises:
      ValueError: it is written in another way.
    """
    written = re.fullmatch(r"([\d.]+)\s*(h|min|)", text.strip().lower())
    if written is None:
        raise ValueError(text)
    return float(written[1]) / (60 if written[2] == "min" else 1)


def place_of_features(text: str) -> str:
    """Return where features are: online, cache or the absolute path of a folder."""
    if text in FEATURES or os.sep not in text:
        return text
    return str(Path(text).expanduser().absolute())


def row_sizes(help: str) -> Any:
    """Return the declaration of buckets."""
    expected = "buckets like 160x16,448x6 (length x rows)"
    return declare(MISSING, help, expected=expected, reader=buckets)


# fmt: off
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Declared):
    """Everything that determines a training run, apart from the target and the data."""

    _noun = "setting of a recipe"

    name: str = ""
    seed: int = whole(0, "of all random numbers", least=0)
    kind: str = declare(
        DFLASH, "dflash, dflash2, dspark, domino, or a registered kind of another package",
    )
    layers: int = whole(5, "layers of the drafter")
    inner: int = whole(0, "width of its MLPs; 0 takes the target's", least=0)
    heads: int = whole(0, "its attention heads; 0 takes the target's", least=0)
    kv_heads: int = whole(0, "its key and value heads; 0 takes the target's", least=0)
    head_dim: int = whole(0, "size of its heads; 0 takes the target's", least=0)
    taps: tuple[int, ...] = declare(
        (),
        "target layers whose output the drafter reads, from 0; empty spreads `tap_count`",
        expected="layers like 1,9,17",
    )
    tap_count: int = whole(5, "number of taps, evenly spread")
    block: int = whole(16, "tokens per block, the anchor included", least=2)
    initial: str = declare(
        LAYERS,
        "layers (layers of the target, evenly spread, where shapes fit, and its final norm), or"
        " fresh (random)",
        choices=INITIALS,
    )
    draft_vocab: int = whole(
        0,
        "tokens that the drafter chooses from, the most frequent of the answers; 0 is the target's"
        " whole vocabulary. The drafter gets a head of its own, which starts as the target's"
        " columns",
        least=0,
    )
    rank: int = whole(
        256, "of DFlash 2's selector, DSpark's Markov head and Domino's correction",
    )
    candidates: int = whole(16, "of DFlash 2's selector")
    markov_head: str = declare("vanilla", "vanilla, gated or rnn")
    confidence_head: bool = declare(
        True,
        "whether DSpark predicts how likely drafts are to be accepted, which needs the target's"
        " distributions",
    )
    sample_from_anchor: bool = declare(
        True,
        "whether DSpark and Domino predict a token at every place of a block, the anchor's"
        " included, which then drafts `block` tokens. Without it, as in the other kinds, the"
        " anchor's place predicts nothing: only so can a DFlash drafter be gone on from",
    )
    loss: str = declare(
        CE,
        "ce (target's argmax token), kl (target's distribution), mix (0.1 ce + 0.9 total"
        " variation, as in DSpark)",
        choices=LOSSES,
    )
    weights: str = declare(
        DECAY,
        "weights of the places of a block: decay (early places first), dpace (by the probability"
        " of reaching a place), uniform, auf (places up to the first wrong draft), vat (later"
        " ones, too, less and less)",
        choices=WEIGHTS,
    )
    decay: float = declare(
        7.0,
        "place k has weight exp(-k / decay) with `decay` weights; with `vat`, the k-th place after"
        " the first wrong one",
        minimum=1e-3, maximum=1e6,
    )
    smoothing: float = declare(
        0.5,
        "share of certainty mixed into the drafter's probabilities; with `dpace` weights",
        maximum=1,
    )
    head_weight: float = declare(
        1.0,
        "weight of the second loss: of the selector, the confidence head, or Domino's logits"
        " before correction",
        maximum=1e6,
    )
    optimizer: str = declare(MUON, "muon (of matrices) or adamw", choices=OPTIMIZERS)
    weight_decay: float = declare(0.01, "of the optimizer", maximum=1e3)
    frozen_backbone: bool = declare(
        False,
        "whether what the kind has in common with DFlash stays as in the drafter that the run goes"
        " on from, so that only its own weights are trained",
    )
    average: float = declare(
        0.0,
        "decay of an average of the weights over steps, which is the drafter in place of the"
        " weights after the last step; 0 for none",
        maximum=0.999999,
    )
    schedule: Schedule
    budget: float = declare(
        0.0,
        "hours that the run may take, such as 3h or 90min: as many of its steps are made as fit in"
        " what answers leave, at least a quarter of it; 0 for no limit",
        maximum=1e4, expected="a time like 3h or 90min", reader=hours,
    )
    anchors: int = whole(
        MISSING,
        "blocks per row of the first bucket; longer rows have proportionally more. 0 starts a"
        " block at every position that can start one",
        least=0,
    )
    chained: float = declare(
        0.0,
        "share of the blocks of a row, all but one at most, that start where decoding would draft"
        " after a block at a random place, that is, after the drafts which the row confirms and"
        " the token that follows them. Decoding drafts at such places, and random ones are easier",
        maximum=1,
    )
    buckets: tuple[Bucket, ...] = row_sizes("lengths of rows, and rows per batch of each")
    parts: int = whole(1, "sequential parts of a batch: the same gradient in less memory")
    features: str = declare(
        ONLINE,
        "run the target in each step (online), or once over the rows that are read (cache, in the"
        " run's folder; or a folder that runs share, such as ./features)",
        reader=place_of_features,
    )
    dtype: str = declare(
        "float32",
        "of the target and of the drafter's computation; drafter weights stay float32",
    )
    drafter_dtype: str = declare(
        SAME, "another dtype of the drafter's computation, or same", choices=DRAFTER_DTYPES,
    )
    target_weights: Weights = declare(
        "float",
        "the target's matrices in float, or rounded as `Plan.weights` int8 or int4 rounds them; it"
        " answers with the kernels of that format, faster on a CPU",
        choices=TARGET_WEIGHTS,
    )
    answers: str = declare(
        REGENERATED,
        "target (it rewrites assistant turns and continues plain text), given (both are learnt as"
        " given), or mixed (turns as given, text continued by the target)",
        choices=ANSWERS,
    )
    prompts: int = whole(MISSING, "most conversations that the target answers", least=0)
    text_prompts: int = whole(0, "most text pieces that it continues", least=0)
    given: int = whole(0, "most further conversations that are learnt as given", least=0)
    new_tokens: int = whole(MISSING, "most tokens of an answer")
    text_tokens: int = whole(64, "most tokens of a continued text")
    text_prompt: int = whole(96, "tokens of a text piece")
    temperature: float = declare(0.0, "of the answers", maximum=1e6)
    turn_tokens: int = whole(
        128, "most tokens of a user turn that the target writes itself (`--data self:N`)",
    )
    turn_temperature: float = declare(
        1.0, "temperature of these turns", minimum=1e-3, maximum=1e3,
    )
    turn_scripts: Texts = declare(
        ("latin",), "scripts whose letters they may have, such as latin; or any", reader=words,
    )
    mixture: Texts = declare(
        (),
        'kinds of these turns (`prompt_kinds.toml`) and their shares, as "chat:2,code:3"; without'
        " it, the target writes whole turns that no kind begins",
        reader=words,
    )
    follow_ups: float = declare(
        0.0,
        "share of these turns that become conversations: the target answers, writes the user's"
        " next turn, and answers that",
        maximum=1,
    )
    greedy_share: float = declare(
        0.0,
        "share of the prompts answered greedily although `temperature` is above 0; each prompt"
        " then draws with a seed of its own",
        maximum=1,
    )
    long_share: float = declare(
        0.0, "share of the prompts that may have answers of `long_tokens`", maximum=1,
    )
    long_tokens: int = whole(512, "most tokens of these answers")
    answer_buckets: tuple[Bucket, ...] = row_sizes(
        "length of prompt and answer together, and answers decoded together",
    )
    held_out: int = whole(100, "held-out prompts for the final acceptance length", least=0)
    held_out_tokens: int = whole(128, "most tokens of their answers")
    measure_every: int = whole(
        0,
        "steps between measurements of held-out prompts, 32 at most, by decoding, of which the best"
        " drafter is kept; 0 to measure the last one alone",
        least=0,
    )
    devices: int = whole(
        1, "data-parallel devices; rows of every bucket must be a multiple",
    )
    # fmt: on

    def _check(self) -> None:
        """Raise ConfigError for settings that contradict each other."""
        kinds = drafter_kinds()
        if self.kind not in kinds:
            raise ConfigError(f"kind is {self.kind!r}; expected one of {', '.join(kinds)}")
        if self.frozen_backbone and self.kind == DFLASH:
            raise ConfigError(
                "frozen_backbone is true, but kind=dflash has no weights beyond its backbone;"
                " choose another kind, or frozen_backbone=false"
            )
        check_mixture(self.mixture)
        if self.features not in FEATURES and not Path(self.features).is_absolute():
            raise ConfigError(
                f"features is {self.features!r}; expected online, cache or a folder such as"
                " ./features"
            )
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

        Settings that they did not have are left out where they have their defaults. A folder of
        features changes no result, and is recorded as if steps computed them.
        """
        settings = dataclasses.asdict(self)
        if self.features not in FEATURES:
            settings["features"] = ONLINE
        return {k: v for k, v in settings.items() if k not in LATER or v != LATER[k]}

    def blocks(self, bucket: int) -> int:
        """Return the anchors in each row of a bucket; 0 for all that can start a block."""
        if not self.anchors:
            return 0
        return max(1, self.anchors * self.buckets[bucket].length // self.buckets[0].length)


document(Recipe)


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
        if not text:
            raise ConfigError(f"setting {setting!r} has no value; expected NAME=VALUE")
        changes[key] = text
    return Recipe.parse(changes, base=RECIPES[name])


RECIPES: dict[str, Recipe] = {}
for _name, _table in tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
).items():
    _base = RECIPES.get(_table.pop("base", ""))
    RECIPES[_name] = dataclasses.replace(Recipe.parse(_table, base=_base), name=_name)
SMOKE = RECIPES["smoke"]
