"""Reads the output of a request for the recovery rules: decodes and parses every token once."""

import json
from collections.abc import Iterable
from typing import NamedTuple

from dflash_jax.engine.state_machine.output_vocabulary import Ids, OutputVocabulary
from dflash_jax.tool_parsers.calls import Content, Event, ToolCallEnd, calls_of
from dflash_jax.tool_parsers.malformed_calls import FENCE, are_valid_arguments
from dflash_jax.tool_parsers.stream import OutputParser

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # in place of bytes that are no character, or not yet
BLANK = " \t\r\n\v\f\N{NO-BREAK SPACE}\N{ZERO WIDTH SPACE}\N{ZERO WIDTH NO-BREAK SPACE}"


class CompleteCall(NamedTuple):
    """A complete tool call. Calls that mean the same are equal."""

    name: str
    arguments: str  # JSON text with sorted keys, or the text that is not JSON


class EndedOutput(NamedTuple):
    """Facts about an output that ends here, read in any supported syntax."""

    # Whether it calls a tool. An undeclared one counts, as the caller can answer the call.
    called: bool
    began: bool  # whether it calls a tool, or ends inside a call
    answered: bool  # whether it has content that is neither a thought nor blank


class OutputReader:
    """Reads one output. Every answer is a function of the ids of the question.

    The reader remembers what it read, so that ids that extend those of an earlier question cost
    only the new ones. After a retraction, and after the end of an output that goes on, it begins
    again.
    """

    def __init__(self, vocabulary: OutputVocabulary):
        self.vocabulary = vocabulary
        self._ids: Ids = ()  # ids that were decoded, up to a complete character
        self._context = 0  # index of the first id that later texts are decoded with
        self._text = ""  # text of the ids
        # A parser that was given `_parsed`, and returned `_events`. It was not told of an end.
        self._parser: OutputParser | None = None
        self._parsed = ""
        self._events: list[Event] = []
        self._calls: tuple[CompleteCall, ...] = ()  # calls of the events that are complete

    def text(self, ids: Ids) -> str:
        """Return the text of an output, special tokens included."""
        if ids[: len(self._ids)] != self._ids:
            self._ids = ()
            self._context = 0
            self._text = ""
        count = len(self._ids)
        if len(ids) == count:
            return self._text
        old_text = self.vocabulary.text(ids[self._context : count]) if count else ""
        text_in_context = self.vocabulary.text(ids[self._context :])
        new_text = text_in_context[len(old_text) :]
        if text_in_context.startswith(old_text) and INCOMPLETE not in new_text:
            text = self._text + new_text
        else:  # bytes that are no character may change earlier text
            text = self.vocabulary.text(ids)
        if not text.endswith(INCOMPLETE):
            self._context = count
            self._ids = ids
            self._text = text
        return text

    def thinking(self, ids: Ids) -> bool:
        """Return whether an output ends inside a thought."""
        syntax = self.vocabulary.syntax
        if syntax is None or syntax.thought is None:
            return False
        return syntax.thought.is_open(self.text(ids), inside=self.vocabulary.inside_thought)

    def calls(self, ids: Ids) -> tuple[CompleteCall, ...]:
        """Return the calls of an output that are complete."""
        self._parse(self.text(ids).rstrip(INCOMPLETE))
        return self._calls

    def ended(self, ids: Ids) -> EndedOutput:
        """Return the facts about an output that ends after these ids."""
        text = self.text(ids)
        if self.vocabulary.fenced is not None and FENCE in text:
            # The end decides whether a code fence is a call, so the text is parsed by itself.
            parser = _parser(self.vocabulary, fenced=True)
            events = parser.push(text)
        else:
            parser = self._parse(text)
            events = self._events
            self._parser = None  # a parser that was told of the end reads no further
        events += parser.finish()
        content = "".join(event.text for event in events if isinstance(event, Content))
        has_content = bool(content.strip(BLANK))
        if not text:  # there is no tokenizer, or the tokens are no text
            has_content = self.vocabulary.syntax is None
        called = parser.calls > 0
        return EndedOutput(
            called=called,
            began=called or parser.unfinished,
            answered=has_content and self.vocabulary.is_visible(ids),
        )

    def _parse(self, text: str) -> OutputParser:
        """Return the parser after it was given a text, of which it may know the beginning."""
        if self._parser is None or not text.startswith(self._parsed):
            self._parser = _parser(self.vocabulary, fenced=False)
            self._parsed = ""
            self._events = []
            self._calls = ()
        new = self._parser.push(text[len(self._parsed) :])
        self._parsed = text
        self._events += new
        if any(isinstance(event, ToolCallEnd) for event in new):
            calls = calls_of(self._events)
            self._calls = tuple(
                CompleteCall(name, _sorted(arguments)) for name, arguments, ended in calls if ended
            )
        return self._parser


def is_broken_call(text: str, vocabulary: OutputVocabulary) -> bool:
    """Return whether a text is no whole call, or has arguments that its tool does not take.

    Arguments have to be an object with the tool's required keys. Text after a call is allowed.
    """
    parser = _parser(vocabulary, fenced=True)
    events = [*parser.push(text), *parser.finish()]
    if parser.unfinished or parser.unreadable or parser.empty_calls:
        return True
    return not _are_valid(events, vocabulary)


def _parser(vocabulary: OutputVocabulary, *, fenced: bool) -> OutputParser:
    """Return a parser of an output.

    Args:
      fenced: whether calls in code fences are calls if the output ends with them.
    """
    may_be_call = vocabulary.fenced if fenced else None
    return OutputParser(
        vocabulary.syntax, vocabulary.tools, thinking=vocabulary.inside_thought, fenced=may_be_call
    )


def _are_valid(events: Iterable[Event], vocabulary: OutputVocabulary) -> bool:
    """Return whether all calls among events have valid arguments."""
    declared = {tool.name: tool for tool in vocabulary.tools}
    return all(
        are_valid_arguments(declared.get(name), arguments)
        for name, arguments, _ in calls_of(events)
    )


def _sorted(arguments: str) -> str:
    """Return arguments in one spelling for equal values."""
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
