"""Complete a plan and check it against models and memory."""

import bisect
import dataclasses
from typing import Any

from dflash_jax.config.rope import BY_LENGTH
from dflash_jax.device import default_device, free_memory
from dflash_jax.errors import PlanError
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.memory import Budget, budget, gibi
from dflash_jax.graph.protocols import ModelConfig
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.kernels.caches import has_caches
from dflash_jax.kernels.native.build import library
from dflash_jax.plan import LEAST, Dtype, Plan, ResolvedPlan, WeightLayout
from dflash_jax.quant.layouts import MAX_TILED_TOKENS, STACK
from dflash_jax.utils.processor import widest_vectors

# Widths from which decode steps are faster with tiled, and with column-major matrices.
MIN_TILED_WIDTH, MIN_COLUMN_MAJOR_WIDTH = 128, 512
MAX_COLUMN_MAJOR_TOKENS = 64  # steps with more tokens gain nothing from column-major matrices
DEFAULT_BLOCK = 8  # where a drafter advises none
CPU_STEPS_PER_CALL = 4  # dispatching a call costs about a millisecond there


def resolve(plan: Plan, pair: Pair, *, platform: str, memory: int) -> ResolvedPlan:
    """Return the plan with every automatic choice made, checked against models and memory.

    Args:
      platform: "cpu", "gpu" or "tpu".
      memory: free bytes of device memory, for weights, state and temporaries.

    Raises:
      PlanError: the plan does not fit the models or the memory.
    """
    completed = _completed(plan, pair, platform, memory)
    resolved = ResolvedPlan(
        **{f.name: getattr(completed, f.name) for f in dataclasses.fields(Plan)}
    )
    if problem := _problem(resolved, pair) or _kernel_problem(resolved, platform):
        raise PlanError(problem)
    if resolved.two_devices:
        pair = dataclasses.replace(pair, drafter=None)  # the models of the target's device
    need = budget(PlannedPair(pair, resolved))
    if need.total > resolved.memory_limit:
        raise PlanError(_does_not_fit(resolved, pair, need))
    return resolved


def _completed(plan: Plan, pair: Pair, platform: str, memory: int) -> Plan:
    cpu, target, drafter = platform == "cpu", pair.target.config, pair.drafter
    plan = _without_stacks(plan, pair, platform)
    if plan.weights == "auto":
        packed = bool(plan.stored) and _multiplies_packed(plan, platform)
        weights, stored = ("packed", plan.stored) if packed else ("float", ())
        plan = dataclasses.replace(plan, weights=weights, stored=stored)
    default_dtype: Dtype = "float32" if cpu else "bfloat16"
    plan = dataclasses.replace(
        plan,
        max_length=plan.max_length or min(max_length_of(target), 1024 if cpu else 8192),
        block=plan.block or getattr(drafter, "block", None) or DEFAULT_BLOCK,
        chunk=plan.chunk or (64 if cpu else 256),
        steps_per_call=plan.steps_per_call
        or (CPU_STEPS_PER_CALL if cpu and _one_device(plan) else 1),
        dtype=default_dtype if plan.dtype == "auto" else plan.dtype,
        memory_limit=plan.memory_limit or memory,
    )
    if plan.kernels == "auto" and cpu and _wants_native(plan) and library():
        plan = dataclasses.replace(plan, kernels="native")
    if plan.activations == "auto":
        quantised = plan.kernels == "native" and plan.weights != "float"
        plan = dataclasses.replace(plan, activations="int8" if quantised else "float")
    if not plan.plain_width:
        wide = plan.exact and not is_alike_at_any_width(plan, pair)
        plan = dataclasses.replace(plan, plain_width=plan.block if wide else 1)
    if plan.weight_layout != "auto":
        return plan
    if plan.kernels == "native":
        return dataclasses.replace(plan, weight_layout="interleaved")
    layout: WeightLayout = "row_major"
    if cpu and _one_device(plan) and plan.weights == "float":
        tokens = plan.rows * (plan.plain_width if drafter is None else plan.block)  # per step
        layout = _fastest_layout(plan.dtype, target.hidden_size, tokens)
    return dataclasses.replace(plan, weight_layout=layout)


def _one_device(plan: Plan) -> bool:
    return not plan.two_devices and plan.mesh == (1, 1)


def _multiplies_packed(plan: Plan, platform: str) -> bool:
    """Return whether kernels multiply packed weights under a plan that leaves weights open.

    What the plan chooses for float weights only, such as a mesh, is respected.
    """
    if plan.mesh != (1, 1) or plan.weight_layout not in ("auto", "interleaved"):
        return False
    if platform == "cpu":
        wanted = plan.kernels in ("auto", "native") and plan.activations != "float"
        return wanted and _one_device(plan) and bool(library())
    layout = plan.weight_layout == "auto"
    return platform == "gpu" and layout and plan.kernels in ("auto", "pallas")


def _without_stacks(plan: Plan, pair: Pair, platform: str) -> Plan:
    """Return the plan without packed stacks of experts, unless native kernels multiply them."""
    native = platform == "cpu" and plan.kernels in ("auto", "native") and bool(library())
    if not plan.stored or (native and _wants_native(plan)):
        return plan
    forms = PlannedPair(pair, LEAST).forms
    stored = tuple((path, how) for path, how in plan.stored if forms.get(path) != STACK)
    return dataclasses.replace(plan, stored=stored)


def _wants_native(plan: Plan) -> bool:
    """Return whether a plan leaves a CPU free to use native kernels."""
    floats = plan.activations == "float" and plan.weights in ("packed", "int4")
    return _one_device(plan) and plan.weight_layout in ("auto", "interleaved") and not floats


def is_alike_at_any_width(plan: Plan, pair: Pair) -> bool:
    """Return whether a token has the same bits in calls of any width; see `Target.any_width`."""
    return plan.kernels == "native" and getattr(pair.target, "any_width", False)


def max_length_of(target: Any) -> int:
    """Return the number of positions that a target was made for."""
    return getattr(target, "max_length", ModelConfig.max_length)


def _problem(plan: ResolvedPlan, pair: Pair) -> str | None:
    """Return why a completed plan cannot be used with these models, or None."""
    target, drafter = pair.target.config, pair.drafter
    if plan.max_length > max_length_of(target):
        kind = getattr(getattr(target, "rope", None), "kind", "")
        changes = kind in BY_LENGTH
        reason = f" (beyond them its {kind} rotary embedding turns cached keys too)"
        return (
            f"max_length is {plan.max_length}, but the target was made for {max_length_of(target)}"
            f" positions{reason if changes else ''}; ask for at most {max_length_of(target)}"
        )
    if plan.min_survival and not getattr(drafter, "predicts_survival", False):
        return (
            f"min_survival is {plan.min_survival}, but the drafter has no confidence head;"
            " leave it at 0"
        )
    if plan.draft_window and drafter is not None and not hasattr(drafter, "windowed"):
        return (
            f"draft_window is {plan.draft_window}, but {type(drafter).__name__} has no window to"
            " set; leave it at 0"
        )
    if 0 < plan.draft_window < (widest := max(plan.block, getattr(drafter, "reads", 0))):
        return (
            f"draft_window is {plan.draft_window}, less than the block that the drafter reads; give"
            f" at least {widest}, or 0 for no window"
        )
    if plan.steps_per_call > 1 and not _one_device(plan):
        return (
            f"steps_per_call is {plan.steps_per_call} for mesh {plan.mesh} and devices"
            f" {plan.devices}; calls of more than one step need a single device: leave"
            " steps_per_call at 0"
        )
    if plan.plain_width not in (1, plan.block):
        return f"plain_width is {plan.plain_width}; expected 1 or the block, {plan.block}"
    if plan.exact and plan.plain_width == 1 and not is_alike_at_any_width(plan, pair):
        name = getattr(target, "model_type", "the target")
        return (
            f"plain_width is 1 for {name} with kernels {plan.kernels!r}, whose bits"
            f" depend on the width; use {plan.block} (or 0), or exact=False"
        )
    if plan.prefix_cache and not has_caches(PlannedPair(pair, plan).state.target):
        return (
            f"prefix_cache is {plan.prefix_cache}, but {type(pair.target).__name__} has caches of"
            " its own, which prefixes cannot be cut from; use prefix_cache=0"
        )
    if plan.two_devices and drafter is None:
        return f"devices is {plan.devices}, but there is no drafter to have one; use (0, 0)"
    may_relayout = _one_device(plan) and plan.weights == "float"
    if plan.weight_layout != "row_major" and plan.kernels != "native" and not may_relayout:
        return (
            f"weight_layout is {plan.weight_layout!r} for weights {plan.weights!r}, mesh"
            f" {plan.mesh} and devices {plan.devices}; it needs weights='float' and one"
            " device: leave it 'auto'"
        )
    if plan.weights == "packed" and not plan.stored:
        return (
            "weights='packed' keeps matrices as the file packs them, but neither model has GGUF"
            " quantised blocks, or suitable groups of AWQ, GPTQ or compressed-tensors; ask for"
            " 'int8' or 'int4'"
        )
    if plan.weights != "float" and plan.mesh != (1, 1):
        return (
            f"weights={plan.weights!r} cannot be split over a mesh of {plan.mesh}; use one device,"
            " or weights='float'"
        )
    return None


def _kernel_problem(plan: ResolvedPlan, platform: str) -> str | None:
    """Return why the native kernels that a plan asks for cannot be used, or None."""
    native, quantised = plan.kernels == "native", plan.weights != "float"
    if plan.activations == "int8" and not (native and quantised):
        return (
            f"activations='int8' is for quantised weights with native kernels, not for"
            f" {plan.weights!r} with kernels {plan.kernels!r}; leave it 'auto'"
        )
    if plan.activations == "float" and native and plan.weights in ("int4", "packed"):
        return (
            f"native kernels multiply weights {plan.weights!r} by activations in int8 only; use"
            " weights='int8', kernels='xla' or activations='int8'"
        )
    if not native:
        interleaved = plan.weight_layout == "interleaved"
        absent = f": {library().reason}" * (not library())
        return f"weight_layout 'interleaved' is for native kernels{absent}" if interleaved else None
    reason = "" if library() else library().reason
    if platform != "cpu" or not _one_device(plan):
        reason = f"they are for a single CPU device, not for {platform} or several"
    if plan.weight_layout != "interleaved":
        reason = f"they multiply by interleaved matrices, not by {plan.weight_layout!r} ones"
    return f"kernels='native' cannot be used: {reason}; leave it 'auto'" if reason else None


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


def resolve_here(plan: Plan, pair: Pair) -> ResolvedPlan:
    """Return the plan, completed and checked for the default device.

    Raises:
      PlanError: as for `resolve`, or JAX finds no device.
    """
    device = default_device()
    return resolve(plan, pair, platform=device.platform, memory=free_memory(device))


def _fastest_layout(dtype: Dtype, width: int, tokens: int) -> WeightLayout:
    """Return the fastest layout for steps of `tokens` on this CPU; measured with AVX2 only."""
    if widest_vectors() != "avx2" or tokens == 1 or width < MIN_TILED_WIDTH:
        return "row_major"
    if width >= MIN_COLUMN_MAJOR_WIDTH:
        return "column_major" if tokens <= MAX_COLUMN_MAJOR_TOKENS else "row_major"
    return "tiled" if dtype == "float32" and tokens <= MAX_TILED_TOKENS else "row_major"


def _does_not_fit(plan: ResolvedPlan, pair: Pair, need: Budget) -> str:
    """Return an error message with the required memory and the longest max_length that fits."""

    def bytes_for(length: int) -> int:
        return budget(PlannedPair(pair, dataclasses.replace(plan, max_length=length))).total

    lengths, limit = range(2, plan.max_length), plan.memory_limit  # bytes grow with the length
    remedy = "even a short max_length does not; use fewer rows, a smaller dtype or a smaller model"
    if fitting := bisect.bisect_right(lengths, limit, key=bytes_for):
        remedy = f"max_length={lengths[fitting - 1]} would fit"
    return f"the plan needs {need}, but only {gibi(limit)} are allowed; {remedy}"
