"""Target and drafter on a device each (`Plan.devices`): programs of two parts, called as one.

The target's part runs the same steps, but returns the taps instead of updating the drafter's
context; the drafter's part follows with them, and has drafted before. Only blocks and taps are
transferred, and no part waits for the host. The drafter's device holds copies of the target's
embedding and head.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dflash_jax.compiler.keys import ProgramKey, Step, Variant
from dflash_jax.compiler.sharding import placed
from dflash_jax.decode.inputs import DecodeInputs, UpdateDrafterInputs, VerifyInputs
from dflash_jax.decode.pair import Params
from dflash_jax.decode.rows import Segment
from dflash_jax.errors import PlanError
from dflash_jax.plan import Plan
from dflash_jax.state import DecodeState, RowRules

SHARED = ("embed", "head", "norm")  # parameters of the target that drafters use, and their scales
Call = Callable[..., Any]
Parts = tuple[Call, ...]
Programs = Mapping[ProgramKey, Any]


class TwoDeviceState(NamedTuple):
    """The state on both devices; each part has every row's position and anchor."""

    target_state: DecodeState
    drafter_state: DecodeState


def split(state: DecodeState) -> TwoDeviceState:
    """Return the state split by the model its caches belong to."""
    return TwoDeviceState(
        dataclasses.replace(state, draft=()), dataclasses.replace(state, target=())
    )


def devices(plan: Plan) -> tuple[jax.Device, jax.Device]:
    """Return the target's and the drafter's device.

    Raises:
      PlanError: there are fewer devices, or JAX runs in more than one process.
    """
    found, last = jax.devices(), max(plan.devices)
    if last >= len(found):
        raise PlanError(
            f"devices is {plan.devices}, but there are {len(found)}, counted from 0 (on a CPU,"
            " XLA_FLAGS=--xla_force_host_platform_device_count=N makes more)"
        )
    if jax.process_count() > 1:
        raise PlanError(f"devices is {plan.devices}; that needs a single process, there are more")
    return found[plan.devices[0]], found[plan.devices[1]]


def place_state(plan: Plan, state: DecodeState) -> TwoDeviceState:
    """Return the state on its devices."""
    return TwoDeviceState(*map(jax.device_put, split(state), devices(plan)))


def place_params(plan: Plan, params: Params) -> Params:
    """Return each model's parameters on its device, and copies of those the drafter shares."""
    target_device, drafter_device = devices(plan)
    return {
        "target": jax.device_put(params["target"], target_device),
        "drafter": jax.device_put(params["drafter"], drafter_device),
        "shared": jax.device_put(shared_params(params["target"]), drafter_device),
    }


def shared_params(target: Params) -> Params:
    """Return the parameters of the target that a drafter uses."""
    return {name: target[name] for name in SHARED if name in target}


def join(
    plan: Plan, target: Programs, drafter: Programs, updates: Mapping[int, Any]
) -> dict[ProgramKey, Any]:
    """Return the programs of a plan, made of those of its two devices.

    Args:
      target: programs of the target's device, with `verify` in place of `speculative`.
      drafter: `draft` in every variant, and the programs that change rows without a model.
      updates: programs that update the drafter, by the number of tokens the target was fed.
    """
    target_device, drafter_device = devices(plan)
    transfers = _Transfers(target_device, drafter_device, plan.rows)
    drafter = {key: _on(drafter_device, program) for key, program in drafter.items()}
    updates = {width: _on(drafter_device, program) for width, program in updates.items()}
    plain = plan.block if plan.exact else 1
    widths = {Step.PREFILL: plan.chunk, Step.PLAIN: plain, Step.FORCED_TOKENS: plan.block}
    segments = {
        Step.TAKE_SEGMENT: transfers.take_segment,
        Step.PUT_SEGMENT: transfers.put_segment,
    }
    joined = {}

    def add(step: Step, variant: Variant | None, call: Call, *parts: Any) -> None:
        key = ProgramKey(step, variant)
        joined[key] = dataclasses.replace(parts[0], key=key, parts=parts, call=call)

    for key, program in target.items():
        step, variant = key
        part = _on(target_device, program)
        if step == Step.SET_LOGITS_STATE:
            joined[key] = part
        elif step == Step.PROMPT_LOGPROBS:
            add(step, None, transfers.target_only, part)
        elif step in widths:
            add(step, variant, transfers.target_step, part, updates[widths[step]])
        elif step == Step.VERIFY:
            draft, update = drafter[ProgramKey(Step.DRAFT, variant)], updates[plan.block]
            if variant == Variant.CONSTRAINED:
                add(step, variant, transfers.verify, part, update)
                add(Step.DRAFT, variant, transfers.draft, draft)
            else:
                add(Step.SPECULATIVE, variant, transfers.speculative, part, draft, update)
        else:
            add(step, None, segments.get(step, transfers.change_rows), part, drafter[key])
        if step == Step.PUT_SEGMENT:
            inputs, other = part.arguments[3], drafter[key].arguments[3]
            segment = Segment(inputs.segment.target, other.segment.draft)
            arguments = (*part.arguments[:3], dataclasses.replace(inputs, segment=segment))
            joined[key] = dataclasses.replace(joined[key], arguments=arguments)
    return joined


def _on(device: jax.Device, program: Any) -> Any:
    """Return a program with all arrays on one device."""
    where = SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda _: where, program.arguments)
    return dataclasses.replace(
        program, arguments=placed(program.arguments, arguments), placement=where
    )


class _Transfers:
    """Calls of the compiled parts of programs, with the transfers between them.

    Arguments and results are those of every program, after the parts.
    """

    def __init__(self, target_device: jax.Device, drafter_device: jax.Device, rows: int):
        self._target_device, self._drafter_device = target_device, drafter_device
        self._not_fresh = np.zeros((rows,), bool)
        self._rules: tuple[RowRules | None, Any] = (None, None)

    def target_step(self, parts: Parts, params: Any, state: Any, logits: Any, inputs: Any) -> Any:
        """Run a step that drafts nothing, then update the drafter."""
        target, update = parts
        result = target(_target_params(params), state.target_state, logits, inputs)
        fresh = getattr(inputs, "fresh", self._not_fresh)
        return self._updated(update, params, state, result, fresh)

    def speculative(self, parts: Parts, params: Any, state: Any, logits: Any, inputs: Any) -> Any:
        """Draft on the drafter's device, verify on the target's, then update the drafter."""
        target, draft, update = parts
        state, _, drafted = self.draft((draft,), params, state, None, inputs)
        to_verify = VerifyInputs(drafted, inputs.rules, inputs.masks)
        return self.verify((target, update), params, state, logits, to_verify)

    def draft(self, parts: Parts, params: Any, state: Any, logits: None, inputs: Any) -> Any:
        """Run the drafting half of a speculative step."""
        if self._rules[0] is not inputs.rules:
            self._rules = (inputs.rules, jax.device_put(inputs.rules, self._drafter_device))
        given = DecodeInputs(self._rules[1])
        after, _, drafted = parts[0](_drafter_params(params), state.drafter_state, None, given)
        return TwoDeviceState(state.target_state, after), None, drafted

    def verify(self, parts: Parts, params: Any, state: Any, logits: Any, inputs: Any) -> Any:
        """Run the verifying half of a speculative step, then update the drafter."""
        target, update = parts
        draft = jax.device_put(inputs.draft, self._target_device)
        inputs = dataclasses.replace(inputs, draft=draft)
        result = target(_target_params(params), state.target_state, logits, inputs)
        return self._updated(update, params, state, result, self._not_fresh)

    def target_only(self, parts: Parts, params: Any, state: Any, logits: Any, inputs: Any) -> Any:
        """Run a program that concerns the target only."""
        after, *rest = parts[0](_target_params(params), state.target_state, logits, inputs)
        return TwoDeviceState(after, state.drafter_state), *rest

    def change_rows(self, parts: Parts, params: Any, state: Any, logits: Any, inputs: Any) -> Any:
        """Change the rows of both models."""
        return self._changed(parts, state, (inputs, inputs))

    def take_segment(self, parts: Parts, params: Any, state: Any, logits: Any, inputs: Any) -> Any:
        """Return a segment of both models."""
        pairs = zip(parts, state, strict=True)
        target, drafter = (part(None, own, None, inputs)[-1] for part, own in pairs)
        return None, None, Segment(target.target, drafter.draft)

    def put_segment(self, parts: Parts, params: Any, state: Any, logits: Any, inputs: Any) -> Any:
        """Put a segment into the rows of both models."""
        segments = Segment(inputs.segment.target, ()), Segment((), inputs.segment.draft)
        given = tuple(dataclasses.replace(inputs, segment=segment) for segment in segments)
        return self._changed(parts, state, given)

    def _changed(self, parts: Parts, state: Any, inputs: tuple[Any, Any]) -> Any:
        calls = zip(parts, state, inputs, strict=True)
        return TwoDeviceState(*(part(None, own, None, x)[0] for part, own, x in calls)), None, None

    def _updated(self, update: Call, params: Any, state: Any, result: Any, fresh: Any) -> Any:
        """Return the result of a target's step after updating the drafter with its taps."""
        after, *rest = result  # its `draft` are the taps
        moved = jax.device_put((after.draft, after.position, after.anchor), self._drafter_device)
        taps, position, anchor = moved
        inputs = UpdateDrafterInputs(taps, fresh, position, anchor)
        drafter_state, *_ = update(_drafter_params(params), state.drafter_state, None, inputs)
        return TwoDeviceState(dataclasses.replace(after, draft=()), drafter_state), *rest


def _target_params(params: Params) -> Params:
    return {"target": params["target"]}


def _drafter_params(params: Params) -> Params:
    return {"target": params["shared"], "drafter": params["drafter"]}
