"""What configurations share: their fields, how they are read, and how a pair fits.

Families build on it, each in a file of `dflash_jax/families`. This package never imports jax.
"""

import dataclasses

from dflash_jax.config.base import (
    ALWAYS_FLOAT32,
    AUTO,
    EARLY,
    FULL,
    LATE,
    LINEAR,
    SLIDING,
    TAPS_AT,
    UPSTREAM,
    AttentionConfig,
    RopeConfig,
    TargetConfig,
    first_id,
    id_tuple,
    window_kinds,
)
from dflash_jax.config.drafter import DrafterConfig
from dflash_jax.config.fields import is_gguf, read_json
from dflash_jax.errors import ConfigError

__all__ = [
    "ALWAYS_FLOAT32",
    "AUTO",
    "EARLY",
    "FULL",
    "LATE",
    "LINEAR",
    "PAIRED",
    "SLIDING",
    "TAPS_AT",
    "UPSTREAM",
    "AttentionConfig",
    "DrafterConfig",
    "RopeConfig",
    "TargetConfig",
    "check_pair",
    "first_id",
    "id_tuple",
    "is_gguf",
    "paired",
    "read_json",
    "window_kinds",
    "wrong_role",
]
INSTEAD = {
    "target": "the target that the drafter was trained for, and this as its drafter",
    "drafter": "a drafter that was trained for this target, 'auto' for a published one, or none",
}


def wrong_role(where: object, needed: str) -> ConfigError:
    """Return the error about a drafter in place of a target, or the reverse.

    Args:
      needed: the role that was asked for.
    """
    [role] = INSTEAD.keys() - {needed}
    return ConfigError(f"{where} is a {role}; a {needed} is needed here: give {INSTEAD[needed]}")


def check_pair(target: TargetConfig, drafter: DrafterConfig, *, taps_at: str = AUTO) -> None:
    """Check that a drafter was made for a target.

    Args:
      taps_at: where the plan takes the taps; every value but AUTO defines the output of the
        last layer.

    Raises:
      ConfigError: the two do not fit; the message lists every reason.
    """
    layers = range(target.num_layers)
    outside = [i for i in drafter.target_layer_ids if i not in layers]
    reasons = []
    if drafter.hidden_size != target.hidden_size:
        reasons.append(f"hidden size {drafter.hidden_size}, the target has {target.hidden_size}")
    if drafter.vocab_size != target.vocab_size:
        reasons.append(f"vocabulary {drafter.vocab_size}, the target has {target.vocab_size}")
    if drafter.num_target_layers not in (0, target.num_layers):
        reasons.append(
            f"made for {drafter.num_target_layers} target layers, this one has {target.num_layers}"
        )
    if outside:
        reasons.append(f"reads target layers {outside}, the target has layers 0 to {layers[-1]}")
    if target.num_layers - 1 in drafter.target_layer_ids and taps_at == AUTO:
        reasons.append(
            f"reads the last target layer ({target.num_layers - 1}), which is ambiguous: other"
            " engines take it before (taps_at='late') or after (taps_at='upstream') the final norm"
        )
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        reasons.append(
            f"mask token {drafter.mask_token_id} is outside the target's vocabulary"
            f" of {target.vocab_size}"
        )
    if reasons:
        raise ConfigError(
            "the drafter does not fit the target: " + "; ".join(reasons) + ". Load the drafter"
            " that was trained for this target"
        )


# Fields of a drafter's config that `paired` may take from the target.
PAIRED = ("input_embedding_scale", "rounded_embedding_scale", "final_logit_softcapping")


def paired(target: TargetConfig, drafter: DrafterConfig) -> DrafterConfig:
    """Return the drafter with fields that its config leaves open taken from its target.

    Drafters share the target's embedding and head, so the target's embedding scale and softcap
    are the defaults, as in every engine that serves Gemma. Drafters with their own tables have
    neither by default.
    """
    if drafter.input_embedding_scale is None:
        drafter = dataclasses.replace(
            drafter,
            input_embedding_scale=1.0 if drafter.own_embedding else target.embedding_scale,
            rounded_embedding_scale=True,
        )
    if drafter.final_logit_softcapping is None:
        cap = None if drafter.own_head else target.final_softcap
        drafter = dataclasses.replace(drafter, final_logit_softcapping=cap or 0.0)
    return drafter
