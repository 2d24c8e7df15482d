"""Modules, parameters and state of a target and its drafter, most of them as shapes only."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.compiler.settings import isolated_jax_config
from dflash_jax.config import ALWAYS_FLOAT32, AUTO, LATE, DrafterConfig, TargetConfig, paired
from dflash_jax.decode.pair import Pair, Params
from dflash_jax.kernels.products import abstract, abstract_layout
from dflash_jax.models import build_drafter, build_target, drafter_caches, target_caches
from dflash_jax.nn.layers import MODEL_AXES, ModelAxis
from dflash_jax.plan import Plan
from dflash_jax.quant.layouts import Spec, is_matrix, is_widened, spec
from dflash_jax.state import (
    CHOICES,
    DecodeState,
    LayerCache,
    RecurrentCache,
    RowRules,
    empty_cache,
    empty_recurrent,
)


def path_name(path: Any) -> str:
    """Return a key path of JAX's as text, such as "target/embed"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(tree: Any, *kept: type) -> dict[str, Any]:
    """Return the leaves of a tree by path; nodes of the kept types count as leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kept))
    return {path_name(path): leaf for path, leaf in leaves}


def build_pair(
    target: TargetConfig, drafter: DrafterConfig | None, *, exact: bool = True, taps_at: str = AUTO
) -> Pair:
    """Return the modules of both configs; the drafter's open fields are the target's."""
    module = build_drafter(paired(target, drafter)) if drafter else None
    return Pair(build_target(target), module, exact, LATE if taps_at == AUTO else taps_at)


@dataclasses.dataclass(frozen=True)
class CacheMaker:
    """Makes the empty caches of a plan, one per layer (a `models.MakeCache`)."""

    plan: Plan

    def __call__(self, kv_heads: int, head_dim: int, window: int | None) -> LayerCache:
        """Return the cache of an attention layer."""
        plan, ring = self.plan, self.plan.ring_slots(window)
        dtype = jnp.dtype(plan.compute_dtype if plan.kv_dtype == "auto" else plan.kv_dtype)
        options = {"dtype": dtype, "ring": ring is not None}
        return empty_cache(plan.rows, kv_heads, ring or plan.slots, head_dim, **options)

    def recurrent(self, state: tuple[int, int, int], inputs: tuple[int, int]) -> RecurrentCache:
        """Return the cache of a recurrent layer: state [N, P, Q] and convolution inputs [W, C]."""
        return empty_recurrent(
            self.plan.rows, state, inputs, dtype=jnp.dtype(self.plan.compute_dtype)
        )


def empty_state(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None) -> DecodeState:
    """Return a state with every row at position 0."""
    caches = ()
    if drafter:  # it may read longer blocks than are verified, and the tokens of several steps
        widest = max(plan.block, drafter.step_width, plan.steps_per_call)
        wide = dataclasses.replace(plan, block=widest)
        caches = drafter_caches(drafter, CacheMaker(wide))
    return DecodeState(
        target=target_caches(target, CacheMaker(plan)),
        drafter=caches,
        position=jnp.zeros((plan.rows,), jnp.int32),
        anchor=jnp.zeros((plan.rows,), jnp.int32),
    )


def abstract_state(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None) -> DecodeState:
    """Return the shapes and dtypes of `empty_state`."""
    return jax.eval_shape(lambda: empty_state(plan, target, drafter))


def idle_arrays(plan: Plan) -> dict[str, np.ndarray]:
    """Return the fields of rules under which every row is frozen, on the host."""
    b = plan.rows
    arrays = {
        "stop_ids": np.full((b, plan.stop_slots), -1, np.int32),
        "limit": np.zeros(b, np.int32),
        "max_drafts": np.full(b, plan.block - 1, np.int32),
        "temperature": np.zeros(b, np.float32),
        "top_k": np.zeros(b, np.int32),
        "top_p": np.ones(b, np.float32),
        "min_p": np.zeros(b, np.float32),
        "seed": np.zeros((b, 2), np.uint32),
        "choices": np.full((b, CHOICES), -1, np.int32),
    }
    return arrays | ({"opening": np.full(b, -1, np.int32)} if plan.call_odds else {})


def idle_rules(plan: Plan) -> RowRules:
    """Return rules under which every row is frozen."""
    return RowRules(**{name: jnp.asarray(array) for name, array in idle_arrays(plan).items()})


def abstract_params(
    plan: Plan, target: TargetConfig, drafter: DrafterConfig | None
) -> dict[str, Any]:
    """Return shapes and dtypes of all parameters; no memory is used.

    Token ids stay integers, and parameters in `ALWAYS_FLOAT32` stay float32.
    """
    dtype, kernel = jnp.dtype(plan.dtype), plan.kernels != "xla"
    specs = weight_specs(plan, target, drafter)

    def planned(path: Any, x: jax.ShapeDtypeStruct) -> Any:
        name = path_name(path)
        if name in specs:
            packed = abstract(x.shape, specs[name], dtype, kernel=kernel)
            return abstract_layout(packed, plan.weight_layout)
        kept = jnp.issubdtype(x.dtype, jnp.integer) or path[-1].key in ALWAYS_FLOAT32
        chosen = jnp.dtype(plan.compute_dtype) if is_widened(path[-1].key) else dtype
        stored = jax.ShapeDtypeStruct(x.shape, x.dtype if kept else chosen)
        if not is_matrix(path[-1].key):
            return stored
        return abstract_layout(stored, plan.weight_layout)

    return jax.tree_util.tree_map_with_path(planned, _variables(target, drafter, "params"))


def weight_specs(
    plan: Plan, target: TargetConfig, drafter: DrafterConfig | None
) -> dict[str, Spec]:
    """Return how each packed parameter is packed, by its path with the role in front."""
    if plan.weights == "packed":
        return dict(plan.stored)
    if plan.weights == "float":
        return {}
    leaves = by_path(_variables(target, drafter, "params"))
    specs = {path: spec(plan.weights, path, leaf.shape) for path, leaf in leaves.items()}
    return {path: chosen for path, chosen in specs.items() if chosen}


def model_axes(target: TargetConfig, drafter: DrafterConfig | None) -> dict[str, int]:
    """Return the axis of each weight that a mesh may split, by path with the role."""
    found = by_path(_variables(target, drafter, MODEL_AXES), ModelAxis)
    return {path: leaf.axis for path, leaf in found.items()}


def _variables(target: TargetConfig, drafter: DrafterConfig | None, kind: str) -> dict[str, Any]:
    """Return shapes of the variables of a kind, by role."""
    found = {"target": _shapes(_init_target, target)}
    if drafter is not None:
        found["drafter"] = _shapes(_init_drafter, target, drafter)
    return {role: variables.get(kind, {}) for role, variables in found.items()}


@functools.lru_cache(maxsize=32)
@isolated_jax_config()
def _shapes(init: Callable[..., Params], *configs: TargetConfig | DrafterConfig) -> dict[str, Any]:
    """Return shapes of a model's variables, as float32. Tracing a large model takes seconds."""
    return jax.eval_shape(lambda: init(*configs))


_LEAST = Plan(max_length=2, block=2, chunk=1, dtype="float32", rings=False)


def _init_target(target: TargetConfig) -> Params:
    caches, start = target_caches(target, CacheMaker(_LEAST)), jnp.zeros((1,), jnp.int32)
    module: Any = build_target(target)
    return module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32), caches, start)


def _init_drafter(target: TargetConfig, drafter: DrafterConfig) -> Params:
    x, start = jnp.zeros((1, 1, target.hidden_size), jnp.float32), jnp.zeros((1,), jnp.int32)
    caches = drafter_caches(drafter, CacheMaker(_LEAST))
    return build_drafter(paired(target, drafter)).init(jax.random.key(0), x, caches, start)
