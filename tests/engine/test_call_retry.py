"""Incomplete calls of the shipped pair are decoded again, equally in every mode."""

import threading
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.bench.replay import prompt_of, read_turns
from dflash_jax.cli.replay import SHIPPED
from dflash_jax.engine.engine import Engine, RequestHandle
from dflash_jax.engine.request import Request
from dflash_jax.engine.sampling_params import Structure
from dflash_jax.engine.structured.grammars import CallGrammars, Grammar
from dflash_jax.errors import RequestError

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

# Biases of the end token with which these turns end inside their calls.
TURNS = {"agent-4.1": 13, "agent-7.2": 12}


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = dj.load("tiny", plan=dj.Plan(rows=2, max_length=1024))
    made.measures_drafting = False
    made.warm_up("greedy", "penalized", "constrained", "recovery")
    return made


@pytest.fixture(scope="module")
def turns(engine: Engine) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Prompt and options by name of the turn."""
    assert engine.tokenizer is not None
    [end] = engine.tokenizer.encode("<|im_end|>", specials=False)
    found = {turn.id: turn for turn in read_turns(SHIPPED) if turn.id in TURNS}
    return {
        name: (
            prompt_of(turn, engine),
            {"max_tokens": 150, "tools": turn.tools, "logit_bias": {end: TURNS[name]}},
        )
        for name, turn in found.items()
    }


def raw(engine: Engine, result: dj.Result) -> str:
    assert engine.tokenizer is not None
    return engine.tokenizer.raw(result.token_ids)


def request_with_pending_grammar(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, prompt: list[int], options: dict[str, Any]
) -> tuple[RequestHandle, threading.Event]:
    """Return a request that waits for the grammar of its call, and the event that releases it."""
    ready, make = threading.Event(), CallGrammars.make

    def late(self: CallGrammars, structure: Structure) -> Grammar:
        assert ready.wait(60)
        return make(self, structure)

    monkeypatch.setattr(CallGrammars, "make", late)
    handle = engine.submit(prompt, recovery=dj.Recovery(), **options)
    while not handle.sequence.retries_call:
        engine.advance()
    return handle, ready


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TURNS)
def test_an_incomplete_call_is_completed(engine: Engine, turns: dict[str, Any], name: str) -> None:
    prompt, options = turns[name]
    broken = engine.generate(prompt, **options)
    assert raw(engine, broken).count("<tool_call>") == 1
    assert "</tool_call>" not in raw(engine, broken)
    found = engine.generate(prompt, recovery=dj.Recovery(), **options)
    assert raw(engine, found).endswith("}\n</tool_call><|im_end|>")
    assert found.stats.recovery == {"call_retry": 1}
    kept = raw(engine, broken).partition("<tool_call>")[0]
    assert raw(engine, found).startswith(kept + "<tool_call>")
    for more in ({"speculative": False}, {"block_size": 2}, {"logprobs": 1}):
        other = engine.generate(prompt, recovery=dj.Recovery(), **options, **more)
        assert other.token_ids == found.token_ids
        assert other.stats.recovery == found.stats.recovery
    assert [x.token_id for x in other.logprobs or ()] == found.token_ids


def test_a_stream_never_shows_the_call_that_is_dropped(
    engine: Engine, turns: dict[str, Any]
) -> None:
    prompt, options = turns["agent-7.2"]
    stream = engine.submit(prompt, recovery=dj.Recovery(), **options)
    pieces = [i for piece in stream for i in piece.token_ids]
    assert pieces == stream.result().token_ids


def test_other_rows_decode_while_the_grammar_is_compiled(
    engine: Engine, turns: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, options = turns["agent-4.1"]
    wanted = engine.generate(prompt, recovery=dj.Recovery(), **options).token_ids
    handle, ready = request_with_pending_grammar(engine, monkeypatch, prompt, options)
    alone = engine.generate([5, 6, 7], max_tokens=30).token_ids
    assert not handle.done
    ready.set()
    while not handle.done:
        engine.advance()
    assert handle.result().token_ids == wanted
    assert len(alone) == 30


def test_without_a_grammar_the_call_is_unchanged(
    engine: Engine, turns: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, options = turns["agent-4.1"]
    broken = engine.generate(prompt, **options)

    def refused(self: CallGrammars, request: Request, before: str) -> Structure:
        raise RequestError("the grammar is too large")

    monkeypatch.setattr(CallGrammars, "structure", refused)
    found = engine.generate(prompt, recovery=dj.Recovery(), **options)
    assert found.token_ids == broken.token_ids
    assert found.finish_reason == "stop"
    assert not found.stats.recovery


@pytest.mark.exhaustive
def test_a_request_can_be_cancelled_while_its_grammar_is_compiled(
    engine: Engine, turns: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, ready = request_with_pending_grammar(engine, monkeypatch, *turns["agent-4.1"])
    handle.close()
    assert handle.result().finish_reason == "cancelled"
    engine.advance()  # reads what was in flight
    assert not engine.core.busy
    ready.set()
    assert len(engine.generate([5, 6, 7], max_tokens=30).token_ids) == 30
