"""Calls that cannot be read: held back while they are written, and decoded once more if broken."""

from dflash_jax.engine.recovery.cut import Cut
from dflash_jax.engine.recovery.request_state import Policy, State

LONGEST = 512  # tokens of a call that is held back; a longer one is given as it comes


def watches(state: State, policy: Policy) -> bool:
    """Whether calls of this output are held back until they are complete."""
    settings, words = policy.recovery, policy.words
    asked = settings.call_retry and settings.floor > 0 and settings.below_floor == "odds"
    return asked and bool(words.calls) and words.marker >= 0 and not state.call_retried


def watch(plan: Cut, policy: Policy) -> None:
    """Note what the last token of the cut means to the call it begins, belongs to or ends."""
    state, words, last = plan.state, policy.words, plan.new[-1]
    if not watches(state, policy):
        return
    if state.call_at < 0:
        if last == words.marker and not words.thinking(plan.ids):
            plan.mark(call_at=plan.length - 1)
    elif last == words.closer:
        close(plan, policy)
    elif plan.length - state.call_at > LONGEST:
        plan.mark(call_at=-1)


def watch_forced(plan: Cut, policy: Policy) -> None:
    """Hold a call back that was begun by forced tokens."""
    if watches(plan.state, policy) and policy.words.marker in plan.new:
        plan.mark(call_at=plan.before + plan.new.index(policy.words.marker))


def close(plan: Cut, policy: Policy) -> None:
    """A call that is held back ends here: release it, or have it decoded once more."""
    if policy.words.read(plan.ids[plan.state.call_at :]).broken:
        plan.retry_call = True
    else:
        plan.mark(call_at=-1)
