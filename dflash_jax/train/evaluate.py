"""Acceptance length by real speculative decoding on held-out prompts, with the engine itself."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.compiler import Plan
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.result import Result

CHAT, CODE = "chat", "code"


@dataclasses.dataclass(frozen=True)
class Score:
    """Pooled figures of one kind of prompt."""

    prompts: int
    tokens: int
    rounds: int
    acceptance_length: float  # tokens per round, bonus included
    accepted_per_position: tuple[float, ...]  # share of rounds
    full_blocks: float  # share of rounds in which every draft was kept


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The lines of heldout.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompt_ids(engine: Engine, entry: dict[str, Any]) -> list[int]:
    """A held-out prompt as token ids: a conversation, or the opening of a source file."""
    assert engine.tokenizer is not None
    if entry["kind"] == CODE:
        return engine.tokenizer.encode(entry["text"], specials=False)
    switch = {} if entry["thinking"] else {"enable_thinking": False}
    return engine.chat_ids(entry["messages"], tools=entry["tools"] or None, **switch)


def score(results: Sequence[Result], block: int) -> Score:
    """Sums over all rounds, divided once."""
    rounds = sum(result.stats.rounds for result in results)
    decided = [n for result in results for n in result.stats.acceptance_lengths]
    kept = [sum(n > place for n in decided) for place in range(1, block)]
    return Score(
        prompts=len(results),
        tokens=sum(len(result.token_ids) for result in results),
        rounds=rounds,
        acceptance_length=round(sum(decided) / rounds, 3),
        accepted_per_position=tuple(round(n / rounds, 3) for n in kept),
        full_blocks=round(kept[-1] / rounds, 3),
    )


def evaluate(
    target: Path,
    drafter: Path,
    prompts: Path,
    *,
    max_tokens: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Scores of chat and code prompts, greedy, float32; `max_tokens` for each answer."""
    from dflash_jax.loading import load

    engine = load(target, drafter, plan=Plan(dtype="float32", max_length=2048))
    entries = read_prompts(prompts)
    found: dict[str, Any] = {"max_tokens": max_tokens, "dtype": "float32", "temperature": 0}
    for kind in (CHAT, CODE):
        chosen = [entry for entry in entries if entry["kind"] == kind]
        results = [
            engine.generate(prompt_ids(engine, entry), max_tokens=max_tokens) for entry in chosen
        ]
        found[kind] = dataclasses.asdict(score(results, engine.plan.block))
        tell(f"{kind}: acceptance length {found[kind]['acceptance_length']}")
    return found
