"""Domino drafters: logits of later places are corrected by what was drafted before them."""

import dataclasses
from typing import Any

from dflash_jax.config.base import at_least
from dflash_jax.config.dflash import DrafterConfig, DrafterFields, common_fields
from dflash_jax.config.family import DrafterKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class DominoConfig(DrafterConfig):
    """A Domino drafter."""

    kind: str = "domino"
    gru_hidden_dim: int = 1024  # of the state that reads the tokens of the block
    emb_dim: int = 256  # between hidden state and correction
    pure_draft_prefix_len: int = 1  # first places, which are not corrected

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "gru_hidden_dim", "emb_dim")
        at_least(self, 0, "pure_draft_prefix_len")


def from_hf(fields: DrafterFields) -> DominoConfig:
    """Return the config of a Domino drafter, which has every size of its head."""
    fields.dflash.used.add("projector_type")
    shifted = fields.flag("sample_from_anchor", fields.flag("shift_label", False))

    def size(name: str) -> int:
        return fields.pick(name).integer(name)

    return DominoConfig(
        **common_fields(fields) | {"sample_from_anchor": shifted},
        gru_hidden_dim=size("gru_hidden_dim"),
        emb_dim=size("emb_dim"),
        pure_draft_prefix_len=size("pure_draft_prefix_len"),
    )


def _recipe_fields(recipe: Any) -> dict[str, Any]:
    """Return sizes of which `rank` is that of the correction, the state four times that."""
    return {
        "gru_hidden_dim": 4 * recipe.rank,
        "emb_dim": recipe.rank,
        "sample_from_anchor": recipe.sample_from_anchor,
    }


DRAFTER = DrafterKind(
    config=DominoConfig,
    from_hf=from_hf,
    architectures=("DominoDraftModel",),
    projector_types=("domino",),
    recipe_fields=_recipe_fields,
    second_loss=True,
    reads_embeddings=True,
)
