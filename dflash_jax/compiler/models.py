"""Modules, parameters and state of a target and its drafter, most of them as shapes only."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.compiler.settings import isolated_jax_config
from dflash_jax.config import (
    ALWAYS_FLOAT32,
    AUTO,
    LATE,
    DrafterConfig,
    TargetConfig,
    paired,
)
from dflash_jax.decode.pair import Pair, Params
from dflash_jax.models import build_drafter, build_target, drafter_caches, target_caches
from dflash_jax.nn.layers import MODEL_AXES, ModelAxis
from dflash_jax.plan import Plan
from dflash_jax.quant.layouts import Spec, is_matrix, spec
from dflash_jax.quant.products import abstract, abstract_layout
from dflash_jax.state import (
    CHOICES,
    DecodeState,
    LayerCache,
    RecurrentCache,
    RowRules,
    empty_cache,
    empty_recurrent,
)


def build_pair(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    exact: bool = True,
    taps_at: str = AUTO,
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
        return empty_cache(
            plan.rows,
            kv_heads,
            ring or plan.slots,
            head_dim,
            dtype=jnp.dtype(plan.dtype if plan.kv_dtype == "auto" else plan.kv_dtype),
            ring=ring is not None,
            kernel=plan.kernels == "pallas",
        )

    def recurrent(self, state: tuple[int, int, int], inputs: tuple[int, int]) -> RecurrentCache:
        """Return the cache of a recurrent layer: state [N, P, Q] and convolution inputs [W, C]."""
        return empty_recurrent(self.plan.rows, state, inputs, dtype=jnp.dtype(self.plan.dtype))


def empty_state(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None) -> DecodeState:
    """Return a state with every row at position 0."""
    return DecodeState(
        target=target_caches(target, CacheMaker(plan)),
        draft=drafter_caches(drafter, CacheMaker(plan)) if drafter else (),
        position=jnp.zeros((plan.rows,), jnp.int32),
        anchor=jnp.zeros((plan.rows,), jnp.int32),
    )


def idle_rules(plan: Plan) -> RowRules:
    """Return rules under which every row is frozen."""
    b = plan.rows
    return RowRules(
        stop_ids=jnp.full((b, plan.stop_slots), -1, jnp.int32),
        limit=jnp.zeros((b,), jnp.int32),
        max_drafts=jnp.full((b,), plan.block - 1, jnp.int32),
        temperature=jnp.zeros((b,), jnp.float32),
        top_k=jnp.zeros((b,), jnp.int32),
        top_p=jnp.ones((b,), jnp.float32),
        min_p=jnp.zeros((b,), jnp.float32),
        seed=jnp.zeros((b,), jnp.uint32),
        choices=jnp.full((b, CHOICES), -1, jnp.int32),
        opening=jnp.full((b,), -1, jnp.int32) if plan.call_odds else None,
    )


def abstract_params(
    plan: Plan, target: TargetConfig, drafter: DrafterConfig | None
) -> dict[str, Any]:
    """Return shapes and dtypes of all parameters; no memory is used.

    Token ids stay integers, and parameters in `ALWAYS_FLOAT32` stay float32.
    """
    dtype, kernel = jnp.dtype(plan.dtype), plan.kernels != "xla"
    specs = weight_specs(plan, target, drafter)

    def planned(path: Any, x: jax.ShapeDtypeStruct) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in specs:
            return abstract(x.shape, specs[name], dtype, kernel=kernel)
        kept = jnp.issubdtype(x.dtype, jnp.integer) or path[-1].key in ALWAYS_FLOAT32
        stored = jax.ShapeDtypeStruct(x.shape, x.dtype if kept else dtype)
        return abstract_layout(stored, plan.weight_layout) if is_matrix(path[-1].key) else stored

    return jax.tree_util.tree_map_with_path(planned, _shapes(target, drafter))


def weight_specs(
    plan: Plan, target: TargetConfig, drafter: DrafterConfig | None
) -> dict[str, Spec]:
    """Return how each packed parameter is packed, by its path with the role in front."""
    if plan.weights == "packed":
        return dict(plan.stored)
    if plan.weights == "float":
        return {}
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(_shapes(target, drafter)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if chosen := spec(plan.weights, name, leaf.shape):
            found[name] = chosen
    return found


def init_params(target: TargetConfig, drafter: DrafterConfig | None, *, seed: int) -> Params:
    """Return random float32 parameters, for tests, benchmarks and training."""
    keys = jax.random.split(jax.random.key(seed))
    params = {"target": _init_target(target, keys[0])["params"]}
    if drafter is not None:
        params["drafter"] = _init_drafter(target, drafter, keys[1])["params"]
    return params


def model_axes(target: TargetConfig, drafter: DrafterConfig | None) -> dict[str, int]:
    """Return the axis of each weight that a mesh may split, by path with the role."""
    found = {role: tree.get(MODEL_AXES, {}) for role, tree in _variables(target, drafter).items()}
    leaves = jax.tree_util.tree_leaves_with_path(found, is_leaf=lambda x: isinstance(x, ModelAxis))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.axis for path, leaf in leaves
    }


def _shapes(target: TargetConfig, drafter: DrafterConfig | None) -> dict[str, Any]:
    return {role: tree["params"] for role, tree in _variables(target, drafter).items()}


def _variables(target: TargetConfig, drafter: DrafterConfig | None) -> dict[str, Any]:
    found = {"target": _target_shapes(target)}
    return found | ({"drafter": _drafter_shapes(target, drafter)} if drafter else {})


@functools.lru_cache(maxsize=16)
@isolated_jax_config()
def _target_shapes(target: TargetConfig) -> dict[str, Any]:
    """Return shapes of a target's variables, as float32. Tracing a large model takes seconds."""
    return jax.eval_shape(lambda: _init_target(target, jax.random.key(0)))


@functools.lru_cache(maxsize=16)
@isolated_jax_config()
def _drafter_shapes(target: TargetConfig, drafter: DrafterConfig) -> dict[str, Any]:
    return jax.eval_shape(lambda: _init_drafter(target, drafter, jax.random.key(0)))


_LEAST = Plan(max_length=2, block=2, chunk=1, dtype="float32", rings=False)


def _init_target(target: TargetConfig, key: jax.Array) -> Params:
    caches, start = target_caches(target, CacheMaker(_LEAST)), jnp.zeros((1,), jnp.int32)
    module: Any = build_target(target)
    return module.init(key, jnp.zeros((1, 1), jnp.int32), caches, start)


def _init_drafter(target: TargetConfig, drafter: DrafterConfig, key: jax.Array) -> Params:
    x, start = jnp.zeros((1, 1, target.hidden_size), jnp.float32), jnp.zeros((1,), jnp.int32)
    caches = drafter_caches(drafter, CacheMaker(_LEAST))
    return build_drafter(paired(target, drafter)).init(key, x, caches, start)
