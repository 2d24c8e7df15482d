"""Structured output: what comes follows the structure, and drafts change nothing of it."""

import json
import re
from typing import Any

import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import RequestError
from dflash_jax.loading import TargetModel

llguidance = pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
DATE = r"[0-9]{4}-[01][0-9]-[0-3][0-9]"


@pytest.fixture(scope="module")
def shipped() -> Engine:
    return dj.load(plan=dj.Plan(rows=3, max_length=160, chunk=32, block=5))


@pytest.fixture(scope="module")
def prompt(shipped: Engine) -> list[int]:
    return shipped.chat_ids([{"role": "user", "content": "List three colours."}])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_follows_its_structure(
    shipped: Engine, prompt: list[int], temperature: float
) -> None:
    options: dict[str, Any] = {"max_tokens": 90, "temperature": temperature, "seed": 3}
    structures = [{"json": SCHEMA}, {"regex": DATE}, {"choice": ['say "a"', "no"]}]
    structures += [{"grammar": 'start: "x" /[0-9]+/ "y"'}]
    results = [shipped.generate(prompt, structured=s, **options) for s in structures]
    for result in results[:3]:
        assert result.finish_reason == "stop"
    value = json.loads(results[0].text)
    assert set(value) == {"name", "size", "kind"}
    assert value["kind"] in ("red", "green")
    assert 0 <= value["size"] <= 99
    assert re.fullmatch(DATE, results[1].text)
    assert results[2].text in ('say "a"', "no")
    assert re.fullmatch("x[0-9]+y?", results[3].text)


def test_drafting_changes_no_token_of_structured_output(shipped: Engine, prompt: list[int]) -> None:
    for structure in ({"json": SCHEMA}, {"regex": "(colour|red|green|,| ){9,}"}):
        options: dict[str, Any] = {"max_tokens": 60, "structured": structure}
        plain = shipped.generate(prompt, speculative=False, **options)
        fast = shipped.generate(prompt, **options)
        assert fast.token_ids == plain.token_ids
        assert plain.stats.rounds == 0 < fast.stats.rounds
        assert plain.token_ids != shipped.generate(prompt, max_tokens=60).token_ids
    assert fast.stats.accepted > 0


def test_greedy_structured_output_takes_the_best_token_allowed(
    shipped: Engine, prompt: list[int]
) -> None:
    ids = shipped.generate(prompt, max_tokens=60, structured={"json": SCHEMA}).token_ids
    model = TargetModel(shipped.target, shipped.params["target"], "float32")
    logits = np.asarray(model.forward([[*prompt, *ids]]).logits)[0, len(prompt) - 1 :]
    grammar = shipped._grammars.make({"json": SCHEMA})
    for token, row in zip(ids, logits, strict=False):
        words = np.zeros((1, -(-len(row) // 32)), np.uint32)
        grammar.fill(words, [])
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(row)] > 0
        assert allowed[token]
        assert row[token] >= row[allowed].max() - 1e-4
        grammar.accept([token])


def test_neighbours_of_structured_rows_say_what_they_say_alone(
    shipped: Engine, prompt: list[int]
) -> None:
    alone = shipped.generate(prompt, max_tokens=30).token_ids
    drawn = shipped.generate(prompt, max_tokens=30, temperature=1.0, seed=9).token_ids
    wanted = shipped.generate(prompt, max_tokens=90, structured={"json": SCHEMA}).token_ids
    lives = [
        shipped.submit(prompt, max_tokens=90, structured={"json": SCHEMA}),
        shipped.submit(prompt, max_tokens=30),
        shipped.submit(prompt, max_tokens=30, temperature=1.0, seed=9),
    ]
    while not all(live.done for live in lives):
        shipped.advance()
    assert [live.ids for live in lives] == [wanted, alone, drawn]


@pytest.mark.parametrize(
    ("structure", "says"),
    [
        ({"xml": "x"}, "expected a mapping with one of json, regex, choice, grammar"),
        ({"json": SCHEMA, "regex": "a"}, "expected a mapping with one of"),
        ("json", "structured is 'json'; expected a mapping"),
        ({"json": {"type": "nothing"}}, "the structure is not understood"),
        ({"regex": "("}, "the structure is not understood"),
        ({"regex": 3}, "structured regex is 3; expected a text"),
        ({"choice": "ab"}, "structured choice is 'ab'; expected a list of texts"),
        ({"json": [1]}, r"structured json is \[1\]; expected a schema"),
    ],
)
def test_bad_structures_are_refused_by_name(
    shipped: Engine, prompt: list[int], structure: Any, says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        shipped.submit(prompt, max_tokens=4, structured=structure)
    assert not shipped.busy


def test_a_model_without_tokenizer_refuses_structures(tiny: Engine) -> None:
    with pytest.raises(RequestError, match="needs a tokenizer, and this model ships none"):
        tiny.submit([1, 2], max_tokens=4, structured={"regex": "a"})
