"""DSpark drafters: each position predicts the next token, corrected by a Markov head.

Version 1 with that head and one that predicts how likely drafts are to be accepted.
"""

import dataclasses
from typing import Any

from dflash_jax.config.base import at_least
from dflash_jax.config.drafter import DrafterConfig, DrafterFields, common_config
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.tensors import Shapes
from dflash_jax.converters.formats.gguf.writer import BOOL, Typed
from dflash_jax.converters.formats.slots import Slot, linear, same
from dflash_jax.errors import ConfigError
from dflash_jax.families import dflash
from dflash_jax.families.entry import DrafterGguf, DrafterKind, Speculator

MARKOV_HEADS = ("vanilla", "gated", "rnn")
TRAINING = (
    "ce_loss_alpha",
    "confidence_head_alpha",
    "l1_loss_alpha",
    "loss_decay_gamma",
    "num_anchors",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig(DrafterConfig):
    """A DSpark drafter."""

    kind: str = "dspark"
    sample_from_anchor: bool = True
    markov_rank: int = 256  # 0 is no Markov head
    markov_head: str = "vanilla"
    confidence_head: bool = False
    confidence_with_markov: bool = True  # the confidence also reads the previous token

    @property
    def predicts_confidence(self) -> bool:
        """Whether the drafter predicts how likely its drafts are to be accepted."""
        return self.confidence_head

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_head not in MARKOV_HEADS:
            raise ConfigError(
                f"markov_head_type is {self.markov_head!r}; expected one of"
                f" {', '.join(MARKOV_HEADS)}"
            )
        at_least(self, 0, "markov_rank")
        if self.confidence_head and self.confidence_with_markov and not self.markov_rank:
            raise ConfigError(
                "confidence_head_with_markov is true but markov_rank is 0; set it to false"
            )


def from_hf(fields: DrafterFields) -> DSparkConfig:
    """Return the config of a DSpark drafter, spelled as in DeepSpec, SpecForge or ModelOpt."""
    fields.outer.used.update(TRAINING)
    fields.dflash.used.update((*TRAINING, "projector_type"))
    fields.pick("attention_mode").must_be("attention_mode", "gqa")
    rank = fields.pick("markov_rank").integer("markov_rank", 256)
    enabled = fields.flag("enable_confidence_head", fields.flag("use_confidence_head", False))
    shifted = fields.flag("sample_from_anchor", fields.flag("shift_label", True))
    return common_config(
        fields,
        DSparkConfig,
        sample_from_anchor=shifted,
        markov_rank=rank,
        markov_head=fields.pick("markov_head_type").get("markov_head_type", "vanilla"),
        confidence_head=enabled,
        confidence_with_markov=fields.flag("confidence_head_with_markov", rank > 0),
    )


def _recipe_fields(recipe: Any) -> dict[str, Any]:
    return {
        "markov_rank": recipe.rank,
        "markov_head": recipe.markov_head,
        "confidence_head": recipe.confidence_head,
        "sample_from_anchor": recipe.sample_from_anchor,
    }


FIELDS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
CONFIDENCE = "confidence_head.proj.weight"
GGUF_NAMES = {
    "markov_head.markov_w1.weight": ("markov_w1.weight",),
    "markov_head.markov_w2.weight": ("markov_w2.weight",),
    CONFIDENCE: ("conf_proj.weight", "confidence_proj.weight"),
    "confidence_head.proj.bias": ("conf_proj.bias", "confidence_proj.bias"),
}
GGUF_MARKS = ("markov_w1.weight", *GGUF_NAMES[CONFIDENCE])
GGUF_FLAT = (CONFIDENCE,)


def slots(config: DSparkConfig) -> list[Slot]:
    """Return every parameter of the drafter."""
    width = config.hidden_size
    rank = config.markov_rank
    head = "markov_head."
    slots = dflash.slots(config)
    if rank:
        slots += [
            same(("markov_w1",), f"{head}markov_w1.weight", config.vocab_size, rank),
            linear(("markov_w2",), f"{head}markov_w2.weight", config.choices, rank),
        ]
    if rank and config.markov_head == "gated":
        slots += [
            linear(("markov_gate",), f"{head}gate_proj.weight", rank, width + rank),
            same(("markov_gate_bias",), f"{head}gate_proj.bias", rank),
        ]
    if rank and config.markov_head == "rnn":
        slots += [
            linear(("markov_joint",), f"{head}joint_proj.weight", 3 * rank, 2 * rank + width),
            same(("markov_joint_bias",), f"{head}joint_proj.bias", 3 * rank),
        ]
    if config.confidence_head:
        read = width + rank if config.confidence_with_markov else width
        slots += [
            linear(("confidence",), "confidence_head.proj.weight", 1, read),
            same(("confidence_bias",), "confidence_head.proj.bias", 1),
        ]
    return slots


def to_hf(config: DSparkConfig) -> dict[str, Any]:
    """Return the kind's own fields of `dflash_config`."""
    own = config.markov_rank, config.markov_head, config.confidence_head
    return dict(zip(FIELDS, (*own, config.confidence_with_markov), strict=True))


def from_gguf(fields: GgufFields, shapes: Shapes) -> dict[str, Any]:
    """Return the kind's own fields of `dflash_config` that a GGUF file holds."""
    hf_fields = dflash.from_gguf(fields, shapes)
    confidence = next((shapes[n] for n in GGUF_NAMES[CONFIDENCE] if n in shapes), None)
    rank = shapes.get("markov_w1.weight", (0, 0))[-1]
    alone = fields.count("embedding_length", 131072)
    if confidence is not None:
        hf_fields["confidence_head_with_markov"] = confidence[-1] != alone
    return hf_fields | {"markov_rank": rank, "enable_confidence_head": confidence is not None}


def to_gguf(config: DSparkConfig) -> dict[str, Typed]:
    """Return the kind's own metadata of a GGUF file.

    Raises:
      ConfigError: llama.cpp does not have this Markov head.
    """
    if config.markov_rank and config.markov_head != "vanilla":
        raise ConfigError(
            f"a {config.markov_head} Markov head has no place in a drafter GGUF; export to the"
            " Hugging Face layout instead"
        )
    return {
        "has_confidence_head": Typed(BOOL, config.confidence_head),
        "sample_from_anchor": Typed(BOOL, config.sample_from_anchor),
    }


DRAFTER = DrafterKind(
    config=DSparkConfig,
    from_hf=from_hf,
    architectures=("Qwen3DSparkModel", "DSparkDraftModel"),
    projector_types=("dspark",),
    own_tables=True,
    recipe_fields=_recipe_fields,
    second_loss=True,
    wants_distribution=lambda recipe: recipe.confidence_head,
    net="dflash_jax.families.dspark_net",
    slots=slots,
    fields=FIELDS,
    to_hf=to_hf,
    speculator=Speculator(name="DSparkSpeculator"),
    gguf=DrafterGguf(
        names=GGUF_NAMES,
        marks=GGUF_MARKS,
        flat=GGUF_FLAT,
        from_gguf=from_gguf,
        to_gguf=to_gguf,
    ),
)
