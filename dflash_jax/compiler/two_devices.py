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
from dflash_jax.decode.inputs import (
    DecodeInputs,
    PutSegmentInputs,
    UpdateDrafterInputs,
    VerifyInputs,
)
from dflash_jax.decode.pair import Params
from dflash_jax.decode.rows import Segment
from dflash_jax.errors import PlanError
from dflash_jax.plan import Plan
from dflash_jax.state import DecodeState, RowRules

SHARED = ("embed", "head", "norm")  # parameters of the target that drafters use, and their scales
Call = Callable[..., Any]
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
      PlanError: there are fewer devices, or they belong to several processes.
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
            add(step, None, transfers.prompt_logprobs, part)
        elif step in widths:
            add(step, variant, transfers.target_step, part, updates[widths[step]])
        elif step == Step.VERIFY and variant == Variant.CONSTRAINED:
            draft_key = ProgramKey(Step.DRAFT, variant)
            add(step, variant, transfers.verify, part, updates[plan.block])
            add(Step.DRAFT, variant, transfers.draft, drafter[draft_key])
        elif step == Step.VERIFY:
            draft = drafter[ProgramKey(Step.DRAFT, variant)]
            add(Step.SPECULATIVE, variant, transfers.speculative, part, draft, updates[plan.block])
        elif step == Step.TAKE_SEGMENT:
            add(step, None, transfers.take_segment, part, drafter[key])
        elif step == Step.PUT_SEGMENT:
            inputs, other = part.arguments[3], drafter[key].arguments[3]
            segment = Segment(inputs.segment.target, other.segment.draft)
            add(step, None, transfers.put_segment, part, drafter[key])
            arguments = (*part.arguments[:3], dataclasses.replace(inputs, segment=segment))
            joined[key] = dataclasses.replace(joined[key], arguments=arguments)
        else:
            add(step, None, transfers.change_rows, part, drafter[key])
    return joined


def _on(device: jax.Device, program: Any) -> Any:
    """Return a program with all arrays on one device."""
    where = SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda _: where, program.arguments)
    return dataclasses.replace(
        program, arguments=placed(program.arguments, arguments), placement=where
    )


class _Transfers:
    """Calls of the parts of a program, with the transfers between them."""

    def __init__(self, target_device: jax.Device, drafter_device: jax.Device, rows: int):
        self._target_device, self._drafter_device = target_device, drafter_device
        self._not_fresh = np.zeros((rows,), bool)
        self._rules: tuple[RowRules | None, Any] = (None, None)

    def target_step(
        self, target: Call, update: Call, params: Params, state: Any, logits_state: Any, inputs: Any
    ) -> Any:
        """Run a step that drafts nothing, then update the drafter."""
        result = target(_target_params(params), state.target_state, logits_state, inputs)
        fresh = getattr(inputs, "fresh", self._not_fresh)
        return self._updated(update, params, state, result, fresh)

    def speculative(
        self, target: Call, draft: Call, update: Call, params: Params, state: Any, *rest: Any
    ) -> Any:
        """Draft on the drafter's device, verify on the target's, then update the drafter."""
        logits_state, inputs = rest
        state, _, drafted = self.draft(draft, params, state, None, inputs)
        to_verify = VerifyInputs(drafted, inputs.rules, inputs.masks)
        return self.verify(target, update, params, state, logits_state, to_verify)

    def draft(
        self, draft: Call, params: Params, state: Any, logits_state: None, inputs: DecodeInputs
    ) -> Any:
        """Run the drafting half of a speculative step."""
        rules = inputs.rules
        if self._rules[0] is not rules:
            self._rules = (rules, jax.device_put(rules, self._drafter_device))
        inputs = DecodeInputs(self._rules[1])
        drafter_state, _, drafted = draft(
            _drafter_params(params), state.drafter_state, None, inputs
        )
        return TwoDeviceState(state.target_state, drafter_state), None, drafted

    def verify(self, target: Call, update: Call, params: Params, state: Any, *rest: Any) -> Any:
        """Run the verifying half of a speculative step, then update the drafter."""
        logits_state, inputs = rest
        inputs = dataclasses.replace(
            inputs, draft=jax.device_put(inputs.draft, self._target_device)
        )
        result = target(_target_params(params), state.target_state, logits_state, inputs)
        return self._updated(update, params, state, result, self._not_fresh)

    def prompt_logprobs(self, target: Call, params: Params, state: Any, *rest: Any) -> Any:
        """Run the target only."""
        target_state, *result = target(_target_params(params), state.target_state, *rest)
        return TwoDeviceState(target_state, state.drafter_state), *result

    def change_rows(
        self, target: Call, drafter: Call, params: None, state: Any, logits_state: None, inputs: Any
    ) -> Any:
        """Change the rows of both models."""
        return self._changed(target, drafter, state, inputs, inputs)

    def take_segment(
        self, target: Call, drafter: Call, params: None, state: Any, logits_state: None, inputs: Any
    ) -> Any:
        """Return a segment of both models."""
        _, _, first = target(None, state.target_state, None, inputs)
        _, _, second = drafter(None, state.drafter_state, None, inputs)
        return None, None, Segment(first.target, second.draft)

    def put_segment(
        self,
        target: Call,
        drafter: Call,
        params: None,
        state: Any,
        logits_state: None,
        inputs: PutSegmentInputs,
    ) -> Any:
        """Put a segment into the rows of both models."""
        own = dataclasses.replace(inputs, segment=Segment(inputs.segment.target, ()))
        other = dataclasses.replace(inputs, segment=Segment((), inputs.segment.draft))
        return self._changed(target, drafter, state, own, other)

    def _changed(self, target: Call, drafter: Call, state: Any, own: Any, other: Any) -> Any:
        target_state, *_ = target(None, state.target_state, None, own)
        drafter_state, *_ = drafter(None, state.drafter_state, None, other)
        return TwoDeviceState(target_state, drafter_state), None, None

    def _updated(
        self, update: Call, params: Params, state: Any, result: Any, fresh: np.ndarray
    ) -> Any:
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
