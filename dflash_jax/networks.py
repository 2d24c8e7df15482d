"""Networks of target families and drafter kinds, by configuration (see `graph.protocols`)."""

import importlib
from collections.abc import Callable
from typing import Any

from dflash_jax.config import DrafterConfig, TargetConfig, paired
from dflash_jax.errors import ConfigError
from dflash_jax.families import drafter_kinds, family
from dflash_jax.graph import Graph, Pair
from dflash_jax.plan import Plan


def build_target(config: TargetConfig) -> Any:
    """Return the network of a target config.

    Raises:
      ConfigError: the family is not known, or its network cannot be imported.
    """
    return _builder(family(config.model_type).net)(config)


def build_drafter(config: DrafterConfig) -> Any:
    """Return the network of a drafter config.

    Raises:
      ConfigError: the network cannot be imported.
    """
    return _builder(drafter_kinds()[config.kind].net)(config)


def _builder(net: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that makes a network, or that of the module with this name."""
    if not isinstance(net, str):
        return net
    try:
        return importlib.import_module(net).build
    except ImportError as error:
        raise ConfigError(
            f"the network {net} cannot be imported ({error}); repair or uninstall its package"
        ) from error


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
