"""Stacked experts in GGUF files: [E, out, in], gate and up separate or concatenated."""

import re
from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.converters.canonical import Origin, Piled
from dflash_jax.converters.gguf.dense import Shapes
from dflash_jax.converters.gguf.keys import GgufFields
from dflash_jax.errors import ConfigError

MAX_EXPERTS = 4096
SOFTMAX = 1  # expert_gating_func: over all experts, before the choice
_ONE = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def origin(name: str, config: TargetConfig, shapes: Shapes) -> Origin | None:
    """Return one expert's weight in its layer's stack; None if `name` is not an expert's."""
    if (match := _ONE.fullmatch(name)) is None:
        return None
    layer, expert, which = match[1], int(match[2]), match[3]
    stack, both = (f"blk.{layer}.ffn_{x}_exps.weight" for x in (which, "gate_up"))
    if _stacked(shapes.get(stack), config):
        size = shapes[stack][1]
        return Origin(stack, range(expert * size, (expert + 1) * size), "one of stacked experts")
    if which != "down" and _stacked(shapes.get(both), config):
        size = shapes[both][1] // 2
        start = (2 * expert + (which == "up")) * size
        return Origin(both, range(start, start + size), "one of stacked experts, gate over up")
    return None


def stored(name: str, config: TargetConfig) -> dict[str, Origin] | None:
    """Return the stack that begins with an expert's weight; None if `name` is not an expert's."""
    if (match := _ONE.fullmatch(name)) is None:
        return None
    layer, expert, which = match.groups()
    if int(expert):
        return {}
    at = f"layers.{layer}.mlp.experts."
    names = [f"{at}{e}.{which}_proj.weight" for e in range(config.num_experts)]
    return {f"blk.{layer}.ffn_{which}_exps.weight": Piled(names[0], others=tuple(names[1:]))}


def _stacked(shape: tuple[int, ...] | None, config: TargetConfig) -> bool:
    return shape is not None and len(shape) == 3 and shape[0] == config.num_experts


def counts(fields: GgufFields, *, gating: int = SOFTMAX) -> dict[str, Any]:
    """Return number and choice of experts, under their Hugging Face names.

    Raises:
      ConfigError: the architecture chooses its experts in another way.
    """
    found = fields.get("expert_gating_func")
    if found not in (None, 0, gating):
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.expert_gating_func is {found!r}; this"
            f" architecture chooses by {gating}"
        )
    fields.refuse_unless({"expert_weights_scale": 1.0, "expert_group_count": 1.0})
    return {
        "num_experts": fields.count("expert_count", MAX_EXPERTS),
        "num_experts_per_tok": fields.count("expert_used_count", MAX_EXPERTS),
    }
