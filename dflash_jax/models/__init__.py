"""Modules of target families and drafter kinds: one file each, found by name.

The file has the name of the one in `dflash_jax/config` that registers the family, unless that one
names another (`Family.module`). It provides `build(config)`, the module (see `graph.protocols`).
"""

from typing import Any

from dflash_jax.config import DrafterConfig, TargetConfig, family_of, paired
from dflash_jax.config.family import MODEL, part, target_families
from dflash_jax.graph import Graph, Pair
from dflash_jax.plan import Plan


def build_target(config: TargetConfig) -> Any:
    """Return the module of a target config.

    Raises:
      ConfigError: the family is not known.
    """
    name = family_of(config.model_type)
    return part(target_families()[name].module or name, MODEL).build(config)


def build_drafter(config: DrafterConfig) -> Any:
    """Return the module of a drafter config."""
    return part(config.kind, MODEL).build(config)


def build_pair(target: TargetConfig, drafter: DrafterConfig | None = None) -> Pair:
    """Return the modules of both configs; the drafter's open fields are the target's."""
    module = None if drafter is None else build_drafter(paired(target, drafter))
    return Pair(build_target(target), module)


def build_graph(
    target: TargetConfig,
    drafter: DrafterConfig | None = None,
    plan: Plan | None = None,
    *,
    device: str = "",
) -> Graph:
    """Return the graph of both configs' modules; arguments and errors as for `Graph`."""
    return Graph(build_pair(target, drafter), plan, device=device)
