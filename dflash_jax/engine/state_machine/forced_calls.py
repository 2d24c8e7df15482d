"""Begin a tool call for a stalled output: whether the target wants one, and of which tool."""

from dflash_jax.engine.state_machine import call_retry, floor
from dflash_jax.engine.state_machine.announcements import read_ending
from dflash_jax.engine.state_machine.request_state import (
    CallProbe,
    Finish,
    Policy,
    StepCut,
    TokenIds,
)
from dflash_jax.engine.state_machine.words import calls_after, split_names


def begin_call(cut: StepCut, policy: Policy) -> None:
    """Force the beginning of a tool call in place of an end token, up to where names differ."""
    first = policy.words.calls[0][:1]
    shared, rest = split_names([ids for ids in policy.words.calls if ids[:1] == first])
    cut.mark(injected=True, calls=rest)
    cut.force_tokens(shared, "tool_prefix")
    call_retry.watch_forced(cut, policy)
    cut.end_at_stop(policy)


def probe(cut: StepCut, end: int, odds: float | None, policy: Policy) -> None:
    """Force the text that leads to a tool call, to read the odds of a call after it."""
    words = policy.words
    lead = words.opening[: words.lead]
    ending = read_ending(words.text(cut.ids), words.tools)
    wanted = floor.wanted_odds(ending, policy.recovery)
    call_probe = CallProbe(end, len(lead), odds or 0.0, wanted)
    cut.mark(probe=call_probe, calls=tuple(ids[len(lead) :] for ids in words.calls))
    cut.new += lead
    cut.replace, cut.force = lead[0], lead[1:]


def accepts_call(cut: StepCut, token: int, odds: float | None, policy: Policy) -> bool:
    """Evaluate the odds of a marker's token: return True once the whole marker is accepted.

    Until then, either force that token, to read the odds of the next one, or restore the end token
    as soon as the sum of the odds is too small.
    """
    probed, opening = cut.state.probe, policy.words.opening
    assert probed is not None
    if odds is not None and probed.odds + odds >= probed.wanted:
        if probed.lead + 1 == len(opening):
            cut.mark(probe=None, injected=True)
            cut.note("tool_prefix")
            return True
        marker = opening[probed.lead]
        further = probed._replace(lead=probed.lead + 1, odds=probed.odds + odds)
        cut.mark(probe=further, calls=tuple(ids[1:] for ids in cut.state.calls))
        cut.new.append(marker)
        cut.replace = None if marker == token else marker
        return False
    state, cut.retract = cut.state, probed.lead
    ids = TokenIds(state.ids[: len(state.ids) - probed.lead])
    cut.mark(probe=None, calls=(), ids=ids, held=state.held - probed.lead)
    cut.before -= probed.lead
    cut.new.append(probed.end)
    cut.end(Finish.STOP)
    return False


def name_tool(cut: StepCut, token: int, best: int, policy: Policy) -> None:
    """Choose the tool of a forced call, and force the ids that follow from the choice.

    Args:
      token: the target's own choice; used if it continues a declared name.
      best: the target's best token among those that continue a declared name.
    """
    calls = cut.state.calls
    known = {ids[0] for ids in calls}
    chosen = next(i for i in (token, best, calls[0][0]) if i in known)
    shared, rest = split_names(calls_after(calls, chosen))
    cut.mark(calls=rest)
    cut.new += (chosen, *shared)
    cut.replace, cut.force = None if chosen == token else chosen, shared
    call_retry.watch_forced(cut, policy)
    cut.end_at_stop(policy)
