"""Rules for every token that need no more than the output before it: loops, calls, thoughts.

Those for end tokens are in `floor.py`, those for held calls in `call_retry.py`. `controller.RULES`
is the order of all.
"""

from typing import Protocol

from dflash_jax.engine.state_machine import floor, guards
from dflash_jax.engine.state_machine.request_state import Finish, Policy, StepDecision, Stepped


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
