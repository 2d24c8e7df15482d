"""Answers to training prompts, decoded by actors of Ray Data, each with an engine of its own."""

import json
import pickle
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data

from dflash_jax.graph.cache import use_compilation_cache
from dflash_jax.graph.keys import Variant
from dflash_jax.trainer.data import example
from dflash_jax.trainer.decoding import EnginePool
from dflash_jax.trainer.recipes import Recipe
from dflash_jax.trainer.regenerate import AnswerGroup, Decoder
from dflash_jax.trainer.run import answered_rows
from dflash_jax.trainer.setup import begin, open_target
from dflash_jax.trainer.sources import TrainingData, split
from dflash_jax.trainer.training import Report


def answers(
    source: Any,
    out: Path,
    recipe: Recipe,
    *,
    target: str,
    workers: int | None,
    mask_id: int | None,
    report: Report,
) -> Any:
    """Return a dataset of answered prompts; arguments and errors as for `ray.answers`."""
    prompts = source if isinstance(source, str) else training_data(source.iter_rows())
    begun = begin(target, prompts, out, recipe, report=report, mask_id=mask_id)
    decoder = ray_decoder(target, recipe, workers)
    parts = answered_rows(begun, decoder=decoder)
    model = begun.model
    rows = []
    for part in parts:
        for tokens, real, wanted in zip(part.tokens, part.real, part.wanted, strict=True):
            row = {"ids": tokens[real].tolist(), "wanted": wanted[real].tolist()}
            if model.tokenizer is not None:
                row["text"] = model.tokenizer.raw(row["ids"])
            rows.append(row)
    return ray.data.from_items(rows)


def training_data(rows: Any) -> TrainingData:
    """Return rows like the lines of a JSONL file as data, some of it held out by hash.

    Ray's tables fill absent fields with None, which is left out at every depth.
    """
    lines = (json.dumps(_without_none(row)) for row in rows)
    return split([example(line, f"row {i} of the dataset") for i, line in enumerate(lines)])


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(x) for name, x in value.items() if x is not None}
    if isinstance(value, np.ndarray | np.generic):
        return _without_none(value.tolist())
    return [_without_none(x) for x in value] if isinstance(value, list) else value


def ray_decoder(target: str, recipe: Recipe, workers: int | None) -> Decoder:
    """Return a function that decodes groups by actors.

    A group whose actor ends is decoded by another one.

    Args:
      workers: number of actors; by default one per GPU, or one per machine if there are none.
    """

    def decoded(groups: Sequence[AnswerGroup]) -> Generator[list[list[int]]]:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        count = workers or gpus or sum(bool(node["Alive"]) for node in ray.nodes())
        path = Path(target).expanduser()
        source = str(path.resolve()) if path.exists() else target
        rows = [{"group": pickle.dumps(group)} for group in groups]
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
        dataset.context.execution_options.preserve_order = True
        dataset.context.enable_progress_bars = False  # groups are reported as they are saved
        done = dataset.map_batches(
            AnswerActor,
            fn_constructor_args=(source, recipe),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=count),
            num_cpus=1,
            num_gpus=1 if gpus else 0,
        )
        for row in done.iter_rows():
            yield json.loads(row["answers"])

    return decoded


class AnswerActor:
    """Decodes groups of prompts by one engine.

    Args:
      target: path, hub id or name of the target.
    """

    def __init__(self, target: str, recipe: Recipe):
        use_compilation_cache()
        variant = Variant.SAMPLED if recipe.temperature else Variant.GREEDY
        model = open_target(target, recipe)
        weights = recipe.target_weights
        self._pool = EnginePool(model, variant, most=1, weights=weights)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        groups = [pickle.loads(group) for group in batch["group"]]
        return {"answers": [json.dumps(group.decode(self._pool)) for group in groups]}
