"""Complete a plan and check it against models and memory.

A plan may leave fields open. `AUTOMATIC` has the function that chooses each of them, in order.
`_problems` are the reasons why a completed plan cannot be used.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dflash_jax.config.rope import BY_LENGTH
from dflash_jax.device import default_device, free_memory
from dflash_jax.errors import PlanError
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.memory import Budget, budget, gibi
from dflash_jax.graph.protocols import ModelConfig
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.kernels.caches import has_caches
from dflash_jax.kernels.native.build import library
from dflash_jax.plan import LEAST, Plan, ResolvedPlan
from dflash_jax.quant.layouts import STACK

DEFAULT_BLOCK = 8  # where a drafter advises none
CPU_STEPS_PER_CALL = 4  # dispatching a call costs about a millisecond there


class Machine(NamedTuple):
    """The device that a plan is made for.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      memory: free bytes of device memory, for weights, state and temporaries.
    """

    platform: str
    memory: int

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a CPU."""
        return self.platform == "cpu"


def resolve(plan: Plan, pair: Pair, *, platform: str, memory: int) -> ResolvedPlan:
    """Return the plan with every automatic choice made, checked against models and memory.

    Args:
      platform: "cpu", "gpu" or "tpu".
      memory: free bytes of device memory, for weights, state and temporaries.

    Raises:
      PlanError: the plan does not fit the models or the memory.
    """
    resolved = complete(plan, pair, Machine(platform, memory))
    for problem in _problems(resolved, pair, platform):
        raise PlanError(problem)
    if resolved.two_devices:
        pair = dataclasses.replace(pair, drafter=None)  # the models of the target's device
    need = budget(PlannedPair(pair, resolved))
    if need.total > resolved.memory_limit:
        raise PlanError(_does_not_fit(resolved, pair, need))
    return resolved


def resolve_here(plan: Plan, pair: Pair) -> ResolvedPlan:
    """Return the plan, completed and checked for the default device.

    Raises:
      PlanError: as for `resolve`, or JAX finds no device.
    """
    device = default_device()
    return resolve(plan, pair, platform=device.platform, memory=free_memory(device))


def usable_stored(plan: Plan, pair: Pair, machine: Machine) -> tuple[tuple[str, Any], ...]:
    """Return the weights that stay as the file packs them.

    Only native kernels multiply packed stacks of experts, and a plan that chose floats has none.
    """
    if plan.weights == "auto" and not _multiplies_packed(plan, machine):
        return ()
    native = machine.is_cpu and plan.kernels in ("auto", "native") and bool(library())
    if not plan.stored or (native and _leaves_native(plan)):
        return plan.stored
    forms = PlannedPair(pair, LEAST).forms
    return tuple((path, how) for path, how in plan.stored if forms.get(path) != STACK)


def default_weights(plan: Plan, pair: Pair, machine: Machine) -> str:
    """Return "packed" where kernels multiply weights as the file packs them, else "float"."""
    return "packed" if plan.stored else "float"


def default_max_length(plan: Plan, pair: Pair, machine: Machine) -> int:
    """Return the target's own number of positions, at most 1024 on a CPU and 8192 elsewhere."""
    return min(max_length_of(pair.target.config), 1024 if machine.is_cpu else 8192)


def default_block(plan: Plan, pair: Pair, machine: Machine) -> int:
    """Return the block that the drafter advises, or `DEFAULT_BLOCK`."""
    return getattr(pair.drafter, "block", None) or DEFAULT_BLOCK


def default_chunk(plan: Plan, pair: Pair, machine: Machine) -> int:
    """Return 64 tokens on a CPU and 256 elsewhere."""
    return 64 if machine.is_cpu else 256


def default_steps_per_call(plan: Plan, pair: Pair, machine: Machine) -> int:
    """Return `CPU_STEPS_PER_CALL` on one CPU device, else 1."""
    return CPU_STEPS_PER_CALL if machine.is_cpu and on_one_device(plan) else 1


def default_dtype(plan: Plan, pair: Pair, machine: Machine) -> str:
    """Return float32 on a CPU and bfloat16 elsewhere."""
    return "float32" if machine.is_cpu else "bfloat16"


def default_memory_limit(plan: Plan, pair: Pair, machine: Machine) -> int:
    """Return the free memory of the device."""
    return machine.memory


def default_kernels(plan: Plan, pair: Pair, machine: Machine) -> str:
    """Return native kernels on one CPU device that has them; else modules choose ("auto")."""
    wanted = machine.is_cpu and _leaves_native(plan)
    return "native" if wanted and library() else "auto"


def default_activations(plan: Plan, pair: Pair, machine: Machine) -> str:
    """Return int8 where native kernels multiply quantised weights, else float."""
    return "int8" if plan.kernels == "native" and plan.weights != "float" else "float"


def default_plain_width(plan: Plan, pair: Pair, machine: Machine) -> int:
    """Return one token, or the block where an exact plan's bits depend on the width of calls."""
    depends = plan.exact and not is_width_invariant(plan, pair)
    return plan.block if depends else 1


Choice = Callable[[Plan, Pair, Machine], Any]

# Fields that a plan may leave open, in the order in which they are chosen: each function sees the
# choices above it.
AUTOMATIC: Sequence[tuple[str, Choice]] = (
    ("weights", default_weights),  # follows what is stored
    ("max_length", default_max_length),
    ("block", default_block),
    ("chunk", default_chunk),
    ("steps_per_call", default_steps_per_call),
    ("dtype", default_dtype),
    ("memory_limit", default_memory_limit),
    ("kernels", default_kernels),  # follows weights
    ("activations", default_activations),  # follows kernels and weights
    ("plain_width", default_plain_width),  # follows kernels and block
)


def complete(plan: Plan, pair: Pair, machine: Machine) -> ResolvedPlan:
    """Return the plan with every open field chosen; nothing is checked."""
    plan = dataclasses.replace(plan, stored=usable_stored(plan, pair, machine))
    for name, choose in AUTOMATIC:
        if getattr(plan, name) in (0, "auto"):
            plan = dataclasses.replace(plan, **{name: choose(plan, pair, machine)})
    return ResolvedPlan(**{name: getattr(plan, name) for name in Plan.fields()})


def on_one_device(plan: Plan) -> bool:
    """Return whether target and drafter run on one device."""
    return not plan.two_devices and plan.mesh == (1, 1)


def is_width_invariant(plan: Plan, pair: Pair) -> bool:
    """Return whether a token has the same bits in calls of any width (`Target.width_invariant`)."""
    return plan.kernels == "native" and getattr(pair.target, "width_invariant", False)


def max_length_of(target: Any) -> int:
    """Return the number of positions that a target was made for.

    Args:
      target: its config.
    """
    return getattr(target, "max_length", ModelConfig.max_length)


def wide_block(block: int, trained: int | None) -> str | None:
    """Return a warning about a block that is wider than the drafter's own, or None.

    Such a plan is valid and its output is the same. With the shipped pair, the second draft past
    the trained block is accepted in 6 of 100 rounds, the fourth in none.

    Args:
      trained: `Drafter.trained_block`, if there is a drafter that has it.
    """
    if trained is None or block <= trained:
        return None
    return (
        f"block {block} is wider than the {trained} the drafter was trained for: drafts past that"
        f" are hardly ever accepted and cost time; give at most {trained}, or 0 for its own size"
    )


def _problems(plan: ResolvedPlan, pair: Pair, platform: str) -> Iterator[str]:
    """Yield the reasons why a completed plan cannot be used with these models, or here."""
    yield from _target_problems(plan, pair)
    yield from _drafter_problems(plan, pair)
    yield from _width_problems(plan, pair)
    yield from _cache_problems(plan, pair)
    yield from _weight_problems(plan)
    yield from _kernel_problems(plan, platform)


def _target_problems(plan: ResolvedPlan, pair: Pair) -> Iterator[str]:
    target = pair.target.config
    most = max_length_of(target)
    if plan.max_length > most:
        kind = getattr(getattr(target, "rope", None), "kind", "")
        reason = ""
        if kind in BY_LENGTH:
            reason = f" (beyond them its {kind} rotary embedding turns cached keys too)"
        yield (
            f"max_length is {plan.max_length}, but the target was made for {most}"
            f" positions{reason}; ask for at most {most}"
        )


def _drafter_problems(plan: ResolvedPlan, pair: Pair) -> Iterator[str]:
    drafter = pair.drafter
    if plan.confidence_threshold and not getattr(drafter, "predicts_confidence", False):
        yield (
            f"confidence_threshold is {plan.confidence_threshold}, but the drafter has no"
            " confidence head; leave it at 0"
        )
    if plan.draft_window and drafter is not None and not hasattr(drafter, "windowed"):
        yield (
            f"draft_window is {plan.draft_window}, but {type(drafter).__name__} has no window to"
            " set; leave it at 0"
        )
    widest = max(plan.block, getattr(drafter, "reads", 0))
    if 0 < plan.draft_window < widest:
        yield (
            f"draft_window is {plan.draft_window}, less than the block that the drafter reads; give"
            f" at least {widest}, or 0 for no window"
        )
    if plan.two_devices and drafter is None:
        yield f"devices is {plan.devices}, but there is no drafter to have one; use (0, 0)"


def _width_problems(plan: ResolvedPlan, pair: Pair) -> Iterator[str]:
    if plan.steps_per_call > 1 and not on_one_device(plan):
        yield (
            f"steps_per_call is {plan.steps_per_call} for mesh {plan.mesh} and devices"
            f" {plan.devices}; calls of more than one step need a single device: leave"
            " steps_per_call at 0"
        )
    if plan.plain_width not in (1, plan.block):
        yield f"plain_width is {plan.plain_width}; expected 1 or the block, {plan.block}"
    if plan.exact and plan.plain_width == 1 and not is_width_invariant(plan, pair):
        name = getattr(pair.target.config, "model_type", "the target")
        yield (
            f"plain_width is 1 for {name} with kernels {plan.kernels!r}, whose bits"
            f" depend on the width; use {plan.block} (or 0), or exact=False"
        )


def _cache_problems(plan: ResolvedPlan, pair: Pair) -> Iterator[str]:
    if plan.prefix_cache and not has_caches(PlannedPair(pair, plan).state.target):
        yield (
            f"prefix_cache is {plan.prefix_cache}, but {type(pair.target).__name__} has caches of"
            " its own, which prefixes cannot be cut from; use prefix_cache=0"
        )


def _weight_problems(plan: ResolvedPlan) -> Iterator[str]:
    if plan.weights == "packed" and not plan.stored:
        yield (
            "weights='packed' keeps matrices as the file packs them, but neither model has GGUF"
            " quantised blocks, or suitable groups of AWQ, GPTQ or compressed-tensors; ask for"
            " 'int8' or 'int4'"
        )
    if plan.weights != "float" and plan.mesh != (1, 1):
        yield (
            f"weights={plan.weights!r} cannot be split over a mesh of {plan.mesh}; use one device,"
            " or weights='float'"
        )


def _kernel_problems(plan: ResolvedPlan, platform: str) -> Iterator[str]:
    native = plan.kernels == "native"
    if plan.activations == "int8" and not (native and plan.weights != "float"):
        yield (
            f"activations='int8' is for quantised weights with native kernels, not for"
            f" {plan.weights!r} with kernels {plan.kernels!r}; leave it 'auto'"
        )
    if plan.activations == "float" and native and plan.weights in ("int4", "packed"):
        yield (
            f"native kernels multiply weights {plan.weights!r} by activations in int8 only; use"
            " weights='int8', kernels='xla' or activations='int8'"
        )
    if not native:
        return
    if platform != "cpu" or not on_one_device(plan):
        reason = f"they are for a single CPU device, not for {platform} or several"
        yield f"kernels='native' cannot be used: {reason}; leave it 'auto'"
    elif not library():
        yield f"kernels='native' cannot be used: {library().reason}; leave it 'auto'"


def _multiplies_packed(plan: Plan, machine: Machine) -> bool:
    """Return whether kernels multiply packed weights under a plan that leaves weights open.

    What the plan chooses for float weights only, such as a mesh, is respected.
    """
    if plan.mesh != (1, 1):
        return False
    if machine.is_cpu:
        wanted = plan.kernels in ("auto", "native") and plan.activations != "float"
        return wanted and on_one_device(plan) and bool(library())
    return machine.platform == "gpu" and plan.kernels in ("auto", "pallas")


def _leaves_native(plan: Plan) -> bool:
    """Return whether a plan leaves a CPU free to use native kernels."""
    multiplies_floats = plan.activations == "float" and plan.weights in ("packed", "int4")
    return on_one_device(plan) and not multiplies_floats


def _does_not_fit(plan: ResolvedPlan, pair: Pair, need: Budget) -> str:
    """Return an error message with the required memory and the longest max_length that fits."""

    def bytes_for(length: int) -> int:
        return budget(PlannedPair(pair, dataclasses.replace(plan, max_length=length))).total

    lengths = range(2, plan.max_length)
    limit = plan.memory_limit
    remedy = "even a short max_length does not; use fewer rows, a smaller dtype or a smaller model"
    if fitting := bisect.bisect_right(lengths, limit, key=bytes_for):  # bytes grow with the length
        remedy = f"max_length={lengths[fitting - 1]} would fit"
    return f"the plan needs {need}, but only {gibi(limit)} are allowed; {remedy}"
