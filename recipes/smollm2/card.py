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
from dflash_jax.trainer.files import saved_as
from dflash_jax.trainer.recipes import DFLASH, DFLASH2, DSPARK, Recipe
from dflash_jax.trainer.rows import load
from dflash_jax.trainer.trained import write_weights
from recipes import model_card

ROWS = 12  # rows of the table with the curve of training
KINDS = {
    DFLASH: "DFlash",
    DFLASH2: "DFlash 2 with a selector of rank {rank}",
    DSPARK: "DSpark, that is DFlash with a Markov head of rank {rank}",
}


def ship(run: Path, folder: Path, chosen: Recipe, *, draft_tokens: int, window: int) -> None:
    """Write the drafter of a finished run into a folder, with its figures and card.

    Args:
      draft_tokens: drafts of a step by default, as the drafter's config advises.
      window: positions that the drafter sees; 0 for all.
    """
    drafter = open_model(run / "drafter")
    assert isinstance(drafter.config, DrafterConfig)
    advised = dataclasses.replace(
        drafter.config,
        speculative_tokens=draft_tokens,
        windows=(window or None,) * drafter.config.num_layers,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / "drafter", export.Weights(advised, drafter.tensors))
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    with saved_as(folder / "results.json") as partial:
        shutil.copyfile(run / "results.json", partial)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    answers: list[np.ndarray] = []
    for part in load(run / "rows.npz"):
        answers += list(part.wanted)
    size = sum(path.stat().st_size for path in (folder / "drafter").iterdir())
    with saved_as(folder / "README.md") as partial:
        card = text(chosen, results, log, answers, size, advised)
        partial.write_text(card, encoding="utf-8")


def text(
    chosen: Recipe,
    results: Mapping[str, Any],
    log: Sequence[Mapping[str, float]],
    answers: Sequence[np.ndarray],
    size: int,
    shipped: DrafterConfig,
) -> str:
    """Return the card.

    Args:
      results: acceptance lengths on the held-out turns.
      log: metrics of every step.
      answers: the mask of answer tokens of every row.
      size: bytes of the drafter's files.
      shipped: the config of the drafter's files.
    """
    places = np.cumsum([step["places"] for step in log])
    curve = []
    for span in np.array_split(np.arange(len(log)), ROWS):
        last = span[-1]
        loss = np.mean([log[step]["loss"] for step in span])
        simulated = np.mean([log[step]["simulated"] for step in span])
        curve.append((last + 1, places[last], loss, simulated))
    return model_card(
        "smollm2",
        recipe=chosen,
        kind=KINDS[chosen.kind].format(rank=chosen.rank),
        trained=shipped.step_width - 1,
        draft_tokens=shipped.speculative_tokens,
        window=shipped.windows[0],
        size=size,
        answers=len(answers),
        tokens=sum(int(mask.sum()) for mask in answers),
        curve=curve,
        hours=sum(step["seconds"] for step in log) / 3600,
        cores=os.cpu_count(),
        month=time.strftime("%B %Y"),
        results=results,
    )
