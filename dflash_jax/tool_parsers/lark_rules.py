"""Reads the rules of a grammar in llguidance's dialect of Lark, to check them before compilation.

The reader accepts more than the compiler, which reports errors of syntax. Its stack is explicit, so
that no nesting exhausts it.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from dflash_jax.tool_parsers.derivations import Derivations

TOKEN = re.compile(
    r"""(?P<space>[ \t]+|(?:\#|//)[^\n]*)
    |(?P<newline>(?:\r?\n)+[ \t]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<value>%(?:json|regex|llguidance)\b)
    |(?P<keyword>%\w+)
    |(?P<special><[^<>\s]+>)
    |(?P<reference>@[\w-]+)
    |(?P<name>[!?]*_*[A-Za-z][\w-]*)
    |(?P<number>[+-]?[0-9][\w.]*?(?=\.\.|[^\w.]|$))
    |(?P<arrow>->)
    |(?P<range>\.\.)
    |(?P<op>[+*?])
    |(?P<sign>::|[:|&~(){}\[\],.=_])""",
    re.VERBOSE,
)
UNREAD = ("%lark", "%if", "%override")  # their rules are not read here


@dataclasses.dataclass(frozen=True)
class LarkToken:
    """A token of a grammar.

    Attributes:
      kind: a name of `TOKEN`'s groups.
      rule: the rule that it belongs to; empty outside of rules.
    """

    kind: str
    text: str
    rule: str = ""


class LarkSyntaxError(ValueError):
    """The text has tokens that the reader does not know."""


def lark_tokens(grammar: str) -> Iterator[LarkToken]:
    """Yield the tokens of a grammar, each with its rule, without white space and comments.

    Raises:
      LarkSyntaxError: the grammar has other tokens.
    """
    tokens = [token for token in _tokens(grammar) if token.kind != "space"]
    rule, depth = "", 0
    for at, token in enumerate(tokens):
        following = tokens[at + 1 : at + 2]
        if token.kind == "newline":
            if depth == 0 and not any(x.text == "|" for x in following):
                rule = ""
            continue
        if token.kind == "sign":
            depth += token.text in ("(", "[", "{")
            depth -= token.text in (")", "]", "}")
        if not rule and token.kind == "name" and (at == 0 or tokens[at - 1].kind == "newline"):
            rule = _plain_name(token.text)
        yield dataclasses.replace(token, rule=rule)


def _tokens(grammar: str) -> Iterator[LarkToken]:
    at, decoder = 0, json.JSONDecoder()
    while at < len(grammar):
        if (match := TOKEN.match(grammar, at)) is None:
            raise LarkSyntaxError(f"an unknown token at character {at}")
        at, kind = match.end(), str(match.lastgroup)
        text = match[0]
        if kind == "value":
            start = at
            try:
                while grammar[at : at + 1].isspace():
                    at += 1
                _, at = decoder.raw_decode(grammar, at)
            except (ValueError, RecursionError) as error:
                raise LarkSyntaxError(str(error)) from error
            text += grammar[start:at]
        yield LarkToken(kind, text)


def with_schemas(grammar: str, change: Callable[[Any], Any]) -> str:
    """Return a grammar with each JSON schema after `%json` replaced by `change(schema)`.

    A grammar that is not understood stays as it is.
    """
    try:
        tokens = list(_tokens(grammar))
    except LarkSyntaxError:
        return grammar
    word = "%json"
    return "".join(
        f"{word} {json.dumps(change(json.loads(token.text.removeprefix(word))))}"
        if token.text.startswith(word)
        else token.text
        for token in tokens
    )


def regexes(grammar: str) -> list[str]:
    """Return the distinct regular expressions of a grammar, with their slashes and flags."""
    try:
        found = [token.text for token in lark_tokens(grammar) if token.kind == "regex"]
    except LarkSyntaxError:
        return []
    return list(dict.fromkeys(found))


def endless_rule(grammar: str) -> str | None:
    """Return a rule that `start` needs or may choose, and that derives no finite text, if any.

    None also if the grammar is not understood.
    """
    try:
        tokens = list(lark_tokens(grammar))
    except LarkSyntaxError:
        return None
    if any(token.text in UNREAD or token.text == "::" for token in tokens):
        return None
    bodies: dict[str, list[LarkToken]] = {}
    for token in tokens:
        if token.rule:
            bodies.setdefault(token.rule, []).append(token)
    graph = Derivations()
    parts = {name: graph.add() for name in bodies}
    for name, body in bodies.items():
        colon = next((at for at, x in enumerate(body) if x.text == ":"), len(body))
        _Body(graph, parts, body[colon + 1 :]).define(parts[name])
    finite = graph.finite()
    named = {
        name: [_plain_name(token.text) for token in body if token.kind == "name"]
        for name, body in bodies.items()
    }
    reached, todo, last = {"start"}, ["start"], None
    while todo:
        name = todo.pop()
        if endless := name in parts and not finite[parts[name]]:
            last, todo = name, []  # a cause of it is among the rules that it names
        for other in named.get(name, ()):
            if other not in reached and not (endless and finite[parts.get(other, parts[name])]):
                reached.add(other)
                todo.append(other)
        if endless and not todo:
            break
    return last


class _Body:
    """The alternatives of one rule, added to a graph of derivations."""

    def __init__(self, graph: Derivations, parts: dict[str, int], tokens: list[LarkToken]):
        self._graph, self._parts, self._tokens = graph, parts, tokens

    def define(self, part: int) -> None:
        """Define the rule's part by its alternatives."""
        groups: list[tuple[list[list[int]], bool]] = [([[]], False)]  # alternatives; optional
        at, negated = 0, False
        while at < len(self._tokens):
            token = self._tokens[at]
            at += 1
            alternatives = groups[-1][0]
            if token.text == "|":
                alternatives.append([])
                continue
            if token.text in ("(", "["):
                groups.append(([[]], token.text == "[" or negated))
                negated = False
                continue
            if token.text == "~":
                negated = True
                continue
            if token.kind == "arrow":
                at += 1  # the alias
                continue
            needed: int | None = None
            if token.text in (")", "]"):
                if len(groups) == 1:
                    continue
                inner, optional = groups.pop()
                if not optional:
                    choices = [self._graph.define_all(self._graph.add(), x) for x in inner]
                    needed = self._graph.define_any(self._graph.add(), choices)
            elif token.kind == "name" and not negated:
                needed = self._parts.get(_plain_name(token.text))
            negated = False
            least, at = self._least(at)
            if needed is not None and least > 0:
                groups[-1][0][-1].append(needed)
        choices = [self._graph.define_all(self._graph.add(), x) for x in groups[0][0]]
        self._graph.define_any(part, choices)

    def _least(self, at: int) -> tuple[int, int]:
        """Return the least number of repetitions that are stated here, and the next place."""
        texts = [token.text for token in self._tokens[at : at + 5]]
        if texts[:1] in (["*"], ["?"]):
            return 0, at + 1
        if texts[:1] == ["+"]:
            return 1, at + 1
        if texts[:1] == ["~"] and texts[1:2] and texts[1].isdigit():
            return int(texts[1]), at + (4 if texts[2:3] == [".."] else 2)
        if texts[:1] == ["{"]:
            closing = texts.index("}") if "}" in texts else len(texts) - 1
            return (int(texts[1]) if texts[1:2] and texts[1].isdigit() else 0), at + closing + 1
        return 1, at


def _plain_name(name: str) -> str:
    return name.lstrip("!?")
