"""Hold tool calls until they are complete, and decode those that cannot be parsed again.

Where the markers around calls are single tokens, a call is held from its opening marker on. Markers
of several tokens are recognised by their text once they are complete, and have been emitted by
then: the call is held and decoded again from the token after its opening marker, under a grammar
that was advanced by the marker's text.
"""

from dflash_jax.engine.state_machine.output_reader import is_broken_call
from dflash_jax.engine.state_machine.output_vocabulary import Ids, OutputVocabulary
from dflash_jax.engine.state_machine.request_state import Policy, State, StepDecision, Stepped
from dflash_jax.tool_parsers.syntax import CallState

LONGEST = 512  # most tokens of a held call; a longer one is emitted as it comes


def end_call(decision: StepDecision, policy: Policy) -> bool:
    """End the held call at an end token; return whether it is decoded again."""
    if decision.state.call_at < 0 or decision.state.guard is not None:
        return False
    _close(decision, policy)
    if decision.retry_call:
        decision.new.append(decision.token)
    return decision.retry_call


def watch(decision: StepDecision, _: Stepped, policy: Policy) -> bool:
    """Track the call that the last token of the output begins, continues or ends; a rule."""
    state = decision.state
    if not _watches(state, policy):
        return False
    vocabulary = policy.vocabulary
    last = decision.new[-1]
    if state.call_at < 0:
        if last == vocabulary.marker or last in vocabulary.call_begins:
            _begin(decision, decision.length, policy)
    elif _ends_call(decision, last, vocabulary):
        _close(decision, policy)
    elif decision.length - state.call_at > LONGEST:
        decision.mark(call_at=-1)
    return decision.retry_call


def watch_forced(decision: StepDecision, policy: Policy) -> None:
    """Hold a call that was begun by forced tokens."""
    if not _watches(decision.state, policy):
        return
    for length, token in enumerate(decision.new, decision.before + 1):
        if token == policy.vocabulary.marker or token in policy.vocabulary.call_begins:
            _begin(decision, length, policy)


def marker_before(ids: Ids, vocabulary: OutputVocabulary) -> str:
    """Return the text of a marker of several tokens that ends an output, from its beginning on."""
    if not vocabulary.call_begins or vocabulary.syntax is None:
        return ""
    marker = vocabulary.syntax.marker
    text = vocabulary.text(ids[-len(marker) :])  # no marker has more tokens than characters
    return text[max(text.rfind(marker), 0) :]


def _watches(state: State, policy: Policy) -> bool:
    """Return whether calls of this output are held until they are complete."""
    vocabulary = policy.vocabulary
    recovery = policy.recovery
    if not recovery.call_retry or not recovery.floor or state.call_retried:
        return False
    has_marker = vocabulary.marker >= 0 or bool(vocabulary.call_begins)
    return has_marker and bool(vocabulary.calls)


def _close(decision: StepDecision, policy: Policy) -> None:
    """End the held call: release it, or have it decoded again if it cannot be parsed."""
    if is_broken_call(_held_text(decision, policy.vocabulary), policy.vocabulary):
        decision.retry_call = True
    else:
        decision.mark(call_at=-1)


def _begin(decision: StepDecision, length: int, policy: Policy) -> None:
    """Hold the call whose opening marker may end the first ids of the output."""
    vocabulary = policy.vocabulary
    ids = decision.ids[:length]
    if policy.output.thinking(ids):
        return
    if vocabulary.marker >= 0:
        decision.mark(call_at=length - 1)
        return
    assert vocabulary.syntax is not None
    marker = vocabulary.syntax.marker
    text = policy.output.text(ids)
    end = text.rfind(marker) + len(marker)
    last_token_start = len(text) - len(vocabulary.text(ids[-1:]))
    if marker in text and end > last_token_start:
        decision.mark(call_at=length)


def _ends_call(decision: StepDecision, last: int, vocabulary: OutputVocabulary) -> bool:
    """Return whether the last token ends the held call."""
    if vocabulary.marker >= 0:
        return last == vocabulary.closer
    if vocabulary.syntax is None:
        return False
    if vocabulary.call_ends is not None and last not in vocabulary.call_ends:
        return False
    return vocabulary.syntax.call_state(_held_text(decision, vocabulary)) is CallState.COMPLETE


def _held_text(decision: StepDecision, vocabulary: OutputVocabulary) -> str:
    """Return the text of the held call, its opening marker included."""
    ids = decision.ids
    start = decision.state.call_at
    return marker_before(ids[:start], vocabulary) + vocabulary.text(ids[start:])
