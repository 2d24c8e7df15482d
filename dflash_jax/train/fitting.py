"""A whole training run: data, answers, features, steps, export, measured acceptance length.

Each stage leaves one result in the run's folder and is skipped where that exists, so that a
run that was stopped, or killed, is gone on with by the same call.
"""

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.compiler import Plan, jit
from dflash_jax.compiler.programs import build_pair, weight_specs
from dflash_jax.config import DrafterConfig, TargetConfig, check_pair
from dflash_jax.errors import ConfigError
from dflash_jax.loading import TargetModel
from dflash_jax.quant.layouts import Packed, dequantise, pack_tree
from dflash_jax.train import (
    data,
    drafter,
    evaluate,
    features,
    loop,
    objective,
    optimizer,
    regenerate,
)
from dflash_jax.train import rows as packing
from dflash_jax.train.files import saved_as
from dflash_jax.train.recipe import CACHE, FLOAT, GIVEN, Recipe, mask_token, new_drafter
from dflash_jax.train.rows import Batches, Document, Rows
from dflash_jax.train.target import TrainState
from dflash_jax.train.vocabulary import write_json

Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run leaves behind."""

    drafter: Path  # the exported folder
    results: dict[str, Any]  # acceptance length of each kind of held-out prompt


def run(
    target: str,
    source: str,
    out: Path,
    recipe: Recipe,
    *,
    tell: Tell,
    mask_id: int | None = None,
    start: Path | None = None,
) -> Outcome:
    """Trains a drafter for a target and measures it.

    Args:
      target: whatever `dflash_jax.load_target` opens.
      source: a JSONL file (see `data.read`), or "tiny" for the shipped corpus.
      out: the run's folder.
      mask_id: the mask token, where it cannot be found by itself.
      start: a drafter to go on from; of the shape that the recipe makes.

    Raises:
      ConfigError: data, recipe and target do not fit each other, or `out` belongs to another run.
      ComputeError, CheckpointError, Stopped: see `loop.fit`.
    """
    model = open_target(target, recipe)
    training, held_out = data.load(source, recipe)
    if mask_id is None:
        mask_id, why = mask_token(model.tokenizer, model.config)
        tell(f"mask token {mask_id}: {why}")
    about = {
        "target": str(target),
        "data": data.fingerprint(training),
        "mask_id": mask_id,
        "start": str(start) if start else None,
        "recipe": dataclasses.asdict(recipe),
    }
    identity = claim(out, about)
    rows = stored_rows(out, model, training, recipe, tell)
    config = new_drafter(recipe, model.config, mask_id)
    params = read_start(start, config) if start else None
    if not (out / "drafter").is_dir():
        _, trained = fit(
            model, recipe, mask_id, rows, out, identity=identity, tell=tell, start=params
        )
        write_drafter(out / "drafter", config, trained)
    results = measured(out, target, model, held_out, recipe, tell)
    return Outcome(out / "drafter", results)


def open_target(source: str, recipe: Recipe) -> TargetModel:
    """The target, its matrices rounded if the recipe says so."""
    from dflash_jax.loading import load_target

    model = load_target(source, dtype=recipe.dtype)  # pyrefly: ignore
    if recipe.target_weights == FLOAT:
        return model
    plan = Plan(weights=recipe.target_weights)  # pyrefly: ignore
    specs = weight_specs(plan, model.config, None)
    own = {path.removeprefix("target/"): how for path, how in specs.items()}
    exact = jax.tree.map(lambda x: np.asarray(x, np.float32), jax.device_get(model.params))

    def rounded(old: jax.Array, new: np.ndarray | Packed) -> jax.Array:
        if not isinstance(new, Packed):
            return old
        weight = dequantise(new.arrays, new.kind).reshape(new.shape)
        return jax.device_put(weight.astype(old.dtype))

    params = jax.tree.map(rounded, model.params, pack_tree(exact, own))
    return TargetModel(model.config, params, model.dtype, tokenizer=model.tokenizer)


def claim(out: Path, about: dict[str, Any]) -> str:
    """Notes in the folder what is made there, or refuses a folder of another run."""
    path, wanted = out / "run.json", json.loads(json.dumps(about))
    if not path.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise ConfigError(f"{out} holds other things; give a new folder, or one of a run")
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, wanted)
    found = json.loads(path.read_text(encoding="utf-8"))
    if found != wanted:
        changed = sorted(k for k in wanted if found.get(k) != wanted[k])
        raise ConfigError(
            f"{out} was begun with other settings ({', '.join(changed)} differ);"
            " give another --out, or remove the folder"
        )
    return json.dumps(wanted, sort_keys=True)


def stored_rows(
    out: Path,
    model: TargetModel,
    training: Sequence[data.Example],
    recipe: Recipe,
    tell: Tell,
) -> list[Rows]:
    """The training rows, made on the first call: answers of the target, or the text as given."""
    path, fill = out / "rows.npz", 0
    if not path.is_file():
        if recipe.answers == GIVEN:
            found = data.as_given(training, model.tokenizer, model.config.eos_token_ids)
        else:
            prompts = data.prompts(training, model.tokenizer, recipe)
            found = regenerate.answer(
                out / "answers.jsonl",
                model,
                prompts,
                recipe.answer_buckets,
                tell=tell,
                temperature=recipe.temperature,
                seed=recipe.seed,
            )
        check_ids(found, model.config)
        random.Random(recipe.seed).shuffle(found)
        packing.save(path, packing.apart(found, recipe.buckets, fill=fill))
    return packing.load(path)


def check_ids(found: Sequence[Document], config: TargetConfig) -> None:
    """Raises ConfigError for token ids that the target does not have."""
    highest = max((int(d.ids.max(initial=0)) for d in found), default=0)
    if highest >= config.vocab_size:
        raise ConfigError(
            f"the data holds token {highest}, but the target knows 0 to {config.vocab_size - 1};"
            " was it made with another tokenizer?"
        )


def usable(rows: Sequence[Rows], recipe: Recipe) -> list[Rows]:
    """Rows in which a block can start; a bucket with less than a batch repeats its rows.

    Raises:
      ConfigError: no row can teach anything.
    """
    kept = []
    for bucket, part in zip(recipe.buckets, rows, strict=True):
        start = part.wanted[:, 1:-1] & part.wanted[:, 2:]
        good = np.flatnonzero(start.any(axis=1))
        if 0 < len(good) < bucket.rows:
            good = np.resize(good, bucket.rows)
        kept.append(Rows(part.tokens[good], part.wanted[good], part.real[good]))
    if not any(len(part.tokens) for part in kept):
        total = sum(len(part.tokens) for part in rows)
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
    kept = usable(rows, recipe)
    used = [i for i, part in enumerate(kept) if len(part.tokens)]
    recipe_buckets = tuple(recipe.buckets[i] for i in used)
    batches = Batches(recipe_buckets, tuple(kept[i] for i in used), recipe.seed)
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


def read_start(path: Path, config: DrafterConfig) -> dict[str, Any]:
    """Parameters to go on from: of a drafter of the same kind, or of a DFlash one, to which
    DFlash 2 and DSpark add.

    Raises:
      ConfigError: the drafter there is not of the shape that this run makes.
    """
    from converters.models import open_model

    found = open_model(path, role="drafter")
    kind = type(config) if type(found.config) is type(config) else DrafterConfig
    have, wanted = (
        {f.name: getattr(c, f.name, None) for f in dataclasses.fields(kind)}
        for c in (found.config, config)
    )
    free = ("kind", "num_target_layers", "rope", "dtype", "sample_from_anchor")
    differ = [k for k, v in wanted.items() if have[k] != v and k not in free]
    if differ or not isinstance(found.config, DrafterConfig):
        listed = "; ".join(f"{k} is {have[k]}, expected {wanted[k]}" for k in differ)
        raise ConfigError(f"the drafter {path} has another shape: {listed}; change the recipe")
    return found.load("float32")


def write_drafter(path: Path, config: DrafterConfig, params: dict[str, Any]) -> None:
    """The drafter as a folder that other engines read, in bfloat16."""
    from converters import export
    from converters.tree_source import TreeSource

    weights = export.Weights(config, TreeSource(params, config))
    export.export(weights, path, layout=export.HUGGING_FACE, dtype="bfloat16", overwrite=True)


def measured(
    out: Path,
    target: str,
    model: TargetModel,
    held_out: Sequence[data.Example],
    recipe: Recipe,
    tell: Tell,
) -> dict[str, Any]:
    """Acceptance length on held-out prompts by real decoding, kept in results.json."""
    path = out / "results.json"
    if not path.is_file():
        entries = data.held_out(held_out, model.tokenizer, recipe)
        if not entries:
            tell("no line fell to the held-out side; acceptance length was not measured")
            return {}
        with saved_as(out / "heldout.jsonl") as partial:
            lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
            partial.write_text("".join(lines), encoding="utf-8")
        found = evaluate.evaluate(
            target,
            out / "drafter",
            out / "heldout.jsonl",
            max_tokens=recipe.held_out_tokens,
            tell=tell,
            dtype=recipe.dtype,  # pyrefly: ignore
            weights=recipe.target_weights,
        )
        with saved_as(path) as partial:
            write_json(partial, found)
    return json.loads(path.read_text(encoding="utf-8"))
