"""Structured output: what comes follows the structure, and drafts change nothing of it."""

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dflash_jax import Recovery
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import RequestError
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import force_acceptance, scripted_engine, set_script
from dflash_jax.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

PROMPT, EOS = [5, 4, 3, 2, 1], 250
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # random weights like nothing but spaces
}
DATE = r"[0-9]{4}-[01][0-9]-[0-3][0-9]"


@pytest.fixture(scope="module")
def speaking(tiny3: Engine) -> Engine:
    """Three rows, a token for each of 250 bytes, an end token, and a drafter that is told."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) > 126, c))
    vocab = {letter: i for i, letter in enumerate(letters[:EOS])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab | {"<end>": EOS}, merges=[]))
    core.add_special_tokens(["<end>"])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = scripted_engine(tiny3)
    target = type(made.target)(**vars(made.target) | {"eos_token_ids": (EOS,)})
    return Engine(target, made.drafter, made.params, made.plan, tokenizer=Tokenizer(core, None, {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_follows_its_structure(speaking: Engine, temperature: float) -> None:
    options: dict[str, Any] = {"max_tokens": 90, "temperature": temperature, "seed": 3}
    structures = [{"json": SCHEMA}, {"regex": DATE}, {"choice": ['say "a"', "no"]}]
    structures += [{"grammar": 'start: "x" /[0-9]+/ "y"'}]
    results = [speaking.generate(PROMPT, structured=s, **options) for s in structures]
    assert [r.finish_reason for r in results[:3]] == ["stop"] * 3
    texts = [str(r.text) for r in results]
    value = json.loads(texts[0])
    assert set(value) == {"name", "size", "kind"}
    assert value["kind"] in ("red", "green")
    assert 0 <= value["size"] <= 99
    assert re.fullmatch(DATE, texts[1])
    assert texts[2] in ('say "a"', "no")
    assert re.fullmatch("x[0-9]+y?", texts[3])


def test_recovery_dictates_nothing_into_a_structure(speaking: Engine) -> None:
    """The structure says how it may end, however early that is; loops still end it."""
    settings = Recovery(floor=90, below_floor="replace", answer_reserve=80)
    options: dict[str, Any] = {"max_tokens": 90, "tools": [{"name": "a"}]}
    for structure in ({"regex": "[ab]{0,30}"}, {"choice": ["", "x:"]}, {"json": SCHEMA}):
        free = speaking.generate(PROMPT, structured=structure, **options)
        found = speaking.generate(PROMPT, structured=structure, recovery=settings, **options)
        assert found.text == free.text[: len(found.text or "")]
        assert set(found.stats.recovery) <= {"repeat", "runaway", "runaway_dropped_tokens"}
        if not found.stats.recovery:
            assert found.token_ids == free.token_ids
    looping = {"regex": "a{90}"}
    original = dataclasses.replace(settings, runaway="compat")
    found = speaking.generate(PROMPT, structured=looping, recovery=original, **options)
    assert found.text == "a" * 12
    assert found.finish_reason == "length"


@pytest.mark.parametrize("pattern", [[3], [0], [2, 0, 3, 1]])
def test_drafting_changes_no_token_of_structured_output(
    speaking: Engine, pattern: list[int]
) -> None:
    for structure in ({"json": SCHEMA}, {"regex": "([a-f]{3}[0-9],){9,}"}):
        options: dict[str, Any] = {"max_tokens": 50, "structured": structure}
        plain = speaking.generate(PROMPT, speculative=False, **options)
        script = [*PROMPT, *plain.token_ids]
        set_script(speaking, force_acceptance(script, len(PROMPT), pattern, 251))
        fast = speaking.generate(PROMPT, **options)
        assert fast.token_ids == plain.token_ids
        assert fast.text == plain.text
        assert fast.stats.acceptance_lengths[:3] == [n + 1 for n in (pattern * 3)[:3]]
        assert plain.stats.rounds == 0


def test_greedy_structured_output_takes_the_best_token_allowed(
    speaking: Engine,
) -> None:
    ids = speaking.generate(PROMPT, max_tokens=60, structured={"json": SCHEMA}).token_ids
    model = TargetModel(speaking.target, speaking.params["target"], "float32")
    logits = np.asarray(model.forward([[*PROMPT, *ids]]).logits)[0, len(PROMPT) - 1 :]
    grammar = speaking.grammars.make({"json": SCHEMA})
    for token, row in zip(ids, logits, strict=False):
        words = np.zeros((1, -(-len(row) // 32)), np.uint32)
        grammar.fill(words, [])
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(row)] > 0
        assert allowed[token]
        assert row[token] >= row[allowed].max() - 1e-4
        grammar.accept([token])


def test_neighbours_of_structured_rows_say_what_they_say_alone(
    speaking: Engine,
) -> None:
    alone = speaking.generate(PROMPT, max_tokens=30).token_ids
    drawing: dict[str, Any] = {"temperature": 1.0, "seed": 9, "structured": {"regex": "[a-z]{40}"}}
    drawn = speaking.generate(PROMPT, max_tokens=30, **drawing).token_ids
    wanted = speaking.generate(PROMPT, max_tokens=90, structured={"json": SCHEMA}).token_ids
    lives = [
        speaking.submit(PROMPT, max_tokens=90, structured={"json": SCHEMA}),
        speaking.submit(PROMPT, max_tokens=30),
        speaking.submit(PROMPT, max_tokens=30, **drawing),
    ]
    while speaking.busy:
        speaking.advance()
    assert [live.token_ids for live in lives] == [wanted, alone, drawn]


@pytest.mark.parametrize(
    ("structure", "says"),
    [
        ({"xml": "x"}, "expected a mapping with one of json, regex, choice, grammar"),
        ({"json": SCHEMA, "regex": "a"}, "expected a mapping with one of"),
        ("json", "structured is 'json'; expected a mapping"),
        ({"json": {"type": "nothing"}}, "the structure is not understood"),
        ({"json": {"type": "array", "uniqueItems": True}}, "the structure is not understood"),
        ({"regex": "("}, "the structure is not understood"),
        ({"regex": 3}, "structured regex is 3; expected a text"),
        ({"choice": "ab"}, "structured choice is 'ab'; expected a list of texts"),
        ({"choice": 5}, "structured choice is 5; expected a list of texts"),
        ({"choice": []}, r"structured choice is \[\]; expected a list of texts"),
        ({"json": [1]}, r"structured json is \[1\]; expected a schema"),
    ],
)
def test_bad_structures_are_refused_by_name(speaking: Engine, structure: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        speaking.submit(PROMPT, max_tokens=4, structured=structure)
    assert not speaking.busy


def test_a_grammar_that_gives_up_fails_its_request(speaking: Engine) -> None:
    """Neither is the half of an answer called a whole one, nor is anybody else disturbed."""
    many = {"choice": [f"item {i}" for i in range(3000)]}
    alone = speaking.generate(PROMPT, max_tokens=8).token_ids
    live = speaking.submit(PROMPT, max_tokens=20, structured=many)
    beside = speaking.submit(PROMPT, max_tokens=8)
    while not (live.done and beside.done):
        speaking.advance()
    with pytest.raises(RequestError, match=r"the grammar gave up after .* fewer choices"):
        live.result()
    assert beside.result().token_ids == alone
    assert not speaking.busy
    endless = {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}
    with pytest.raises(RequestError, match="nothing can follow the structure"):
        speaking.submit(PROMPT, max_tokens=4, structured=endless)


def test_a_model_without_tokenizer_refuses_structures(tiny: Engine) -> None:
    with pytest.raises(RequestError, match="needs a tokenizer, and this model ships none"):
        tiny.submit([1, 2], max_tokens=4, structured={"regex": "a"})
