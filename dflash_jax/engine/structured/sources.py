"""Requested structures in the form of the grammar compiler, llguidance."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.engine.structured import refusals
from dflash_jax.engine.structured.process import Part
from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers.bounded_schema import bounded
from dflash_jax.tool_parsers.grammar_bounds import (
    check_lark,
    check_schema,
    endless_rule,
    parsed_schema,
    regexes,
    with_schemas,
)

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
        return {"lark_grammar": "start: " + " | ".join(map(json.dumps, value))}, None
    expected = {"json": "a schema", "choice": "a list of texts"}.get(kind, "a text")
    raise RequestError(f"structured {kind} is {value!r}; expected {expected}")


def _check_grammar(grammar: str) -> None:
    """Check that a user's grammar is Lark, not too large, and derives a finite text.

    Raises:
      RequestError: it does not.
    """
    if refusals.is_ebnf(grammar):
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
