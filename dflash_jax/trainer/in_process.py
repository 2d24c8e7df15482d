"""Training in the process that has the target, on its device or on a mesh."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax
import numpy as np
from jax.sharding import Mesh

from dflash_jax.config import TargetConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import ConfigError, PlanError, install_hint
from dflash_jax.graph import Pair
from dflash_jax.graph.abstract import PlannedPair, cast_params
from dflash_jax.graph.cache import use_compilation_cache
from dflash_jax.graph.contract import is_of_package
from dflash_jax.graph.placement import named_mesh, param_shardings, place
from dflash_jax.graph.protocols import ModelConfig
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.plan import LEAST
from dflash_jax.quant.layouts import Joined, StructuredWeight
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer import data, own_modules, recipes, sources
from dflash_jax.trainer.loop import TrainingStopped, Watch, to_stderr
from dflash_jax.trainer.recipes import FLOAT, Recipe
from dflash_jax.trainer.trained import TrainedDrafter, read_drafter, read_params
from dflash_jax.utils.forking import check_not_forked
from dflash_jax.utils.progress import is_shown
from dflash_jax.utils.sources import Source

FORMS = "a list of texts, conversations or dicts, or a file as for `dflash-jax train --data`"


class Hooks(TypedDict, total=False):
    """Functions that `train` calls."""

    on_progress: Callable[[str], Any] | None
    on_step: Callable[[dict[str, Any]], Any] | None


def watch(hooks: Hooks) -> Watch:
    """Return those who watch a run; without hooks, lines of progress may be shown.

    Raises:
      ConfigError: a hook cannot be called.
      TypeError: there is no hook of that name.
    """
    for name in hooks:
        if name not in Hooks.__annotations__:
            raise TypeError(f"train() got an unexpected keyword argument {name!r}")
    on_progress = hooks.get("on_progress")
    on_step = hooks.get("on_step")
    for name, hook in (("on_progress", on_progress), ("on_step", on_step)):
        if hook is not None and not callable(hook):
            raise ConfigError(f"{name} is {hook!r}; expected a function of one argument")
    shown = to_stderr if is_shown() else lambda line: None
    return Watch(on_progress or shown, on_step or (lambda metrics: None))


def train(
    target: Engine | TargetModel | Source,
    prompts: Source | Iterable[Any],
    recipe: Recipe | str,
    *,
    mesh: Mesh | None = None,
    out: Source | None = None,
    start: Source | TrainedDrafter | None = None,
    mask_id: int | None = None,
    **hooks: Unpack[Hooks],
) -> TrainedDrafter:
    """Train a drafter for a target, where the target is.

    The target answers the prompts, and the drafter learns to predict the answers. This is the run
    of `dflash-jax train`, without files unless they are asked for.

    Args:
      target: an engine, of which a drafter of your own is trained in place of the recipe's kind,
        starting with its parameters; a `dj.TargetModel`, which takes parameters of other libraries
        from `converters.live.from_arrays`; or a source as for `dj.load`. One in memory keeps its
        dtype, whatever that of the recipe.
      prompts: user turns, conversations (lists of messages), lists of token ids, or dicts like the
        lines of `dflash-jax train --data`. Or what that option takes: a file, or "self:N".
      recipe: the name of a preset, or one that `dj.recipe` changed.
      mesh: devices to train on, with axes "data" (rows of a batch, which replace the recipe's
        `devices`) and "model" (heads and widths). By default, those that the target is on.
      out: a folder for answers, features, states, a log and the drafter, with which the same call
        continues a run that was stopped.
      start: a drafter to start from, with the shape of the recipe.
      mask_id: the mask token; found in tokenizer or embedding table by default.
      hooks: `on_progress(line)` is called with lines; by default they are printed on standard
        error, on terminals and in notebooks. `on_step(metrics)` is called with a dict for every
        step, in order, a few steps at a time: its `step`, `loss`, `accuracy`, `simulated` (the
        acceptance length of the batch's blocks), `seconds` and others, and with `measure_every` of
        the recipe `held_out`, the acceptance length on held-out prompts. An error that it raises
        ends the run, which goes on from the last state that was saved.

    Raises:
      ConfigError: prompts, recipe and target do not match, or `out` belongs to another run.
      PlanError: the mesh has other axes, or does not divide heads or rows.
      CheckpointError: the target's parameters do not fit its config, or a file is damaged.
      ComputeError: a metric is not finite, or the device has too little memory.
      KeyboardInterrupt: SIGINT or SIGTERM arrived; in `out`, the state is saved.
    """
    check_not_forked()
    try:
        from dflash_jax.trainer import run
    except ImportError as error:
        raise ConfigError(f"training needs {error.name}; {install_hint('train')}") from error
    chosen = recipes.recipe(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(chosen, Recipe):
        raise ConfigError(f"recipe is {recipe!r}; expected a preset's name, or a dj.recipe(...)")
    report = watch(hooks)
    source = training_data(prompts)
    use_compilation_cache(None)
    with optax_settings(), tempfile.TemporaryDirectory(prefix="dflash_jax-") as scratch:
        model, chosen = placed(in_memory(target, chosen), mesh, chosen)
        start = started(target, model, start)
        folder = Path(scratch) / "run" if out is None else Path(out).expanduser()
        try:
            outcome = run.run(
                model, source, folder, chosen, report=report, mask_id=mask_id, start=start
            )
        except TrainingStopped as stop:
            again = "without out=, nothing is kept" if out is None else "the same call goes on"
            raise KeyboardInterrupt(f"{stop}; {again}") from None
        return outcome.own or read_drafter(outcome.drafter, model, outcome.results)


@contextlib.contextmanager
def optax_settings() -> Iterator[None]:
    """Apply the settings of engines, and the promotion of dtypes and shapes that Optax needs."""
    with (
        isolated_jax_config(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def training_data(prompts: Any) -> str | sources.TrainingData:
    """Return prompts as data, some of them held out by hash, or the name of a source.

    Raises:
      ConfigError: there are none, or one has none of the known forms.
    """
    if isinstance(prompts, str | os.PathLike):
        return str(prompts)
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts is {prompts!r}; expected {FORMS}")
    examples = [data.example(data.line(x), f"prompt {i}") for i, x in enumerate(prompts)]
    if not examples:
        raise ConfigError(f"prompts is empty; expected {FORMS}")
    return sources.split(examples)


def in_memory(target: Any, recipe: Recipe) -> TargetModel:
    """Return the target of an engine, a model as it is, or one that is read in the recipe's dtype.

    Raises:
      ConfigError: it is none of these, or an engine's target is packed, or none of ours.
      CheckpointError: a model's parameters do not fit its config.
    """
    from dflash_jax.converters.tree_source import TreeSource
    from dflash_jax.loading import open_pair

    if isinstance(target, str | os.PathLike):
        pair = open_pair(target, None)
        params = pair.target.load(recipe.dtype)
        return TargetModel(
            pair.configs[0],
            params,
            recipe.dtype,  # pyrefly: ignore
            tokenizer=pair.tokenizer,
        )
    if isinstance(target, TargetModel):
        if isinstance(target.config, TargetConfig):
            TreeSource(target.params, target.config)
        return target
    if not isinstance(target, Engine):
        raise ConfigError(
            f"target is a {type(target).__name__}; expected an engine, a dj.TargetModel or a"
            " source; dflash_jax.converters.live.from_arrays converts other libraries' parameters"
        )
    module = target.graph.pair.target
    dtype = target.plan.dtype
    params = cast_params(floats_of(target, "target"), dtype)
    config = target.graph.config
    if is_of_package(module) and isinstance(config, TargetConfig):
        return TargetModel(config, params, dtype, tokenizer=target.tokenizer)
    config = completed(config)
    return TargetModel(config, params, dtype, tokenizer=target.tokenizer, module=module)


def completed(config: Any) -> Any:
    """Return the config of a target of one's own, or a `ModelConfig` if optional fields lack."""
    fields = dataclasses.fields(ModelConfig)
    values: dict[str, Any] = {x.name: getattr(config, x.name, x.default) for x in fields}
    whole = all(hasattr(config, name) for name in values)
    return config if whole else ModelConfig(**values)


def floats_of(engine: Engine, role: str) -> Any:
    """Return the parameters of an engine's target or drafter as plain arrays.

    Raises:
      ConfigError: they are packed.
    """

    def plain(weight: Any) -> Any:
        if isinstance(weight, Joined) or getattr(weight, "kind", ""):
            raise ConfigError(
                f"the engine's {role} has packed matrices; load it with dj.Plan(weights='float'),"
                " and give a recipe with target_weights if it is served packed"
            )
        return np.asarray(weight) if isinstance(weight, StructuredWeight) else weight

    return jax.tree.map(
        plain, engine.params[role], is_leaf=lambda x: isinstance(x, StructuredWeight)
    )


def started(
    target: Any, model: TargetModel, start: Source | TrainedDrafter | None
) -> Path | TrainedDrafter | None:
    """Return the drafter to start from: `start`, or else an engine's drafter of one's own.

    Raises:
      CheckpointError: a file does not hold the parameters of an engine's own drafter.
    """
    if isinstance(start, TrainedDrafter):
        return start
    module = target.graph.pair.drafter if isinstance(target, Engine) else None
    if is_of_package(module) or not own_modules.is_own(module):
        return None if start is None else Path(start)
    params = jax.device_get(floats_of(target, "drafter"))
    if start is not None:
        params = read_params(Path(start), params, type(module).__name__)
    return TrainedDrafter(None, params, {}, model, module)


def placed(model: TargetModel, mesh: Mesh | None, recipe: Recipe) -> tuple[TargetModel, Recipe]:
    """Return a target on a mesh, as decoding shards it, and the recipe for both.

    Args:
      mesh: by default, the one that the target is on; if there is none, the default device.

    Raises:
      ConfigError, PlanError: the mesh cannot be used with them.
    """
    recipe = dataclasses.replace(recipe, dtype=model.dtype)
    where = None
    mesh = mesh or model.mesh
    tree: dict[str, Any] = {"target": model.params}
    if mesh is not None:
        mesh = named_mesh(mesh)
        recipe = dataclasses.replace(recipe, devices=mesh.shape["data"])
        check_mesh(mesh, model.config, recipe)
        planned = PlannedPair(Pair(model.module), LEAST)
        where = param_shardings(mesh, tree, planned.model_axes)
    params = place(tree, where)["target"]
    return model.with_params(params), recipe


def check_mesh(mesh: Mesh, config: TargetConfig, recipe: Recipe) -> None:
    """Raise PlanError if a mesh does not suit a target and a recipe."""
    by_row = mesh.shape["data"]
    by_head = mesh.shape["model"]
    if any(device.process_index != jax.process_index() for device in mesh.devices.flat):
        raise PlanError(
            "mesh has devices of other processes; expected those of this one. On several hosts,"
            " `dflash-jax train --hosts` trains for a target in files"
        )
    if getattr(config, "num_kv_heads", by_head) % by_head:
        raise PlanError(
            f"mesh has {by_head} devices along 'model' for {config.num_kv_heads} kv heads; expected"
            " a divisor of them"
        )
    rows = [bucket.rows for bucket in recipe.answer_buckets]
    if any(count % by_row for count in rows):
        raise PlanError(
            f"mesh has {by_row} devices along 'data', but answer_buckets decode {rows} answers"
            " together; expected multiples of the devices"
        )
    if recipe.target_weights != FLOAT and mesh.size > 1:
        raise PlanError(
            f"target_weights is {recipe.target_weights!r}, which cannot be split over a mesh;"
            " use float, or a single device"
        )
