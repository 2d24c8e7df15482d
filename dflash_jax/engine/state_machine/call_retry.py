"""Hold tool calls until they are complete, and decode those that cannot be parsed again."""

from dflash_jax.engine.state_machine.request_state import Policy, State, StepCut

LONGEST = 512  # tokens of a held call; a longer one is emitted as it comes


def watches(state: State, policy: Policy) -> bool:
    """Return whether calls of this output are held until they are complete."""
    settings, words = policy.recovery, policy.words
    asked = settings.call_retry and settings.floor > 0 and settings.below_floor == "odds"
    return asked and bool(words.calls) and words.marker >= 0 and not state.call_retried


def watch(cut: StepCut, policy: Policy) -> None:
    """Track the call that the last token of the cut begins, continues or ends."""
    state, words, last = cut.state, policy.words, cut.new[-1]
    if not watches(state, policy):
        return
    if state.call_at < 0:
        if last == words.marker and not words.thinking(cut.ids):
            cut.mark(call_at=cut.length - 1)
    elif last == words.closer:
        close(cut, policy)
    elif cut.length - state.call_at > LONGEST:
        cut.mark(call_at=-1)


def watch_forced(cut: StepCut, policy: Policy) -> None:
    """Hold a call that was begun by forced tokens."""
    if watches(cut.state, policy) and policy.words.marker in cut.new:
        cut.mark(call_at=cut.before + cut.new.index(policy.words.marker))


def close(cut: StepCut, policy: Policy) -> None:
    """End the held call: release it, or have it decoded again if it cannot be parsed."""
    if policy.words.read(cut.ids[cut.state.call_at :]).broken:
        cut.retry_call = True
    else:
        cut.mark(call_at=-1)
