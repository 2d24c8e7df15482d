"""Place parameters and states on a device, on two devices, or on a mesh of devices.

A mesh is (data, model); XLA inserts its communication. Rows are split over `data`. Over `model` go
kv heads with the query heads they serve, the width of MLPs and experts, and the vocabulary of the
head: the axis that a weight's declaration names (`nn.layers.weight`). An axis that the number of
devices does not divide stays whole; results are the same either way, only memory and time differ.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.errors import CheckpointError, PlanError
from dflash_jax.graph import two_devices
from dflash_jax.graph.abstract import PlannedPair, by_path, path_name
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.graph.state import DecodeState
from dflash_jax.graph.steps.pair import Params
from dflash_jax.kernels.caches import LayerCache
from dflash_jax.kernels.products import set_weight_layout
from dflash_jax.plan import Plan
from dflash_jax.quant.layouts import StructuredWeight


@isolated_jax_config()
def place_params(planned: PlannedPair, params: Params) -> Params:
    """Return the parameters in the layout and on the devices of the plan."""
    plan, pair = planned.plan, planned.pair
    if pair.drafter is not None:
        params = {"drafter": {}} | params  # it may have no parameters
    params = jax.tree.map(lambda x: x, params, is_leaf=lambda x: isinstance(x, StructuredWeight))
    # In the copy of the tree.
    set_weight_layout(params, plan.weight_layout, planned.forms)
    if plan.two_devices and pair.drafter is not None:
        return two_devices.place_params(plan, params, pair.target)
    mesh = device_mesh(plan)
    if mesh is None:
        return jax.device_put(params)
    return place(params, param_shardings(mesh, params, planned.model_axes))


def place_params_like(planned: PlannedPair, params: Any, present: Params) -> Params:
    """Return parameters that can replace those present, on the same devices.

    Raises:
      CheckpointError: they have other names, shapes or dtypes.
    """
    try:
        placed = place_params(planned, params)
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


def place_empty_state(planned: PlannedPair) -> Any:
    """Return a `DecodeState` of zeros, or a `TwoDeviceState` if each model has its own device."""
    plan = planned.plan
    empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), planned.state)
    if plan.two_devices and planned.pair.drafter is not None:
        return two_devices.place_state(plan, empty)
    mesh = device_mesh(plan)
    return place(empty, None if mesh is None else row_shardings(mesh, empty))


def place(tree: Any, places: Any) -> Any:
    """Return a tree of arrays that every host has, placed; each host transfers its shards only.

    Args:
      places: shardings of the arrays; None for the default device.
    """
    if places is None or jax.process_count() == 1:
        return jax.device_put(tree, places)

    def put(x: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and x.sharding == sharding:
            return x
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree, places)


def device_mesh(plan: Plan) -> Mesh | None:
    """Return the plan's mesh over the first devices; None for a plan of one device.

    Raises:
      PlanError: there are fewer devices.
    """
    data, model = plan.mesh
    if data * model == 1:
        return None
    if data * model > len(jax.devices()):
        raise PlanError(
            f"mesh is {data} x {model}, but there are {len(jax.devices())} devices; make it"
            " smaller (on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes more)"
        )
    devices = np.asarray(jax.devices()[: data * model]).reshape(data, model)
    return Mesh(devices, ("data", "model"))


def param_shardings(mesh: Mesh, params: Any, axes: Mapping[str, int]) -> Any:
    """Return a sharding for every parameter of a tree of arrays or of their shapes.

    Args:
      params: parameters by role, as in {"target": ..., "drafter": ...}.
      axes: the axis that may be split, by path (see `model_axes`); others stay whole.
    """

    def place(path: Any, leaf: Any) -> NamedSharding:
        axis = axes.get(path_name(path))
        spec: list[str | None] = [None] * len(leaf.shape)
        if axis is not None and axis < len(spec) and leaf.shape[axis] % mesh.shape["model"] == 0:
            spec[axis] = "model"
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(place, params)


def row_shardings(mesh: Mesh, tree: Any) -> Any:
    """Return a sharding for every array [B, ...] of a state or a part of one.

    Rows are split over `data`, and kv heads over `model` if it divides them.
    """

    def place(part: Any) -> Any:
        split = isinstance(part, LayerCache) and part.k.shape[1] % mesh.shape["model"] == 0
        where = PartitionSpec("data", "model") if split else PartitionSpec("data")
        return jax.tree.map(lambda _: NamedSharding(mesh, where), part)

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, LayerCache))


def shardings(mesh: Mesh, tree: Any, axes: Mapping[str, int]) -> Any:
    """Return a sharding for every array of parameters, a state, or anything else, replicated."""
    if isinstance(tree, dict):
        return param_shardings(mesh, tree, axes)
    if isinstance(tree, DecodeState):
        return row_shardings(mesh, tree)
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tree)
