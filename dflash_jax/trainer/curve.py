"""Acceptance on held-out prompts while a drafter is trained, by real decoding."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dflash_jax.engine.engine import Engine
from dflash_jax.trainer.evaluate import engine_of, prompt_ids
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
            "held_out": length.value,
            "held_out_low": length.low,
            "held_out_high": length.high,
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
