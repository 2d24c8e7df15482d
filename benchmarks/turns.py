"""Generator of the turns that `dflash-jax replay` runs by default, for the shipped pair.

    python -m benchmarks.turns

Candidates come from the seeded corpus, from questions that are not in the training data. Each is
answered once with recovery off, and the first ones that show the behaviour of their kind are kept:
stalls must stall, runaways must run away. Answers with recovery on are not considered.
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import dflash_jax as dj
from dflash_jax.bench.replay import Turn, outcome_of, prompt_of
from dflash_jax.cli.options import use_compilation_cache
from dflash_jax.cli.replay import SHIPPED
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.state_machine.floor import ends_on_colon
from dflash_jax.engine.state_machine.guards import runaway_drop
from recipes.tiny.corpus import agents, conversation
from recipes.tiny.corpus.world import is_held_out

COUNTS = {"stall": 17, "control": 10, "chat": 12, "agent": 12, "runaway": 6}
LONGEST = 760  # prompt tokens
WORDS = ("yes", "one", "la", "red", "and", "go", "next", "to", "of", "0", "x", "ok", "we", "not")
MOST_TRIED = 400  # candidates per kind


def transcripts(seed: str) -> Iterator[conversation.Conversation]:
    """Yield agent transcripts that begin with a held-out question."""
    rng = random.Random(seed)
    while True:
        shipped_turns = agents.transcript(rng)
        if is_held_out(conversation.questions(shipped_turns)[0]):
            yield shipped_turns


def agent_turns(kind: str) -> Iterator[Turn]:
    """Yield turns of transcripts: after truncated outputs, before the answer, before a call."""
    for number, shipped_turns in enumerate(transcripts(kind)):
        for at, message in enumerate(shipped_turns.messages):
            if message["role"] != "assistant":
                continue
            before = shipped_turns.messages[at - 1]
            cut = before["role"] == "tool" and before["content"].endswith(agents.TRUNCATED)
            calls = bool(message.get("tool_calls"))
            found = "stall" if cut else "agent" if calls else "control"
            if found == kind and before["content"] != "Please continue.":
                yield turn(kind, f"{number}.{at}", shipped_turns.messages[:at], shipped_turns.tools)
                break


def chats() -> Iterator[Turn]:
    """Yield questions without tools."""
    for number, shipped_turns in enumerate(conversation.held_out_conversations(5, MOST_TRIED)):
        if not shipped_turns.tools:
            yield turn("chat", str(number), shipped_turns.messages, ())


def runaways(engine: Engine) -> Iterator[Turn]:
    """Yield repetitive texts that a small model continues without end."""
    assert engine.tokenizer
    for number, (word, mark) in enumerate(itertools.product(WORDS, (" ", ", ", "\n"))):
        ids = engine.tokenizer.encode((word + mark) * 24)
        yield Turn(id=f"runaway-{number}", kind="runaway", prompt_ids=tuple(ids))


def turn(kind: str, number: str, messages: tuple, tools: tuple) -> Turn:
    return Turn(id=f"{kind}-{number}", kind=kind, messages=tuple(messages), tools=tuple(tools))


def expected_class(engine: Engine, candidate: Turn) -> str | None:
    """Return the class expected with recovery on; None if the turn does not show its kind."""
    prompt = prompt_of(candidate, engine)
    if len(prompt) > LONGEST:
        return None
    result = engine.generate(prompt, max_tokens=candidate.max_tokens)
    outcome, text = outcome_of(engine, candidate, result), result.text or ""
    stopped = result.finish_reason == "stop"
    match candidate.kind:
        case "stall":
            return "tool call" if outcome == "prose" and stopped and ends_on_colon(text) else None
        case "control" | "chat":
            fine = outcome == "prose" and stopped and not ends_on_colon(text)
            return "prose" if fine else None
        case "agent":
            return outcome if outcome == "tool call" else None
        case _:
            ran_away = outcome == "bounded length" and runaway_drop(result.token_ids)
            return "bounded length" if ran_away and has_text(engine, result) else None


def has_text(engine: Engine, result: dj.Result) -> bool:
    """Return whether an output has text, other than blank lines, before it repeats."""
    assert engine.tokenizer
    ids = result.token_ids
    first = next((n for n in range(1, len(ids)) if runaway_drop(ids[:n])), len(ids))
    return bool(engine.tokenizer.raw(ids[:first]).strip())


def shipped_turns(engine: Engine) -> Iterator[dict]:
    """Return the set, one JSON object per turn."""
    sources = {
        "stall": agent_turns("stall"),
        "control": agent_turns("control"),
        "chat": chats(),
        "agent": agent_turns("agent"),
        "runaway": runaways(engine),
    }
    for kind, source in sources.items():
        kept, tried = 0, 0
        for candidate in itertools.islice(source, MOST_TRIED):
            tried += 1
            if expected := expected_class(engine, candidate):
                kept += 1
                yield fields(candidate, expected)
            if kept == COUNTS[kind]:
                break
        print(f"{kind}: {kept} of {tried} candidates", flush=True)
        if kept < COUNTS[kind]:
            raise SystemExit(f"only {kept} {kind} turns were found, {COUNTS[kind]} are needed")


def fields(candidate: Turn, expected: str) -> dict:
    """Return the fields of a turn without empty ones."""
    names = ("id", "kind", "messages", "prompt_ids", "tools")
    found = {name: getattr(candidate, name) for name in names} | {"expected": expected}
    return {name: value for name, value in found.items() if value}


def main() -> None:
    """Write the set."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--target", default="tiny")
    options.add_argument("--drafter", default="own")
    options.add_argument("--out", type=Path, default=SHIPPED)
    chosen = options.parse_args()
    use_compilation_cache()
    engine = dj.load(chosen.target, chosen.drafter, plan=dj.Plan(max_length=1024))
    lines = [json.dumps(line, ensure_ascii=False) for line in shipped_turns(engine)]
    chosen.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
