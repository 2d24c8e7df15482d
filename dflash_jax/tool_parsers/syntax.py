"""Description of a model family's syntax of reasoning and tool calls."""

import dataclasses
import enum
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers.bounded_schema import bounded
from dflash_jax.tool_parsers.finite_schema import FiniteSchema, endless, relocated
from dflash_jax.tool_parsers.parameters import LONGEST_NAME, Form
from dflash_jax.tool_parsers.tool_schema import Tool, ToolChoice

# Rules of grammars for the arguments of a tool, in llguidance's dialect of Lark.


Quote = Callable[[str], str]  # a text as grammar terminals
WHOLE = "parameters"  # a definition with those of the tool, for references between them
LETTER = "[A-Za-z0-9_.-]"  # letter of a parameter's name that the schema does not state
# Patterns of names without alternatives outside of groups of words, which need no translation.
PLAIN_PATTERN = re.compile(
    r"(\^?)((?:(?:[\w .:@-]|\\[dwsDWS.-]|\[[^]\\/]+\]|\((?:[\w-]+\|?)+\))"
    r"(?:[*+?]|\{\d+(?:,\d*)?\})?)*)(\$?)"
)


def all_arguments(tool: Tool) -> str:
    """Return the arguments of a tool, as one JSON object, as a part of a rule."""
    schema = tool.parameters
    return as_rule(tool, schema if tool.merged.is_object else {**schema, "type": "object"})


def as_rule(tool: Tool, schema: Mapping[str, Any]) -> str:
    """Return a schema of a tool as a part of a rule.

    Raises:
      RequestError: a number cannot be followed exactly, or no finite value fits the schema.
    """
    try:
        return f"%json {json.dumps(bounded(schema))}"
    except RequestError as error:
        raise RequestError(f"the tool {tool.name!r}: {error}") from error


def parameter_rule(tool: Tool, schema: Any) -> str:
    """Return the JSON value of a parameter as a part of a rule."""
    if not isinstance(schema, Mapping):
        return as_rule(tool, {})
    if '"$ref"' not in json.dumps(schema):
        return as_rule(tool, schema)
    place = f"#/$defs/{WHOLE}"
    moved = relocated(tool.parameters, "#", place)
    own = relocated(schema, "#", place)
    return as_rule(tool, {**own, "$defs": {WHOLE: moved}})


def finite_forms(tool: Tool) -> list[Form]:
    """Return the forms of the arguments, without what has no finite value.

    Raises:
      RequestError: no form has a finite value.
    """
    forms = tool.merged.forms
    named = [schema for form in forms for schema in form.properties.values()]
    finite = FiniteSchema(tool.parameters, named)
    kept = []
    for form in forms:
        ends = {k: x for k, x in form.properties.items() if x is not False and finite.ends(x)}
        if ends.keys() >= set(form.required):
            kept.append(dataclasses.replace(form, properties=ends))
    if not kept or not finite.ends(tool.parameters):
        raise RequestError(f"the tool {tool.name!r}: {endless(finite)}")
    return kept


@dataclasses.dataclass(frozen=True)
class Rule:
    """A part of a grammar.

    Attributes:
      text: alternatives of a rule.
      terminals: definitions that it needs, by name.
    """

    text: str
    terminals: Mapping[str, str] = dataclasses.field(default_factory=dict)


def further_names(form: Form, before: str, after: str) -> list[tuple[str, str, Any]]:
    """Return what a form says of parameters that it does not name, where it does.

    Args:
      before: markup before a name.
      after: markup behind it.

    Returns:
      Names and definitions of terminals, which match a parameter's name with its markup, and the
      schemas of the values.
    """
    ways = [(name_regex(pattern), schema) for pattern, schema in form.patterns.items()]
    if form.others is not None:
        ways.append((f"{LETTER}{{1,{LONGEST_NAME}}}", form.others))
    further = []
    for at, (names, schema) in enumerate(ways):
        if names is None or schema is False:
            continue
        taken = [regex_text(name) for name in form.properties]
        taken += [earlier for earlier, _ in ways[:at] if earlier is not None]
        allowed = f"{LETTER}{{1,{LONGEST_NAME}}}"
        parts = [f"/{regex_text(before)}({x}){regex_text(after)}/" for x in (allowed, names)]
        parts += [f"~/{regex_text(before)}({x}){regex_text(after)}/" for x in taken]
        terminal = " & ".join(dict.fromkeys(parts))
        further.append((f"NAME_{zlib.crc32(terminal.encode()):08X}", terminal, schema))
    return further


def name_regex(pattern: str) -> str | None:
    """Return a regular expression of the names that a plain pattern matches, else None."""
    if (parts := PLAIN_PATTERN.fullmatch(pattern)) is None:
        return None
    start, inner, end = parts.groups()
    any_text = f"{LETTER}{{0,{LONGEST_NAME}}}"
    return ("" if start else any_text) + inner + ("" if end else any_text)


def regex_text(text: str) -> str:
    """Return a text as a part of a regular expression in a grammar."""
    return re.sub(r"[]\\.+*?(){}|[^$/#&~-]", r"\\\g<0>", text).replace("\n", r"\n")


SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # names that are never parsed as markup
PREFERRED = "terminal"  # the tool with which an agent can do anything


class CallState(enum.Enum):
    """State of the tool calls of an output."""

    NONE = "none"  # there is no call
    OPEN = "open"  # the last call is incomplete
    COMPLETE = "complete"  # all calls are complete


@dataclasses.dataclass(frozen=True)
class Thought:
    """Markup of reasoning.

    Attributes:
      opening: text before reasoning.
      closing: text after it.
      forced: text that ends reasoning from outside, and starts the answer.
    """

    opening: str
    closing: str
    forced: str

    def is_open(self, text: str, *, inside: bool = False) -> bool:
        """Return whether a text ends inside reasoning.

        Args:
          inside: the text starts inside reasoning, because the prompt opened it.
        """
        begun = text.rfind(self.opening)
        closed = text.rfind(self.closing)
        return inside if begun < 0 and closed < 0 else begun > closed


def by_markers(syntax: "Syntax", text: str) -> CallState:
    """Return the state that follows from the last opening and the last closing marker."""
    begun = max(text.rfind(marker) for marker in syntax.opens)
    closed = max(text.rfind(marker) for marker in syntax.closes)
    if begun < 0:
        return CallState.NONE
    return CallState.OPEN if begun > closed else CallState.COMPLETE


@dataclasses.dataclass(frozen=True)
class Syntax:
    """A family's syntax. All texts are raw output, including special tokens.

    Attributes:
      thought: markup of reasoning, or None.
      opens: texts that start a call; output is not shown to users from there on.
      closes: texts that end a call.
      lead: text that models write between content and a call.
      marker: text that calls start with after `lead`, and answers do not.
      template_mark: text that only chat templates of the family contain.
      begin: returns the text that forces a call of a tool, up to the value of its first parameter,
        or up to the arguments without a parameter. It never ends in a space, since tokenizers
        merge spaces with the following text.
      render: returns a call as the family's chat template writes it.
      grammar: returns the rule of a call of a tool, from the tool and a function that quotes texts.
      grammar_rules: returns the rules that it refers to.
      parallel: an output may have several calls.
      channels: all further markup, if outputs are messages in channels, and not text with markers.
      before_answer: text between reasoning and the header of a message.
      answer_header: text that every answer starts with.
      read_state: implements `call_state`.
    """

    name: str
    thought: Thought | None
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    lead: str
    marker: str
    template_mark: str
    begin: Callable[[str, str | None], str]
    render: Callable[[str, Mapping[str, Any]], str]
    grammar: Callable[[Tool, Quote], Rule]
    grammar_rules: Callable[[Quote], list[str]] = lambda quote: []
    parallel: bool = True
    channels: tuple[str, ...] = ()
    before_answer: str = ""
    answer_header: str = ""
    read_state: Callable[["Syntax", str], CallState] = by_markers

    def call_state(self, text: str) -> CallState:
        """Return the state of the calls of an output."""
        return self.read_state(self, text)

    def beginnings(self, tools: Sequence[Tool], choice: ToolChoice) -> tuple[str, ...]:
        """Return the texts with which recovery may force a call, one per tool.

        A text contains the names of the tool and its first parameter. If a tool is required or
        preferred, it is the only one. Tools whose names could be parsed as markup are left out.
        """
        if choice.kind == "none":
            return ()
        wanted = [tool for tool in tools if tool.name == (choice.name or PREFERRED)] or tools
        pairs = [(tool.name, tool.first_parameter) for tool in wanted]
        safe = [pair for pair in pairs if all(SAFE.fullmatch(n) for n in pair if n is not None)]
        return tuple(self.begin(name, parameter) for name, parameter in safe)

    def markers(self, *, calls: bool) -> tuple[str, ...]:
        """Return texts with all special tokens that must be kept when output is decoded.

        Args:
          calls: include the markup of calls.
        """
        texts = [self.thought.opening, self.thought.closing] if self.thought else []
        if calls or self.channels:
            texts += [*self.opens, *self.closes, self.lead, self.render("f", {"k": "v"})]
        return (*texts, *self.channels)


def as_json(value: Any) -> str:
    """Return JSON as chat templates write it: with spaces, without escaping non-ASCII letters."""
    return json.dumps(value, ensure_ascii=False)


class JsonCalls(NamedTuple):
    """The functions of a `Syntax` for calls whose arguments are one JSON object."""

    begin: Callable[[str, str | None], str]
    render: Callable[[str, Mapping[str, Any]], str]
    grammar: Callable[[Tool, Quote], Rule]


def json_calls(head: Callable[[str], str], tail: str, *, lead: str) -> JsonCalls:
    """Return the functions for calls whose arguments are one JSON object.

    Args:
      head: returns the text before the arguments, from the tool's name.
      tail: text after them.
      lead: text before a forced call.
    """

    def begin(name: str, parameter: str | None) -> str:
        text = lead + head(name)
        return text + f'{{"{parameter}":' if parameter else text.rstrip()

    def render(name: str, arguments: Mapping[str, Any]) -> str:
        return head(name) + as_json(arguments) + tail

    def grammar(tool: Tool, quote: Quote) -> Rule:
        return Rule(f"{quote(head(tool.name))} {all_arguments(tool)} {quote(tail)}")

    return JsonCalls(begin, render, grammar)
