"""Say why a structure is refused, in words of the request rather than of the grammar compiler."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from dflash_jax.tool_parsers.bounded_schema import relocated, resolved, subschemas

MOST_TRIALS = 200  # compilations of parts of one schema, to find the one that is refused
EMPTY = "NoExtensionBias"  # the compiler's word for a state in which no text may follow
ROOT = "whole_schema"  # a definition with the schema whose part is tried
UNSATISFIABLE = "Unsatisfiable schema: "
PREFIX = "the structure is not understood: "
# Errors of the compiler in JSON schemas, and what to say.
WORDS = (
    (r"Unsatisfiable schema: Regex is empty.*", "no text fits its pattern, format and lengths"),
    (r"Unsatisfiable schema: (.*)", "no value fits it: {0}"),
    (r"Unimplemented keys: \[(.*)\]", "the keyword {0} is not supported here; leave it out, and"
     " check the value afterwards"),
    (r"oneOf constraints are not supported.*", "the alternatives of its oneOf overlap, and no"
     " grammar excludes values that fit two of them; write anyOf, or make them exclude each other"),
    (r"regex parse error.*error: look-around.*", "its pattern looks ahead or behind, which is not"
     " supported here; write the pattern without (?=, (?!, (?<= and (?<!"),
    (r"regex parse error.*error: (.*)", "its pattern is not supported here: {0}"),
    (r"Failed to generate regex for \w+ range.*", "its bounds cannot be followed exactly; use"
     " bounds of fewer digits"),
    (r"Unknown format: (.*)", "the format {0} is unknown"),
    (r"Invalid type: (.*)", "the type {0!r} is unknown"),
    (r"Pointer '(.*)' does not exist", "the reference #{0} points to nothing"),
    (r"Resource '(.*)' is not present.*", "the reference {0} leaves the schema; expected one that"
     " starts with #"),
)  # fmt: skip
PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)  # in a Lark grammar


def schema_refusal(
    schema: Mapping[str, Any], error: str, attempt: Callable[[Mapping[str, Any]], str | None]
) -> str:
    """Return why a JSON schema is refused, with the path of the part that is the cause.

    Args:
      error: the compiler's error.
      attempt: returns the compiler's error for another schema, or None.
    """
    path, error = refused_part(schema, error, attempt)
    return f"the JSON schema is not supported at {path}: {words(error)}"


def refused_part(
    schema: Mapping[str, Any], error: str, attempt: Callable[[Mapping[str, Any]], str | None]
) -> tuple[str, str]:
    """Return the path of the innermost part that is refused by itself, and the error of it."""
    path, part, trials = "#", schema, 0
    found = True
    while found and isinstance(part, Mapping):
        found = False
        for place, inner in subschemas(part):
            trials += 1
            if trials > MOST_TRIALS:
                return path, error
            reason = attempt(alone(schema, path + place))
            if reason is not None:
                path, part, error, found = path + place, inner, reason, True
                break
    return path, error


def alone(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a schema for the part at a path, whose references still work."""
    moved = relocated(schema, "#", f"#/$defs/{ROOT}")
    return {"$ref": f"#/$defs/{ROOT}" + path[1:], "$defs": {ROOT: moved}}


def words(error: str) -> str:
    """Return an error of the compiler in plain words."""
    error = error.removeprefix(PREFIX).partition("\n  while processing")[0].strip()
    error = error.replace(f"/$defs/{ROOT}", "")
    for pattern, said in WORDS:
        if match := re.fullmatch(pattern, error, re.DOTALL):
            return said.format(*(text.replace('"', "'").strip() for text in match.groups()))
    return error.replace("regex parse error:\n", "").strip()


def text_refusal(kind: str, error: str) -> str:
    """Return why a regular expression, a grammar or a list of choices is refused.

    Args:
      kind: "regex", "grammar" or "choice".
    """
    name = {"regex": "the regular expression", "grammar": "the grammar"}.get(kind, "the structure")
    error = error.removeprefix(PREFIX)
    where = ""
    if match := PLACE.match(error):
        where = f" in line {match[1]}, column {match[2]}" if kind == "grammar" else ""
        error = re.sub(r"\n +\d+ \| .*", "", match[3], flags=re.DOTALL)
    parts = re.fullmatch(r"invalid regex (.*?) \(in regex\): regex parse error.*error: (.*)", error,
                         re.DOTALL)  # fmt: skip
    if parts:
        error = f"{json.loads(parts[1])}: {parts[2].strip()}" if kind == "grammar" else parts[2]
    if match := re.fullmatch(r"failed to compile JSON schema: (.*)", error, re.DOTALL):
        error = f"its JSON schema: {words(match[1])}"
    return f"{name} is not understood{where}: {error.strip()}"


def is_ebnf(grammar: str) -> bool:
    """Return whether a grammar is written with `::=`, as llama.cpp's GBNF."""
    return re.search(r"^\s*[\w-]+\s*::=", grammar, re.MULTILINE) is not None


def usable(
    schema: Mapping[str, Any], attempt: Callable[[Mapping[str, Any]], str | None]
) -> tuple[Mapping[str, Any], list[tuple[str, str, str]], tuple[str, str] | None]:
    """Return a schema without values that the compiler does not support, such as patterns.

    Args:
      attempt: returns the compiler's error for a schema with bounds, or None.

    Returns:
      The schema, the paths, keywords and reasons of what was left out, and the path and reason of
      what could not be left out, or None.
    """
    dropped: list[tuple[str, str, str]] = []
    while (error := attempt(schema)) is not None:
        path, error = refused_part(schema, error, attempt)
        part = resolved(schema, path)
        keys = [] if error.startswith(PREFIX + UNSATISFIABLE) else _suspects(part)
        for key in keys:
            rest = _replaced(schema, path, {k: v for k, v in part.items() if k != key})
            again = attempt(alone(rest, path))
            if again is None or again != error:
                schema = rest
                dropped.append((path, key, words(error)))
                break
        else:
            return schema, dropped, (path, words(error))
    return schema, dropped, None


def _suspects(part: Any) -> list[str]:
    """Return the keywords of a schema whose values may be unsupported, the likeliest first."""
    if not isinstance(part, Mapping):
        return []
    first = ("pattern", "format", "patternProperties", "oneOf", "multipleOf", "$ref")
    return sorted(part, key=lambda key: first.index(key) if key in first else len(first))


def _replaced(schema: Any, path: str, part: Any) -> Any:
    """Return a schema with another part at a path."""
    step, _, rest = path.removeprefix("#").removeprefix("/").partition("/")
    if not step:
        return part
    name = step.replace("~1", "/").replace("~0", "~")
    if isinstance(schema, Mapping):
        return {**schema, name: _replaced(schema[name], rest, part)}
    return [_replaced(x, rest, part) if str(i) == name else x for i, x in enumerate(schema)]
