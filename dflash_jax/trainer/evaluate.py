"""Acceptance length on held-out prompts, measured by decoding them with the engine."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.result import Result
from dflash_jax.errors import RequestError
from dflash_jax.plan import Plan
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer.trained import TrainedDrafter, read_drafter

CHAT = "chat"
CODE = "code"
IDS = "ids"
KINDS = (CHAT, CODE, IDS)
LENGTH = 2048  # tokens of prompt and answer together
COMPARED = 4  # prompts of each kind that are also decoded without the drafter


@dataclasses.dataclass(frozen=True)
class Score:
    """Pooled figures of one kind of prompt."""

    prompts: int
    tokens: int
    rounds: int
    acceptance_length: float  # tokens per round, bonus included
    accepted_per_position: tuple[float, ...]  # share of rounds
    full_blocks: float  # share of rounds in which every draft was accepted


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Return the lines of heldout.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompt_ids(engine: Engine, entry: dict[str, Any]) -> list[int]:
    """Return the token ids of a held-out prompt.

    Raises:
      RequestError: the prompt is text and the target ships no tokenizer.
    """
    if "ids" in entry:
        return entry["ids"]
    if engine.tokenizer is None:
        raise RequestError("the target ships no tokenizer; give held-out prompts as token ids")
    if "text" in entry:
        return engine.tokenizer.encode(entry["text"])
    tools = entry.get("tools") or None
    if entry.get("thinking", True):
        return engine.chat_ids(entry["messages"], tools=tools)
    return engine.chat_ids(entry["messages"], tools=tools, enable_thinking=False)


def score(results: Sequence[Result], block: int) -> Score:
    """Return the figures pooled over all rounds of all results."""
    rounds = sum(result.stats.rounds for result in results)
    decided: list[int] = []
    for result in results:
        decided += result.stats.acceptance_lengths
    kept = [len([n for n in decided if n > place]) for place in range(1, block)]
    return Score(
        prompts=len(results),
        tokens=sum(len(result.token_ids) for result in results),
        rounds=rounds,
        acceptance_length=round(sum(decided) / max(rounds, 1), 3),
        accepted_per_position=tuple(round(n / max(rounds, 1), 3) for n in kept),
        full_blocks=round(kept[-1] / max(rounds, 1), 3),
    )


def summary(row: dict[str, Any]) -> str:
    """Return one line with the figures of a kind of prompt."""
    line = f"acceptance length {row['acceptance_length']:.2f} on {row['prompts']} held-out prompts"
    if "compared" in row:  # absent from results of earlier versions
        line += f"; {row['equal']} of {row['compared']} answers equal to plain decoding's"
    return line


def engine_of(
    target: str | Path | TargetModel,
    drafter: Path | TrainedDrafter,
    *,
    dtype: str = "float32",
    weights: str = "float",
) -> Engine:
    """Return an engine for `evaluate`.

    Args:
      dtype, weights: fields of the engine's plan.
    """
    from dflash_jax.loading import open_pair

    plan = dataclasses.replace(Plan(), dtype=dtype, weights=weights)  # pyrefly: ignore
    if isinstance(drafter, Path) and not isinstance(target, TargetModel):
        pair = open_pair(target, drafter)
        length = min(LENGTH, pair.configs[0].max_length)
        return pair.engine(dataclasses.replace(plan, max_length=length))
    if isinstance(drafter, Path):
        drafter = read_drafter(drafter, target, {})  # pyrefly: ignore
    model = drafter.target
    rows = 1 if model.mesh is None else model.mesh.shape["data"]
    length = min(LENGTH, model.config.max_length)
    return drafter.unmeasured_engine(dataclasses.replace(plan, rows=rows, max_length=length))


def evaluate(
    engine: Engine, prompts: Path, *, max_tokens: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Return the scores of each kind of prompt, decoded greedily.

    The first few prompts are also decoded without the drafter: `equal` of `compared` answers
    had the same tokens.

    Args:
      max_tokens: length limit of each answer.
      report: called with a line about prompts that are skipped.
    """
    entries = read_prompts(prompts)
    length = engine.plan.max_length

    def answers(asked: Sequence[Sequence[int]], drafted: bool) -> list[Result]:
        return engine.generate_many(asked, max_tokens=max_tokens, speculative=drafted)

    scores: dict[str, Any] = {"max_tokens": max_tokens, "dtype": engine.plan.dtype}
    scores["temperature"] = 0
    for kind in sorted({entry["kind"] for entry in entries}):
        every = [prompt_ids(engine, entry) for entry in entries if entry["kind"] == kind]
        asked = [ids for ids in every if len(ids) + max_tokens <= length]
        if left := len(every) - len(asked):
            report(f"{kind}: {left} of {len(every)} held-out prompts are too long and were skipped")
        if asked:
            results = answers(asked, True)
            plain = answers(asked[:COMPARED], False)
            equal = 0
            for drafted, alone in zip(results, plain, strict=False):
                if drafted.token_ids == alone.token_ids:
                    equal += 1
            row = dataclasses.asdict(score(results, engine.plan.block))
            scores[kind] = row | {"compared": len(plain), "equal": equal}
    return scores
