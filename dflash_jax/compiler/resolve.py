"""Complete a plan and check it against models and memory."""

import dataclasses

from dflash_jax.compiler.memory import Budget, budget, gibi
from dflash_jax.compiler.processor import widest_vectors
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.config.rope import BY_LENGTH
from dflash_jax.device import default_device, free_memory
from dflash_jax.errors import PlanError
from dflash_jax.plan import Dtype, Order, Plan
from dflash_jax.quant.layouts import FEW

NARROW, WIDE = 128, 512  # widths from which blocks gain from panels, and from columns
MANY = 64  # tokens of a step above which columns gain nothing
ROUNDS = 4  # steps of a call on a CPU, where calling costs about a millisecond


def resolve(
    plan: Plan, target: TargetConfig, drafter: DrafterConfig | None, *, platform: str, memory: int
) -> Plan:
    """Return the plan with every open choice made, checked against models and memory.

    Args:
      platform: "cpu", "gpu" or "tpu".
      memory: bytes of device memory free for weights, state and temporaries.

    Raises:
      PlanError: the plan does not fit the models, the memory or itself.
    """
    small = platform == "cpu"
    default_dtype: Dtype = "float32" if small else "bfloat16"
    default_block = _trained_block(drafter) if drafter else 8
    plan = dataclasses.replace(
        plan,
        max_length=plan.max_length or min(target.max_length, 1024 if small else 8192),
        block=plan.block or default_block,
        chunk=plan.chunk or (64 if small else 256),
        rounds=plan.rounds or (ROUNDS if small and _one_device(plan) else 1),
        dtype=default_dtype if plan.dtype == "auto" else plan.dtype,
        memory_limit=plan.memory_limit or memory,
    )
    if plan.order == "auto":
        tokens = plan.rows * (plan.block if drafter or plan.exact else 1)  # of a step
        free = small and _one_device(plan) and plan.weights == "float"
        order = _order(plan.dtype, target.hidden_size, tokens) if free else "rows"
        plan = dataclasses.replace(plan, order=order)
    if problem := _problem(plan, target, drafter):
        raise PlanError(problem)
    sharing = None if plan.two_devices else drafter  # the model that shares the target's device
    need = budget(plan, target, sharing)
    if need.total > plan.memory_limit:
        raise PlanError(_does_not_fit(plan, target, sharing, need))
    return plan


def _one_device(plan: Plan) -> bool:
    return not plan.two_devices and plan.mesh == (1, 1)


def _problem(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None) -> str | None:
    """Return why a plan without open choices cannot be used with these models, or None."""
    if plan.max_length > target.max_length:
        changes = target.rope.kind in BY_LENGTH
        reason = f" (beyond them its {target.rope.kind} rotary embedding turns cached keys too)"
        return (
            f"max_length is {plan.max_length}, but the target was made for {target.max_length}"
            f" positions{reason if changes else ''}; ask for at most {target.max_length}"
        )
    if plan.min_survival and not (drafter and drafter.predicts_survival):
        return (
            f"min_survival is {plan.min_survival}, but the drafter has no confidence head;"
            " leave it at 0"
        )
    if plan.rounds > 1 and not _one_device(plan):
        return (
            f"rounds is {plan.rounds} for mesh {plan.mesh} and devices {plan.devices}; one call"
            " makes more than one step on one device only: leave rounds at 0"
        )
    if plan.two_devices and drafter is None:
        return f"devices is {plan.devices}, but there is no drafter to have one; use (0, 0)"
    if plan.order != "rows" and not (_one_device(plan) and plan.weights == "float"):
        return (
            f"order is {plan.order!r} for weights {plan.weights!r}, mesh {plan.mesh} and devices"
            f" {plan.devices}; it needs weights='float' and one device: leave it 'auto'"
        )
    if plan.weights == "packed" and not plan.stored:
        return (
            "weights='packed' keeps the blocks of a .gguf file, but neither model comes from one"
            " with Q8_0, Q4_0, Q4_K or Q6_K matrices; ask for 'int8' or 'int4'"
        )
    if plan.weights != "float" and plan.mesh != (1, 1):
        return (
            f"weights={plan.weights!r} cannot be split over a mesh of {plan.mesh}; use one device,"
            " or weights='float'"
        )
    return None


def _trained_block(drafter: DrafterConfig) -> int:
    return max(drafter.step_width, 2)  # a step has room for a draft


def wide_block(block: int, drafter: DrafterConfig | None) -> str | None:
    """Return a warning about a block that is wider than the drafter's own, or None.

    Such a plan is legal and its output is the same; measured on the shipped pair, the second
    draft past the trained block is accepted in 6 of 100 rounds, the fourth in none.
    """
    if drafter is None or block <= (trained := _trained_block(drafter)):
        return None
    return (
        f"block {block} is wider than the {trained} the drafter was trained for: drafts past that"
        f" are hardly ever accepted and cost time; give at most {trained}, or 0 for its own size"
    )


def resolve_here(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None) -> Plan:
    """Return the plan completed and checked for the default device.

    Raises:
      PlanError: as for `resolve`, or JAX finds no device.
    """
    device = default_device()
    return resolve(plan, target, drafter, platform=device.platform, memory=free_memory(device))


def _order(dtype: Dtype, width: int, tokens: int) -> Order:
    """Return the layout of matrices for a step on this CPU; measured with AVX2 only."""
    if widest_vectors() != "avx2" or tokens == 1 or width < NARROW:
        return "rows"
    if width >= WIDE:
        return "columns" if tokens <= MANY else "rows"
    return "panels" if dtype == "float32" and tokens <= FEW else "rows"


def _does_not_fit(
    plan: Plan, target: TargetConfig, drafter: DrafterConfig | None, need: Budget
) -> str:
    """Return an error message with the memory needed and the longest max_length that would fit."""
    limit = plan.memory_limit
    low, high = 1, plan.max_length
    while high - low > 1:  # bytes grow with max_length
        middle = (low + high) // 2
        shorter = dataclasses.replace(plan, max_length=middle)
        low, high = (
            (middle, high) if budget(shorter, target, drafter).total <= limit else (low, middle)
        )
    remedy = (
        f"max_length={low} would fit"
        if low > 1
        else "even a short max_length does not; use fewer rows, a smaller dtype or a smaller model"
    )
    return f"the plan needs {need}, but only {gibi(limit)} are allowed; {remedy}"
