"""Why the grammar compiler refuses a structure, in words of the request, and what to leave out."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dflash_jax.tool_parsers.finite_schema import relocated, resolved, subschemas, unescaped

MOST_TRIALS = 200  # most parts of one schema that are compiled to find the one that is refused
ROOT = "whole_schema"  # name of a definition that holds the schema whose part is tried
UNSATISFIABLE = "Unsatisfiable schema: "
# Keywords whose values the compiler may not support, the likeliest first.
UNSUPPORTED = ("pattern", "format", "patternProperties", "oneOf", "multipleOf", "$ref")
# Keywords that may contradict the type of a schema, its properties or each other.
CONTRADICTING = (
    "enum", "const", "pattern", "format", "multipleOf", "minimum", "exclusiveMinimum", "maximum",
    "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties",
    "maxProperties", "required", "additionalProperties", "patternProperties", "oneOf", "anyOf",
    "allOf", "$ref",
)  # fmt: skip
PREFIX = "the structure is not understood: "  # of the compiler's own errors
# Errors of a schema as a whole, of which no part is the cause.
OF_WHOLE = ("initial lexer configuration (grammar) too big", "recursion limit exceeded")
# Errors of the compiler in JSON schemas, and plain words for each.
PLAIN_WORDS = (
    (r"no finite value fits the JSON schema.*", "no value fits it"),
    (r"initial lexer configuration \(grammar\) too big.*", "it has too many different names and"
     " texts; expected at most some hundred: leave some out, or ask for them in several requests"),
    (r"recursion limit exceeded.*", "it is nested too deeply; move inner schemas to $defs, and"
     " refer to them"),
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
# Errors of the compiler in Lark grammars and in regular expressions.
PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
INVALID_REGEX = re.compile(
    r"invalid regex (.*?) \(in regex\): regex parse error.*error: (.*)", re.DOTALL
)


def schema_refusal(
    schema: Mapping[str, Any], error: str, attempt: Callable[[Mapping[str, Any]], str | None]
) -> str:
    """Return why a JSON schema is refused, with the path of the part that is the cause.

    Args:
      error: the compiler's error.
      attempt: returns the compiler's error for another schema, or None.
    """
    path, error = refused_part(schema, error, attempt)
    return f"the JSON schema is not supported at {path}: {in_plain_words(error)}"


def refused_part(
    schema: Mapping[str, Any], error: str, attempt: Callable[[Mapping[str, Any]], str | None]
) -> tuple[str, str]:
    """Return the path of the innermost part that is refused by itself, and its error.

    Only errors of the same origin count: the compiler's, or those found before it.
    """
    path = "#"
    part = schema
    tried = 0
    seen = {id(schema)}
    descends = True
    while descends:
        descends = False
        for inner_path, inner in _needed_parts(schema, part, path):
            if not isinstance(inner, Mapping) or id(inner) in seen:
                continue
            tried += 1
            if tried > MOST_TRIALS:
                return path, error
            reason = attempt(alone(schema, inner, inner_path))
            if reason is not None and reason.startswith(PREFIX) == error.startswith(PREFIX):
                path = inner_path
                part = inner
                error = reason
                seen.add(id(inner))
                descends = True
                break
    return path, error


def _needed_parts(
    schema: Mapping[str, Any], part: Mapping[str, Any], path: str
) -> Iterator[tuple[str, Any]]:
    """Yield the schemas inside a part of a schema and the one that it refers to, with paths."""
    for inner_path, inner in subschemas(part):
        if not inner_path.startswith(("/$defs", "/definitions")):
            yield path + inner_path, inner
    if isinstance(reference := part.get("$ref"), str):
        yield reference, resolved(schema, reference)


def alone(schema: Mapping[str, Any], part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a schema for the part at a path, whose references still work.

    It contains no more of the whole schema than the part refers to, where that is definitions.
    """
    needed: dict[tuple[str, str], Any] = {}
    waiting: list[Any] = [part]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        if not isinstance(value, Mapping):
            continue
        waiting += value.values()
        if isinstance(reference := value.get("$ref"), str):
            keyword, _, name = reference.removeprefix("#/").partition("/")
            name = name.partition("/")[0]
            target = resolved(schema, f"#/{keyword}/{name}")
            if keyword not in ("$defs", "definitions") or target is None:
                moved = relocated(schema, "#", f"#/$defs/{ROOT}")
                return {"$ref": f"#/$defs/{ROOT}" + path[1:], "$defs": {ROOT: moved}}
            if (keyword, name) not in needed:
                needed[keyword, name] = target
                waiting.append(target)
    standalone = dict(part)
    for (keyword, name), target in needed.items():
        definitions = standalone.get(keyword)
        if not isinstance(definitions, Mapping):
            definitions = {}
        standalone[keyword] = {**definitions, unescaped(name): target}
    return standalone


def in_plain_words(error: str) -> str:
    """Return an error of the compiler in plain words."""
    error = error.removeprefix(PREFIX).partition("\n  while processing")[0].strip()
    error = error.replace(f"/$defs/{ROOT}", "")
    for pattern, meaning in PLAIN_WORDS:
        if match := re.fullmatch(pattern, error, re.DOTALL):
            return meaning.format(*(text.replace('"', "'").strip() for text in match.groups()))
    return error.replace("regex parse error:\n", "").strip()


def text_refusal(kind: str, error: str) -> str:
    """Return why a regular expression, a grammar or a list of choices is refused.

    Args:
      kind: "regex", "grammar" or "choice".
    """
    names = {"regex": "the regular expression", "grammar": "the grammar"}
    name = names.get(kind, "the structure")
    error = error.removeprefix(PREFIX)
    where = ""
    if match := PLACE.match(error):
        if kind == "grammar":
            where = f" in line {match[1]}, column {match[2]}"
        error = re.sub(r"\n +\d+ \| .*", "", match[3], flags=re.DOTALL)
    if match := INVALID_REGEX.fullmatch(error):
        error = match[2]
        if kind == "grammar":
            error = f"{json.loads(match[1])}: {error.strip()}"
    if match := re.fullmatch(r"failed to compile JSON schema: (.*)", error, re.DOTALL):
        error = f"its JSON schema: {in_plain_words(match[1])}"
    return f"{name} is not understood{where}: {error.strip()}"


@dataclasses.dataclass(frozen=True)
class UsableSchema:
    """A schema without values that no grammar can follow, such as patterns that look ahead.

    Attributes:
      dropped: path, keyword and reason of each value that was left out.
      refused: path and reason of a value that could not be left out, or None.
    """

    schema: Mapping[str, Any]
    dropped: tuple[tuple[str, str, str], ...] = ()
    refused: tuple[str, str] | None = None


def usable(
    schema: Mapping[str, Any], attempt: Callable[[Mapping[str, Any]], str | None]
) -> UsableSchema:
    """Return a schema without keywords that the compiler does not support, or that contradict.

    Args:
      attempt: returns why a schema is refused, or None.
    """
    dropped: list[tuple[str, str, str]] = []
    while (error := attempt(schema)) is not None:
        path, error = refused_part(schema, error, attempt)
        part = resolved(schema, path)
        for key, rest in _lenient(part, contradicts=is_contradiction(error)):
            less = _replaced(schema, path, rest)
            again = attempt(alone(less, rest, path))
            if again is None or again != error:
                schema = less
                dropped.append((path, key, in_plain_words(error)))
                break
        else:
            return UsableSchema(schema, tuple(dropped), (path, in_plain_words(error)))
    return UsableSchema(schema, tuple(dropped))


def is_contradiction(error: str) -> bool:
    """Return whether an error means that no value fits a schema."""
    return error.startswith(PREFIX + UNSATISFIABLE) or not error.startswith(PREFIX)


def _lenient(part: Any, *, contradicts: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema without one of its keywords each, the likeliest cause first.

    Args:
      contradicts: whether keywords contradict each other. Then its type and properties stay.
    """
    if not isinstance(part, Mapping):
        return
    first = CONTRADICTING if contradicts else UNSUPPORTED
    keys = [key for key in first if key in part]
    if not contradicts:
        keys = list(dict.fromkeys((*keys, *part)))
    for key in keys:
        rest = {k: v for k, v in part.items() if k != key}
        required = part.get("required")
        properties = part.get("properties")
        if key == "required" and isinstance(required, list) and isinstance(properties, Mapping):
            rest["required"] = [name for name in required if name in properties]
            if rest["required"] == required:
                del rest["required"]
        yield key, rest


def _replaced(schema: Any, path: str, part: Any) -> Any:
    """Return a schema with another part at a path."""
    step, _, rest = path.removeprefix("#").removeprefix("/").partition("/")
    if not step:
        return part
    name = step.replace("~1", "/").replace("~0", "~")
    if isinstance(schema, Mapping):
        return {**schema, name: _replaced(schema[name], rest, part)}
    return [_replaced(x, rest, part) if str(i) == name else x for i, x in enumerate(schema)]
