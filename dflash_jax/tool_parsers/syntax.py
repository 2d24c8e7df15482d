"""Description of a model family's syntax of reasoning and tool calls."""

import dataclasses
import enum
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers.bounded_schema import FiniteSchema, bounded, endless, relocated
from dflash_jax.tool_parsers.tool_schema import Tool, ToolChoice

# Rules of grammars for the arguments of a tool, in llguidance's dialect of Lark.


Quote = Callable[[str], str]  # a text as grammar terminals
WHOLE = "parameters"  # a definition with those of the tool, for references between them


def all_arguments(tool: Tool) -> str:
    """Return the arguments of a tool, as one JSON object, as a part of a rule."""
    return as_rule(tool, tool.parameters or {"type": "object"})


def as_rule(tool: Tool, schema: Mapping[str, Any]) -> str:
    """Return a schema of a tool as a part of a rule.

    Raises:
      RequestError: a number cannot be followed exactly, or no finite value fits the schema.
    """
    try:
        return f"%json {json.dumps(bounded(schema))}"
    except RequestError as error:
        raise RequestError(f"the tool {tool.name!r}: {error}") from error


def parameter_schema(tool: Tool, name: str) -> Mapping[str, Any]:
    """Return the schema of one parameter with the definitions that its references need."""
    schema = tool.properties[name]
    if not isinstance(schema, Mapping):
        return {}
    if '"$ref"' not in json.dumps(schema):
        return schema
    moved = relocated(tool.parameters, "#", f"#/$defs/{WHOLE}")
    path = "/properties/" + name.replace("~", "~0").replace("/", "~1")
    return {"$ref": f"#/$defs/{WHOLE}{path}", "$defs": {WHOLE: moved}}


def finite_parameters(tool: Tool) -> list[tuple[str, Any, bool]]:
    """Return (name, schema, required) of the parameters in declaration order.

    Optional parameters without a finite value are left out.

    Raises:
      RequestError: a required parameter has no finite value.
    """
    finite = FiniteSchema(tool.parameters)
    if not finite.ends(tool.parameters):
        raise RequestError(f"the tool {tool.name!r}: {endless(finite)}")
    required = tool.required
    return [
        (name, schema, name in required)
        for name, schema in tool.properties.items()
        if schema is not False and finite.ends(schema)
    ]


def enum_texts(schema: Any) -> list[str]:
    """Return the values of a string enum; empty for other schemas."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    return values if isinstance(values, list) and all(isinstance(v, str) for v in values) else []


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
    grammar: Callable[[Tool, Quote], str]
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


def json_calls(head: Callable[[str], str], tail: str, *, lead: str) -> dict[str, Any]:
    """Return `begin`, `render` and `grammar` of calls whose arguments are one JSON object.

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

    def grammar(tool: Tool, quote: Quote) -> str:
        return f"{quote(head(tool.name))} {all_arguments(tool)} {quote(tail)}"

    return {"begin": begin, "render": render, "grammar": grammar}
