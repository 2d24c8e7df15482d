"""Requested structures in the form of the grammar compiler, llguidance, and why it refuses one."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dflash_jax.engine.structured.process import Part
from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers.bounded_schema import (
    bounded,
    relocated,
    resolved,
    subschemas,
    unescaped,
)
from dflash_jax.tool_parsers.grammar_bounds import (
    check_lark,
    check_schema,
    endless_rule,
    parsed_schema,
    regexes,
    with_schemas,
)

# Say why a structure is refused, in words of the request rather than of the grammar compiler.


MOST_TRIALS = 200  # compilations of parts of one schema, to find the one that is refused
EMPTY = "NoExtensionBias"  # the compiler's word for a state in which no text may follow
ROOT = "whole_schema"  # a definition with the schema whose part is tried
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
PREFIX = "the structure is not understood: "
TOO_LARGE = "initial lexer configuration (grammar) too big"  # of the whole, not of a part
# Errors of the compiler in JSON schemas, and what to say.
WORDS = (
    (r"no finite value fits the JSON schema.*", "no value fits it"),
    (r"initial lexer configuration \(grammar\) too big.*", "it has too many different names and"
     " texts; expected at most some hundred: leave some out, or ask for them in several requests"),
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
    """Return the path of the innermost part that is refused by itself, and the error of it.

    Only errors of the same origin count: the compiler's, or those found before it.
    """
    path, part, trials = "#", schema, 0
    seen = {id(schema)}
    found = True
    while found:
        found = False
        for place, inner in _needed_parts(schema, part, path):
            if not isinstance(inner, Mapping) or id(inner) in seen:
                continue
            trials += 1
            if trials > MOST_TRIALS:
                return path, error
            reason = attempt(alone(schema, inner, place))
            if reason is not None and reason.startswith(PREFIX) == error.startswith(PREFIX):
                path, part, error, found = place, inner, reason, True
                seen.add(id(inner))
                break
    return path, error


def _needed_parts(
    schema: Mapping[str, Any], part: Mapping[str, Any], path: str
) -> Iterator[tuple[str, Any]]:
    """Yield the schemas inside a part of a schema and the one that it refers to, with paths."""
    for place, inner in subschemas(part):
        if not place.startswith(("/$defs", "/definitions")):
            yield path + place, inner
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
        if isinstance(place := value.get("$ref"), str):
            keyword, _, name = place.removeprefix("#/").partition("/")
            name = name.partition("/")[0]
            target = resolved(schema, f"#/{keyword}/{name}")
            if keyword not in ("$defs", "definitions") or target is None:
                moved = relocated(schema, "#", f"#/$defs/{ROOT}")
                return {"$ref": f"#/$defs/{ROOT}" + path[1:], "$defs": {ROOT: moved}}
            if (keyword, name) not in needed:
                needed[keyword, name] = target
                waiting.append(target)
    found = dict(part)
    for (keyword, name), target in needed.items():
        definitions = found.get(keyword)
        definitions = definitions if isinstance(definitions, Mapping) else {}
        found[keyword] = {**definitions, unescaped(name): target}
    return found


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


@dataclasses.dataclass(frozen=True)
class UsableSchema:
    """A schema without values that no grammar can follow, such as patterns that look ahead.

    Attributes:
      dropped: paths, keywords and reasons of what was left out.
      refused: the path and reason of what could not be left out, or None.
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
                dropped.append((path, key, words(error)))
                break
        else:
            return UsableSchema(schema, tuple(dropped), (path, words(error)))
    return UsableSchema(schema, tuple(dropped))


def is_contradiction(error: str) -> bool:
    """Return whether an error means that no value fits a schema."""
    return error.startswith(PREFIX + UNSATISFIABLE) or not error.startswith(PREFIX)


def _lenient(part: Any, *, contradicts: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema without one of its keywords each, the likeliest cause first.

    Args:
      contradicts: its keywords contradict each other, so that its type and properties count.
    """
    if not isinstance(part, Mapping):
        return
    first = CONTRADICTING if contradicts else UNSUPPORTED
    keys = [key for key in first if key in part]
    for key in keys if contradicts else dict.fromkeys((*keys, *part)):
        rest = {k: v for k, v in part.items() if k != key}
        named, declared = part.get("required"), part.get("properties")
        if key == "required" and isinstance(named, list) and isinstance(declared, Mapping):
            rest["required"] = [name for name in named if name in declared]
            if rest["required"] == named:
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


KINDS = ("json", "regex", "choice", "grammar")
OPTIONS = ("around", "prefix")  # further keys of a structure
MOST_PARTS = 100  # regular expressions of a grammar that are tried by themselves
# The compiler would otherwise follow bytes without a choice to their end, which a grammar may not
# have; then one mask takes for ever. Without it, the model chooses how such text is tokenized.
HEAD = '%llguidance {"no_forcing": true}\n'


@dataclasses.dataclass(frozen=True)
class Source:
    """A structure for the compiler.

    Attributes:
      grammar: the whole, in the compiler's form.
      parts: what the output may reach only later, to be tried by itself.
      kind: one of `KINDS`.
      schema: of the kind "json", else None.
      prefix: text that the output continues, which is a part of the structure.
    """

    grammar: str
    parts: tuple[Part, ...]
    kind: str
    schema: Mapping[str, Any] | None
    prefix: str


def source_of(structure: Any) -> Source:
    """Return a structure for the compiler.

    Raises:
      RequestError: the structure is not one, is too large, or certainly matches no text.
    """
    if isinstance(structure, Mapping):
        around, prefix = (structure.get(key) for key in OPTIONS)
        structure = {kind: value for kind, value in structure.items() if kind not in OPTIONS}
    else:
        around = prefix = None
    if not isinstance(structure, Mapping) or len(structure) != 1 or set(structure) - set(KINDS):
        raise RequestError(
            f"structured is {structure!r}; expected a mapping with one of {', '.join(KINDS)}"
        )
    ((kind, value),) = structure.items()
    answer, schema = _answer(kind, value)
    parts = [(f"the regular expression {x}", _whole({"lark_grammar": f"start: {x}"}))
             for x in (regexes(value) if kind == "grammar" else ())]  # fmt: skip
    if around is not None:
        check_lark(around)
        parts.append(("the structure", _whole(answer)))
    return Source(
        _whole(answer, around or "start: @answer"),
        tuple(parts[-MOST_PARTS:]), kind, schema, prefix or "",
    )  # fmt: skip


def schema_source(schema: Mapping[str, Any], *, strict: bool = True) -> str:
    """Return a JSON schema for the compiler; see `bounded` for `strict` and errors."""
    return _whole({"json_schema": bounded(schema, strict=strict)})


def _whole(answer: Mapping[str, Any], around: str = "start: @answer") -> str:
    grammars = [{"lark_grammar": HEAD + around}, {**answer, "name": "answer"}]
    return json.dumps({"grammars": grammars})


def _answer(kind: str, value: Any) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return a grammar of a structure without its surroundings, and its schema, if it has one."""
    if kind == "json" and isinstance(value, str | Mapping):
        try:
            schema = parsed_schema(value) if isinstance(value, str) else value
            check_schema(schema)
            if not isinstance(schema, Mapping):
                return {"json_schema": schema}, None
            answer = {"json_schema": bounded(schema, strict=True)}
            json.dumps(answer)
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"the JSON schema is not understood: {error}") from error
        return answer, schema
    if kind in ("regex", "grammar") and isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the structure is not understood: {error}") from error
        if kind == "grammar":
            _check_grammar(value)
            return {"lark_grammar": with_schemas(value, _bounded)}, None
        return {"lark_grammar": f"start: {_regex(value)}"}, None
    choices = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if kind == "choice" and choices and all(isinstance(x, str) for x in value):
        return {"lark_grammar": _choices(value)}, None
    expected = {"json": "a schema", "choice": "a list of texts"}.get(kind, "a text")
    raise RequestError(f"structured {kind} is {value!r}; expected {expected}")


def _choices(texts: Sequence[str]) -> str:
    """Return a grammar of some texts: one terminal, as the parser is slow in many alternatives."""
    some = list(dict.fromkeys(text for text in texts if text))
    if not some:
        return 'start: ""'
    rule = "CHOICE" if len(some) == len(set(texts)) else "CHOICE?"
    return f"start: {rule}\nCHOICE: " + " | ".join(map(json.dumps, some))


def _check_grammar(grammar: str) -> None:
    """Check that a user's grammar is Lark, not too large, and derives a finite text.

    Raises:
      RequestError: it does not.
    """
    if re.search(r"^\s*[\w-]+\s*::=", grammar, re.MULTILINE):
        raise RequestError(
            "the grammar is in EBNF (GBNF), with '::=', as llama.cpp and vLLM take; expected Lark:"
            ' write \'start: "yes" | "no"\' for \'root ::= "yes" | "no"\''
        )
    check_lark(grammar)
    if (rule := endless_rule(grammar)) is not None:
        raise RequestError(
            f"the grammar's rule {rule!r} derives no finite text, as each of its alternatives needs"
            " a rule that never ends; add an alternative that ends"
        )


def _bounded(schema: Any) -> Any:
    return bounded(schema, strict=True) if isinstance(schema, Mapping) else schema


def _regex(pattern: str) -> str:
    """Return a regular expression as a terminal of a Lark grammar."""
    import llguidance

    [grammar] = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"]
    return grammar["lark_grammar"].removeprefix("start: ")
