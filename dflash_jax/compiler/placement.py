"""Place parameters and states on the devices of a plan."""

from typing import Any

import jax
import numpy as np

from dflash_jax.compiler import two_devices
from dflash_jax.compiler.models import abstract_state, by_path, model_axes
from dflash_jax.compiler.settings import isolated_jax_config
from dflash_jax.compiler.sharding import device_mesh, param_shardings, row_shardings
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.decode.pair import Params
from dflash_jax.errors import CheckpointError
from dflash_jax.plan import Plan
from dflash_jax.quant.layouts import StructuredWeight
from dflash_jax.quant.products import set_weight_layout


@isolated_jax_config()
def place_params(
    plan: Plan, target: TargetConfig, drafter: DrafterConfig | None, params: Params
) -> Params:
    """Return the parameters in the layout and on the devices of the plan."""
    params = jax.tree.map(lambda x: x, params, is_leaf=lambda x: isinstance(x, StructuredWeight))
    set_weight_layout(params, plan.weight_layout)  # in the copy of the tree
    if plan.two_devices and drafter is not None:
        return two_devices.place_params(plan, params)
    mesh = device_mesh(plan)
    if mesh is None:
        return jax.device_put(params)
    axes = model_axes(target, drafter)
    return jax.device_put(params, param_shardings(mesh, params, axes))


def place_params_like(
    plan: Plan, target: TargetConfig, drafter: DrafterConfig | None, params: Any, present: Params
) -> Params:
    """Return parameters that can replace those present, on the same devices.

    Raises:
      CheckpointError: they have other names, shapes or dtypes.
    """
    try:
        placed = place_params(plan, target, drafter, params)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"what was given is no tree of parameters ({error}); give one like `engine.params`"
        ) from error
    given, wanted = (
        {name: f"{x.dtype}{list(x.shape)}" for name, x in by_path(tree).items()}
        for tree in (placed, present)
    )
    if wrong := sorted(given.items() ^ wanted.items()):
        name = wrong[0][0]
        raise CheckpointError(
            f"the parameter {name} is {given.get(name, 'missing')}, but the engine's is"
            f" {wanted.get(name, 'none')}; give a tree like `engine.params`, or load again"
        )
    return jax.device_put(placed, jax.tree.map(lambda leaf: leaf.sharding, present))


def place_empty_state(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None) -> Any:
    """Return a `DecodeState`, or a `TwoDeviceState` if each model has its own device."""
    shapes = abstract_state(plan, target, drafter)
    empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    if plan.two_devices and drafter is not None:
        return two_devices.place_state(plan, empty)
    mesh = device_mesh(plan)
    return jax.device_put(empty, None if mesh is None else row_shardings(mesh, empty))
