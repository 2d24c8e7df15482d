"""The table of drafters that are trained alike for a short time."""

import dataclasses
import json
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.modes import generate
from benchmarks.paired import interleaved, markdown

SETTINGS = ("steps=150", "held_out_tokens=64")
ALONE = "no drafter"
PROMPTS, TOKENS = 6, 48  # of the timed decoding


def timed(target: str, runs: Mapping[str, Path], drafts: int) -> dict[str, float]:
    """Return the milliseconds of a decode step of every drafter, and of the target alone.

    All decode the first held-out prompts greedily with the default weights, in turn.

    Args:
      runs: folders of trained drafters, which hold the prompts, too.
      drafts: tokens drafted in a step.
    """
    import dflash_jax as dj
    from dflash_jax.trainer.evaluate import prompt_ids, read_prompts

    plan = dj.Plan(block=drafts + 1)
    engines = {name: dj.load(target, run / "drafter", plan=plan) for name, run in runs.items()}
    for engine in engines.values():
        engine.measures_drafting = False
    engines[ALONE] = dj.load(target, None, plan=dataclasses.replace(plan, block=0))
    entries = read_prompts(next(iter(runs.values())) / "heldout.jsonl")[:PROMPTS]
    prompts = [prompt_ids(engines[ALONE], entry) for entry in entries]
    found: dict[str, list[float]] = {name: [] for name in engines}
    for prompt in prompts:
        calls = {name: _step(engine, prompt) for name, engine in engines.items()}
        for name, samples in interleaved(calls, 2).items():
            found[name] += samples
    return {name: round(1e3 * statistics.median(samples), 2) for name, samples in found.items()}


def _step(engine: Any, prompt: list[int]) -> Any:
    def seconds() -> float:
        run = generate(engine, prompt, max_tokens=TOKENS, ignore_eos=True)
        rounds = (
            len(run.acceptance_lengths) if engine.graph.drafter_config else len(run.token_ids) - 1
        )
        return run.decode_s / rounds

    return seconds


def row(run: Path, drafts: int) -> dict[str, Any]:
    """Return the figures of a trained drafter: of training, and on the held-out turns.

    Args:
      drafts: tokens drafted in a step; the acceptance length is that of so many.
    """
    log = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    kinds = {name: found for name, found in results.items() if isinstance(found, dict)}
    rounds = [found["rounds"] for found in kinds.values()]

    def mean(values: Iterable[float]) -> float:
        return round(sum(map(operator.mul, values, rounds)) / sum(rounds), 3)

    places = zip(*(found["accepted_per_position"] for found in kinds.values()), strict=True)
    accepted = [*map(mean, places)]
    return {
        "steps": len(log),
        "seconds": round(sum(line["seconds"] for line in log)),
        "acceptance_length": round(1 + sum(accepted[:drafts]), 3),
        "of_whole_blocks": mean(found["acceptance_length"] for found in kinds.values()),
        "of_kinds": {name: found["acceptance_length"] for name, found in kinds.items()},
        "accepted_per_position": accepted,
        "prompts": sum(found["prompts"] for found in kinds.values()),
    }


def table(rows: dict[str, dict[str, Any]], steps_ms: Mapping[str, float]) -> dict[str, Any]:
    """Return the table: `speed` is that of drafting over no drafter, from step times."""
    alone = steps_ms[ALONE]
    for name, figures in rows.items():
        cost = steps_ms[name] / alone
        figures |= {"decode_step_ms": steps_ms[name], "cost": round(cost, 2)}
        figures["speed"] = round(figures["acceptance_length"] / cost, 2)
    return {"environment": environment(), "plain_step_ms": alone, "drafters": rows}


def lines(found: Mapping[str, Any], settings: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the table for people.

    Args:
      settings: what differs from the preset, of each drafter.
    """
    rows = [
        [
            name,
            ", ".join(settings[name]) or "the preset",
            *(f"{figures[x]:.2f}" for x in ("acceptance_length", "cost", "speed")),
        ]
        for name, figures in found["drafters"].items()
    ]
    return markdown("drafter | settings | acceptance length | cost of a step | speed", rows)
