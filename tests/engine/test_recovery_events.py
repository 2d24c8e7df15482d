"""Every recovery event but retried calls, by one block size; `tests/soak` runs all of both."""

from types import SimpleNamespace
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.engine.structured.grammars import CallGrammars, Grammars
from dflash_jax.engine.vocabulary import vocabulary_of
from dflash_jax.errors import StructureError
from tests.soak.recovery_events import END, ID, SIZE, make_tokenizer, make_tool, scenarios, sweep


def test_every_event_gives_the_same_output_in_all_modes() -> None:
    """Opening and closing markers of calls are two tokens each."""
    compared = sweep([5], [(9,), (0, 2, 1)], structured=False, pieces=True)
    events = {scenario.event for scenario in scenarios(structured=False)}
    assert set(compared) == {event or "none" for event in events}
    assert min(compared.values()) >= 2


def test_a_call_with_a_marker_of_several_tokens_follows_its_grammar_from_there() -> None:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    tokenizer = make_tokenizer(pieces=True)
    vocabulary = vocabulary_of(tokenizer, (), dj.Recovery(), make_tool("path"), None)
    assert vocabulary.marker == vocabulary.closer == -1
    assert vocabulary.call_begins == {ID["_call>"]}
    grammars = CallGrammars(Grammars(tokenizer, SIZE, [ID[END]]), lambda _: None, tokenizer)
    request: Any = SimpleNamespace(vocabulary=vocabulary)
    grammar = grammars.make(grammars.structure(request, "<tool_call>\n"))
    rest = '{"name": "read", "arguments": {"path":"a"}}\n</tool_call>'
    grammar.accept(tokenizer.encode(rest, specials=False))
    assert grammar.error is None
    grammar.accept([ID[END]])
    assert grammar.finished
    with pytest.raises(StructureError, match="is not the beginning"):
        grammars.make(grammars.structure(request, "<tool_call>()"))
    grammars.grammars.close()
