"""The shipped pair: complete, small, and lossless on held-out prompts."""

import dataclasses
import json
from pathlib import Path

import pytest

import dflash_jax as dj
from dflash_jax.bench.replay import Turn, play, read_turns
from dflash_jax.cli.replay import SHIPPED
from dflash_jax.engine.engine import Engine

pytestmark = [pytest.mark.optimised, pytest.mark.exhaustive]

FOLDER = Path(dj.__file__).parent / "data" / "tiny"
CHATS, NEW = 6, 48


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = dj.load("tiny", plan=dj.Plan(max_length=1024))
    engine.measures_drafting = False  # drafts on every machine
    return engine


def heldout(kind: str) -> list[dict]:
    lines = (FOLDER / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def test_it_is_complete_and_small() -> None:
    for name in ("config.json", "model.safetensors"):
        assert (FOLDER / "target" / name).is_file()
        assert (FOLDER / "drafter" / name).is_file()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (FOLDER / "target" / name).is_file()
    assert (FOLDER / "README.md").is_file()
    assert sum(p.stat().st_size for p in FOLDER.rglob("*") if p.is_file()) < 40 * 2**20


def test_heldout_conversations_decode_alike_with_and_without_drafts(engine: Engine) -> None:
    rounds = tokens = 0
    for entry in heldout("chat")[:CHATS]:
        prompt = engine.chat_ids(entry["messages"], tools=entry["tools"] or None)
        fast = engine.generate(prompt, max_tokens=NEW)
        slow = engine.generate(prompt, max_tokens=NEW, speculative=False)
        assert fast.token_ids == slow.token_ids
        assert fast.finish_reason == slow.finish_reason
        assert fast.text == slow.text
        rounds += fast.stats.rounds
        tokens += sum(fast.stats.acceptance_lengths)
    assert tokens / rounds > 1.8  # a trained drafter; its card has the figures


def test_lengths_around_chunks_decode_alike(engine: Engine) -> None:
    text = [i for entry in heldout("code")[:8] for i in engine.tokenizer.encode(entry["text"])]
    chunk = engine.plan.chunk
    for length in (1, chunk - 1, chunk, chunk + 1, 2 * chunk + 1):
        prompt = text[:length]
        fast = engine.generate(prompt, max_tokens=NEW, ignore_eos=True)
        slow = engine.generate(prompt, max_tokens=NEW, ignore_eos=True, speculative=False)
        assert fast.token_ids == slow.token_ids


def test_streamed_text_is_the_whole_text(engine: Engine) -> None:
    prompt = engine.chat_ids([{"role": "user", "content": "What can you do for me?"}])
    stream = engine.submit(prompt, max_tokens=NEW)
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == stream.result().text
    assert len(pieces) < stream.result().stats.output_tokens  # more than one token per step
    assert stream.result().text
    assert "<|" not in stream.result().text


def replayed(engine: Engine, turns: list[Turn]) -> None:
    """Check turns: modes are equal, stalls occur, and with recovery all end as expected."""
    failed: dict[str, int] = {}
    for turn in turns:
        if turn.kind == "runaway":
            turn = dataclasses.replace(turn, max_tokens=520)  # numbers may repeat longer
        off, on = play(engine, turn, None), play(engine, turn, dj.Recovery())
        assert off.equal, turn.id
        assert on.equal, turn.id
        assert on.outcome != "empty", turn.id
        assert not off.speculative.stats.recovery
        if turn.kind == "stall":
            assert off.outcome == "prose", turn.id
            assert (off.speculative.text or "").rstrip().endswith(":")
        else:
            assert off.outcome == turn.expected, turn.id
        if turn.kind == "runaway":
            assert on.speculative.stats.recovery["runaway"] == 1
            assert len(on.speculative.token_ids) < len(off.speculative.token_ids)
        elif turn.kind != "stall":
            assert on.speculative.token_ids == off.speculative.token_ids
        failed[turn.kind] = failed.get(turn.kind, 0) + (on.outcome != turn.expected)
    assert failed.pop("stall", 0) <= 1
    assert not any(failed.values()), failed


def test_stalled_agents_make_their_call_and_other_turns_do_not(engine: Engine) -> None:
    turns = {turn.kind: turn for turn in read_turns(SHIPPED)}  # the last one of each kind
    replayed(engine, list(turns.values()))


@pytest.mark.soak
def test_all_shipped_turns_end_as_they_should(engine: Engine) -> None:
    replayed(engine, read_turns(SHIPPED))


def test_the_card_gives_the_figures_that_were_measured() -> None:
    measured = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for kind in ("chat", "code"):
        assert f"{measured[kind]['acceptance_length']:.2f}" in card
