"""Several decode steps in one call of the device, without the host in between."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.graph.state import DecodeState, OutputSizes, StepOutput
from dflash_jax.graph.steps.acceptance import frozen
from dflash_jax.graph.steps.decoding import StepFn, StepResult, plain
from dflash_jax.graph.steps.inputs import DecodeInputs
from dflash_jax.graph.steps.pair import Pair, Params


def multi_step(
    step: StepFn,
    params: Params,
    state: DecodeState,
    logits_state: None,
    inputs: DecodeInputs,
    *,
    max_steps: int,
    sizes: OutputSizes,
) -> StepResult:
    """Run up to `inputs.num_steps` decode steps without the host in between.

    They end early when every row is frozen, unless the number is negative, or when numbers of any
    row are not finite.

    Args:
      sizes: sizes of the output of a step.

    Returns:
      The state and the outputs [max_steps, B, ...], those of steps that were not made all -1.
    """
    rules = inputs.rules
    num_steps = inputs.num_steps
    assert num_steps is not None
    inputs = DecodeInputs(rules)
    Carry = tuple[Int[Array, ""], Bool[Array, ""], DecodeState, Int[Array, "R B A"]]

    def cond(carry: Carry) -> Bool[Array, ""]:
        done, finite, state, _ = carry
        live = ~frozen(state.anchor, state.position, rules).all()
        return finite & (done < jnp.abs(num_steps)) & (live | (num_steps < 0))

    def body(carry: Carry) -> Carry:
        done, _, state, outputs = carry
        state, _, out = step(params, state, None, inputs)
        outputs = jax.lax.dynamic_update_slice(outputs, out.packed[None], (done, 0, 0))
        return done + 1, out.all_finite, state, outputs

    empty = jnp.full((max_steps, len(state.anchor), sizes.columns(rules)), -1, jnp.int32)
    start = jnp.int32(0), jnp.bool_(True), state, empty
    _, _, state, outputs = jax.lax.while_loop(cond, body, start)
    odds = rules.opening is not None
    return state, None, StepOutput(outputs, None, odds, sizes.drafts, sizes.top)


def plain_multi_step(
    pair: Pair,
    params: Params,
    state: DecodeState,
    logits_state: None,
    inputs: DecodeInputs,
    *,
    max_steps: int,
    sizes: OutputSizes,
) -> StepResult:
    """Run plain steps as `multi_step` does, and let the drafter observe all tokens after the last.

    So its weights are read once for all tokens. What is written for steps that a row did not make
    lies past its position.
    """
    drafter = state.drafter
    start = state.position
    options = dataclasses.replace(pair.options, keeps_taps=True)
    single = functools.partial(plain, pair.with_options(options))
    one = jax.eval_shape(single, params, state, None, DecodeInputs(inputs.rules))[0].drafter
    kept = jax.tree.map(lambda x: jnp.zeros((len(start), max_steps, *x.shape[2:]), x.dtype), one)
    state = _with(state, (jnp.int32(0), kept))
    step = functools.partial(_keeping, single)
    state, _, out = multi_step(step, params, state, None, inputs, max_steps=max_steps, sizes=sizes)
    made = state.position - start
    skipped = made if pair.skips_dead_tokens else None
    observed = pair.observe(params, drafter, state.drafter[1], start, skipped)
    drafter = pair.committed(drafter, observed, made)
    return _with(state, drafter), None, out


def _keeping(
    single: StepFn, params: Params, state: DecodeState, logits_state: None, inputs: DecodeInputs
) -> StepResult:
    """Run a step on a state with the step's number, and what was kept, in the drafter's place."""
    number, kept = state.drafter
    state, _, out = single(params, state, None, inputs)

    def put(every: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice(every, new[:, :1], (0, number, 0)[: every.ndim])

    return _with(state, (number + 1, jax.tree.map(put, kept, state.drafter))), None, out


def _with(state: DecodeState, drafter: Any) -> DecodeState:
    return dataclasses.replace(state, drafter=drafter)
