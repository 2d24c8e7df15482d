"""Domino drafters: version 1 with a GRU over the block's tokens and a correction of logits."""

from typing import Any

from dflash_jax.config.domino import DominoConfig
from dflash_jax.converters.families import dflash
from dflash_jax.converters.names.slots import Slot, linear

SPECULATOR = "DominoSpeculator"
FIELDS = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
SPECULATOR_FIELDS = {"emb_dim": "logits_correction_emb_dim"}
SPECULATOR_TENSORS = {name: f"logits_correction.{name}" for name in ("prefix_gru.", "embed_proj.")}


def slots(config: DominoConfig) -> list[Slot]:
    """Return every parameter of the drafter; the GRU's gates are in PyTorch's order."""
    width, state = config.hidden_size, config.gru_hidden_dim
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
