"""Target and drafter on a device each (`Plan.devices`): programs of two parts, called as one.

The target's part runs the same steps, but returns the taps instead of updating the drafter's
context; the drafter's part follows with them, and has drafted before. Only blocks and taps are
transferred, and no part waits for the host. The drafter's device holds copies of the target's
embedding and head.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dflash_jax.errors import PlanError
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.graph.state import DecodeState, RowRules
from dflash_jax.graph.steps.inputs import DecodeInputs, UpdateDrafterInputs
from dflash_jax.graph.steps.pair import Params
from dflash_jax.graph.steps.rows import Segment
from dflash_jax.plan import ResolvedPlan

Call = Callable[..., Any]
Parts = tuple[Call, ...]


class TwoDeviceState(NamedTuple):
    """The state on both devices; each part has every row's position and anchor."""

    target_state: DecodeState
    drafter_state: DecodeState


def split(state: DecodeState) -> TwoDeviceState:
    """Return the state split by the model its caches belong to."""
    target = dataclasses.replace(state, drafter=())
    drafter = dataclasses.replace(state, target=())
    return TwoDeviceState(target, drafter)


def devices(plan: ResolvedPlan) -> tuple[jax.Device, jax.Device]:
    """Return the target's and the drafter's device.

    Raises:
      PlanError: there are fewer devices, or JAX runs in more than one process.
    """
    visible = jax.devices()
    last = max(plan.devices)
    if last >= len(visible):
        raise PlanError(
            f"devices is {plan.devices}, but there are {len(visible)}, counted from 0 (on a CPU,"
            " XLA_FLAGS=--xla_force_host_platform_device_count=N makes more)"
        )
    if jax.process_count() > 1:
        raise PlanError(f"devices is {plan.devices}; that needs a single process, there are more")
    return visible[plan.devices[0]], visible[plan.devices[1]]


def place_state(plan: ResolvedPlan, state: DecodeState) -> TwoDeviceState:
    """Return the state on its devices."""
    return TwoDeviceState(*map(jax.device_put, split(state), devices(plan)))


def shared_module(target: Any) -> tuple[Any, tuple[str, ...] | None]:
    """Return the module with a target's embedding and head, and its top parameters' names.

    It is the target itself, with all parameters, unless the target has `shared_layers`.
    """
    return target.shared_layers() if hasattr(target, "shared_layers") else (target, None)


def place_params(plan: ResolvedPlan, params: Params, target: Any) -> Params:
    """Return each model's parameters on its device, and copies of those the drafter shares."""
    target, drafter = map(jax.device_put, split_params(params, target), devices(plan))
    return {**target, "drafter": drafter["drafter"], "shared": drafter["target"]}


def split_params(params: Params, target: Any = None) -> tuple[Params, Params]:
    """Return the parameters of each device.

    Args:
      params: a tree that `place_params` made, or will make of the given target.
    """
    own = params["target"]
    shared = params.get("shared")
    if shared is None:
        names = shared_module(target)[1]
        shared = own if names is None else {name: own[name] for name in names if name in own}
    return {"target": own}, {"target": shared, "drafter": params["drafter"]}


def join(
    plan: ResolvedPlan, target: Iterable[Any], drafter: Iterable[Any], updates: Mapping[int, Any]
) -> dict[ProgramKey, Any]:
    """Return the programs of a plan, made of those of its two devices.

    Args:
      target: programs of the target's device, with `verify` in place of `speculative`.
      drafter: `draft` in every variant, and the programs that change rows without a model.
      updates: programs that update the drafter, by the number of tokens the target was fed.
    """
    target_device, drafter_device = devices(plan)
    transfers = _Transfers(target_device, drafter_device, plan.rows)
    drafts = {program.key: _on(drafter_device, program) for program in drafter}
    updates = {width: _on(drafter_device, program) for width, program in updates.items()}
    fed = {Step.PREFILL: plan.chunk, Step.PLAIN: plan.plain_width, Step.FORCED_TOKENS: plan.block}
    joined = {}

    def add(key: ProgramKey, call: Call, *parts: Any) -> None:
        joined[key] = dataclasses.replace(parts[0], key=key, parts=parts, call=call)

    for program in target:
        step, variant = key = program.key
        part = _on(target_device, program)
        if step == Step.SET_LOGITS_STATE:
            joined[key] = part
        elif step == Step.PROMPT_LOGPROBS:
            add(key, transfers.target_only, part)
        elif step in fed:
            add(key, transfers.target_step, part, updates[fed[step]])
        elif step == Step.VERIFY:
            drafting = ProgramKey(Step.DRAFT, variant)
            update = updates[plan.block]
            if variant == Variant.CONSTRAINED:
                add(key, transfers.verify, part, update)
                add(drafting, transfers.draft, drafts[drafting])
            else:
                speculative = ProgramKey(Step.SPECULATIVE, variant)
                add(speculative, transfers.speculative, part, drafts[drafting], update)
        else:
            add(key, transfers.rows, part, drafts[key])
    if put := joined.get(ProgramKey(Step.PUT_SEGMENT)):
        inputs, other = (part.arguments[3] for part in put.parts)
        segment = Segment(inputs.segment.target, other.segment.drafter)
        arguments = (*put.arguments[:3], dataclasses.replace(inputs, segment=segment))
        joined[put.key] = dataclasses.replace(put, arguments=arguments)
    return joined


def placed(shapes: Any, shardings: Any) -> Any:
    """Return shapes with the sharding of their arrays."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings
    )


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
        self._target_device = target_device
        self._drafter_device = drafter_device
        self._no_rows = np.zeros((rows,), bool)
        self._rules: tuple[RowRules | None, Any] = (None, None)

    def target_step(self, parts: Parts, params: Any, state: Any, logits: Any, inputs: Any) -> Any:
        """Run a step of the target, then update the drafter with its taps."""
        target, update = parts
        after, *rest = target(split_params(params)[0], state.target_state, logits, inputs)
        moved = jax.device_put((after.drafter, after.position, after.anchor), self._drafter_device)
        observed, position, anchor = moved  # the target's part returns what the drafter observes
        fresh = getattr(inputs, "fresh", self._no_rows)
        forced = getattr(inputs, "forced", self._no_rows)
        observation = UpdateDrafterInputs(observed, fresh, forced, position, anchor)
        drafter_state, *_ = update(split_params(params)[1], state.drafter_state, None, observation)
        return TwoDeviceState(dataclasses.replace(after, drafter=()), drafter_state), *rest

    def speculative(self, parts: Parts, params: Any, state: Any, logits: Any, inputs: Any) -> Any:
        """Draft on the drafter's device, then verify on the target's."""
        target, draft, update = parts
        state, _, drafted = self.draft((draft,), params, state, None, inputs)
        inputs = dataclasses.replace(inputs, draft=drafted)
        return self.verify((target, update), params, state, logits, inputs)

    def draft(self, parts: Parts, params: Any, state: Any, logits: None, inputs: Any) -> Any:
        """Run the drafting half of a speculative step."""
        if self._rules[0] is not inputs.rules:
            self._rules = (inputs.rules, jax.device_put(inputs.rules, self._drafter_device))
        decode_inputs = DecodeInputs(self._rules[1])
        after, _, drafted = parts[0](
            split_params(params)[1], state.drafter_state, None, decode_inputs
        )
        return TwoDeviceState(state.target_state, after), None, drafted

    def verify(self, parts: Parts, params: Any, state: Any, logits: Any, inputs: Any) -> Any:
        """Run the verifying half of a speculative step."""
        draft = jax.device_put(inputs.draft, self._target_device)
        inputs = dataclasses.replace(inputs, draft=draft)
        return self.target_step(parts, params, state, logits, inputs)

    def target_only(self, parts: Parts, params: Any, state: Any, logits: Any, inputs: Any) -> Any:
        """Run a program that concerns the target only."""
        after, *rest = parts[0](split_params(params)[0], state.target_state, logits, inputs)
        return TwoDeviceState(after, state.drafter_state), *rest

    def rows(self, parts: Parts, params: Any, state: Any, logits: Any, inputs: Any) -> Any:
        """Change the rows of both models, or take a segment of both; each has its part of one."""
        part_inputs = [inputs, inputs]
        if segment := getattr(inputs, "segment", None):
            segments = Segment(segment.target, ()), Segment((), segment.drafter)
            part_inputs = [dataclasses.replace(inputs, segment=own) for own in segments]
        calls = zip(parts, state, part_inputs, strict=True)
        target, drafter = (part(None, own, None, x) for part, own, x in calls)
        if taken := target[-1]:
            return None, None, Segment(taken.target, drafter[-1].drafter)
        return TwoDeviceState(target[0], drafter[0]), None, None
