"""Acceptance on held-out prompts while a drafter is trained, by real decoding; the best is kept."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.engine.engine import Engine
from dflash_jax.trainer.evaluate import engine_of, prompt_ids
from dflash_jax.trainer.files import remove, saved_as, sound, write_json
from dflash_jax.trainer.loop import HELD_OUT
from dflash_jax.trainer.measuring import measurement
from dflash_jax.trainer.recipes import Recipe
from dflash_jax.trainer.trained import TrainedDrafter

PROMPTS = 32  # held-out prompts of a measurement, at most


class HeldOut:
    """Decodes held-out prompts with the parameters of a drafter, in one engine.

    Args:
      drafter: the drafter, whose parameters come with each call.
      entries: held-out prompts, as lines of data.
    """

    def __init__(self, drafter: TrainedDrafter, entries: Sequence[dict[str, Any]], recipe: Recipe):
        self._drafter = drafter
        self._entries = entries
        self._recipe = recipe
        self._engine: Engine | None = None
        self._prompts: list[list[int]] = []

    def __call__(self, params: Any) -> dict[str, float]:
        """Return tokens per round as `held_out`, and its bounds as `held_out_low` and `_high`.

        Nothing is returned where nothing was drafted.
        """
        tokens = self._recipe.held_out_tokens
        if self._engine is None:
            self._engine = self._begin(dataclasses.replace(self._drafter, params=params))
        engine = self._engine
        engine.update_params({"drafter": params})
        answers = engine.generate_many(self._prompts, max_tokens=tokens, trace=True)
        length = measurement([""] * len(answers), answers, engine.plan.block - 1).total.length
        metrics = {
            HELD_OUT: length.value,
            f"{HELD_OUT}_low": length.low,
            f"{HELD_OUT}_high": length.high,
        }
        return {name: value for name, value in metrics.items() if value is not None}

    def _begin(self, drafter: TrainedDrafter) -> Engine:
        recipe = self._recipe
        engine = engine_of(
            drafter.target, drafter, dtype=recipe.dtype, weights=recipe.target_weights
        )
        room = engine.plan.max_length - recipe.held_out_tokens
        every = [prompt_ids(engine, entry) for entry in self._entries]
        self._prompts = [ids for ids in every if len(ids) <= room][:PROMPTS]
        return engine


class BestDrafter:
    """The drafter of a run that accepted most on held-out prompts so far.

        OUT/best/       the drafter, which can be used while the run goes on
        OUT/best.json   after which step it was measured, and its metrics

    Args:
      write: writes parameters as a drafter into a folder.
    """

    def __init__(self, out: Path, measure: HeldOut, write: Callable[[Path, Any], None]):
        self._folder = out / "best"
        self._note = out / "best.json"
        self._measure = measure
        self._write = write

    def __call__(self, params: Any, done: int) -> dict[str, float]:
        """Return the metrics of the parameters after a number of steps, and keep the best ones."""
        metrics = self._measure(params)
        if HELD_OUT in metrics and metrics[HELD_OUT] >= self.kept().get(HELD_OUT, 0.0):
            self._write(self._folder, params)
            with saved_as(self._note) as partial:
                write_json(partial, {"step": done, **metrics})
        return metrics

    def kept(self) -> dict[str, float]:
        """Return step and metrics of the best drafter; nothing if none is kept.

        Raises:
          CheckpointError: the note is damaged.
        """
        if not (self._note.is_file() and self._folder.is_dir()):
            return {}
        with sound(self._note):
            kept = json.loads(self._note.read_text(encoding="utf-8"))
            return {"step": int(kept["step"]), HELD_OUT: float(kept[HELD_OUT])}

    def move_to(self, folder: Path) -> None:
        """Rename the folder of the best drafter, unless that is done already."""
        if self._folder.is_dir():
            self._folder.rename(folder)

    def forget(self) -> None:
        """Remove the best drafter; its metrics stay."""
        remove(self._folder)
