"""Domino drafters: logits of later positions are corrected by what was drafted before them.

Version 1 with a GRU over the block's tokens and a correction of logits.
"""

import dataclasses
from typing import Any

from dflash_jax.config.base import at_least
from dflash_jax.config.drafter import DrafterConfig, DrafterFields, common_config
from dflash_jax.converters.formats.slots import Slot, linear
from dflash_jax.families import dflash
from dflash_jax.families.entry import DrafterKind, Speculator


@dataclasses.dataclass(frozen=True, kw_only=True)
class DominoConfig(DrafterConfig):
    """A Domino drafter."""

    kind: str = "domino"
    gru_hidden_dim: int = 1024  # width of the state that reads the tokens of the block
    emb_dim: int = 256  # between hidden state and correction
    pure_draft_prefix_len: int = 1  # first positions, which are not corrected

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

    return common_config(
        fields,
        DominoConfig,
        sample_from_anchor=shifted,
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


FIELDS = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")


def slots(config: DominoConfig) -> list[Slot]:
    """Return every parameter of the drafter; the GRU's gates are in PyTorch's order."""
    width = config.hidden_size
    state = config.gru_hidden_dim
    return [
        *dflash.slots(config),
        linear(("gru_input",), "prefix_gru.weight_ih_l0", 3 * state, width),
        linear(("gru_state",), "prefix_gru.weight_hh_l0", 3 * state, state),
        linear(("correction_in",), "embed_proj.0.weight", config.emb_dim, width + state),
        linear(("correction_out",), "embed_proj.2.weight", config.choices, config.emb_dim),
    ]


def to_hf(config: DominoConfig) -> dict[str, Any]:
    """Return the kind's own fields of `dflash_config`."""
    own = {name: getattr(config, name) for name in FIELDS}
    return own | {"projector_type": "domino", "shift_label": config.sample_from_anchor}


DRAFTER = DrafterKind(
    config=DominoConfig,
    from_hf=from_hf,
    architectures=("DominoDraftModel",),
    projector_types=("domino",),
    recipe_fields=_recipe_fields,
    second_loss=True,
    reads_embeddings=True,
    net="dflash_jax.families.domino_net",
    slots=slots,
    fields=FIELDS,
    to_hf=to_hf,
    speculator=Speculator(
        name="DominoSpeculator",
        fields={"emb_dim": "logits_correction_emb_dim"},
        tensors={name: f"logits_correction.{name}" for name in ("prefix_gru.", "embed_proj.")},
    ),
)
