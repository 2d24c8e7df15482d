"""Training of a drafter: rows, features, batches, optimizer, saved states."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax import distributed
from dflash_jax.errors import ConfigError
from dflash_jax.graph.abstract import PlannedPair, by_path
from dflash_jax.graph.build import jit
from dflash_jax.graph.placement import AXES, param_shardings
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.plan import LEAST
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer import (
    drafter,
    features,
    initial_weights,
    loop,
    objective,
    optimizer,
    own_modules,
)
from dflash_jax.trainer.feature_store import FeatureOrigin, FeatureStore, weights_digest
from dflash_jax.trainer.files import saved_as, sound, write_json
from dflash_jax.trainer.recipes import CACHE, LAYERS, ONLINE, Recipe, new_drafter
from dflash_jax.trainer.rows import Batches, TokenRows
from dflash_jax.trainer.target import TrainState
from dflash_jax.trainer.trained import TrainedDrafter, pair_of
from dflash_jax.utils.progress import duration

Report = Callable[[str], None]
STEPS = "steps.json"  # in a run's folder, the steps that fit in its budget
LEAST_SHARE = 0.25  # of a budget that is for steps, however long answers took
ROUNDED = 16  # blocks of a row are a multiple of it if all positions start one


def usable(rows: Sequence[TokenRows], recipe: Recipe, report: Report) -> list[TokenRows]:
    """Return the rows in which a block can start, by bucket, and report how many are dropped.

    A bucket with fewer rows than a batch repeats its rows.

    Raises:
      ConfigError: no block can start in any row.
    """
    kept = []
    used = 0
    total = sum(len(part.tokens) for part in rows)
    for bucket, part in zip(recipe.buckets, rows, strict=True):
        good = np.flatnonzero(startable(part).any(axis=1))
        used += len(good)
        if 0 < len(good) < bucket.rows:
            good = np.resize(good, bucket.rows)
        kept.append(TokenRows(part.tokens[good], part.wanted[good], part.real[good]))
    if 0 < used < total:
        report(
            f"using {used:,} of {total:,} rows: in the others no two neighbouring tokens, after"
            " at least one other, are an assistant's"
        )
    if not used:
        raise ConfigError(
            f"no block can start in any of the {total} rows: a row needs two neighbouring tokens"
            " that an assistant wrote, after at least one other; look at the data's roles, or at"
            " the target's answers in answers.jsonl"
        )
    return kept


def startable(rows: TokenRows) -> np.ndarray:
    """Return the mask [row, position - 1] of positions at which a block can start."""
    return rows.wanted[:, 1:-1] & rows.wanted[:, 2:]


def block_counts(recipe: Recipe, used: Sequence[int], rows: Sequence[TokenRows]) -> list[int]:
    """Return the anchors in a row of each bucket.

    Where every position starts a block, that is the most of one row, rounded up so that the blocks
    of a row can be processed a few at a time.

    Args:
      used: the recipe's bucket of each of `rows`.
    """
    counts = []
    for bucket, part in zip(used, rows, strict=True):
        most = int(startable(part).sum(axis=1).max())
        every = min(-(-most // ROUNDED) * ROUNDED, part.tokens.shape[1])
        counts.append(recipe.blocks(bucket) or every)
    return counts


def make_batches(
    rows: Sequence[TokenRows], recipe: Recipe, report: Report
) -> tuple[Batches, list[int]]:
    """Return the batches of a run, and the recipe's bucket of each of their buckets."""
    kept = usable(rows, recipe, report)
    used = [i for i, part in enumerate(kept) if len(part.tokens)]
    buckets = tuple(recipe.buckets[i] for i in used)
    batches = Batches(buckets, tuple(kept[i] for i in used), recipe.seed)
    if (steps := recipe.schedule.steps) < batches.per_epoch:
        report(
            f"{steps:,} steps read {steps:,} of {batches.per_epoch:,} batches: the other rows are"
            f" not learnt; steps={batches.per_epoch} would read each row once"
        )
    return batches, used


def feature_store(out: Path, pair: Pair, model: TargetModel, recipe: Recipe) -> FeatureStore | None:
    """Return the store of features, in a run's folder or the recipe's; None to compute them online.

    Raises:
      CheckpointError: see `FeatureStore`.
    """
    if recipe.features == ONLINE:
        return None
    folder = out / "features" if recipe.features == CACHE else Path(recipe.features)
    final = objective.wants_distribution(recipe)
    origin = FeatureOrigin(
        target=weights_digest(model.params),
        weights=recipe.target_weights,
        taps=tuple(pair.taps),
        final=final,
        width=pair.target.config.hidden_size,
        dtype=recipe.dtype if final else recipe.training_dtype,
    )
    return FeatureStore(folder, origin)


def cached_features(
    store: FeatureStore | None,
    pair: Pair,
    model: TargetModel,
    recipe: Recipe,
    batches: Batches,
    report: Report,
) -> features.FeatureCache | features.FeatureReader | None:
    """Return the features of all rows; None if the training step computes them.

    Host 0 computes those that are missing, before the other hosts read them. Without a store they
    are read by native kernels in each step, if there are some for the target's weights.
    """
    if store is None:
        return features.quantised_reader(
            pair,
            model,
            batches.rows,
            weights=recipe.target_weights,
            dtype=recipe.dtype,
            keep=objective.wants_distribution(recipe),
        )
    group = distributed.current()
    if not group.first:
        group.exchange("features")
    cache = features.fill_cache(
        store,
        pair,
        model,
        batches.rows,
        chosen=batches.read(recipe.schedule.steps),
        together=[bucket.rows // (recipe.devices * recipe.parts) for bucket in batches.buckets],
        dtype=recipe.dtype,
        report=report,
    )
    if group.first:
        group.exchange("features")
    return cache


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A drafter after its last step.

    Attributes:
      config: a `DrafterConfig`; None of a module of one's own.
      last: its parameters after the last step, on the host.
      average: their average over steps, if the recipe keeps one.
      steps: number of steps.
    """

    config: Any
    last: dict[str, Any]
    average: dict[str, Any] | None
    steps: int = 0

    @property
    def params(self) -> dict[str, Any]:
        """The parameters that are the result of the recipe."""
        return self.last if self.average is None else self.average


def fit(
    model: TargetModel,
    recipe: Recipe,
    mask_id: int,
    rows: Sequence[TokenRows],
    out: Path,
    *,
    identity: str,
    report: Report,
    start: dict[str, Any] | TrainedDrafter | None = None,
) -> Fitted:
    """Train a drafter on rows; state, log and feature cache are kept in `out`.

    All hosts of a run make the same call. Each reads its share of the rows of a batch; host 0 fills
    the feature cache and writes the log.

    Args:
      rows: one entry per bucket of the recipe.
      identity: see `loop.TrainingRun`.
      report: called with progress lines.
      start: initial parameters, or a module of one's own, which has no mask; fresh by default.

    Raises:
      ConfigError: no block can start in the rows, or devices are missing.
      ComputeError, CheckpointError, TrainingStopped: see `loop.fit` and `features.fill_cache`.
      HostError: hosts start with different parameters, or from different states.
    """
    group = distributed.current()
    watch = loop.Watch.of(report)
    own = start if isinstance(start, TrainedDrafter) else None
    config = None if own else new_drafter(recipe, model.config, mask_id)
    pair = pair_of(model, own.module if own else config)
    batches, used = make_batches(rows, recipe, report)
    place = Placement(recipe.devices, model.mesh)
    store = feature_store(out, pair, model, recipe)
    cache = cached_features(store, pair, model, recipe, batches, report)
    counts = block_counts(recipe, used, batches.rows)
    first, fixed = first_params(pair, recipe, model, rows, report, start)
    group.agree("the digest of all weights", digest((first, model.params, fixed), group))
    frozen = place.frozen(model) | place.replicated(fixed)

    steps = Steps(pair, place, batches, cache, counts, first, frozen)
    if recipe.budget:
        recipe = within_budget(recipe, out, lambda: steps.seconds(recipe), report)
    state, advance = steps.begin(recipe)
    run = loop.TrainingRun(
        path=out / "state",
        steps=recipe.schedule.steps,
        save_every=recipe.schedule.save_every,
        identity=identity,
        label="drafter",
        log=out / "log.jsonl" if group.first else None,
        batch=functools.partial(described, batches),
        measured=measuring(recipe, watch, fixed),
        on_step=watch.on_step,
    )
    final = loop.fit(run, state, advance, report=report)
    return fitted(config, final, fixed.get(drafter.FIXED, {}), run.steps)


def within_budget(
    recipe: Recipe, out: Path, seconds: Callable[[], float], report: Report
) -> Recipe:
    """Return the recipe with as many steps as fit in its budget, decided once into `STEPS`.

    Args:
      seconds: returns the time of a step; all hosts call it.
    """
    group = distributed.current()
    path = out / STEPS
    decided = 0
    if group.first and path.is_file():
        with sound(path):
            decided = int(json.loads(path.read_text(encoding="utf-8"))["steps"])
    steps = group.exchange("the decided steps", decided)[0]
    if not steps:
        each = seconds()
        fitting = max(int(3600 * recipe.budget / each), 1)
        steps = group.exchange("the steps", min(fitting, recipe.schedule.steps))[0]
        in_time = f"{duration(3600 * recipe.budget)}, {each:.2f} s each"
        report(f"{steps:,} of {recipe.schedule.steps:,} steps fit in {in_time}")
        if group.first:
            with saved_as(path) as partial:
                write_json(partial, {"steps": steps, "seconds": round(each, 4)})
    schedule = dataclasses.replace(recipe.schedule, steps=steps)
    return dataclasses.replace(recipe, schedule=schedule)


def left_for_steps(recipe: Recipe, passed: float) -> Recipe:
    """Return the recipe with the budget that is left, at least `LEAST_SHARE` of it.

    Args:
      passed: seconds that have passed of the run.
    """
    left = max(recipe.budget - passed / 3600, recipe.budget * LEAST_SHARE)
    return dataclasses.replace(recipe, budget=left)


def described(batches: Batches, number: int) -> str:
    """Return what the batch of a step is, for errors."""
    i, chosen = batches.chosen(number)
    return f"the batch of rows {chosen.tolist()} of length {batches.buckets[i].length}"


def measuring(
    recipe: Recipe, watch: loop.Watch, fixed: dict[str, Any]
) -> Callable[[TrainState, int], dict[str, float]]:
    """Return the function that measures held-out prompts every `recipe.measure_every` steps.

    The last step is measured as well, so that the best one is known.
    """
    steps = recipe.schedule.steps

    def measured(state: TrainState, done: int) -> dict[str, float]:
        due = recipe.measure_every and (done % recipe.measure_every == 0 or done == steps)
        if watch.held_out is None or not due:
            return {}
        return watch.held_out(fitted(None, state, fixed.get(drafter.FIXED, {}), done).params, done)

    return measured


def maker_of(recipe: Recipe, *, own: bool) -> optax.GradientTransformation:
    """Return the recipe's optimizer.

    Args:
      own: whether the drafter is a module of one's own, whose weights do not tell which axes are
        inputs.
    """
    return optimizer.build(
        recipe.schedule,
        decay=recipe.weight_decay,
        kind=recipe.optimizer,
        matrices=optimizer.of_two_axes if own else optimizer.are_matrices,
    )


def fitted(config: Any, state: TrainState, fixed: dict[str, Any], steps: int) -> Fitted:
    """Return a drafter from its state after some steps and the parameters that are not trained."""
    last = jax.device_get(drafter.joined(state.params, fixed))
    average = None
    if state.average is not None:
        average = jax.device_get(drafter.joined(state.average, fixed))
    return Fitted(config, last, average, steps)


def first_params(
    pair: Pair,
    recipe: Recipe,
    model: TargetModel,
    rows: Sequence[TokenRows],
    report: Report,
    start: dict[str, Any] | TrainedDrafter | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the drafter's parameters before the first step, and those that are not trained.

    Args:
      start: a module of one's own, or parameters of another drafter; by default, the recipe's
        `initial`.
    """
    if isinstance(start, TrainedDrafter):
        return own_modules.first_params(start), {}
    assert pair.drafter is not None
    fresh = initial_weights.fresh(pair, recipe.seed)
    params, _ = initial_weights.replaced(fresh, start or {})
    if not start and recipe.initial == LAYERS:
        configs = (model.config, pair.drafter.config)
        params, origin = initial_weights.from_target(fresh, model.params, configs)
        report(f"the drafter starts with {origin}")
    fixed: dict[str, Any] = {}
    if recipe.draft_vocab:
        tokens = initial_weights.draft_tokens(rows, recipe.draft_vocab, model.config, report)
        params, fixed = initial_weights.with_draft_vocabulary(params, model.params, tokens, start)
    if recipe.frozen_backbone:
        params, backbone = initial_weights.without_backbone(params, pair.drafter.config)
        fixed = {drafter.FIXED: backbone | fixed.get(drafter.FIXED, {})}
    return params, fixed


class Placement:
    """Placement of arrays on data-parallel devices, of which every host has as many, or on a mesh.

    Attributes:
      everywhere: the sharding of an array of which every device has a copy.

    Args:
      mesh: a mesh with axes data and model, in place of the first devices.

    Raises:
      ConfigError: there are fewer devices than asked for, or hosts cannot have as many each.
    """

    def __init__(self, devices: int, mesh: Mesh | None = None):
        self._hosts = distributed.current().size
        self._mesh = self._first_devices(devices) if mesh is None else mesh
        self.everywhere = NamedSharding(self._mesh, PartitionSpec())
        self._by_row = NamedSharding(self._mesh, PartitionSpec("data"))

    def _first_devices(self, devices: int) -> Mesh:
        each, rest = divmod(devices, self._hosts)
        if rest:
            raise ConfigError(
                f"devices is {devices} for {self._hosts} hosts; expected a multiple of the hosts,"
                f" as with --set devices={self._hosts * (each + 1)}"
            )
        chosen: list[jax.Device] = []
        for host in range(self._hosts):
            available = [x for x in jax.devices() if x.process_index == host]
            if each > len(available):
                of = f" on host {host}" if self._hosts > 1 else ""
                raise ConfigError(
                    f"{each} devices were asked for{of}, but there are {len(available)}; on a CPU,"
                    f" XLA_FLAGS=--xla_force_host_platform_device_count={each} makes some"
                )
            chosen += available[:each]
        return Mesh(np.asarray(chosen)[:, None], AXES)

    def replicated(self, tree: Any) -> Any:
        """Copy a tree, the same on all hosts, to every device."""
        return self._put(tree, self.everywhere)

    def by_row(self, tree: Any) -> Any:
        """Shard arrays by row; each host gives its share of the rows of a batch [B, ...]."""
        return self._put(tree, self._by_row)

    def frozen(self, model: TargetModel) -> Any:
        """Copy a target's parameters to every device, unless they are on a mesh."""
        return self.replicated(model.params) if model.mesh is None else model.params

    def split(self, state: TrainState, pair: Pair) -> TrainState:
        """Shard a drafter's parameters and their moments as their declarations say."""
        axes = PlannedPair(pair, LEAST).model_axes
        own = {name.removeprefix("drafter"): axis for name, axis in axes.items()}
        split_axes = {}
        for path in by_path(state):
            for name, axis in own.items():
                if path.endswith(name):
                    split_axes[path] = axis
        return jax.tree.map(self._put, state, param_shardings(self._mesh, state, split_axes))

    def _put(self, tree: Any, sharding: NamedSharding) -> Any:
        if self._hosts == 1:
            return jax.device_put(tree, sharding)

        def put(x: Any) -> jax.Array:
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))

        return jax.tree.map(put, tree)


@dataclasses.dataclass(frozen=True)
class Steps:
    """What the steps of a run read, whatever its schedule.

    Attributes:
      counts: anchors in a row of each bucket.
      first: the drafter's parameters before the first step.
      frozen: parameters that are not trained (see `drafter.sums`).
    """

    pair: Pair
    place: Placement
    batches: Batches
    cache: features.FeatureCache | features.FeatureReader | None
    counts: Sequence[int]
    first: dict[str, Any]
    frozen: dict[str, Any]

    def begin(self, recipe: Recipe) -> tuple[TrainState, Callable[[TrainState, int], Any]]:
        """Return the state before the first step, and the function that makes a step."""
        maker = maker_of(recipe, own=own_modules.is_own(self.pair.drafter))
        average = jax.tree.map(jnp.copy, self.first) if recipe.average else None
        begun = TrainState(params=self.first, optimizer=maker.init(self.first), average=average)
        state = self.place.split(begun, self.pair)
        after = jax.tree.map(lambda x: x.sharding, state), self.place.everywhere
        step = drafter.step(self.pair, recipe, maker)
        program = jit(step, donate=(0,), static_argnums=(5,), out_shardings=after)
        group = distributed.current()

        def advance(state: TrainState, number: int) -> Any:
            i, chosen = self.batches.chosen(number)
            batch = self.batches.rows[i]
            chosen = np.split(chosen, group.size)[group.index]
            inputs = (batch.tokens[chosen], batch.wanted[chosen])
            cached = self.cache.at(i, chosen) if self.cache else None
            inputs, cached = self.place.by_row((inputs, cached))
            return program(state, self.frozen, inputs, cached, np.int32(number), self.counts[i])

        return state, advance

    def seconds(self, recipe: Recipe) -> float:
        """Return the time of a step."""
        state, advance = self.begin(recipe)
        return loop.seconds_of_step(advance, state, 0)


def digest(tree: Any, group: distributed.Group) -> str:
    """Return a digest of arrays, by which hosts compare theirs; empty on a single host."""
    if group.size == 1:
        return ""
    hashed = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        hashed.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
    return hashed.hexdigest()[:16]
