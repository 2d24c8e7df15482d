"""Requested structures in the form of the grammar compiler, llguidance."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.engine.structured.process import Part
from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers.bounded_schema import bounded, too_deep
from dflash_jax.tool_parsers.lark_reader import regexes, with_schemas

KINDS = ("json", "regex", "choice", "grammar")
OPTIONS = ("around", "prefix")  # further keys of a structure
MOST_PARTS = 100  # most regular expressions of a grammar that are tried by themselves
# The compiler would otherwise follow bytes without a choice to their end, which a grammar may not
# have; then one mask takes for ever. Without it, the model chooses how such text is tokenized.
HEAD = '%llguidance {"no_forcing": true}\n'


@dataclasses.dataclass(frozen=True)
class Source:
    """A structure for the compiler.

    Attributes:
      grammar: the whole grammar, in the compiler's form.
      parts: names and grammars of parts that the output may reach only later. They are to be tried
        by themselves.
      kind: one of `KINDS`.
      schema: the JSON schema of the kind "json"; None for another kind.
      prefix: text before the output that is a part of the structure.
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
    around = prefix = None
    if isinstance(structure, Mapping):
        around = structure.get("around")
        prefix = structure.get("prefix")
        structure = {kind: value for kind, value in structure.items() if kind not in OPTIONS}
    if not isinstance(structure, Mapping) or len(structure) != 1 or set(structure) - set(KINDS):
        raise RequestError(
            f"structured is {structure!r}; expected a mapping with one of {', '.join(KINDS)}"
        )
    ((kind, value),) = structure.items()
    answer, schema = _answer(kind, value)
    parts: list[Part] = []
    if kind == "grammar":
        for pattern in regexes(value):
            source = _whole({"lark_grammar": f"start: {pattern}"})
            parts.append((f"the regular expression {pattern}", source))
    if around is not None:
        parts.append(("the structure", _whole(answer)))
    return Source(
        grammar=_whole(answer, around or "start: @answer"),
        parts=tuple(parts[-MOST_PARTS:]),
        kind=kind,
        schema=schema,
        prefix=prefix or "",
    )


def schema_source(schema: Mapping[str, Any], *, strict: bool = True) -> str:
    """Return a JSON schema for the compiler; see `bounded` for `strict` and errors."""
    return _whole(_json_answer(schema, strict=strict))


def _whole(answer: Mapping[str, Any], around: str = "start: @answer") -> str:
    """Return a grammar in the compiler's form.

    Args:
      around: a Lark grammar of the whole output, which refers to the answer's as `@answer`.
    """
    grammars = [{"lark_grammar": HEAD + around}, {**answer, "name": "answer"}]
    return json.dumps({"grammars": grammars})


def _answer(kind: str, value: Any) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return a grammar of a structure without its surroundings, and its schema, if it has one."""
    if kind == "json" and isinstance(value, str | Mapping):
        schema = _parsed_schema(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping):
            return {"json_schema": schema}, None
        return _json_answer(schema, strict=True), schema
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


def _parsed_schema(text: str) -> Any:
    """Return the JSON value of a schema's text.

    Raises:
      RequestError: the text is not JSON, or too deeply nested.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise too_deep() from error
    except ValueError as error:
        raise RequestError(f"the JSON schema is not understood: {error}") from error


def _json_answer(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return a grammar of the values that fit a JSON schema; see `bounded` for errors."""
    answer = {"json_schema": bounded(schema, strict=strict)}
    try:
        json.dumps(answer)
    except RecursionError as error:
        raise too_deep() from error
    except (ValueError, TypeError) as error:
        raise RequestError(f"the JSON schema is not understood: {error}") from error
    return answer


def _choices(texts: Sequence[str]) -> str:
    """Return a grammar of some texts: one terminal, as the parser is slow in many alternatives."""
    nonempty = list(dict.fromkeys(text for text in texts if text))
    if not nonempty:
        return 'start: ""'
    rule = "CHOICE?" if "" in texts else "CHOICE"
    return f"start: {rule}\nCHOICE: " + " | ".join(map(json.dumps, nonempty))


def _check_grammar(grammar: str) -> None:
    """Check that a user's grammar is Lark.

    Raises:
      RequestError: it is EBNF.
    """
    if re.search(r"^\s*[\w-]+\s*::=", grammar, re.MULTILINE):
        raise RequestError(
            "the grammar is in EBNF (GBNF), with '::=', as llama.cpp and vLLM take; expected Lark:"
            ' write \'start: "yes" | "no"\' for \'root ::= "yes" | "no"\''
        )


def _bounded(schema: Any) -> Any:
    return bounded(schema, strict=True) if isinstance(schema, Mapping) else schema


def _regex(pattern: str) -> str:
    """Return a regular expression as a terminal of a Lark grammar."""
    import llguidance

    [grammar] = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"]
    return grammar["lark_grammar"].removeprefix("start: ")
