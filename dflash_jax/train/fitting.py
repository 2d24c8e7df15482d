"""The steps of a drafter's training: rows, features, batches, optimizer, saved states."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.compiler import jit
from dflash_jax.compiler.models import build_pair
from dflash_jax.config import DrafterConfig, check_pair
from dflash_jax.errors import ConfigError
from dflash_jax.target_model import TargetModel
from dflash_jax.train import drafter, features, loop, objective, optimizer
from dflash_jax.train.recipe import CACHE, Recipe, new_drafter
from dflash_jax.train.rows import Batches, Rows
from dflash_jax.train.target import TrainState

Tell = Callable[[str], None]


def usable(rows: Sequence[Rows], recipe: Recipe, tell: Tell) -> list[Rows]:
    """Rows in which a block can start; a bucket with less than a batch repeats its rows.

    The number of rows left out is passed to `tell`.

    Raises:
      ConfigError: no row can teach anything.
    """
    kept, used, total = [], 0, sum(len(part.tokens) for part in rows)
    for bucket, part in zip(recipe.buckets, rows, strict=True):
        start = part.wanted[:, 1:-1] & part.wanted[:, 2:]
        good = np.flatnonzero(start.any(axis=1))
        used += len(good)
        if 0 < len(good) < bucket.rows:
            good = np.resize(good, bucket.rows)
        kept.append(Rows(part.tokens[good], part.wanted[good], part.real[good]))
    if 0 < used < total:
        tell(
            f"using {used:,} of {total:,} rows: in the others no two neighbouring tokens, after"
            " at least one other, are an assistant's"
        )
    if not used:
        raise ConfigError(
            f"no block can start in any of the {total} rows: a row needs two neighbouring tokens"
            " that an assistant wrote, behind at least one other; look at the data's roles, or at"
            " the target's answers in answers.jsonl"
        )
    return kept


def fit(
    model: TargetModel,
    recipe: Recipe,
    mask_id: int,
    rows: Sequence[Rows],
    out: Path,
    *,
    identity: str,
    tell: Tell,
    start: dict[str, Any] | None = None,
) -> tuple[DrafterConfig, dict[str, Any]]:
    """Trains on rows; the state, the log and the feature cache live in `out`.

    Args:
      rows: one entry per bucket of the recipe.
      start: parameters to begin with; fresh ones by default.
    """
    config = new_drafter(recipe, model.config, mask_id)
    check_pair(model.config, config)
    pair = build_pair(model.config, config)
    kept = usable(rows, recipe, tell)
    used = [i for i, part in enumerate(kept) if len(part.tokens)]
    recipe_buckets = tuple(recipe.buckets[i] for i in used)
    batches = Batches(recipe_buckets, tuple(kept[i] for i in used), recipe.seed)
    if (steps := recipe.schedule.steps) < batches.per_epoch:
        tell(
            f"{steps:,} steps read {steps:,} of {batches.per_epoch:,} batches: the other rows are"
            f" not learnt; steps={batches.per_epoch} would read each row once"
        )
    place = Placement(recipe.devices)
    cache = None
    if recipe.features == CACHE:
        tell(f"features of {sum(len(part.tokens) for part in batches.rows)} rows")
        cache = features.fill_cache(
            out / "features",
            pair,
            model.params,
            batches.rows,
            dtype=recipe.dtype,
            keep=objective.wants_distribution(recipe),
            tell=tell,
        )
    maker = optimizer.build(recipe.schedule, decay=recipe.weight_decay, kind=recipe.optimizer)
    program = jit(drafter.step(pair, recipe, maker), donate=(0,), static_argnums=(5,))
    frozen = place.everywhere(model.params)

    def advance(state: TrainState, number: int) -> Any:
        i, chosen = batches.chosen(number)
        batch = batches.rows[i]
        given = (batch.tokens[chosen], batch.wanted[chosen])
        read = cache.at(i, chosen) if cache else None
        given, read = place.by_row((given, read))
        return program(state, frozen, given, read, np.int32(number), recipe.blocks(used[i]))

    def describe(number: int) -> str:
        i, chosen = batches.chosen(number)
        return f"the batch of rows {chosen.tolist()} of length {recipe_buckets[i].length}"

    params = place.everywhere(begun(drafter.initial(pair, recipe.seed), start or {}))
    state = TrainState(params=params, optimizer=place.everywhere(maker.init(params)))
    found = loop.fit(
        loop.Run(
            path=out / "state",
            steps=recipe.schedule.steps,
            save_every=recipe.schedule.save_every,
            identity=identity,
            label="drafter",
            log=out / "log.jsonl",
            batch=describe,
        ),
        state,
        advance,
        tell=tell,
    )
    return config, jax.device_get(found.params)


class Placement:
    """Where arrays live: on one device, or rows dealt out over several and the rest on all."""

    def __init__(self, devices: int):
        found = jax.devices()
        if devices > len(found):
            raise ConfigError(
                f"{devices} devices were asked for, but there are {len(found)}; on a CPU,"
                f" XLA_FLAGS=--xla_force_host_platform_device_count={devices} makes some"
            )
        self._mesh = Mesh(np.asarray(found[:devices]), ("data",))

    def everywhere(self, tree: Any) -> Any:
        """A copy on every device."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def by_row(self, tree: Any) -> Any:
        """Arrays [B, ...], rows dealt out."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec("data")))


def begun(fresh: dict[str, Any], start: dict[str, Any]) -> dict[str, Any]:
    """Fresh parameters, replaced where there are others to start with."""
    return {
        name: begun(value, start.get(name, {}))
        if isinstance(value, dict)
        else start.get(name, value)
        for name, value in fresh.items()
    }
