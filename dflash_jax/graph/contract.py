"""Checks modules against what `protocols.py` asks of them, before anything is compiled.

Members are looked up, and the programs that decode are evaluated abstractly, whose steps compare
the results of members in structure, shape and dtype. Modules of this package are not evaluated:
their tests do that, and tracing a large one takes seconds.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.errors import PlanError
from dflash_jax.graph.abstract import PlannedPair, by_path
from dflash_jax.graph.keys import Step, Variant
from dflash_jax.graph.programs import Program, declare
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.graph.state import described
from dflash_jax.graph.steps.pair import Pair, expect_floats

SIZES = ("vocab_size", "hidden_size", "num_layers")  # integers of a target's config
MEMBERS = {
    "target": ("config", "empty_caches", "__call__", "embed", "logits"),
    "drafter": ("taps", "empty", "observe", "propose"),
}
DECODING = (Step.PREFILL, Step.PLAIN, Step.SPECULATIVE)


def check_members(pair: Pair) -> None:
    """Check that modules have the members that a graph needs, and that taps exist.

    Raises:
      PlanError: a member is missing, or its value is not what `protocols.py` says.
    """
    _check_has(pair.target, "target")
    target = type(pair.target).__name__
    config = pair.target.config
    for name in SIZES:
        value = getattr(config, name, None)
        if type(value) is not int or value < 1:
            raise PlanError(
                f"config.{name} of {target} is {value!r}; expected a positive integer, as in"
                " dj.graph.ModelConfig"
            )
    ends = getattr(config, "eos_token_ids", ())
    if not isinstance(ends, tuple) or not all(isinstance(end, int) for end in ends):
        raise PlanError(
            f"config.eos_token_ids of {target} is {ends!r}; expected a tuple of token ids"
        )
    if pair.drafter is None:
        return
    _check_has(pair.drafter, "drafter")
    taps = pair.drafter.taps
    last = config.num_layers
    whole = isinstance(taps, tuple) and all(type(tap) is int for tap in taps)
    if not whole or not all(0 <= tap <= last for tap in taps):
        raise PlanError(
            f"taps of {type(pair.drafter).__name__} are {taps!r}; expected a tuple of integers from"
            f" 0, the input of layer 0, to {last}, the output of the last of {target}'s {last}"
            " layers"
        )


def _check_has(model: Any, role: str) -> None:
    """Check that a module is an object with the members of its role."""
    if isinstance(model, type):
        raise PlanError(f"the {role} is the class {model.__name__}; give an object of it")
    if missing := [name for name in MEMBERS[role] if getattr(model, name, None) is None]:
        raise PlanError(
            f"the {role} is of the type {type(model).__name__} without {', '.join(missing)};"
            f" expected the members {', '.join(MEMBERS[role])}, which docs/graph.md describes"
        )


@isolated_jax_config()
def check_shapes(planned: PlannedPair) -> None:
    """Check what a pair's members return under a plan, by shapes alone.

    Raises:
      PlanError: a member fails, or returns another structure, shape or dtype than a step needs.
    """
    pair = planned.pair
    plan = planned.plan
    if all(is_of_package(model) for model in (pair.target, pair.drafter)):
        return
    # No other axis has both of these sizes by chance.
    for rows in (plan.rows, plan.rows + 1):
        _check_rows(PlannedPair(pair, dataclasses.replace(plan, rows=rows, mesh=(1, 1))))
    tokens = jax.ShapeDtypeStruct((plan.rows, plan.block), jnp.int32)
    embedded = jax.eval_shape(
        lambda params, ids: pair.target_call(params, ids, method="embed"), planned.params, tokens
    )
    shape = (*tokens.shape, planned.config.hidden_size)
    expect_floats(pair.target, "embed", embedded, shape, "B, T, config.hidden_size")
    programs = declare(planned, variants=(Variant.GREEDY,), placed=False)
    try:
        for key, program in programs.items():
            if key.step in DECODING:
                _evaluate(program)
    except PlanError as error:
        if plan.kv_dtype == "auto":
            raise
        raise PlanError(
            f"with kv_dtype={plan.kv_dtype!r}, {error}; cast keys and values to the cache's dtype"
            " where they are written and back where they are read, or leave kv_dtype 'auto'"
        ) from error


def is_of_package(model: Any) -> bool:
    """Return whether a module is one of this package, or None."""
    return model is None or type(model).__module__.partition(".")[0] == "dflash_jax"


def _check_rows(planned: PlannedPair) -> None:
    """Check that the first axis of every array of a state is the row."""
    rows = planned.plan.rows
    for path, x in by_path(planned.state).items():
        if not x.shape or x.shape[0] != rows:
            role, _, place = path.partition("/")
            model = planned.pair.target if role == "target" else planned.pair.drafter
            member = "empty_caches" if role == "target" else "empty"
            raise PlanError(
                f"{type(model).__name__}.{member} returned {described(x)}"
                f"{f' at {place}' if place else ''} for {rows} rows; expected arrays whose first"
                " axis is the row: make.rows"
            )


def _evaluate(program: Program) -> None:
    """Evaluate a program by shapes; of one on two devices, its parts."""
    for part in program.parts or (program,):
        jax.eval_shape(part.function, *part.arguments)
