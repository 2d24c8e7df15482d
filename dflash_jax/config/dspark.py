"""DSpark drafters: each position predicts the next token, corrected by a Markov head."""

import dataclasses
from typing import Any

from dflash_jax.config.base import at_least
from dflash_jax.config.dflash import DrafterConfig, DrafterFields, common_fields
from dflash_jax.config.family import DrafterKind
from dflash_jax.errors import ConfigError

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
    def predicts_survival(self) -> bool:
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
    return DSparkConfig(
        **common_fields(fields) | {"sample_from_anchor": shifted},
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


DRAFTER = DrafterKind(
    config=DSparkConfig,
    from_hf=from_hf,
    architectures=("Qwen3DSparkModel", "DSparkDraftModel"),
    projector_types=("dspark",),
    own_tables=True,
    recipe_fields=_recipe_fields,
    second_loss=True,
    wants_distribution=lambda recipe: recipe.confidence_head,
)
