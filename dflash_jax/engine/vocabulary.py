"""Look up a tokenizer's vocabulary for the recovery rules of one request."""

import functools
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.engine.state_machine import OFF, Recovery, guards
from dflash_jax.engine.state_machine.words import NO_WORDS, Ids, Words
from dflash_jax.errors import RequestError
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import Syntax, syntax_of, tools_warning
from dflash_jax.tool_parsers.grammar import call_grammar
from dflash_jax.tool_parsers.tool_schema import choice_of, tools_of

PROMPT_END = 64  # ids at the end of a prompt that show whether it opens a thought
LONGEST_TURN = 2**16  # ids of a turn that is continued
# A marker may end in one token with these; the last two follow the opening one of Llama.
AFTER_CALLS = ("", "\n", "\n\n", " ", "<", ":", ": ")
COLON_ENDS = (":", "`:", "):", '":')  # a token may join a colon and the characters before it


def words_of(
    tokenizer: Tokenizer | None,
    prompt: Ids,
    recovery: Recovery,
    tools: Sequence[Any] | None,
    tool_choice: Any,
) -> Words:
    """Return the vocabulary for the rules of a request.

    Raises:
      RequestError: `tool_choice` names a tool that was not declared.
    """
    declared = tools_of(tools)
    choice = choice_of(tool_choice, declared)
    if tokenizer is None or recovery == OFF:
        return NO_WORDS
    syntax = syntax_of(tokenizer.teaches)
    beginnings = syntax.beginnings(declared, choice) if syntax else ()
    own = syntax.lead + syntax.marker if syntax and recovery.below_floor == "odds" else ""
    beginnings = tuple(b if b.startswith(own) else own + b for b in beginnings)
    thought = syntax.thought if syntax else None
    close = recovery.close_text or (thought.forced if thought else "")
    calls = tuple(ids for text in beginnings if (ids := _ids(tokenizer, text)))
    lead = max(len(_ids(tokenizer, syntax.lead)) if syntax else 0, 1)
    opening = _shared((_ids(tokenizer, own), *calls)) if own and calls else ()
    marker = _special(tokenizer, syntax.marker) if syntax else -1
    return Words(
        text=tokenizer.raw,
        syntax=syntax,
        tools=declared,
        hidden=_hidden(tokenizer, syntax),
        calls=calls,
        opening=opening if len(opening) >= lead else (),
        lead=lead,
        marker=marker,
        closer=_special(tokenizer, syntax.closes[-1]) if syntax else -1,
        call_begins=_call_begins(tokenizer, syntax if declared and marker < 0 else None),
        choice=choice,
        close=_ids(tokenizer, close),
        colons=_colons(tokenizer) if recovery.below_floor == "compat" else frozenset(),
        inside_thought=opens_thought(tokenizer, prompt),
        call_ends=_call_ends(tokenizer, syntax if declared else None),
    )


def chat_ids(
    tokenizer: Tokenizer | None,
    messages: Sequence[Any],
    variables: Mapping[str, Any],
    parse_special: bool = False,
) -> list[int]:
    """Return the prompt ids of a conversation; see `Engine.chat_ids`."""
    if tokenizer is None:
        raise RequestError("this model ships no tokenizer; give token ids instead of messages")
    if variables.get("tools") and (text := tools_warning(tokenizer.teaches)):
        warnings.warn(text, stacklevel=3)
    return tokenizer.chat(messages, parse_special=parse_special, **variables)


def calls_grammar(words: Words, tokenizer: Tokenizer) -> str:
    """Return a grammar of calls of the declared tools, in llguidance's dialect of Lark."""
    assert words.syntax is not None
    specials = tokenizer.special_texts
    return call_grammar(words.syntax, words.tools, words.choice, specials, thoughts=False)


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
    places = range(len(prompt) - 1, max(len(prompt) - LONGEST_TURN, 0), -1)
    header = next((at for at in places if prompt[at] in marks), None)
    return header is not None and thought.is_open(tokenizer.raw(prompt[header + 1 :]))


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
    return _ends(tokenizer, guards.call_closes(syntax) if syntax else ())


@functools.lru_cache(maxsize=16)
def _call_begins(tokenizer: Tokenizer, syntax: Syntax | None) -> frozenset[int]:
    """Return ids with which the opening marker of a tool call can end, if calls begin with it."""
    begins = syntax is not None and syntax.marker in syntax.opens
    return _ends(tokenizer, (syntax.marker,) if syntax and begins else ())


def _ends(tokenizer: Tokenizer, markers: Sequence[str]) -> frozenset[int]:
    """Return ids with which markers can end, also together with the text that follows."""
    found = (_ids(tokenizer, marker + after) for marker in markers for after in AFTER_CALLS)
    ends = {i for ids in found for i in ids[-2:]}
    last = {marker[-1] for marker in markers}
    return frozenset(i for i in ends if last & set(tokenizer.raw((i,))))


@functools.lru_cache(maxsize=16)
def _colons(tokenizer: Tokenizer) -> frozenset[int]:
    """Return ids with which a text that ends in a colon, and newlines, can end."""
    ends = {_ids(tokenizer, end + lines)[-1] for end in COLON_ENDS for lines in ("", "\n", "\n\n")}
    return frozenset(i for i in ends if ":" in tokenizer.raw((i,)))
