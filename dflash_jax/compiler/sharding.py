"""Placement of arrays over a mesh of devices; XLA inserts the communication.

A mesh is (data, model). Rows are split over `data`. Over `model` go kv heads with the query heads
they serve, the width of MLPs and experts, and the vocabulary of the head: the axis that a weight's
declaration names (`nn.layers.weight`). An axis that the number of devices does not divide stays
whole; results are the same either way, only memory and time differ.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.compiler.models import path_name
from dflash_jax.errors import PlanError
from dflash_jax.plan import Plan
from dflash_jax.state import DecodeState, LayerCache


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


def placed(shapes: Any, shardings: Any) -> Any:
    """Return shapes with the sharding of their arrays."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings
    )
