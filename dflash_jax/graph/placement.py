"""Place parameters and states on a device, on two devices, or on a mesh of devices.

A mesh is (data, model); XLA inserts its communication. Rows are split over `data`. Over `model` go
kv heads with the query heads they serve, the width of MLPs and experts, and the vocabulary of the
head: the axis that a weight's declaration names (`nn.layers.weight`). An axis that the number of
devices does not divide stays whole; results are the same either way, only memory and time differ.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.errors import CheckpointError, PlanError
from dflash_jax.graph import two_devices
from dflash_jax.graph.abstract import PlannedPair, by_path, path_name
from dflash_jax.graph.protocols import arrays_of
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.graph.state import DecodeState
from dflash_jax.graph.steps.pair import Params
from dflash_jax.kernels.caches import LayerCache
from dflash_jax.kernels.products import choose_products, set_weight_layout
from dflash_jax.plan import ResolvedPlan
from dflash_jax.quant.layouts import (
    QUANTISED,
    STACK,
    Interleaved,
    Joined,
    Packed,
    Spec,
    StructuredWeight,
    pack,
)
from dflash_jax.utils.allocator import drop_pages_of_zeros

AXES = ("data", "model")
MOST_NAMED = 5  # parameters that an error lists


@isolated_jax_config()
def place_params(planned: PlannedPair, params: Params) -> Params:
    """Return the parameters in the layout and on the devices of the plan."""
    plan = planned.plan
    pair = planned.pair
    params = arrays_of(params)
    if pair.drafter is not None:
        params = {"drafter": {}} | params  # it may have no parameters
    params = jax.tree.map(lambda x: x, params, is_leaf=lambda x: isinstance(x, StructuredWeight))
    # In the copy of the tree.
    set_weight_layout(params, planned.forms, native=plan.kernels == "native")
    params = choose_products(params, plan.kernels, plan.activations)
    if plan.two_devices and pair.drafter is not None:
        return two_devices.place_params(plan, params, pair.target)
    mesh = mesh_of(planned)
    if mesh is None:
        return jax.device_put(params)
    return place(params, param_shardings(mesh, params, planned.model_axes))


def updated_params(planned: PlannedPair, new_params: Any, current_params: Params) -> Params:
    """Return the current parameters with others of one role or of both, on the same devices.

    Args:
      new_params: trees by role, "target" and "drafter"; a role that is left out keeps what it has.
        Floats of any precision are cast, packed and laid out as at loading. Packed weights have to
        be those of a tree like `current_params`.

    Raises:
      CheckpointError: parameters are missing or unknown, or have another shape or type.
    """
    plan = planned.plan
    products = (planned.plan.kernels, planned.plan.activations)
    floats = dataclasses.replace(plan, weights="float", stored=(), kernels="xla")
    wanted = PlannedPair(planned.pair, floats).params
    if not isinstance(new_params, Mapping) or wanted.keys().isdisjoint(new_params):
        raise CheckpointError(
            f"what was given has none of {', '.join(wanted)}; give a tree like `engine.params`"
        )
    new_params = arrays_of(dict(new_params))
    if "shared" in current_params:
        new_params.pop("shared", None)
    old = by_path({name: current_params[name] for name in wanted}, StructuredWeight)
    replaced = {role: tree for role, tree in wanted.items() if role in new_params}
    expected = by_path(replaced)
    new_leaves = by_path(new_params, StructuredWeight)
    new_leaves = {name: choose_products(leaf, *products) for name, leaf in new_leaves.items()}
    forms = planned.forms
    problems = [f"{name} is unknown" for name in new_leaves if name not in expected]
    for name, x in expected.items():
        how = planned.specs.get(name)
        stack = forms.get(name) == STACK
        if problem := _misfit(new_leaves.get(name), x, old[name], how, stack=stack):
            problems.append(f"{name} {problem}")
    for name, x in old.items():
        if name not in expected and any(leaf.is_deleted() for leaf in jax.tree.leaves(x)):
            problems.append(f"{name} was donated to another program and has to be given, too")
    if problems:
        more = ""
        if len(problems) > MOST_NAMED:
            more = f"; and {len(problems) - MOST_NAMED} more"
        raise CheckpointError(
            f"{'; '.join(problems[:MOST_NAMED])}{more}; give a tree like `engine.params`, or load"
            " again"
        )

    def make(path: Any, x: jax.ShapeDtypeStruct) -> Any:
        name = path_name(path)
        leaf = new_leaves[name]
        how = planned.specs.get(name)
        if isinstance(leaf, StructuredWeight) and _alike(leaf, old[name]):
            return leaf
        if how:
            return pack(np.asarray(leaf).astype(np.float32), how)
        if isinstance(leaf, jax.Array):
            return leaf.astype(x.dtype)
        return np.asarray(leaf).astype(x.dtype)

    made = jax.tree_util.tree_map_with_path(make, replaced)
    placed = place_params(planned, {role: made.get(role, current_params[role]) for role in wanted})
    return jax.device_put(placed, jax.tree.map(lambda leaf: leaf.sharding, current_params))


def _misfit(
    new: Any, wanted: jax.ShapeDtypeStruct, old: Any, how: Spec | None, *, stack: bool
) -> str:
    """Return why a parameter cannot take the place of another, or nothing."""
    if new is None:
        return "is missing"
    if isinstance(new, jax.core.Tracer):
        return "is traced; call this outside of functions that JAX transforms"
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(new)):
        return "was donated to another program"
    if _alike(new, old):
        return ""
    if isinstance(new, Packed | Joined) or (isinstance(new, Interleaved) and new.kind):
        return "is packed in another way than the engine's; give floats"
    if how and (stack or len(how[1]) > 1 or how[1][0][0] not in QUANTISED.values()):
        return f"is kept in its file's format, {how[1][0][0]}; load with weights='int8' or 'float'"
    if not isinstance(new, np.ndarray | jax.Array | StructuredWeight):
        return f"is a {type(new).__name__}; expected {wanted.dtype}{[*wanted.shape]}"
    dtype = jax.tree.leaves(new)[0].dtype
    kind = jnp.floating if jnp.issubdtype(wanted.dtype, jnp.floating) else jnp.integer
    if new.shape == wanted.shape and jnp.issubdtype(dtype, kind):
        return ""
    return f"is {dtype}{[*new.shape]}; expected {wanted.dtype}{[*wanted.shape]}"


def _alike(a: Any, b: Any) -> bool:
    """Return whether two weights have the same structure, shapes and dtypes."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        isinstance(x, np.ndarray | jax.Array) and (x.shape, x.dtype) == (y.shape, y.dtype)
        for x, y in leaves
    )


def place_empty_state(planned: PlannedPair) -> Any:
    """Return a `DecodeState` of zeros, or a `TwoDeviceState` if each model has its own device.

    On a processor, caches take memory only as positions are written.
    """
    plan = planned.plan
    empty = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), planned.state)
    if plan.two_devices and planned.pair.drafter is not None:
        return two_devices.place_state(plan, empty)
    mesh = mesh_of(planned)
    if mesh is None and jax.default_backend() == "cpu":
        return jax.tree.map(_untouched, empty)
    return place(empty, None if mesh is None else row_shardings(mesh, empty))


def _untouched(zeros: np.ndarray) -> jax.Array:
    """Return an array of zeros whose pages are not in memory."""
    array = jax.device_put(zeros)
    if not isinstance(array, jax.core.Tracer):
        drop_pages_of_zeros(array.block_until_ready().unsafe_buffer_pointer(), array.nbytes)
    return array


def place(tree: Any, placement: Any) -> Any:
    """Return a tree of arrays that every host has, placed; each host transfers its shards only.

    Args:
      placement: shardings of the arrays; None for the default device.
    """
    if placement is None or jax.process_count() == 1:
        return jax.device_put(tree, placement)

    def put(x: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and x.sharding == sharding:
            return x
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree, placement)


def device_mesh(plan: ResolvedPlan) -> Mesh | None:
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
    return Mesh(devices, AXES)


def mesh_of(planned: PlannedPair) -> Mesh | None:
    """Return the mesh that a plan runs on; None for a plan of one device.

    Raises:
      PlanError: there are fewer devices.
    """
    return device_mesh(planned.plan) if planned.mesh is None else planned.mesh


def named_mesh(mesh: Mesh) -> Mesh:
    """Return a mesh of the same devices in the same order that has both axes.

    One that is missing gets a single device.

    Raises:
      PlanError: it is no mesh, or has several devices along another axis.
    """
    if not isinstance(mesh, Mesh):
        raise PlanError(f"mesh is {mesh!r}; expected a jax.sharding.Mesh")
    if [size for name, size in mesh.shape.items() if size > 1 and name not in AXES]:
        raise PlanError(
            f"mesh has the axes {dict(mesh.shape)}; expected 'data' for rows and 'model' for heads"
            " and widths, as jax.sharding.Mesh(mesh.devices, ('data', 'model')) names those of a"
            " mesh of two"
        )
    missing = [name for name in AXES if name not in mesh.shape]
    devices = mesh.devices.reshape(*mesh.devices.shape, *[1] * len(missing))
    return Mesh(devices, (*mesh.axis_names, *missing))


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
