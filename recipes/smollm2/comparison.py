"""The table of drafters that are trained alike for a short time."""

import dataclasses
import json
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.modes import generate
from benchmarks.paired import interleaved, markdown

SETTINGS = ("steps=150", "held_out_tokens=64")  # settings of the short training
ALONE = "no drafter"  # the target without one
PROMPTS = 6  # whose decoding is timed
TOKENS = 48  # decoded for each prompt


def timed(target: str, runs: Mapping[str, Path], drafts: int) -> dict[str, float]:
    """Return the milliseconds of a decode step with every drafter, and of the target alone.

    Each engine decodes the first held-out prompts greedily with the default weights, in turn.

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
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for prompt in prompts:
        calls = {name: _step(engine, prompt) for name, engine in engines.items()}
        for name, samples in interleaved(calls, 2).items():
            seconds[name] += samples
    return {name: round(1e3 * statistics.median(samples), 2) for name, samples in seconds.items()}


def _step(engine: Any, prompt: list[int]) -> Callable[[], float]:
    """Return a function that decodes the prompt, and returns the mean seconds of a step."""

    def seconds() -> float:
        run = generate(engine, prompt, max_tokens=TOKENS, ignore_eos=True)
        num_steps = len(run.token_ids) - 1
        if engine.graph.drafter_config:
            num_steps = len(run.acceptance_lengths)
        return run.decode_s / num_steps

    return seconds


def row(run: Path, drafts: int) -> dict[str, Any]:
    """Return the figures of a trained drafter, from its training and its held-out turns.

    Args:
      run: folder of the trained drafter.
      drafts: tokens drafted in a step, for which the acceptance length is given.
    """
    log = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    kinds = {name: figures for name, figures in results.items() if isinstance(figures, dict)}
    rounds = [figures["rounds"] for figures in kinds.values()]

    def mean(values: Iterable[float]) -> float:
        """Return the mean over all rounds of values by kind."""
        return round(sum(map(operator.mul, values, rounds)) / sum(rounds), 3)

    by_kind = [figures["accepted_per_position"] for figures in kinds.values()]
    accepted = [mean(position) for position in zip(*by_kind, strict=True)]
    return {
        "steps": len(log),
        "seconds": round(sum(line["seconds"] for line in log)),
        "acceptance_length": round(1 + sum(accepted[:drafts]), 3),
        "of_whole_blocks": mean(figures["acceptance_length"] for figures in kinds.values()),
        "of_kinds": {name: figures["acceptance_length"] for name, figures in kinds.items()},
        "accepted_per_position": accepted,
        "prompts": sum(figures["prompts"] for figures in kinds.values()),
    }


def table(rows: dict[str, dict[str, Any]], steps_ms: Mapping[str, float]) -> dict[str, Any]:
    """Return the table; `speed` is the speed of decoding over that without a drafter.

    Args:
      rows: figures of `row` by drafter, to which those of speed are added.
      steps_ms: milliseconds of a decode step, from `timed`.
    """
    alone = steps_ms[ALONE]
    for name, figures in rows.items():
        cost = steps_ms[name] / alone
        figures["decode_step_ms"] = steps_ms[name]
        figures["cost"] = round(cost, 2)
        figures["speed"] = round(figures["acceptance_length"] / cost, 2)
    return {"environment": environment(), "plain_step_ms": alone, "drafters": rows}


def lines(table: Mapping[str, Any], settings: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of the table for people.

    Args:
      settings: settings of each drafter that differ from the preset's.
    """
    rows = []
    for name, figures in table["drafters"].items():
        shown = [f"{figures[field]:.2f}" for field in ("acceptance_length", "cost", "speed")]
        rows.append([name, ", ".join(settings[name]) or "the preset", *shown])
    return markdown("drafter | settings | acceptance length | cost of a step | speed", rows)
