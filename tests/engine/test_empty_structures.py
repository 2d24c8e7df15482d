"""Structures that match no text, or never end, are refused at once, wherever they are reached."""

import time
from typing import Any

import numpy as np
import pytest

from dflash_jax.engine.structured.grammars import Grammar, Grammars
from dflash_jax.errors import RequestError
from dflash_jax.loading import locate
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.grammar import answer_grammar

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

SELF = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}
MUTUAL = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_directory(locate("tiny", "target"))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    made = Grammars(tokenizer, 2048, [2040])
    made.seconds = 60.0
    return made


def required(schema: Any) -> dict[str, Any]:
    return {"json": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}


EMPTY = [
    ({"json": SELF}, r"no finite value .* because of #/\$defs/n"),
    ({"json": MUTUAL}, "no finite value"),
    (required({"$ref": "#"}), "because of #/properties/a"),
    (required({"enum": []}), "no finite value fits the JSON schema"),
    (required({"type": "integer", "minimum": 3, "maximum": 1}), "no finite value"),
    (required({"type": "string", "pattern": "^a$", "minLength": 3}),
     "at #/properties/a: no text fits its pattern, format and lengths"),
    (required({"allOf": [{"type": "string"}, {"type": "integer"}]}), "at #/properties/a: no value"),
    ({"regex": r"[^\s\S]"}, "no text matches the structure"),
    ({"grammar": "start: start"}, "no text matches the structure"),
    ({"grammar": "start: a\na: b | b b\nb: a"}, "no text matches the structure"),
    ({"grammar": r"start: /[^\s\S]/"}, "no text matches the"),
    ({"grammar": 'start: "x" | "y" A\nA: /[^\\s\\S]/'}, "no text matches the regular expression"),
]  # fmt: skip


@pytest.mark.parametrize(("structure", "message"), EMPTY)
@pytest.mark.parametrize("thinks", [False, True])
def test_empty_structures_are_refused_also_after_reasoning(
    tokenizer: Tokenizer, grammars: Grammars, structure: Any, message: str, *, thinks: bool
) -> None:
    if thinks:
        around = answer_grammar(SYNTAXES["hermes"], tokenizer.special_texts)
        structure = structure | {"around": around}
    with pytest.raises(RequestError, match=message):
        grammars.make(structure)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"anyOf": [SELF, {"const": 1}], "$defs": SELF["$defs"]}, "1"),
        ({"anyOf": [{"enum": []}, {"const": 1}]}, "1"),
        ({"type": "object", "properties": {"a": SELF}, "$defs": SELF["$defs"]}, "{}"),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, '{"a":{"a":{}}}'),
    ],
)
def test_schemas_that_are_empty_in_part_are_followed(
    tokenizer: Tokenizer, grammars: Grammars, schema: Any, text: str
) -> None:
    grammar = grammars.make({"json": schema})
    grammar.accept(tokenizer.encode(text, specials=False))
    assert not grammar.error
    if "anyOf" not in schema and "properties" in schema:
        other = grammars.make({"json": schema})
        other.accept(tokenizer.encode('{"a":', specials=False))
        assert bool(other.error) == ("$defs" in schema)


def mask(grammar: Grammar) -> np.ndarray:
    words = np.zeros((1, 64), np.uint32)
    grammar.fill(words, [])
    return words


@pytest.mark.parametrize("tail", ["b", '/b*/ "b"', '/(bb)*/ "b"', "b{0,3000}"])
def test_no_mask_takes_for_ever_where_the_lexer_finds_no_end(
    tokenizer: Tokenizer, grammars: Grammars, tail: str
) -> None:
    """The compiler's lexer is greedy, so that some rules end on paper only."""
    rules = "b" if tail == "b" else tail
    grammar = grammars.make({"grammar": f'start: "y" | "x" c\nc: {rules}\nb: "z" b | "q"'})
    grammar.accept(tokenizer.encode("x", specials=False))
    begun = time.process_time()
    for _ in range(3):
        assert mask(grammar).any() or grammar.finished
    assert time.process_time() - begun < 10
