"""Target and drafter on a device each (`Plan.devices`): every program in two parts, joined again.

The target's device runs the same steps, but hands out the taps instead of turning them into the
drafter's context; the drafter's device follows with them. Before that it drafted: block and taps
are all that travels. Joined programs are called as others are, with `Halves` for the state; no
part waits for the host. The drafter's device holds copies of what drafters borrow of a target.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dflash_jax.compiler.plan import Plan
from dflash_jax.compiler.sharding import placed
from dflash_jax.decode.block import Params
from dflash_jax.decode.snapshot import Segment
from dflash_jax.errors import PlanError
from dflash_jax.state import DecodeState, RowRules

BORROWED = ("embed", "head", "norm")  # of the target: its table and head, and what goes with them
Call = Callable[..., Any]


class Halves(NamedTuple):
    """The state of both devices; each half has every row's position and anchor."""

    target: DecodeState
    draft: DecodeState


def halves(state: DecodeState) -> Halves:
    """A state parted by whose caches they are."""
    return Halves(dataclasses.replace(state, draft=()), dataclasses.replace(state, target=()))


def devices(plan: Plan) -> tuple[jax.Device, jax.Device]:
    """The target's and the drafter's device.

    Raises:
      PlanError: there are fewer, or they belong to several processes.
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


def place_state(plan: Plan, state: DecodeState) -> Halves:
    """The state, on its devices."""
    return Halves(*map(jax.device_put, halves(state), devices(plan)))


def place_params(plan: Plan, params: Params) -> Params:
    """Each model's parameters on its device, and beside the drafter's what it borrows."""
    here, there = devices(plan)
    return {
        "target": jax.device_put(params["target"], here),
        "drafter": jax.device_put(params["drafter"], there),
        "lent": jax.device_put(borrowed(params["target"]), there),
    }


def borrowed(target: Params) -> Params:
    """What a drafter needs of the target's parameters."""
    return {name: target[name] for name in BORROWED if name in target}


def join(
    plan: Plan, target: Mapping[str, Any], draft: Mapping[str, Any], *, between: str
) -> dict[str, Any]:
    """The programs of a plan, out of those of its two devices, by their names.

    Args:
      target: programs of the target's device; `verify` there is half of `speculative`.
      draft: `draft` for every lane, `follow_<width>`, and what changes rows without a model.
      between: the lane in which the host comes between draft and verify.
    """
    here, there = devices(plan)
    wires, found = _Wires(here, there, plan.rows), {}

    def add(name: str, call: Call, *parts: Any) -> None:
        named = [dataclasses.replace(p, name=f"{name}:{i}") for i, p in enumerate(parts)]
        joined = {"name": name, "parts": tuple(named), "call": call}
        found[name] = dataclasses.replace(parts[0], **joined)

    yours = {name: _on(there, program) for name, program in draft.items()}
    for name, program in target.items():
        mine, lane = _on(here, program), program.lanes[0] if len(program.lanes) == 1 else ""
        match step := name.removesuffix(lane):
            case "shape":
                found[name] = mine
            case "replace" | "wipe":
                add(name, wires.both, mine, yours[name])
            case "score":
                add(name, wires.score, mine)
            case "take_segment":
                add(name, wires.take, mine, yours[name])
            case "put_segment":
                add(name, wires.put, mine, yours[name])
                segment = Segment(mine.arguments[3].target, yours[name].arguments[3].draft)
                arguments = (*mine.arguments[:3], segment)
                found[name] = dataclasses.replace(found[name], arguments=arguments)
            case "verify" if lane != between:
                follow = yours[f"follow_{plan.block}"]
                add("speculative" + lane, wires.speculative, mine, yours["draft" + lane], follow)
            case _:
                width = {"prefill": plan.chunk, "plain1": 1}.get(step, plan.block)
                call = getattr(wires, {"plain1": "plain", "forced": "plain"}.get(step, step))
                add(name, call, mine, yours[f"follow_{width}"])
    if "draft" + between in yours:
        add("draft" + between, wires.draft, yours["draft" + between])
    return found


def _on(device: jax.Device, program: Any) -> Any:
    """A program all of whose arrays live on one device."""
    where = SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda _: where, program.arguments)
    return dataclasses.replace(
        program, arguments=placed(program.arguments, arguments), placement=where
    )


class _Wires:
    """How the parts of a program follow each other, and what goes from device to device."""

    def __init__(self, here: jax.Device, there: jax.Device, rows: int):
        self._here, self._there = here, there
        self._never = np.zeros((rows,), bool)
        self._rules: tuple[RowRules | None, Any] = (None, None)

    def prefill(self, target: Call, follow: Call, params: Params, state: Halves, *rest: Any) -> Any:
        """A prompt chunk; the last argument but one says which rows begin anew."""
        made = target(_own(params), state.target, *rest)
        return self._follow(follow, params, state, made, rest[-2])

    def plain(self, target: Call, follow: Call, params: Params, state: Halves, *rest: Any) -> Any:
        """A step without drafts: the target's choice, or the host's."""
        made = target(_own(params), state.target, *rest)
        return self._follow(follow, params, state, made)

    def speculative(
        self, target: Call, draft: Call, follow: Call, params: Params, state: Halves, *rest: Any
    ) -> Any:
        """Draft there, verify here, follow there."""
        state, drafted = self.draft(draft, params, state, rest[-1])
        return self.verify(target, follow, params, state, *rest[:-1], drafted, rest[-1])

    def draft(self, draft: Call, params: Params, state: Halves, rules: RowRules) -> Any:
        """The drafter's half of a speculative step."""
        if self._rules[0] is not rules:
            self._rules = (rules, jax.device_put(rules, self._there))
        half, drafted = draft(_borrowing(params), state.draft, self._rules[1])
        return Halves(state.target, half), drafted

    def verify(self, target: Call, follow: Call, params: Params, state: Halves, *rest: Any) -> Any:
        """The target's half, and what the drafter learns from it."""
        drafted = jax.device_put(rest[-2], self._here)
        made = target(_own(params), state.target, *rest[:-2], drafted, rest[-1])
        return self._follow(follow, params, state, made)

    def score(self, target: Call, params: Params, state: Halves, *rest: Any) -> Any:
        """What the target alone says of a prompt."""
        half, *made = target(_own(params), state.target, *rest)
        return Halves(half, state.draft), *made

    def both(self, target: Call, draft: Call, state: Halves, *rest: Any) -> Halves:
        """The same to both halves."""
        return Halves(target(state.target, *rest), draft(state.draft, *rest))

    def take(self, target: Call, draft: Call, state: Halves, *rest: Any) -> Segment:
        """A segment, out of both halves."""
        return Segment(target(state.target, *rest).target, draft(state.draft, *rest).draft)

    def put(
        self, target: Call, draft: Call, state: Halves, row: Any, start: Any, segment: Segment
    ) -> Halves:
        """A segment, put into both halves."""
        mine, yours = Segment(segment.target, ()), Segment((), segment.draft)
        return Halves(target(state.target, row, start, mine), draft(state.draft, row, start, yours))

    def _follow(
        self,
        follow: Call,
        params: Params,
        state: Halves,
        made: Any,
        fresh: np.ndarray | None = None,
    ) -> Any:
        """What the target's device made, once the drafter's has gone as far."""
        after = made[0]
        news = (after.draft, after.position, after.anchor)  # the taps are where caches would be
        taps, position, anchor = jax.device_put(news, self._there)
        fresh = self._never if fresh is None else fresh
        half = follow(_borrowing(params), state.draft, taps, fresh, position, anchor)
        return Halves(dataclasses.replace(after, draft=()), half), *made[1:]


def _own(params: Params) -> Params:
    return {"target": params["target"]}


def _borrowing(params: Params) -> Params:
    return {"target": params["lent"], "drafter": params["drafter"]}
