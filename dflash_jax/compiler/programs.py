"""Which programs a plan needs: name, pure function, abstract arguments, what is donated."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.compiler.plan import Plan
from dflash_jax.config import AUTO, LATE, DrafterConfig, TargetConfig, paired
from dflash_jax.decode import steps
from dflash_jax.decode.steps import Pair, Params
from dflash_jax.models import build_drafter, build_target, drafter_caches, target_caches
from dflash_jax.state import DecodeState, RowRules


@dataclasses.dataclass(frozen=True)
class Program:
    """A pure function with everything that is needed to compile it."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # trees of ShapeDtypeStruct
    donated: tuple[int, ...] = ()


def build_pair(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    exact: bool = True,
    taps_at: str = AUTO,
) -> Pair:
    """The modules of both configs; what the drafter's leaves open is the target's."""
    drafting = build_drafter(paired(target, drafter)) if drafter else None
    return Pair(build_target(target), drafting, exact, LATE if taps_at == AUTO else taps_at)


def empty_state(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None) -> DecodeState:
    """A state in which every row stands at position 0."""

    return DecodeState(
        target=target_caches(target, plan.cache),
        draft=drafter_caches(drafter, plan.cache) if drafter else (),
        position=jnp.zeros((plan.rows,), jnp.int32),
        anchor=jnp.zeros((plan.rows,), jnp.int32),
    )


def abstract_params(
    plan: Plan, target: TargetConfig, drafter: DrafterConfig | None
) -> dict[str, Any]:
    """Shapes and dtypes of all parameters; no memory is used. Token ids stay integers."""

    def planned(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        whole = jnp.issubdtype(x.dtype, jnp.integer)
        return jax.ShapeDtypeStruct(x.shape, x.dtype if whole else jnp.dtype(plan.dtype))

    return jax.tree.map(planned, _shapes(target, drafter))


@functools.lru_cache(maxsize=16)
def _shapes(target: TargetConfig, drafter: DrafterConfig | None) -> dict[str, Any]:
    """Shapes of all parameters, weights as float32; tracing a large model takes seconds."""
    return jax.eval_shape(lambda: init_params(target, drafter, seed=0))


def init_params(target: TargetConfig, drafter: DrafterConfig | None, *, seed: int) -> Params:
    """Random float32 parameters, for tests, benchmarks and training."""
    pair = build_pair(target, drafter)
    plan = Plan(max_length=2, block=2, chunk=1, dtype="float32", rings=False)
    state = empty_state(plan, target, drafter)
    keys = jax.random.split(jax.random.key(seed))
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = {"target": pair.target.init(keys[0], tokens, state.target, state.position)["params"]}
    if pair.drafter is not None:
        x = jnp.zeros((1, 1, target.hidden_size), jnp.float32)
        params["drafter"] = pair.drafter.init(keys[1], x, state.draft, state.position)["params"]
    return params


def idle_rules(plan: Plan) -> RowRules:
    """Rules under which every row is frozen."""
    b = plan.rows
    return RowRules(
        stop_ids=jnp.full((b, plan.stop_slots), -1, jnp.int32),
        limit=jnp.zeros((b,), jnp.int32),
        temperature=jnp.zeros((b,), jnp.float32),
        top_k=jnp.zeros((b,), jnp.int32),
        top_p=jnp.ones((b,), jnp.float32),
        seed=jnp.zeros((b,), jnp.uint32),
    )


def declare(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None) -> dict[str, Program]:
    """Every program of a resolved plan, by name. The state is donated to each."""
    pair = build_pair(target, drafter, exact=plan.exact, taps_at=plan.taps_at)
    params = abstract_params(plan, target, drafter)
    state = jax.eval_shape(lambda: empty_state(plan, target, drafter))
    rules = jax.eval_shape(lambda: idle_rules(plan))
    count, flag = rules.limit, jax.ShapeDtypeStruct((plan.rows,), jnp.bool_)

    def tokens(width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((plan.rows, width), jnp.int32)

    def program(name: str, step: Callable[..., Any], *rest: Any, **static: Any) -> Program:
        return Program(name, functools.partial(step, pair, **static), (params, state, *rest), (1,))

    width = plan.block if plan.exact else 1
    plain = "plain" if plan.exact else "plain1"
    programs = [
        program("forced", steps.forced, tokens(plan.block), count, count),
        Program("wipe", steps.wipe, (state, flag), (0,)),
    ]
    for suffix, sampled in (("", False), ("_sampled", True)):
        chunk = tokens(plan.chunk)
        programs += [
            program("prefill" + suffix, steps.prefill, chunk, count, flag, rules, sampled=sampled),
            program(plain + suffix, steps.plain, rules, width=width, sampled=sampled),
        ]
        if drafter is not None:
            static = {"width": plan.block, "min_survival": plan.min_survival}
            programs.append(
                program("speculative" + suffix, steps.speculative, rules, sampled=sampled, **static)
            )
    return {p.name: p for p in programs}
