"""Hold tool calls until they are complete, and decode those that cannot be parsed again.

Where the markers around calls are single tokens, a call is held from its opening marker on. Markers
of several tokens are recognised by their text once they are complete, and have been emitted by
then: the call is held and decoded again from the token after its opening marker, under a grammar
that was advanced by the marker's text.
"""

from dflash_jax.engine.state_machine.request_state import Policy, State, StepCut
from dflash_jax.engine.state_machine.words import Ids, Words
from dflash_jax.tool_parsers.syntax import CallState

LONGEST = 512  # tokens of a held call; a longer one is emitted as it comes
LOOK_BACK = 24  # tokens whose text shows whether an opening marker has just ended


def watches(state: State, policy: Policy) -> bool:
    """Return whether calls of this output are held until they are complete."""
    settings, words = policy.recovery, policy.words
    asked = settings.call_retry and settings.floor > 0 and settings.below_floor == "odds"
    known = words.marker >= 0 or bool(words.call_begins)
    return asked and bool(words.calls) and known and not state.call_retried


def watch(cut: StepCut, policy: Policy) -> None:
    """Track the call that the last token of the cut begins, continues or ends."""
    state, words, last = cut.state, policy.words, cut.new[-1]
    if not watches(state, policy):
        return
    if state.call_at < 0:
        if last == words.marker or last in words.call_begins:
            _begin(cut, cut.length, policy)
    elif last == words.closer if words.marker >= 0 else _is_complete(cut, last, words):
        close(cut, policy)
    elif cut.length - state.call_at > LONGEST:
        cut.mark(call_at=-1)


def watch_forced(cut: StepCut, policy: Policy) -> None:
    """Hold a call that was begun by forced tokens."""
    if not watches(cut.state, policy):
        return
    for place, token in enumerate(cut.new, cut.before + 1):
        if token == policy.words.marker or token in policy.words.call_begins:
            _begin(cut, place, policy)


def close(cut: StepCut, policy: Policy) -> None:
    """End the held call: release it, or have it decoded again if it cannot be parsed."""
    words, start = policy.words, cut.state.call_at
    if words.read(cut.ids[start:], before=marker_before(cut.ids[:start], words)).broken:
        cut.retry_call = True
    else:
        cut.mark(call_at=-1)


def marker_before(ids: Ids, words: Words) -> str:
    """Return the text of a marker of several tokens that ends an output, from its beginning on."""
    if not words.call_begins or words.syntax is None:
        return ""
    text = words.text(ids[-LOOK_BACK:])
    return text[max(text.rfind(words.syntax.marker), 0) :]


def _begin(cut: StepCut, length: int, policy: Policy) -> None:
    """Hold the call whose opening marker may end the first ids of the output."""
    words, ids = policy.words, cut.ids[:length]
    if words.thinking(ids):
        return
    if words.marker >= 0:
        cut.mark(call_at=length - 1)
        return
    assert words.syntax is not None
    last = ids[-LOOK_BACK:]
    before, after = (words.text(x).count(words.syntax.marker) for x in (last[:-1], last))
    if after > before:
        cut.mark(call_at=length)


def _is_complete(cut: StepCut, last: int, words: Words) -> bool:
    """Return whether the last token ends the held call, whose markers are several tokens."""
    if words.syntax is None or (words.call_ends is not None and last not in words.call_ends):
        return False
    start = cut.state.call_at
    text = marker_before(cut.ids[:start], words) + words.text(cut.ids[start:])
    return words.syntax.call_state(text) is CallState.COMPLETE
