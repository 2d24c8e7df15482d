"""Bounds on JSON schemas and grammars of users, checked before compilation.

The grammar compiler is recursive: a few kilobytes can exhaust its stack, or take minutes. The
checks here use explicit stacks, and linear time.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers.finite_schema import resolved

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
