"""Look up a tokenizer's vocabulary for the recovery rules of one request."""

import functools
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.engine.state_machine import OFF, Recovery, guards
from dflash_jax.engine.state_machine.announcements import introduces_call
from dflash_jax.engine.state_machine.output_vocabulary import NO_VOCABULARY, Ids, OutputVocabulary
from dflash_jax.errors import RequestError
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import Syntax, syntax_of, tools_warning
from dflash_jax.tool_parsers.grammar import call_grammar
from dflash_jax.tool_parsers.tool_schema import choice_of, tools_of

PROMPT_END = 64  # number of ids at the end of a prompt that show whether it opens a thought
LONGEST_TURN = 2**16  # most ids of a turn that is continued
# The last token of a marker may include one of these. The last two follow Llama's opening marker.
AFTER_CALLS = ("", "\n", "\n\n", " ", "<", ":", ": ")


def vocabulary_of(
    tokenizer: Tokenizer | None,
    prompt: Ids,
    recovery: Recovery,
    tools: Sequence[Any] | None,
    tool_choice: Any,
) -> OutputVocabulary:
    """Return the vocabulary for the rules of a request.

    Raises:
      RequestError: `tool_choice` names a tool that was not declared.
    """
    declared = tools_of(tools)
    choice = choice_of(tool_choice, declared)
    if tokenizer is None or recovery == OFF:
        return NO_VOCABULARY
    fenced = introduces_call if recovery.fenced_calls else None
    inside_thought = opens_thought(tokenizer, prompt)
    syntax = syntax_of(tokenizer.teaches)
    if syntax is None:
        return OutputVocabulary(
            text=tokenizer.raw,
            tools=declared,
            hidden=_hidden(tokenizer, None),
            choice=choice,
            fenced=fenced,
            close=_ids(tokenizer, recovery.close_text or ""),
            inside_thought=inside_thought,
            call_ends=_call_ends(tokenizer, None),
        )
    close = recovery.close_text or (syntax.thought.forced if syntax.thought else "")
    own = syntax.lead + syntax.marker
    calls = []
    for beginning in syntax.beginnings(declared, choice):
        text = beginning if beginning.startswith(own) else own + beginning
        if ids := _ids(tokenizer, text):
            calls.append(ids)
    lead = max(len(_ids(tokenizer, syntax.lead)), 1)
    opening = _shared((_ids(tokenizer, own), *calls)) if own and calls else ()
    marker = _special(tokenizer, syntax.marker)
    return OutputVocabulary(
        text=tokenizer.raw,
        syntax=syntax,
        tools=declared,
        hidden=_hidden(tokenizer, syntax),
        calls=tuple(calls),
        opening=opening if len(opening) >= lead else (),
        lead=lead,
        marker=marker,
        closer=_special(tokenizer, syntax.closes[-1]),
        call_begins=_call_begins(tokenizer, syntax if declared and marker < 0 else None),
        choice=choice,
        fenced=fenced,
        close=_ids(tokenizer, close),
        inside_thought=inside_thought,
        call_ends=_call_ends(tokenizer, syntax if declared else None),
    )


def chat_ids(
    tokenizer: Tokenizer | None,
    messages: Sequence[Any],
    variables: Mapping[str, Any],
    parse_special: bool = False,
) -> list[int]:
    """Return the prompt ids of a conversation; see `Engine.chat_ids`.

    Raises:
      RequestError: there is no tokenizer.
    """
    if tokenizer is None:
        raise RequestError("this model ships no tokenizer; give token ids instead of messages")
    if variables.get("tools") and (text := tools_warning(tokenizer.teaches)):
        warnings.warn(text, stacklevel=3)
    return tokenizer.chat(messages, parse_special=parse_special, **variables)


def calls_grammar(vocabulary: OutputVocabulary, tokenizer: Tokenizer) -> str:
    """Return a grammar of calls of the declared tools, in llguidance's dialect of Lark."""
    assert vocabulary.syntax is not None
    specials = tokenizer.special_texts
    return call_grammar(
        vocabulary.syntax, vocabulary.tools, vocabulary.choice, specials, thoughts=False
    )


def opens_thought(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Return whether a prompt ends inside a thought, at its beginning or within its text."""
    syntax = syntax_of(tokenizer.teaches)
    if syntax is None or syntax.thought is None:
        return False
    thought = syntax.thought
    if tokenizer.raw(prompt[-PROMPT_END:]).rstrip().endswith(thought.opening.rstrip()):
        return True
    # The text of the last turn follows its header; a start token before a text is no header.
    marks = _marks(tokenizer) - markup_ids(tokenizer, (thought.opening, thought.closing))
    for position in range(len(prompt) - 1, max(len(prompt) - LONGEST_TURN, 0), -1):
        if prompt[position] in marks:
            return thought.is_open(tokenizer.raw(prompt[position + 1 :]))
    return False


@functools.lru_cache(maxsize=16)
def _marks(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the added tokens, special or not."""
    return frozenset(tokenizer.core.get_added_tokens_decoder())


@functools.lru_cache(maxsize=64)
def markup_ids(tokenizer: Tokenizer, markers: tuple[str, ...]) -> frozenset[int]:
    """Return the added tokens of which these markers of a syntax consist."""
    added = tokenizer.core.get_added_tokens_decoder()
    return frozenset(i for i, t in added.items() if any(t.content in m for m in markers))


@functools.lru_cache(maxsize=4096)  # a conversation declares the same tools in every request
def _ids(tokenizer: Tokenizer, text: str) -> Ids:
    """Return the ids of a text that continues another, without a start token."""
    return tuple(tokenizer.encode(text, specials=False)) if text else ()


def _shared(sequences: Sequence[Ids]) -> Ids:
    """Return the ids with which all sequences begin."""
    columns = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*sequences, strict=False))
    return tuple(column[0] for column in columns)


def _special(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of a special token; -1 if the text is none."""
    ids = _ids(tokenizer, text)
    return ids[0] if len(ids) == 1 and text in tokenizer.special_texts else -1


@functools.lru_cache(maxsize=16)
def _hidden(tokenizer: Tokenizer, syntax: Syntax | None) -> frozenset[int]:
    """Return the special tokens, which texts leave out, except those around a thought."""
    thought = syntax.thought if syntax else None
    shown = thought.opening + thought.closing if thought else ""
    added = tokenizer.core.get_added_tokens_decoder()
    return frozenset(i for i, t in added.items() if t.special and t.content not in shown)


@functools.lru_cache(maxsize=16)
def _call_ends(tokenizer: Tokenizer, syntax: Syntax | None) -> frozenset[int]:
    """Return ids with which the closing marker of a tool call can end."""
    if syntax is None:
        return frozenset()
    return _ends(tokenizer, guards.call_closes(syntax))


@functools.lru_cache(maxsize=16)
def _call_begins(tokenizer: Tokenizer, syntax: Syntax | None) -> frozenset[int]:
    """Return ids with which the opening marker of a tool call can end, if calls begin with it."""
    if syntax is None or syntax.marker not in syntax.opens:
        return frozenset()
    return _ends(tokenizer, (syntax.marker,))


def _ends(tokenizer: Tokenizer, markers: Sequence[str]) -> frozenset[int]:
    """Return ids with which markers can end, also together with the text that follows."""
    last_letters = {marker[-1] for marker in markers}
    candidates: set[int] = set()
    for marker, after in itertools.product(markers, AFTER_CALLS):
        candidates.update(_ids(tokenizer, marker + after)[-2:])
    return frozenset(i for i in candidates if last_letters & set(tokenizer.raw((i,))))
