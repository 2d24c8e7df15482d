"""A whole training run: data, answers, features, steps, export, measured acceptance length.

Each stage writes one result into the run's folder and is skipped if it exists, so the same call
resumes an interrupted run.
"""

import contextlib
import dataclasses
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.compiler.models import weight_specs
from dflash_jax.config import DrafterConfig, TargetConfig, check_pair
from dflash_jax.errors import ComputeError, ConfigError
from dflash_jax.plan import Plan
from dflash_jax.quant.layouts import Packed, dequantise, pack_tree
from dflash_jax.target_model import TargetModel
from dflash_jax.train import (
    data,
    evaluate,
    given,
    objective,
    regenerate,
    reuse,
    self_written,
    sources,
)
from dflash_jax.train import rows as packing
from dflash_jax.train.files import claim, saved_as, sound, write_json
from dflash_jax.train.fitting import Placement, Report, feature_store, fit
from dflash_jax.train.mask import mask_token
from dflash_jax.train.recipe import FLOAT, Recipe, new_drafter
from dflash_jax.train.rows import TokenRows
from dflash_jax.train.usage import Usage


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of a run."""

    drafter: Path  # the exported folder
    results: dict[str, Any]  # acceptance length of each kind of held-out prompt


def run(
    target: str,
    source: str,
    out: Path,
    recipe: Recipe,
    *,
    report: Report,
    mask_id: int | None = None,
    start: Path | None = None,
    data_of: Path | None = None,
) -> Outcome:
    """Train a drafter for a target and measure its acceptance length.

    Args:
      target: a source that `dflash_jax.load_target` opens.
      source: JSONL files (see `data.read`), "tiny" for the shipped corpus, "self:N" for N user
        turns that the target writes; several with commas between them.
      out: the run's folder.
      report: called with progress lines.
      mask_id: the mask token; found in tokenizer or embedding table by default.
      start: a drafter to start from, with the shape of the recipe.
      data_of: folder of another run of the same data, whose answers and features are reused.

    Raises:
      ConfigError: data, recipe and target do not match, or `out` belongs to another run.
      ComputeError: a metric is not finite, or the device has too little memory.
      CheckpointError, TrainingStopped: see `loop.fit`.
    """
    model = open_target(target, recipe)
    given_data = sources.load(source, recipe)
    examples = (*given_data.training, *given_data.held_out)
    check_ids((example.ids for example in examples), model.config)
    data.held_out(given_data.held_out, model.tokenizer, recipe)  # fails before anything is written
    check_turns(model, given_data, recipe)
    if mask_id is None:
        mask_id, why = mask_token(model.tokenizer, model.config, examples)
        report(f"mask token {mask_id}: {why}")
    config = new_drafter(recipe, model.config, mask_id)
    check_pair(model.config, config)
    Placement(recipe.devices)  # fails before the target answers for hours
    about = {
        "target": str(target),
        "data": data.fingerprint(given_data.training),
        "self_written": given_data.self_written,
        "mask_id": mask_id,
        "start": str(start) if start else None,
        "recipe": dataclasses.asdict(recipe),
    }
    params = read_start(start, config) if start else None  # fails before anything is written
    if data_of:
        reuse.check(data_of, about)
    claim(out, "run.json", about)
    if data_of:
        reuse.take(data_of, out, about)
    identity = json.dumps(about, sort_keys=True)
    every = with_self_written(out, model, given_data, recipe, report)
    training, asked = every.training, data.held_out(every.held_out, model.tokenizer, recipe)
    usage = Usage(every.lines)
    usage.hold_out(len(every.held_out) - every.separate, len(asked))
    recorded = answer_recording(out, model, config, recipe)
    rows = stored_rows(out, model, training, recipe, report, usage, recording=recorded)
    if not (out / "drafter").is_dir():
        with explained_out_of_memory():
            _, trained = fit(
                model, recipe, mask_id, rows, out, identity=identity, report=report, start=params
            )
        write_drafter(out / "drafter", config, trained)
    results = measured(out, target, asked, recipe, report)
    return Outcome(out / "drafter", results)


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
      CheckpointError, TrainingStopped: see `self_written.write_turns`.
    """
    if not (count := given_data.self_written):
        return given_data
    turns = self_written.write_turns(out, model, count, recipe, report)
    every = given_data.with_turns(turns)
    if not every.training:
        raise ConfigError(
            f"all {len(turns)} self-written turns fell to the held-out side (1 in"
            f" {data.HELD_OUT_SHARE} by hash); ask for more turns"
        )
    return every


@contextlib.contextmanager
def explained_out_of_memory() -> Iterator[None]:
    """Raise ComputeError if the block runs out of device memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0][:200]
        if not reason.startswith("RESOURCE_EXHAUSTED"):
            raise
        raise ComputeError(
            f"training does not fit the device ({reason}); set more parts, fewer rows in buckets or"
            " fewer anchors, into another folder: the gradient of a batch in parts is the same"
        ) from error


def open_target(source: str, recipe: Recipe) -> TargetModel:
    """Load the target, with rounded matrices if the recipe asks for them."""
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


def stored_rows(
    out: Path,
    model: TargetModel,
    training: Sequence[data.Example],
    recipe: Recipe,
    report: Report,
    usage: Usage,
    *,
    recording: regenerate.Recording | None = None,
) -> list[TokenRows]:
    """Return the training rows, making them on the first call.

    Unused lines are counted in `usage` and reported before the target answers.

    Args:
      recording: where to save the features of answers while they are decoded.

    Raises:
      ConfigError: the data cannot be encoded, or holds unknown token ids.
      CheckpointError: stored answers or rows are damaged.
    """
    path, fill, longest = out / "rows.npz", 0, recipe.buckets[-1].length
    if not path.is_file():
        asked, kept = data.split_by_answers(training, recipe)
        more = len(training) - len(asked) - len(kept)
        limits = f"prompts={recipe.prompts}, given={recipe.given}"
        usage.leave_out(more, f"more than the recipe asks for ({limits})")
        ends = model.config.eos_token_ids
        learnt = [given.as_given([one], model.tokenizer, ends, longest) for one in kept]
        usage.leave_out(learnt.count([]), "without an assistant's turn to learn")
        rows = [document for one in learnt for document in one]
        prompts = data.prompts(asked, model.tokenizer, recipe) if asked else []
        usage.answer(asked, prompts, recipe)
        if usage:
            report(str(usage))
        if prompts:
            rows += regenerate.answer(
                out / "answers.jsonl",
                model,
                prompts,
                recipe.answer_buckets,
                report=report,
                temperature=recipe.temperature,
                seed=recipe.seed,
                recording=recording,
            )
        check_ids((document.ids for document in rows), model.config)
        if cut := sum(len(document.ids) > longest for document in rows):
            report(f"{cut} of {len(rows)} rows cut to {longest} tokens, the longest of buckets")
        random.Random(recipe.seed).shuffle(rows)
        packing.save(path, packing.one_per_row(rows, recipe.buckets, fill=fill))
    return packing.load(path)


def answer_recording(
    out: Path, model: TargetModel, config: DrafterConfig, recipe: Recipe
) -> regenerate.Recording | None:
    """Return how features are recorded while the target answers; None if they cannot be.

    Recording has the taps of greedy answers, but no distributions.
    """
    if recipe.temperature or objective.wants_distribution(recipe):
        return None
    store = feature_store(out, model, config, recipe)
    if store is None:
        return None
    return regenerate.Recording(store, config.target_layer_ids, recipe.buckets[-1].length)


def check_ids(sequences: Iterable[Sequence[int] | np.ndarray], config: TargetConfig) -> None:
    """Raise ConfigError for token ids that the target does not have."""
    highest = max((int(np.max(ids, initial=0)) for ids in sequences), default=0)
    if highest >= config.vocab_size:
        raise ConfigError(
            f"the data holds token {highest}, but the target knows 0 to {config.vocab_size - 1};"
            " was it made with another tokenizer?"
        )


def read_start(path: Path, config: DrafterConfig) -> dict[str, Any]:
    """Return the parameters of a drafter to start from.

    It has the kind of this run, or is a DFlash drafter, which DFlash 2 and DSpark extend.

    Raises:
      ConfigError: its shape differs from the recipe's.
    """
    from dflash_jax.converters.models import open_model
    from dflash_jax.loading import locate

    source = open_model(locate(path, "drafter"), role="drafter")
    kind = type(config) if type(source.config) is type(config) else DrafterConfig
    have, wanted = (
        {f.name: getattr(c, f.name, None) for f in dataclasses.fields(kind)}
        for c in (source.config, config)
    )
    free = ("kind", "num_target_layers", "rope", "dtype", "sample_from_anchor")
    differ = [k for k, v in wanted.items() if have[k] != v and k not in free]
    if differ or not isinstance(source.config, DrafterConfig):
        listed = "; ".join(f"{k} is {have[k]}, expected {wanted[k]}" for k in differ)
        raise ConfigError(f"the drafter {path} has another shape: {listed}; change the recipe")
    return source.load("float32")


def write_drafter(path: Path, config: DrafterConfig, params: dict[str, Any]) -> None:
    """Write the drafter as a folder that other engines read, in bfloat16.

    A reduced vocabulary has a form in the layout of speculators only.
    """
    from dflash_jax.converters import export
    from dflash_jax.converters.tree_source import TreeSource

    weights = export.Weights(config, TreeSource(params, config))
    layout = export.SPECULATORS if config.draft_vocab_size else export.HUGGING_FACE
    export.export(weights, path, layout=layout, dtype="bfloat16", overwrite=True)


def measured(
    out: Path,
    target: str,
    entries: Sequence[dict[str, Any]],
    recipe: Recipe,
    report: Report,
) -> dict[str, Any]:
    """Return the acceptance lengths on held-out prompts, measured once into results.json."""
    path = out / "results.json"
    if not path.is_file():
        if not entries:
            report("no line was held out; acceptance length was not measured")
            return {}
        with saved_as(out / "heldout.jsonl") as partial:
            lines = (json.dumps(entry) + "\n" for entry in entries)
            partial.write_text("".join(lines), encoding="utf-8")
        scores = evaluate.evaluate(
            target,
            out / "drafter",
            out / "heldout.jsonl",
            max_tokens=recipe.held_out_tokens,
            report=report,
            dtype=recipe.dtype,  # pyrefly: ignore
            weights=recipe.target_weights,
        )
        with saved_as(path) as partial:
            write_json(partial, scores)
    with sound(path):
        return dict(json.loads(path.read_text(encoding="utf-8")).items())
