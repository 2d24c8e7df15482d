"""Bounds on JSON schemas and grammars of users, checked before compilation.

The grammar compiler is recursive: a few kilobytes can exhaust its stack, or take minutes. The
checks here use explicit stacks, and linear time.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers.bounded_schema import Derivations, resolved

MAX_DEPTH = 100  # nesting of lists and mappings in a JSON schema
MAX_REFERENCES = 100  # length of a chain of references in a JSON schema
# Of multipleOf without its factors 2 and 5: an automaton has that many states.
MAX_MULTIPLE = 10_000
MAX_RULES = 1000  # rules of a Lark grammar, and terminals
DEFINITION = re.compile(r"^[ \t]*[?!]?(_*[A-Za-z]\w*)[ \t]*[:.\[]", re.MULTILINE)


def check_schema(schema: Any) -> None:
    """Check the depth, references and multiples of a JSON schema.

    References are followed depth first, each once, as the compiler does.

    Raises:
      RequestError: a bound is exceeded.
    """
    depth, chain = 1, 0
    followed: set[str] = set()
    waiting: list[tuple[Any, int, int]] = [(schema, 1, 0)]  # value, depth, references followed
    while waiting:
        value, level, references = waiting.pop()
        if isinstance(value, str):  # a reference
            if value in followed:
                continue
            followed.add(value)
            value, level = resolved(schema, value), 1
        depth, chain = max(depth, level), max(chain, references)
        place = None
        if isinstance(value, Mapping):
            _check_multiple(value.get("multipleOf"))
            place, inner = value.get("$ref"), list(value.values())
        else:
            inner = value if isinstance(value, list | tuple) else []
        inner = [x for x in inner if isinstance(x, Mapping | list | tuple)]
        waiting += [(x, level + 1, references) for x in inner]
        if isinstance(place, str):
            waiting.append((place, 1, references + 1))  # last, so that it is followed first
    if depth > MAX_DEPTH:
        raise _too_deep(f"is nested {depth} levels deep")
    if chain > MAX_REFERENCES:
        raise RequestError(
            f"the JSON schema has {chain} references ($ref) in a row; expected at most"
            f" {MAX_REFERENCES}: refer to the last definition directly"
        )


def parsed_schema(text: str) -> Any:
    """Return the JSON value of a schema's text.

    Raises:
      RequestError: the text is not JSON, or too deeply nested.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise _too_deep("is nested too deeply to be read") from error
    except ValueError as error:
        raise RequestError(f"the JSON schema is not understood: {error}") from error


def check_lark(grammar: str) -> None:
    """Check the size of a Lark grammar and its JSON schemas.

    Raises:
      RequestError: a bound is exceeded.
    """
    names = {match[1].lstrip("_") for match in DEFINITION.finditer(grammar)}
    terminals = sum(name[:1].isupper() for name in names)
    for kind, count in (("rules", len(names) - terminals), ("terminals", terminals)):
        if count > MAX_RULES:
            raise RequestError(
                f"the grammar has {count} {kind}; expected at most {MAX_RULES}: merge some of them,"
                " or write alternatives into one"
            )
    for schema in _embedded(grammar):
        check_schema(schema)


def _embedded(grammar: str) -> Iterator[Any]:
    """Yield the JSON schemas after `%json` in a Lark grammar."""
    decoder, place = json.JSONDecoder(), re.compile(r"%json\s*(?=\{)")
    for match in place.finditer(grammar):
        try:
            yield decoder.raw_decode(grammar, match.end())[0]
        except RecursionError as error:
            raise _too_deep("is nested too deeply to be read") from error
        except ValueError:
            continue  # the compiler reports the error


def _check_multiple(number: Any) -> None:
    if not isinstance(number, int | float) or not 0 < number < 2**63 or number % 1:
        return
    rest = int(number)
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    if rest > MAX_MULTIPLE:
        raise RequestError(
            f"the JSON schema has multipleOf {number}; expected at most {MAX_MULTIPLE}, not"
            " counting factors of 2 and 5: leave it out, and check the number afterwards"
        )


def _too_deep(how: str) -> RequestError:
    return RequestError(
        f"the JSON schema {how}; expected at most {MAX_DEPTH} levels: move inner schemas to $defs,"
        " and refer to them"
    )


# Reads the rules of a grammar in llguidance's dialect of Lark, to check them before compilation.
#
# The reader accepts more than the compiler, which reports errors of syntax. Its stack is explicit,
# so that no nesting exhausts it.


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

    A grammar that is not understood, or nests values too deeply, stays as it is: compiling it
    reports the error.
    """
    word = "%json"
    texts = []
    try:
        for token in _tokens(grammar):
            if token.text.startswith(word):
                schema = json.loads(token.text.removeprefix(word))
                texts.append(f"{word} {json.dumps(change(schema))}")
            else:
                texts.append(token.text)
    except (LarkSyntaxError, RecursionError):
        return grammar
    return "".join(texts)


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
