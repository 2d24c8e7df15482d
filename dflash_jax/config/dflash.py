"""DFlash v1 drafters, and what every drafter of the DFlash family has in common."""

import dataclasses
from typing import Any

from dflash_jax.config.base import (
    SLIDING,
    AttentionConfig,
    at_least,
    dtype_name,
    geometry,
    layer_windows,
)
from dflash_jax.config.family import DrafterKind
from dflash_jax.config.fields import Fields
from dflash_jax.config.rope import BY_LENGTH
from dflash_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(AttentionConfig):
    """A DFlash drafter; it borrows embedding and head from its target unless it has its own."""

    kind: str = "dflash"  # the file in models/ that builds it
    vocab_size: int
    block_size: int  # places fed to the drafter: the anchor, then masks
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # output of decoder layer i, counted from 0
    num_target_layers: int
    windows: tuple[int | None, ...]  # per layer; None sees everything
    causal: tuple[bool, ...]  # per layer, inside the block
    sample_from_anchor: bool = False  # place k predicts the token at anchor + k + 1, not + k
    draft_vocab_size: int = 0  # tokens its own head can say; 0 is the whole vocabulary
    own_embedding: bool = False
    own_head: bool = False
    input_embedding_scale: float | None = None  # times raw table rows; None: as the target's
    rounded_embedding_scale: bool = False  # the scale is the target's, rounded as it does
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None  # 0 is none; None: as the target's
    dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "vocab_size", "block_size")

    @property
    def step_width(self) -> int:
        """Tokens of a decode step at the trained size: the anchor and every draft."""
        return self.block_size + self.sample_from_anchor

    @property
    def predicts_survival(self) -> bool:
        """Whether the drafter says how likely its drafts are to be kept."""
        return False

    @property
    def choices(self) -> int:
        """Tokens a place chooses from."""
        return self.draft_vocab_size or self.vocab_size


@dataclasses.dataclass(frozen=True)
class DrafterFields:
    """A published config: drafter fields are in `dflash_config`, or else at the top level."""

    outer: Fields
    dflash: Fields

    def pick(self, name: str) -> Fields:
        """Where a drafter field stands (the order of dflash 0.1.0)."""
        self.outer.used.add(name)
        return self.dflash if self.dflash.get(name) is not None else self.outer

    def flag(self, name: str, default: bool) -> bool:
        """A drafter field that is true or false."""
        return self.pick(name).flag(name, default)


# Fields of relatives, and the only values that change nothing here.
NEUTRAL = {
    "rope_is_neox_style": True,
    "attention_value_scale": 1.0,
    "attention_sink_bias": False,
}


def from_hf(fields: DrafterFields) -> DrafterConfig:
    """The config of a v1 drafter; causal ones are JetSpec's."""
    return DrafterConfig(**common_fields(fields))


def common_fields(fields: DrafterFields) -> dict[str, Any]:
    """The fields of DrafterConfig, which every kind spells alike.

    A sliding layer is causal inside its block and a full one is not, unless the config says
    `is_causal` at its top level or `causal` among the drafter fields (as JetSpec does).

    Embedding scale and softcap stay None where the config is silent: `paired` takes the target's.
    """
    f, pick = fields.outer, fields.pick
    f.must_be("model_type", "qwen3")
    f.must_be("hidden_act", "silu")

    def optional(name: str) -> float | None:
        return None if pick(name).get(name) is None else pick(name).number(name, 0.0)

    taps = pick("target_layer_ids").get("target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(type(i) is int for i in taps):
        raise ConfigError(
            f"{f.where}: target_layer_ids is {taps!r}; expected the list of target layers whose"
            " outputs the drafter reads (it cannot be guessed safely)"
        )
    size = geometry(f)
    if size["rope"].kind in BY_LENGTH:
        raise ConfigError(
            f"{f.where}: rope type {size['rope'].kind!r} is not supported in a drafter, whose"
            " cached context would have to turn again whenever the text grows"
        )
    layers = layer_windows(f, size["num_layers"])
    if fields.flag("use_swa", False):  # ModelOpt's: in every layer, whatever their types say
        width = pick("swa_window_size").integer("swa_window_size")
        if width < 1:
            raise ConfigError(f"{f.where}: swa_window_size is {width}; expected a positive integer")
        layers = [(SLIDING, width)] * size["num_layers"]
    pick("swa_window_size")
    fields.dflash.used.update(("swa_window_size", "has_embed_tokens"))
    f.used.add("has_embed_tokens")  # the weights say it
    for name, neutral in NEUTRAL.items():
        pick(name).must_be(name, neutral)
    said = [x for x in (f.get("block_size"), fields.dflash.get("block_size")) if x is not None]
    if len(said) == 2 and said[0] != said[1]:
        raise ConfigError(
            f"{f.where}: block_size is {said[0]!r}, and {said[1]!r} in dflash_config; remove the"
            " one that is wrong"
        )
    vocab = f.integer("vocab_size")
    reduced = f.integer("draft_vocab_size", vocab)
    return size | {
        "vocab_size": vocab,
        "block_size": pick("block_size").integer("block_size", 16),
        "mask_token_id": pick("mask_token_id").integer("mask_token_id"),
        "target_layer_ids": tuple(taps),
        "num_target_layers": f.integer("num_target_layers", 0),
        "windows": tuple(window for _, window in layers),
        "causal": tuple(
            f.flag("is_causal", fields.dflash.flag("causal", kind == SLIDING)) for kind, _ in layers
        ),
        "sample_from_anchor": fields.flag("sample_from_anchor", False),
        "draft_vocab_size": 0 if reduced == vocab else reduced,
        "own_head": reduced != vocab,
        "input_embedding_scale": optional("input_embedding_scale"),
        "output_multiplier": pick("output_multiplier").number("output_multiplier", 1.0),
        "final_logit_softcapping": optional("final_logit_softcapping"),
        "dtype": dtype_name(f),
    }


DRAFTER = DrafterKind(
    config=DrafterConfig,
    from_hf=from_hf,
    architectures=("DFlashDraftModel", "Qwen3DFlashDraftModel"),
    projector_types=("dflash",),
)
