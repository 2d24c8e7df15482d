"""Reads grammars in llguidance's dialect of Lark, to change them before compilation.

The reader accepts more than the compiler, which reports errors of syntax. It uses no recursion, so
that no nesting exhausts its stack.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class LarkToken(NamedTuple):
    """A token of a grammar.

    Attributes:
      kind: a name of `TOKEN`'s groups.
    """

    kind: str
    text: str


class LarkSyntaxError(ValueError):
    """The text has tokens that the reader does not know."""


def lark_tokens(grammar: str) -> Iterator[LarkToken]:
    """Yield the tokens of a grammar, white space and comments among them.

    Raises:
      LarkSyntaxError: the grammar has other tokens.
    """
    at = 0
    decoder = json.JSONDecoder()
    while at < len(grammar):
        if (match := TOKEN.match(grammar, at)) is None:
            raise LarkSyntaxError(f"an unknown token at character {at}")
        at = match.end()
        kind = str(match.lastgroup)
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
        for token in lark_tokens(grammar):
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
        texts = [token.text for token in lark_tokens(grammar) if token.kind == "regex"]
    except LarkSyntaxError:
        return []
    return list(dict.fromkeys(texts))
