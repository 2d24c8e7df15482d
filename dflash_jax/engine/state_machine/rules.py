"""Rules for every token that need no more than the output before it: loops, calls, thoughts.

Those for end tokens are in `floor.py`, those for held calls in `call_retry.py`. `BEFORE_TOKEN` and
`AFTER_TOKEN` are the order of all, and say when each applies.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from dflash_jax.engine.state_machine import call_retry, floor, guards
from dflash_jax.engine.state_machine.request_state import (
    Finish,
    Policy,
    State,
    StepDecision,
    Stepped,
)


class RecoveryRule(Protocol):
    """A function that judges `StepDecision.token`, the next token that the device decided.

    A rule reads the output by `Policy.output`, and changes the decision. It returns whether the
    step ends with this token; otherwise the next rule judges the token.
    """

    def __call__(self, decision: StepDecision, step: Stepped, policy: Policy, /) -> bool: ...


def end_after_loop(decision: StepDecision, _: Stepped, policy: Policy) -> bool:
    """End the output before the token that follows a loop, unless that ends it."""
    if decision.state.guard is None or decision.token in policy.stop_ids:
        return False
    decision.end(Finish.LENGTH)
    return True


def close_long_thought(decision: StepDecision, _: Stepped, policy: Policy) -> bool:
    """Close a thought that is open where the rest of the length is reserved for an answer."""
    if decision.state.past_close or policy.close_at is None or decision.length < policy.close_at:
        return False
    decision.mark(past_close=True)
    if not policy.output.thinking(decision.ids):
        return False
    floor.close_thought(decision, policy)
    return True


def count_calls(decision: StepDecision, _: Stepped, policy: Policy) -> bool:
    """Note that the output repeats a call, or has too many."""
    if policy.recovery.counts_calls and guards.may_end_call(decision.new[-1], policy.vocabulary):
        calls = policy.output.calls(decision.ids)
        if reason := guards.too_many_calls(calls, policy.recovery):
            decision.mark(guard=reason)
    return False


def find_loops(decision: StepDecision, _: Stepped, policy: Policy) -> bool:
    """Note that the output repeats a text or a token."""
    if decision.loops is not None:
        kind = decision.loops.take(decision.new[-1], decision.since, closed=decision.state.closed)
        if kind and decision.state.guard is None:
            decision.mark(guard=kind)
    return False


def _counts_calls(_: State, policy: Policy) -> bool:
    return policy.recovery.counts_calls and bool(policy.vocabulary.tools)


def _finds_loops(_: State, policy: Policy) -> bool:
    return policy.recovery.ends_loops


def _ends_loops(state: State, policy: Policy) -> bool:
    return _finds_loops(state, policy) or _counts_calls(state, policy)


def _names_tool(state: State, _: Policy) -> bool:
    return bool(state.calls)


def _closes_thoughts(_: State, policy: Policy) -> bool:
    return policy.close_at is not None


def _holds_calls(_: State, policy: Policy) -> bool:
    return policy.recovery.call_retry and bool(policy.vocabulary.calls)


def _always(_: State, __: Policy) -> bool:
    return True


class ListedRule(NamedTuple):
    """A rule of the table.

    Attributes:
      judge: the rule itself.
      applies: whether it can act in a step, by the state before it. Where it cannot, it would only
        cost time.
    """

    judge: RecoveryRule
    applies: Callable[[State, Policy], bool] = _always


# What judges each decided token, in this order: before it is added to the output, and afterwards.
BEFORE_TOKEN = (
    ListedRule(floor.confirm_call, _names_tool),
    ListedRule(floor.choose_tool, _names_tool),
    ListedRule(end_after_loop, _ends_loops),
    ListedRule(close_long_thought, _closes_thoughts),
    ListedRule(floor.judge_end),
)
AFTER_TOKEN = (
    ListedRule(call_retry.watch, _holds_calls),
    ListedRule(count_calls, _counts_calls),
    ListedRule(find_loops, _finds_loops),
)
# What these rules note where they end an output because it repeats itself.
LOOPS = ("repeat", "runaway", "period", guards.REPEATED_CALLS, guards.TOO_MANY_CALLS)
