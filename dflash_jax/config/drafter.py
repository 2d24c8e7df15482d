"""The fields that all kinds of drafters share, which are those of DFlash v1."""

import dataclasses
from typing import Any, TypeVar

from dflash_jax.config.base import (
    SLIDING,
    AttentionConfig,
    at_least,
    dtype_name,
    extended,
    geometry,
    layer_windows,
)
from dflash_jax.config.fields import Fields
from dflash_jax.config.rope import BY_LENGTH
from dflash_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(AttentionConfig):
    """A DFlash drafter; embedding and head are shared with its target unless it has its own."""

    kind: str = "dflash"  # name of its file in `families`
    vocab_size: int
    block_size: int  # inputs of the drafter: the anchor, then masks
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # output of decoder layer i, counted from 0
    num_target_layers: int
    windows: tuple[int | None, ...]  # per layer; None is full attention
    causal: tuple[bool, ...]  # per layer, inside the block
    sample_from_anchor: bool = False  # place k predicts the token at anchor + k + 1, not + k
    speculative_tokens: int = 0  # drafts of a step that its makers advise; 0: all of a block
    draft_vocab_size: int = 0  # tokens of its own head; 0 is the whole vocabulary
    own_embedding: bool = False
    own_head: bool = False
    input_embedding_scale: float | None = None  # factor of raw table rows; None: the target's
    rounded_embedding_scale: bool = False  # the scale is the target's, rounded in the same way
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None  # 0 is none; None: the target's
    dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "vocab_size", "block_size")
        at_least(self, 0, "speculative_tokens")

    @property
    def step_width(self) -> int:
        """Tokens of a decode step at the trained size: the anchor and all drafts."""
        return self.block_size + 1 if self.sample_from_anchor else self.block_size

    @property
    def predicts_confidence(self) -> bool:
        """Whether the drafter predicts how likely its drafts are to be accepted."""
        return False

    @property
    def choices(self) -> int:
        """Number of tokens that a draft is chosen from."""
        return self.draft_vocab_size or self.vocab_size


@dataclasses.dataclass(frozen=True)
class DrafterFields:
    """A published config: drafter fields are in `dflash_config`, else at the top level."""

    outer: Fields
    dflash: Fields

    def pick(self, name: str) -> Fields:
        """Return the object that holds a drafter field (in the order of dflash 0.1.0)."""
        self.outer.used.add(name)
        return self.dflash if self.dflash.get(name) is not None else self.outer

    def flag(self, name: str, default: bool) -> bool:
        """Return a drafter field that is true or false."""
        return self.pick(name).flag(name, default)


Kind = TypeVar("Kind", bound=DrafterConfig)

# Fields of related drafters, and their neutral values.
NEUTRAL = {
    "rope_is_neox_style": True,
    "attention_value_scale": 1.0,
    "attention_sink_bias": False,
}


def common_config(
    fields: DrafterFields,
    cls: type[Kind],
    *,
    sample_from_anchor: bool | None = None,
    **own: Any,
) -> Kind:
    """Return the config of a drafter, with the fields that all kinds spell the same way.

    A sliding layer is causal inside its block and a full one is not, unless the config has
    `is_causal` at its top level or `causal` among the drafter fields (as in JetSpec).

    Embedding scale and softcap are None if the config lacks them; `paired` takes the target's.

    Args:
      cls: class of the kind's configs.
      sample_from_anchor: the field of this name, where the kind has another spelling of it.
      own: further fields of the class.

    Raises:
      ConfigError: a field is missing, contradictory or not supported.
    """
    f = fields.outer
    pick = fields.pick
    f.must_be("model_type", "qwen3")
    f.must_be("hidden_act", "silu")

    def optional(name: str) -> float | None:
        return None if pick(name).get(name) is None else pick(name).number(name, 0.0)

    layer_ids = _target_layer_ids(fields)
    size = geometry(f)
    if size.rope.kind in BY_LENGTH:
        raise ConfigError(
            f"{f.where}: rope type {size.rope.kind!r} is not supported in a drafter, whose"
            " cached context would have to be rotated again whenever the text grows"
        )
    layers = _kinds_and_windows(fields, size.num_layers)
    fields.dflash.used.add("has_embed_tokens")  # determined from the weights
    f.used.add("has_embed_tokens")
    for name, neutral in NEUTRAL.items():
        pick(name).must_be(name, neutral)
    block_size = _block_size(fields)
    vocab = f.integer("vocab_size")
    reduced = f.integer("draft_vocab_size", vocab)
    if sample_from_anchor is None:
        sample_from_anchor = fields.flag("sample_from_anchor", False)
    return extended(
        size,
        cls,
        vocab_size=vocab,
        block_size=block_size,
        mask_token_id=pick("mask_token_id").integer("mask_token_id"),
        target_layer_ids=layer_ids,
        num_target_layers=f.integer("num_target_layers", 0),
        windows=tuple(window for _, window in layers),
        causal=tuple(
            f.flag("is_causal", fields.dflash.flag("causal", kind == SLIDING)) for kind, _ in layers
        ),
        sample_from_anchor=sample_from_anchor,
        speculative_tokens=fields.dflash.integer("speculative_tokens", 0),
        draft_vocab_size=0 if reduced == vocab else reduced,
        own_head=reduced != vocab,
        input_embedding_scale=optional("input_embedding_scale"),
        output_multiplier=pick("output_multiplier").number("output_multiplier", 1.0),
        final_logit_softcapping=optional("final_logit_softcapping"),
        dtype=dtype_name(f),
        **own,
    )


def _target_layer_ids(fields: DrafterFields) -> tuple[int, ...]:
    """Return the target layers whose outputs a drafter reads."""
    layers = fields.pick("target_layer_ids").get("target_layer_ids")
    if not isinstance(layers, list) or not layers or not all(type(i) is int for i in layers):
        raise ConfigError(
            f"{fields.outer.where}: target_layer_ids is {layers!r}; expected the list of target"
            " layers whose outputs the drafter reads (it cannot be guessed safely)"
        )
    return tuple(layers)


def _kinds_and_windows(fields: DrafterFields, count: int) -> list[tuple[str, int | None]]:
    """Return kind and window of each layer; ModelOpt has one window for all, of any kind."""
    layers = layer_windows(fields.outer, count)
    if fields.flag("use_swa", False):
        width = fields.pick("swa_window_size").integer("swa_window_size")
        if width < 1:
            raise ConfigError(
                f"{fields.outer.where}: swa_window_size is {width}; expected a positive integer"
            )
        alike: list[tuple[str, int | None]] = [(SLIDING, width)] * count
        layers = alike
    fields.pick("swa_window_size")
    fields.dflash.used.add("swa_window_size")
    return layers


def _block_size(fields: DrafterFields) -> int:
    """Return the block size, which two objects may name alike."""
    named = (fields.outer.get("block_size"), fields.dflash.get("block_size"))
    sizes = [size for size in named if size is not None]
    if len(sizes) == 2 and sizes[0] != sizes[1]:
        raise ConfigError(
            f"{fields.outer.where}: block_size is {sizes[0]!r}, and {sizes[1]!r} in dflash_config;"
            " remove the one that is wrong"
        )
    return fields.pick("block_size").integer("block_size", 16)
