"""Set-up of a training run: target, settings, data; all checked before it writes.

The data of another run, its turns, answers, rows and features, serve another drafter.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax import distributed
from dflash_jax.config import DrafterConfig, TargetConfig, check_pair
from dflash_jax.errors import ConfigError, HostError
from dflash_jax.graph import Pair
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.placement import AXES
from dflash_jax.plan import LEAST, Weights
from dflash_jax.quant.layouts import Packed, dequantise, pack_tree
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer import (
    data,
    drafter,
    follow_ups,
    own_modules,
    prompt_kinds,
    self_written,
    sources,
)
from dflash_jax.trainer.data import Usage
from dflash_jax.trainer.feature_store import weights_digest
from dflash_jax.trainer.files import claim, differences, saved_as, sound
from dflash_jax.trainer.mask_token import mask_token
from dflash_jax.trainer.recipes import CACHE, FLOAT, Recipe, new_drafter
from dflash_jax.trainer.saved import full
from dflash_jax.trainer.trained import (
    TrainedDrafter,
    pair_of,
    read_params,
)
from dflash_jax.trainer.training import Report, feature_store

PARAMS = "params.safetensors"  # parameters of a drafter of one's own, in its folder
RUN = "run.json"  # the settings of a run, in its folder


@dataclasses.dataclass(frozen=True)
class BegunRun:
    """A run whose folder belongs to its settings.

    Attributes:
      target, out, recipe, report: arguments of `begin`.
      model: the target.
      config: the drafter's config; None for a module of one's own.
      params: parameters of the drafter to start from, if there is one.
      identity: everything that the result depends on.
      own: the drafter to start from, if it is a module of one's own.
      since: when the call began, by `time.monotonic`.
    """

    target: str | TargetModel
    out: Path
    recipe: Recipe
    report: Report
    model: TargetModel
    config: DrafterConfig | None
    data: sources.TrainingData
    params: dict[str, Any] | None
    identity: str
    own: TrainedDrafter | None = None
    since: float = 0.0

    @property
    def pair(self) -> Pair:
        """The modules of target and drafter."""
        return pair_of(self.model, self.own.module if self.own else self.config)

    def own_trained(self) -> TrainedDrafter | None:
        """Return the drafter that `write` wrote, if it is a module of one's own."""
        if self.own is None:
            return None
        name = type(self.own.module).__name__
        params = read_params(self.out / "drafter" / PARAMS, self.own.params, name)
        return dataclasses.replace(
            self.own, block=self.recipe.block, params=params, target=self.model, results={}
        )

    def held_out(self) -> tuple[list[dict[str, Any]], Usage]:
        """Return the held-out prompts, and the count of lines, in which they are entered."""
        asked = data.held_out(self.data.held_out, self.model.tokenizer, self.recipe)
        usage = Usage(self.data.lines)
        usage.hold_out(len(self.data.held_out) - self.data.separate, len(asked))
        return asked, usage


def begin(
    target: str | TargetModel,
    source: str | sources.TrainingData,
    out: Path,
    recipe: Recipe,
    *,
    report: Report,
    mask_id: int | None = None,
    start: Path | TrainedDrafter | None = None,
    data_of: Path | None = None,
) -> BegunRun:
    """Check the settings, claim the folder, and read the data; arguments and errors as for `run`.

    The target writes user turns if the source asks for them. Of several hosts, host 0 does this,
    and the others follow.
    """
    since = time.monotonic()
    group = distributed.current()
    if not group.first:
        return follow(target, out, recipe, report, start, group)
    check_start(recipe, start)
    model = open_target(target, recipe)
    given_data = sources.load(source, recipe)
    examples = (*given_data.training, *given_data.held_out)
    check_ids((example.ids for example in examples), model.config)
    data.held_out(given_data.held_out, model.tokenizer, recipe)  # fails before anything is written
    check_turns(model, given_data, recipe)
    own = start if isinstance(start, TrainedDrafter) and start.module is not None else None
    if own is not None:
        config = None
        check_own(own, model, recipe, mask_id)
    else:
        check_sizes(model.config)
        if mask_id is None:
            mask_id, why = mask_token(model.tokenizer, model.config, examples)
            report(f"mask token {mask_id}: {why}")
        config = new_drafter(recipe, model.config, mask_id)
        check_pair(model.config, config)
    about: dict[str, Any] = {
        "target": named(target),
        "data": data.fingerprint(given_data.training),
        "self_written": given_data.self_written,
        "mask_id": mask_id,
        "start": named(start) if start else None,
        "recipe": recipe.settings,
    }
    if model.mesh is not None:
        about["mesh"] = [model.mesh.shape[name] for name in AXES]
    if recipe.mixture or recipe.follow_ups:
        texts = prompt_kinds.SOURCE.read_text(encoding="utf-8"), *given_data.avoided
        about["openings"] = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    params = None
    if own is not None:
        about["drafter"] = f"{type(own.module).__module__}.{type(own.module).__qualname__}"
    elif start and config is not None:
        params = read_start(start, config)  # fails before anything is written
    if data_of:
        check_reuse(data_of, about)
    claim(out, RUN, about)
    if data_of:
        reuse_data(data_of, out, with_features=recipe.features == CACHE)
    pair = pair_of(model, own.module if own else config)
    feature_store(out, pair, model, recipe)  # fails before the target answers for hours
    identity = json.dumps(about, sort_keys=True)
    every = with_self_written(out, model, given_data, recipe, report)
    group.exchange("begun", about)
    return BegunRun(target, out, recipe, report, model, config, every, params, identity, own, since)


def check_start(recipe: Recipe, start: Path | TrainedDrafter | None) -> None:
    """Raise ConfigError if the recipe needs a drafter to go on from and there is none."""
    if recipe.frozen_backbone and not start:
        raise ConfigError(
            "frozen_backbone is true, but there is no drafter to go on from; give one (--from), or"
            " frozen_backbone=false"
        )


def check_own(own: TrainedDrafter, model: TargetModel, recipe: Recipe, mask_id: int | None) -> None:
    """Check a module of one's own, its gradient included, by shapes.

    Raises:
      ConfigError, PlanError: it does not draft, or there is nothing to train.
    """
    if mask_id is not None:
        raise ConfigError(
            f"mask_id is {mask_id}, but {type(own.module).__name__}, a drafter of your own, is not"
            " asked for masks; leave it out"
        )
    pair = pair_of(model, own.module)
    own_modules.check(pair, recipe, model)
    params = own_modules.first_params(own)
    drafter.check_gradient(pair, recipe, params, model.params)


def check_sizes(config: Any) -> None:
    """Raise ConfigError if a target's config does not say what the drafters of recipes need."""
    if not isinstance(config, TargetConfig):
        raise ConfigError(
            f"the target's config, {config!r}, has no sizes for a drafter of the recipe; give an"
            " engine with a drafter of your own: dj.Engine(dj.Graph(dj.Pair(target, drafter)),"
            " params)"
        )


def follow(
    target: str | TargetModel,
    out: Path,
    recipe: Recipe,
    report: Report,
    start: Path | TrainedDrafter | None,
    group: distributed.Group,
) -> BegunRun:
    """Return the run that host 0 began, without its data.

    Raises:
      HostError: this host does not see the run's folder.
      ConfigError: as for `begin`, of the settings that need no data.
    """
    model = open_target(target, recipe)
    about = group.exchange("begun")[0]
    try:
        seen = json.loads((out / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        seen = None
    if seen != json.loads(json.dumps(about)):
        raise HostError(
            f"{out} on host {group.index} is not the folder that host 0 writes; give an --out in a"
            " file system that all hosts share"
        )
    config = new_drafter(recipe, model.config, about["mask_id"])
    params = read_start(start, config) if start else None
    identity = json.dumps(about, sort_keys=True)
    none = sources.TrainingData()
    return BegunRun(target, out, recipe, report, model, config, none, params, identity)


def check_turns(model: TargetModel, given_data: sources.TrainingData, recipe: Recipe) -> None:
    """Raise ConfigError if the target is to write user turns and cannot."""
    if given_data.self_written:
        self_written.user_header(model, recipe)


def with_self_written(
    out: Path, model: TargetModel, given_data: sources.TrainingData, recipe: Recipe, report: Report
) -> sources.TrainingData:
    """Return the data with the user turns that the target writes, if any are asked for.

    Raises:
      ConfigError: no turn can be used, or all of them are held out.
      CheckpointError, TrainingStopped: see `self_written.write_turns`, `follow_ups`.
    """
    if not (count := given_data.self_written):
        return given_data
    turns = self_written.write_turns(out, model, count, recipe, report, given_data.avoided)
    if recipe.follow_ups:
        turns = follow_ups.write_follow_ups(out, model, turns, recipe, report, given_data.avoided)
    every = given_data.with_turns(turns)
    if not every.training:
        raise ConfigError(
            f"all {len(turns)} self-written turns fell to the held-out side (1 in"
            f" {data.HELD_OUT_SHARE} by hash); ask for more turns"
        )
    return every


def open_target(source: str | TargetModel, recipe: Recipe) -> TargetModel:
    """Load the target unless it is one, with rounded matrices if the recipe asks for them."""
    from dflash_jax.loading import load_target

    if not isinstance(source, TargetModel):
        source = load_target(source, dtype=recipe.dtype)  # pyrefly: ignore
    if not isinstance(source.config, TargetConfig):
        own_modules.check_target(source, recipe)
    return rounded(source, recipe.target_weights)


def rounded(model: TargetModel, weights: Weights) -> TargetModel:
    """Return the target with the values of its matrices after rounding to a format."""
    if weights == FLOAT:
        return model
    plan = dataclasses.replace(LEAST, weights=weights)
    specs = PlannedPair(Pair(model.module), plan).specs
    own = {path.removeprefix("target/"): how for path, how in specs.items()}
    exact = jax.tree.map(lambda x: np.asarray(x, np.float32), jax.device_get(model.params))

    def value(old: jax.Array, new: np.ndarray | Packed) -> jax.Array:
        if not isinstance(new, Packed):
            return old
        weight = dequantise(new.arrays, new.kind).reshape(new.shape)
        return jax.device_put(weight.astype(old.dtype), old.sharding)

    params = jax.tree.map(value, model.params, pack_tree(exact, own))
    return model.with_params(params)


def check_ids(sequences: Iterable[Sequence[int] | np.ndarray], config: TargetConfig) -> None:
    """Raise ConfigError for token ids that the target does not have."""
    highest = max((int(np.max(ids, initial=0)) for ids in sequences), default=0)
    if highest >= config.vocab_size:
        raise ConfigError(
            f"the data holds token {highest}, but the target knows 0 to {config.vocab_size - 1};"
            " was it made with another tokenizer?"
        )


def named(model: str | Path | TargetModel | TrainedDrafter) -> str:
    """Return the path of a model, or a digest of the weights of one in memory."""
    if isinstance(model, str | Path):
        return str(model)
    return f"in memory, {weights_digest(model.params)}"


def read_start(path: Path | TrainedDrafter, config: DrafterConfig) -> dict[str, Any]:
    """Return the parameters of a drafter to start from.

    It has the kind of this run, or is a DFlash drafter, which the other kinds extend.

    Raises:
      ConfigError: its shape differs from the recipe's.
    """
    from dflash_jax.converters.models import open_model
    from dflash_jax.loading import locate

    known = isinstance(path, TrainedDrafter)
    source = path if known else open_model(locate(path, "drafter"), role="drafter")
    kind = type(config) if type(source.config) is type(config) else DrafterConfig
    names = [field.name for field in dataclasses.fields(kind)]
    have = {name: getattr(source.config, name, None) for name in names}
    wanted = {name: getattr(config, name, None) for name in names}
    free = ("kind", "num_target_layers", "rope", "dtype", "windows", "speculative_tokens")
    differ = [k for k, v in wanted.items() if have[k] != v and k not in free]
    if differ or not isinstance(source.config, DrafterConfig):
        listed = "; ".join(f"{k} is {have[k]}, expected {wanted[k]}" for k in differ)
        raise ConfigError(
            f"the drafter {named(path)} has another shape: {listed}; change the recipe"
        )
    return source.params if isinstance(source, TrainedDrafter) else source.load("float32")


ROWS = "rows.npz"
FEATURES = "features"
ANSWERS = "answers.jsonl"
# What decides rows.
OF_RUN = ("target", "data", "self_written", "openings")
OF_ROWS = ("seed", "dtype", "target_weights", "answers", "prompts", "text_prompts",
           "given", "new_tokens", "text_tokens", "text_prompt", "temperature", "answer_buckets",
           "turn_tokens", "turn_temperature", "turn_scripts", "mixture", "follow_ups",
           "greedy_share", "long_share", "long_tokens")  # fmt: skip


def data_files(folder: Path) -> list[str]:
    """Return the names of a run's files of turns, answers and rows."""
    turns = sorted(path.name for path in folder.glob(self_written.FILES))
    return [*turns, *(name for name in (ANSWERS, ROWS) if (folder / name).is_file())]


def check_reuse(source: Path, about: dict[str, Any]) -> None:
    """Check that the data of a run serve another one.

    Args:
      source: folder of the run that has the data.
      about: the settings of the run that wants them.

    Raises:
      ConfigError: `source` has no rows yet, or was made with other settings that decide them.
    """
    if not (source / ROWS).is_file():
        raise ConfigError(
            f"{source} has no {ROWS} to reuse; give the folder of a run whose answers are finished"
        )
    with sound(source / "run.json"):
        recorded = json.loads((source / "run.json").read_text(encoding="utf-8"))
        have = _deciding(recorded, OF_ROWS)
        want = _deciding(json.loads(json.dumps(about)), OF_ROWS)
    if changed := differences(have, want):
        raise ConfigError(
            f"the data of {source} were made with other settings ({'; '.join(changed)}); give the"
            " same, or train without --reuse"
        )


def reuse_data(source: Path, out: Path, *, with_features: bool) -> None:
    """Copy the data of a run that passed `check_reuse`; features are linked, not copied.

    Raises:
      CheckpointError: they cannot be written.
    """
    try:
        for name in data_files(source):
            if not (out / name).is_file():
                with saved_as(out / name) as partial:
                    shutil.copyfile(source / name, partial)
        if with_features and (source / FEATURES).is_dir() and not (out / FEATURES).is_dir():
            with saved_as(out / FEATURES) as partial:
                unfinished = shutil.ignore_patterns(".*")
                shutil.copytree(source / FEATURES, partial, ignore=unfinished, copy_function=_link)
    except OSError as error:
        raise full(out, error) from error


def _link(source: str, path: str) -> None:
    """Give a file a second name; copy it where the file system has no links."""
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)


def _deciding(about: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    recipe = about["recipe"]
    lengths = [bucket["length"] for bucket in recipe["buckets"]]  # their rows decide batches only
    settings = {name: about.get(name) for name in OF_RUN}
    settings |= {f"recipe.{name}": recipe.get(name) for name in names}
    settings["recipe.buckets"] = lengths
    return settings
