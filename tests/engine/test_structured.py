"""Structured output follows its structure, and does not depend on drafts."""

import dataclasses
import json
import re
import threading
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dflash_jax import Recovery
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.structured import grammars
from dflash_jax.engine.structured.grammars import Grammar
from dflash_jax.errors import RequestError
from dflash_jax.graph import Graph
from dflash_jax.networks import build_target
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
    "x-guidance": {"whitespace_flexible": False},  # random weights would write only spaces
}
DATE = r"[0-9]{4}-[01][0-9]-[0-3][0-9]"


@pytest.fixture(scope="module")
def byte_engine(tiny3: Engine) -> Engine:
    """Three rows, a token for each of 250 bytes, an end token, and a scripted drafter."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) > 126, c))
    vocab = {letter: i for i, letter in enumerate(letters[:EOS])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab | {"<end>": EOS}, merges=[]))
    core.add_special_tokens(["<end>"])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = scripted_engine(tiny3)
    target = type(made.graph.config)(**vars(made.graph.config) | {"eos_token_ids": (EOS,)})
    plan = dataclasses.replace(made.plan, report_drafts=True)
    pair = dataclasses.replace(made.graph.pair, target=build_target(target))
    return Engine(Graph(pair, plan), made.params, tokenizer=Tokenizer(core, None, {}))


@pytest.mark.exhaustive
def test_integers_without_bounds_end(byte_engine: Engine) -> None:
    for schema in ({"type": "integer"}, {"type": "array", "items": {"type": "integer"}}):
        for seed in range(4):
            options: dict[str, Any] = {"max_tokens": 60, "temperature": 2.0, "seed": seed}
            found = byte_engine.generate(PROMPT, structured={"json": schema}, **options)
            numbers = re.findall(r"\d+", str(found.text))
            assert all(int(number) < 2**53 for number in numbers)
            if schema["type"] == "integer":
                assert found.finish_reason == "stop"
                assert json.loads(str(found.text)) == int(str(found.text))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_follows_its_structure(byte_engine: Engine, temperature: float) -> None:
    options: dict[str, Any] = {"max_tokens": 90, "temperature": temperature, "seed": 3}
    structures = [{"json": SCHEMA}, {"regex": DATE}, {"choice": ['say "a"', "no"]}]
    structures += [{"grammar": 'start: "x" /[0-9]+/ "y"'}]
    results = [byte_engine.generate(PROMPT, structured=s, **options) for s in structures]
    assert [r.finish_reason for r in results[:3]] == ["stop"] * 3
    texts = [str(r.text) for r in results]
    value = json.loads(texts[0])
    assert set(value) == {"name", "size", "kind"}
    assert value["kind"] in ("red", "green")
    assert 0 <= value["size"] <= 99
    assert re.fullmatch(DATE, texts[1])
    assert texts[2] in ('say "a"', "no")
    assert re.fullmatch("x[0-9]+y?", texts[3])


def test_recovery_forces_no_token_into_a_structure(byte_engine: Engine) -> None:
    """The structure alone decides where it may end; loops still end it."""
    settings = Recovery(min_tokens=90, answer_reserve=80)
    options: dict[str, Any] = {"max_tokens": 90, "tools": [{"name": "a"}]}
    for structure in ({"regex": "[ab]{0,30}"}, {"choice": ["", "x:"]}, {"json": SCHEMA}):
        free = byte_engine.generate(PROMPT, structured=structure, **options)
        found = byte_engine.generate(PROMPT, structured=structure, recovery=settings, **options)
        assert found.text == free.text[: len(found.text or "")]
        assert set(found.stats.recovery) <= {"repeat", "runaway", "runaway_dropped_tokens"}
        if not found.stats.recovery:
            assert found.token_ids == free.token_ids
    looping = {"regex": "g{90}"}
    strict = dataclasses.replace(settings, loop_tokens=6)
    found = byte_engine.generate(PROMPT, structured=looping, recovery=strict, **options)
    assert found.text == "g" * 12
    assert found.finish_reason == "length"


@pytest.mark.parametrize("pattern", [[3], [0], [2, 0, 3, 1]])
def test_drafting_changes_no_token_of_structured_output(
    byte_engine: Engine, pattern: list[int]
) -> None:
    for structure in ({"json": SCHEMA}, {"regex": "([a-f]{3}[0-9],){9,}"}):
        options: dict[str, Any] = {"max_tokens": 50, "structured": structure}
        plain = byte_engine.generate(PROMPT, speculative=False, **options)
        script = [*PROMPT, *plain.token_ids]
        set_script(byte_engine, force_acceptance(script, len(PROMPT), pattern, 251))
        fast = byte_engine.generate(PROMPT, **options)
        assert fast.token_ids == plain.token_ids
        assert fast.text == plain.text
        assert fast.stats.acceptance_lengths[:3] == [n + 1 for n in (pattern * 3)[:3]]
        assert plain.stats.rounds == 0


def test_greedy_structured_output_takes_the_best_token_allowed(
    byte_engine: Engine,
) -> None:
    ids = byte_engine.generate(PROMPT, max_tokens=60, structured={"json": SCHEMA}).token_ids
    model = TargetModel(byte_engine.graph.config, byte_engine.params["target"], "float32")
    logits = np.asarray(model.forward([[*PROMPT, *ids]]).logits)[0, len(PROMPT) - 1 :]
    grammar = byte_engine.core.grammars.make({"json": SCHEMA})
    for token, row in zip(ids, logits, strict=False):
        words = np.zeros((1, -(-len(row) // 32)), np.uint32)
        grammar.fill(words, [])
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(row)] > 0
        assert allowed[token]
        assert row[token] >= row[allowed].max() - 1e-4
        grammar.accept([token])


def test_structured_rows_do_not_affect_other_rows(
    byte_engine: Engine,
) -> None:
    alone = byte_engine.generate(PROMPT, max_tokens=30).token_ids
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 9, "structured": {"regex": "[a-z]{40}"}}
    sampled = byte_engine.generate(PROMPT, max_tokens=30, **sampling).token_ids
    wanted = byte_engine.generate(PROMPT, max_tokens=90, structured={"json": SCHEMA}).token_ids
    handles = [
        byte_engine.submit(PROMPT, max_tokens=90, structured={"json": SCHEMA}),
        byte_engine.submit(PROMPT, max_tokens=30),
        byte_engine.submit(PROMPT, max_tokens=30, **sampling),
    ]
    while byte_engine.core.busy:
        byte_engine.advance()
    assert [handle.token_ids for handle in handles] == [wanted, alone, sampled]


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"xml": "x"}, "expected a mapping with one of json, regex, choice, grammar"),
        ({"json": SCHEMA, "regex": "a"}, "expected a mapping with one of"),
        ("json", "structured is 'json'; expected a mapping"),
        ({"json": {"type": "nothing"}}, "not supported at #: the type 'nothing' is unknown"),
        ({"json": {"type": "array", "uniqueItems": True}}, "at #: the keyword 'uniqueItems' is"),
        ({"regex": "("}, "the regular expression is not understood: unclosed group"),
        ({"regex": 3}, "structured regex is 3; expected a text"),
        ({"choice": "ab"}, "structured choice is 'ab'; expected a list of texts"),
        ({"choice": 5}, "structured choice is 5; expected a list of texts"),
        ({"choice": []}, r"structured choice is \[\]; expected a list of texts"),
        ({"json": [1]}, r"structured json is \[1\]; expected a schema"),
    ],
)
def test_invalid_structures_are_refused(byte_engine: Engine, structure: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        byte_engine.submit(PROMPT, max_tokens=4, structured=structure)
    assert not byte_engine.core.busy


def test_a_grammar_that_exceeds_its_limits_fails_its_request(byte_engine: Engine) -> None:
    """An incomplete answer is an error, and other rows are not affected."""
    many = {"grammar": "start: " + " | ".join(f'"item {i}"' for i in range(3000))}
    alone = byte_engine.generate(PROMPT, max_tokens=8).token_ids
    handle = byte_engine.submit(PROMPT, max_tokens=20, structured=many)
    other = byte_engine.submit(PROMPT, max_tokens=8)
    while not (handle.done and other.done):
        byte_engine.advance()
    with pytest.raises(RequestError, match=r"the grammar gave up after .* fewer choices"):
        handle.result()
    assert other.result().token_ids == alone
    assert not byte_engine.core.busy


class Stuck:
    """A matcher that computes no mask until it is released."""

    def __init__(self, matcher: Any):
        self._matcher, self.released = matcher, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def unsafe_compute_mask_ptr(self, *given: int) -> None:
        assert self.released.wait(60)
        self._matcher.unsafe_compute_mask_ptr(*given)


def test_a_grammar_without_masks_fails_its_request_and_no_other(
    byte_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "structured": {"regex": "[a-f]{12}"}}
    alone = byte_engine.generate(PROMPT, **options).token_ids
    monkeypatch.setattr(grammars, "MASK_SECONDS", 0.3)
    matchers = []
    make = byte_engine.core.grammars.make

    def stuck(structure: Any) -> Grammar:
        grammar = make(structure)
        if structure["regex"] == "x+":
            matchers.append(Stuck(grammar._matcher))
            grammar._matcher = matchers[-1]
        return grammar

    monkeypatch.setattr(byte_engine.core.grammars, "make", stuck)
    hostile = byte_engine.submit(PROMPT, max_tokens=12, structured={"regex": "x+"})
    others = [byte_engine.submit(PROMPT, **options) for _ in range(2)]
    while not all(handle.done for handle in (hostile, *others)):
        byte_engine.advance()
    with pytest.raises(RequestError, match=r"gave up after 0 .* masks took longer than 0.3 s"):
        hostile.result()
    for handle in others:
        assert handle.result().token_ids == alone
    matchers[0].released.set()
    assert byte_engine.generate(PROMPT, **options).token_ids == alone


def test_a_model_without_tokenizer_refuses_structures(tiny: Engine) -> None:
    with pytest.raises(RequestError, match="needs a tokenizer, and this model ships none"):
        tiny.submit([1, 2], max_tokens=4, structured={"regex": "a"})


def test_a_trace_has_the_rejected_drafts_and_what_the_grammar_determined(
    byte_engine: Engine,
) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "structured": {"regex": "say: [ab]{5}[0-9]{4}"}}
    plain = byte_engine.generate(PROMPT, speculative=False, trace=True, **options)
    assert [x.sources for x in plain.trace] == [("forced",)] * 5 + [("target",)] * 9
    script = [*PROMPT, *plain.token_ids]
    set_script(byte_engine, force_acceptance(script, len(PROMPT), [1, 2, 0], 251))
    result = byte_engine.generate(PROMPT, trace=True, **options)
    assert [i for x in result.trace for i in x.tokens] == result.token_ids == plain.token_ids
    first, *rounds = result.trace
    assert (first.sources, first.proposed) == (("forced",), 0)
    assert [x.accepted for x in rounds[:3]] == [1, 2, 0]
    assert [len(x.rejected) for x in rounds[:3]] == [2, 1, 3]
    assert [x.sources for x in rounds[:2]] == [
        ("drafted", "forced"),
        ("drafted", "drafted", "target"),
    ]
    assert "".join(text for x in result.trace for text in x.texts) == result.text
