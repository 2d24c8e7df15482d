"""Bounds on users' JSON schemas and grammars, checked before anything compiles them.

A grammar compiler recurses over what it is given, and a few kilobytes can exhaust its stack or keep
it busy for minutes. The walks here use explicit stacks, and take time linear in their input.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dflash_jax.errors import RequestError

MAX_DEPTH = 100  # lists and mappings in each other, in a JSON schema
MAX_REFERENCES = 100  # references of a JSON schema that lead from one to the next
MAX_MULTIPLE = (
    10_000  # of multipleOf, without its factors 2 and 5: an automaton has that many states
)
MAX_RULES = 1000  # of a Lark grammar; of terminals as many
DEFINITION = re.compile(r"^[ \t]*[?!]?(_*[A-Za-z]\w*)[ \t]*[:.\[]", re.MULTILINE)


def check_schema(schema: Any) -> None:
    """Refuse, by RequestError, a JSON schema that is too deep or has too long a chain of `$ref`.

    References are followed depth first, each once, as a compiler follows them.
    """
    depth, chain = 1, 0
    followed: set[str] = set()
    waiting: list[tuple[Any, int, int]] = [(schema, 1, 0)]  # values, how deep, after how many $ref
    while waiting:
        value, level, references = waiting.pop()
        if isinstance(value, str):  # where a reference points
            if value in followed:
                continue
            followed.add(value)
            value, level = _at(schema, value), 1
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
            waiting.append((place, 1, references + 1))  # last, and so followed first
    if depth > MAX_DEPTH:
        raise _too_deep(f"is nested {depth} levels deep")
    if chain > MAX_REFERENCES:
        raise RequestError(
            f"the JSON schema has {chain} references ($ref) in a row; expected at most"
            f" {MAX_REFERENCES}: refer to the last definition directly"
        )


def parsed_schema(text: str) -> Any:
    """Return the JSON value of a schema's text; raises RequestError, as `check_schema` does."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise _too_deep("is nested too deeply to be read") from error
    except ValueError as error:
        raise RequestError(f"the JSON schema is not understood: {error}") from error


def check_lark(grammar: str) -> None:
    """Refuse, by RequestError, a Lark grammar of too many rules or terminals, or a schema in it."""
    names = {found[1].lstrip("_") for found in DEFINITION.finditer(grammar)}
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
    """JSON schemas that a Lark grammar has after `%json`."""
    decoder, place = json.JSONDecoder(), re.compile(r"%json\s*(?=\{)")
    for found in place.finditer(grammar):
        try:
            yield decoder.raw_decode(grammar, found.end())[0]
        except RecursionError as error:
            raise _too_deep("is nested too deeply to be read") from error
        except ValueError:
            continue  # the compiler says where the error is


def _at(schema: Any, reference: str) -> Any:
    """The value that a reference within the schema points at; None where there is none."""
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping):
            schema = schema.get(name)
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return None
    return schema


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
