"""Traces of requests on the real engine: rounds, rejected drafts, pieces and texts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import dflash_jax as dj
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.state_machine import OFF
from dflash_jax.errors import RequestError
from dflash_jax.graph import Graph
from dflash_jax.testing import (
    force_acceptance,
    random_engine,
    scripted_engine,
    set_script,
    tiny_drafter,
    tiny_target,
)
from dflash_jax.tokenizer import Tokenizer

PROMPT, EOS, VOCAB, BLOCK = [5, 4, 3, 2, 1], 250, 251, 4


@pytest.fixture(scope="module")
def engine() -> Engine:
    """An engine that reports drafts, of which a script decides, and has a token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) > 126, c))
    vocab = {letter: i for i, letter in enumerate(letters[:EOS])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab | {"<end>": EOS}, merges=[]))
    core.add_special_tokens(["<end>"])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    target = tiny_target(num_layers=1, vocab_size=VOCAB, eos_token_ids=(EOS,))
    one: dict[str, Any] = {"num_layers": 1, "windows": (None,), "causal": (False,)}
    drafter = tiny_drafter(target, target_layer_ids=(0,), **one)
    plan = dj.Plan(max_length=128, chunk=16, block=BLOCK, steps_per_call=3, report_drafts=True)
    made = scripted_engine(random_engine(target, drafter, plan, seed=1))
    tokenizer = Tokenizer(core, None, {})
    return Engine(Graph(made.graph.pair, made.plan), made.params, tokenizer=tokenizer)


def plain_and_script(
    engine: Engine, pattern: Sequence[int], **options: Any
) -> tuple[list[int], list[int]]:
    """Script the drafts by a pattern of acceptance; return the plain tokens and the script."""
    plain = engine.generate(PROMPT, speculative=False, **options)
    script = force_acceptance([*PROMPT, *plain.token_ids], len(PROMPT), pattern, VOCAB)
    set_script(engine, script)
    return plain.token_ids, script


def check(engine: Engine, result: dj.Result) -> None:
    """Check what holds for the trace of every request that was decoded once."""
    assert engine.tokenizer is not None
    assert [token for x in result.trace for token in x.tokens] == result.token_ids
    texts = "".join(text for x in result.trace for text in x.texts)
    assert engine.tokenizer.raw(result.token_ids).removeprefix(texts).strip("\ufffd") == ""
    lengths = [x.accepted + 1 for x in result.trace if x.proposed]
    assert lengths == result.stats.acceptance_lengths
    assert [x.proposed for x in result.trace if x.proposed] == result.stats.drafts_per_round
    assert all(x.seconds > 0 for x in result.trace)
    seconds = result.stats.prefill_s + result.stats.decode_s
    assert sum(x.seconds for x in result.trace) == pytest.approx(seconds, abs=0.05)


def test_sources_and_rejected_drafts_are_those_of_the_script(engine: Engine) -> None:
    pattern = [3, 1, 0, 2]
    plain, script = plain_and_script(engine, pattern, max_tokens=30)
    result = engine.generate(PROMPT, max_tokens=30, trace=True)
    assert result.token_ids == plain
    check(engine, result)
    first, *rounds = result.trace
    assert [x.prefill for x in result.trace] == [True, *[False] * len(rounds)]
    assert (first.tokens, first.sources, first.proposed) == ((plain[0],), ("target",), 0)
    assert [x.accepted for x in rounds[:8]] == pattern * 2
    place = len(PROMPT) + 1
    for traced in rounds[:-1]:
        n = traced.accepted
        assert traced.sources == ("drafted",) * n + ("target",)
        assert traced.tokens[:n] == tuple(script[place : place + n])
        assert traced.rejected == tuple(script[place + n : place + BLOCK - 1])
        place += n + 1
    assert [len(x.rejected) for x in rounds[:4]] == [0, 2, 3, 1]


def test_a_trace_changes_no_token_and_is_empty_unless_requested(engine: Engine) -> None:
    plain_and_script(engine, [1, 2], max_tokens=30)
    for options in ({}, {"speculative": False}, {"stop_token_ids": [9]}):
        with_trace = engine.generate(PROMPT, max_tokens=30, trace=True, **options)
        without = engine.generate(PROMPT, max_tokens=30, **options)
        assert with_trace.token_ids == without.token_ids
        assert without.trace == ()
        check(engine, with_trace)
    with pytest.raises(RequestError, match="trace is 1; expected true or false"):
        engine.generate(PROMPT, trace=1)  # type: ignore[arg-type]


def test_plain_decoding_has_a_round_for_each_token(engine: Engine) -> None:
    result = engine.generate(PROMPT, max_tokens=9, speculative=False, trace=True)
    check(engine, result)
    assert {(len(x.tokens), x.sources, x.proposed) for x in result.trace} == {(1, ("target",), 0)}


def test_pieces_of_a_stream_have_every_round_once(engine: Engine) -> None:
    plain_and_script(engine, [2, 0, 3], max_tokens=30)
    stream = engine.submit(PROMPT, max_tokens=30, trace=True)
    pieces = list(stream)
    assert tuple(x for piece in pieces for x in piece.trace) == stream.result().trace
    assert all(
        piece.token_ids == tuple(token for x in piece.trace for token in x.tokens)
        for piece in pieces
    )


def test_rounds_end_at_a_stop_text(engine: Engine) -> None:
    plain_and_script(engine, [3], max_tokens=30)
    whole = engine.generate(PROMPT, max_tokens=30, trace=True)
    assert whole.text is not None
    stop = whole.text[10:12]
    result = engine.generate(PROMPT, max_tokens=30, trace=True, stop=stop)
    check(engine, result)
    assert len(result.token_ids) < 30
    assert (
        result.trace[-1].tokens
        == whole.trace[len(result.trace) - 1].tokens[: len(result.trace[-1].tokens)]
    )


def test_a_replaced_end_token_is_forced(engine: Engine) -> None:
    plain, _ = plain_and_script(engine, [3], max_tokens=20)
    settings = dataclasses.replace(OFF, min_tokens=20)
    stop = plain[6]
    options = {"stop_token_ids": [stop], "max_tokens": 20, "recovery": settings}
    result = engine.generate(PROMPT, trace=True, **options)
    check(engine, result)
    sources = [source for x in result.trace for source in x.sources]
    assert sources.count("forced") == result.stats.recovery["min_tokens"] >= 1
    assert sources[plain.index(stop)] == "forced"


def test_several_answers_have_a_trace_each(engine: Engine) -> None:
    for result in engine.generate_many([PROMPT, [7]], max_tokens=8, trace=True):
        check(engine, result)


def test_texts_of_rejected_drafts_follow_the_tokens_before_them(engine: Engine) -> None:
    plain_and_script(engine, [1], max_tokens=12)
    result = engine.generate(PROMPT, max_tokens=12, trace=True)
    assert engine.tokenizer is not None
    for traced in result.trace:
        assert len(traced.rejected_texts) == len(traced.rejected)
        text = "".join(traced.rejected_texts).strip("\ufffd")
        assert text in engine.tokenizer.raw([*traced.tokens[: traced.accepted], *traced.rejected])


def test_without_reported_drafts_only_the_rejected_ones_are_unknown(
    tiny: Engine, scripted: Engine
) -> None:
    truth = tiny.generate(PROMPT, max_tokens=20, speculative=False).token_ids
    set_script(scripted, force_acceptance([*PROMPT, *truth], len(PROMPT), [2, 0], VOCAB))
    result = scripted.generate(PROMPT, max_tokens=20, trace=True)
    assert [x.accepted for x in result.trace[1:5]] == [2, 0, 2, 0]
    assert {x.rejected for x in result.trace} == {()}
    assert {x.texts for x in result.trace} == {()}  # no tokenizer
    assert [token for x in result.trace for token in x.tokens] == truth
