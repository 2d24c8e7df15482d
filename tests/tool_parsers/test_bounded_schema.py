"""Schemas get bounds on all repetitions, exact numbers, and no parts without values."""

import contextlib
import json
import random
from typing import Any

import pytest

from dflash_jax.engine.structured.grammars import Grammars
from dflash_jax.errors import RequestError
from dflash_jax.loading import locate
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.bounded_schema import bounded

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

MOST = 2**53 - 1
BOTH = {"minimum": -MOST, "maximum": MOST}
FRACTION = {"multipleOf": 1e-10}


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [
        ({"type": "integer"}, BOTH),
        ({"type": ["integer", "null"]}, BOTH),
        ({"type": "integer", "minimum": 0}, {"maximum": MOST}),
        ({"type": "integer", "exclusiveMaximum": 5}, {"minimum": -MOST}),
        ({"type": "integer", "minimum": 2**60}, {"maximum": 2**63 - 1024}),
        ({"type": "integer", "minimum": 1, "maximum": 2}, {}),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, BOTH),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, {"maximum": MOST}),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 5},
         {"minimum": 2**53 + 2, "maximum": 2**53 + 4}),
        ({"type": "integer", "enum": [2**60]}, {}),
        ({"type": "integer", "multipleOf": 2.5}, BOTH),
        ({"type": ["integer", "number"]}, BOTH | FRACTION),
        ({"type": "number"}, BOTH | FRACTION),
        ({"type": "number", "multipleOf": 0.01}, BOTH),
        ({"type": "number", "minimum": 1e-300}, {"minimum": 1e-10, "maximum": MOST} | FRACTION),
        ({"type": "string", "minimum": "x"}, {}),
        ({"type": "string", "format": "date-time"}, {"maxLength": 35}),
        ({"type": "string", "minLength": 2.0, "maxLength": 5.0}, {"minLength": 2, "maxLength": 5}),
    ],
)  # fmt: skip
def test_bounds_are_added_where_the_schema_has_none(
    schema: dict[str, Any], bounds: dict[str, Any]
) -> None:
    inner = {"properties": {"type": schema, "integer": {"type": "string"}}, "const": ["integer"]}
    found = bounded(inner)
    assert found["properties"]["type"] == schema | bounds
    assert found["properties"]["integer"] == {"type": "string"}
    assert found["const"] == ["integer"]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 2**53 + 1}, "number 9007199254740993 at #/const"),
        ({"const": -(2**63)}, "number -9223372036854775808 at #/const"),
        ({"properties": {"a": {"enum": [[{"x": 2**64}]]}}}, "at #/properties/a/enum"),
        ({"type": "integer", "minimum": 2**63, "maximum": 2**63 + 5}, "minimum 92233720368547758"),
        ({"items": {"type": "number", "maximum": -1e300}}, "maximum -1e.300 at #/items/maximum"),
        ({"type": "integer", "minimum": -(10**20), "maximum": -(10**19)}, "at #/maximum"),
        ({"type": "number", "minimum": float("inf")}, "minimum inf at #/minimum"),
        ({"type": "number", "multipleOf": 0}, "multipleOf 0 at #/multipleOf; expected a number"),
        ({"type": "number", "multipleOf": 0.07}, "multipleOf 0.07 at #/multipleOf"),
        ({"type": "number", "multipleOf": 1e300}, "multipleOf 1e.300 at"),
        ({"allOf": [{"multipleOf": 99991}, {"multipleOf": 99989}]}, "combines schemas"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, "because of #/.defs/n;"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
         "no finite value fits the JSON schema, because of #/properties/a"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "because of #/items"),
        ({"anyOf": [{"$ref": "#"}, False, {"enum": []}]}, "no finite value"),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"$ref": "#"}}}, "no finite value"),
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_followed_exactly_or_never_end_are_refused(
    schema: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        bounded(schema)


def test_parts_without_a_finite_value_are_never_chosen() -> None:
    endless = {"type": "object", "properties": {"b": {"$ref": "#/$defs/e"}}, "required": ["b"]}
    reference = {"$ref": "#/$defs/e"}
    schema = {
        "type": "object",
        "properties": {"a": reference, "c": {"anyOf": [reference, {"const": 1}]}},
        "$defs": {"e": endless},
    }  # fmt: skip
    found = bounded(schema)
    assert found["properties"]["a"] is False
    assert found["properties"]["c"] == {"anyOf": [False, {"const": 1}]}


def test_lengths_that_no_output_has_are_no_bounds() -> None:
    found = bounded({"type": "array", "items": {"type": "null"}, "maxItems": 2**64 - 1})
    assert "maxItems" not in found


def test_references_by_name_are_left_to_the_compiler() -> None:
    anchored = {"$ref": "#node", "$defs": {"n": {"$anchor": "node", "type": "null"}}}
    assert bounded(anchored)["$ref"] == "#node"


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Tokenizer.from_directory(locate("tiny", "target")), 2048, [2040])


def accepted(grammars: Grammars, schema: Any, text: str) -> int:
    """Return how many characters of a text a schema's grammar accepts, one by one."""
    grammar = grammars.make({"json": schema})
    view, _ = grammars._compilers()
    for at, character in enumerate(text):
        [token] = view.tokenize_str(character)
        if not grammar._matcher.try_consume_tokens([token]):
            return at
    return len(text)


ANY_VALUES = [
    {},
    {"type": "object"},
    {"type": "array"},
    {"type": "object", "properties": {"a": {}}},
]


@pytest.mark.parametrize(
    ("schema", "start"),
    [
        ({"type": "number"}, ""),
        ({"type": ["number", "null"]}, "-"),
        *zip(ANY_VALUES, ("", '{"b":', "[", '{"a":'), strict=True),
        ({"properties": {"a": True}, "type": "object"}, '{"a":[['),
        ({"type": "integer", "multipleOf": 2.5}, "-"),
        ({"type": "integer", "multipleOf": 7}, ""),
    ],
)
def test_no_number_goes_on_without_an_end(grammars: Grammars, schema: Any, start: str) -> None:
    for digits in ("9" * 40, "0." + "0" * 40, "1." + "3" * 40, "1e" + "9" * 40):
        assert accepted(grammars, schema, start + digits) < len(start) + 30


@pytest.mark.parametrize("name", ["date-time", "time"])
def test_fractions_of_seconds_end(grammars: Grammars, name: str) -> None:
    start = '"' + ("2026-01-01T" if name == "date-time" else "") + "10:00:00."
    schema = {"type": "string", "format": name}
    assert len(start) < accepted(grammars, schema, start + "1" * 60) < len(start) + 20


@pytest.mark.parametrize(
    "value", [MOST, 2**53 + 2, -(2**62), 2**63 - 1024, 0.1, 1e-7, 1e22, 123456789.12345678, -1.5]
)
def test_numbers_that_are_exact_are_written_with_their_digits(
    grammars: Grammars, value: float
) -> None:
    view, _ = grammars._compilers()
    grammar = grammars.make({"json": {"const": value}})
    text = bytearray()
    while not grammar.finished:
        found = bytes(grammar._matcher.compute_bitmask())
        bits = [i for i in range(2040) if found[i // 8] >> i % 8 & 1]
        if not bits:
            break
        grammar.accept(bits[:1])
        text += view.decode_bytes(bits[:1])
    assert json.loads(text) == value


WORDS = ("type", "properties", "items", "anyOf", "allOf", "$ref", "$defs", "const", "enum",
         "minimum", "exclusiveMaximum", "multipleOf", "required", "format", "maxLength",
         "additionalProperties", "prefixItems", "minItems")  # fmt: skip
VALUES = (True, False, None, 0, -5, 2**63, -(2**64), 1.5, 1e300, 1e-300, "", "object", "integer",
          "#", "#/$defs/a", "a", float("inf"))  # fmt: skip


def test_schemas_of_any_shape_are_bounded_or_refused() -> None:
    draws = random.Random(7)

    def value(depth: int) -> Any:
        shape = draws.randrange(12 if depth < 4 else 6)
        if shape < 6:
            return draws.choice(VALUES)
        count = draws.randrange(4)
        if shape < 10:
            return {draws.choice(WORDS): value(depth + 1) for _ in range(count)}
        return [value(depth + 1) for _ in range(count)]

    for _ in range(2000):
        schema = {draws.choice(WORDS): value(0) for _ in range(draws.randrange(5))}
        with contextlib.suppress(RequestError):
            bounded(schema, strict=draws.random() < 0.5)
