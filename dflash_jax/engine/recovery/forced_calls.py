"""Tool calls begun for a stalled output: whether the target wants one, and of which tool."""

from dflash_jax.engine.recovery import call_retry, floor, tool_names
from dflash_jax.engine.recovery.cut import Cut
from dflash_jax.engine.recovery.endings import read_ending
from dflash_jax.engine.recovery.request_state import Asked, Finish, Policy, Said


def begin_call(plan: Cut, policy: Policy) -> None:
    """Force the beginning of a tool call in place of an end token, up to where names differ."""
    first = policy.words.calls[0][:1]
    shared, rest = tool_names.split([ids for ids in policy.words.calls if ids[:1] == first])
    plan.mark(injected=True, calls=rest)
    plan.force_tokens(shared, "tool_prefix")
    call_retry.watch_forced(plan, policy)
    plan.end_at_stop(policy)


def ask(plan: Cut, end: int, odds: float | None, policy: Policy) -> None:
    """Force what leads to a tool call in place of an end token, to see whether a call follows."""
    words = policy.words
    lead = words.opening[:-1]
    wanted = floor.wanted_odds(read_ending(words.text(plan.ids)), policy.recovery)
    asked = Asked(end, len(lead), odds or 0.0, wanted)
    plan.mark(asked=asked, calls=tuple(ids[len(lead) :] for ids in words.calls))
    plan.new += lead
    plan.replace, plan.force = lead[0], lead[1:]


def accepts_call(plan: Cut, odds: float | None) -> bool:
    """Take the target's answer to what it was asked: go on with a call, or end as it wanted to."""
    asked = plan.state.asked
    assert asked is not None
    if odds is not None and asked.odds + odds >= asked.wanted:
        plan.mark(asked=None, injected=True)
        plan.note("tool_prefix")
        return True
    state, plan.retract = plan.state, asked.lead
    ids = Said(state.ids[: len(state.ids) - asked.lead])
    plan.mark(asked=None, calls=(), ids=ids, held=state.held - asked.lead)
    plan.before -= asked.lead
    plan.new.append(asked.end)
    plan.end(Finish.STOP)
    return False


def name_tool(plan: Cut, token: int, best: int, policy: Policy) -> None:
    """Take the token that chooses the tool of a forced call, and force what follows from it.

    Args:
      token: the target's own choice; taken if it continues a declared name.
      best: the target's best token of those that continue a declared name.
    """
    calls = plan.state.calls
    known = {ids[0] for ids in calls}
    chosen = next(i for i in (token, best, calls[0][0]) if i in known)
    shared, rest = tool_names.split(tool_names.following(calls, chosen))
    plan.mark(calls=rest)
    plan.new += (chosen, *shared)
    plan.replace, plan.force = None if chosen == token else chosen, shared
    call_retry.watch_forced(plan, policy)
    plan.end_at_stop(policy)
