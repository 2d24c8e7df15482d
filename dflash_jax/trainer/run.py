"""A whole training run: data, answers, features, steps, export, measured acceptance length.

Each stage writes one result into the run's folder and is skipped if it exists, so the same call
resumes an interrupted run.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from dflash_jax import distributed
from dflash_jax.config import AttentionConfig
from dflash_jax.errors import ComputeError
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer import data, evaluate, objective, regenerate
from dflash_jax.trainer import rows as packing
from dflash_jax.trainer.data import Usage
from dflash_jax.trainer.files import saved_as, sound, unless_refused, write_json
from dflash_jax.trainer.loop import HELD_OUT, Watch
from dflash_jax.trainer.recipes import CACHE, Recipe
from dflash_jax.trainer.rows import TokenRows
from dflash_jax.trainer.setup import PARAMS, RUN, BegunRun, begin, check_ids
from dflash_jax.trainer.sources import TrainingData
from dflash_jax.trainer.trained import TrainedDrafter, write_drafter, write_params
from dflash_jax.trainer.training import (
    Fitted,
    Placement,
    Report,
    cached_features,
    feature_store,
    fit,
    left_for_steps,
    make_batches,
)

if TYPE_CHECKING:
    from dflash_jax.trainer.curve import BestDrafter


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of a run."""

    drafter: Path  # the exported folder
    results: dict[str, Any]  # acceptance length of each kind of held-out prompt
    own: TrainedDrafter | None = None  # the drafter, if it is a module of one's own


def run(
    target: str | TargetModel,
    source: str | TrainingData,
    out: Path,
    recipe: Recipe,
    *,
    report: Report,
    mask_id: int | None = None,
    start: Path | TrainedDrafter | None = None,
    data_of: Path | None = None,
) -> Outcome:
    """Train a drafter for a target and measure its acceptance length.

    Args:
      target: a source that `dflash_jax.load_target` opens, or a model in memory.
      source: JSONL files (see `data.read`), "tiny" for the shipped corpus, "self:N" for N user
        turns that the target writes; several with commas between them; or the data themselves.
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
    mesh = target.mesh if isinstance(target, TargetModel) else None
    Placement(recipe.devices, mesh)  # fails before the target answers for hours
    with unless_refused(out, RUN):
        begun = begin(
            target, source, out, recipe, report=report, mask_id=mask_id, start=start,
            data_of=data_of,
        )  # fmt: skip
        return finish(begun)


def prepare(
    target: str, source: str | TrainingData, out: Path, recipe: Recipe, *, report: Report
) -> None:
    """Make the data of a run without training: rows, and features if the recipe keeps them.

    Other runs take them by `data_of`. Arguments and errors are those of `run`.
    """
    begun = begin(target, source, out, recipe, report=report)
    model = begun.model
    pair = begun.pair
    rows = answered_rows(begun)
    batches, _ = make_batches(rows, recipe, report)
    if store := feature_store(out, pair, model, recipe):
        cached_features(store, pair, model, recipe, batches, report)


def answered_rows(begun: BegunRun, *, decoder: regenerate.Decoder | None = None) -> list[TokenRows]:
    """Return the training rows of a run that was begun; arguments and errors as for `finish`."""
    _, usage = begun.held_out()
    recording = None
    if decoder is None:
        recording = answer_recording(begun)
    return stored_rows(
        begun.out,
        begun.model,
        begun.data.training,
        begun.recipe,
        begun.report,
        usage,
        recording=recording,
        decoder=decoder,
    )


def finish(begun: BegunRun, *, decoder: regenerate.Decoder | None = None) -> Outcome:
    """Complete a run that was begun; errors as for `run`.

    Host 0 makes the rows, exports the drafter and measures it; all hosts train.

    Args:
      decoder: decodes the answers; by default this process, which then records features too.
    """
    out = begun.out
    recipe = begun.recipe
    report = begun.report
    model = begun.model
    group = distributed.current()
    rows: list[TokenRows] = []
    if group.first:
        rows = answered_rows(begun, decoder=decoder)
    if not group.exchange("is trained", (out / "drafter").is_dir())[0]:
        if not group.first:
            rows = packing.load(out / "rows.npz")
        mask = 0 if begun.config is None else begun.config.mask_token_id
        with explained_out_of_memory():
            watch, best = watched(begun)
            limited = left_for_steps(recipe, time.monotonic() - begun.since)
            trained = fit(
                model, limited, mask, rows, out, identity=begun.identity, report=watch,
                start=begun.own or begun.params,
            )  # fmt: skip
        if group.first:
            write_best(begun, trained, best)
    if not group.first:
        return Outcome(out / "drafter", {})
    asked, _ = begun.held_out()
    own = begun.own_trained()
    results = measured(out, begun.target, asked, recipe, report, drafter=own)
    if own is not None:
        own = dataclasses.replace(own, results=results)
    return Outcome(out / "drafter", results, own)


def watched(begun: BegunRun) -> tuple[Watch, "BestDrafter | None"]:
    """Return those who watch a run, and the best drafter if the recipe measures held-out prompts.

    Several hosts would wait for the one that decodes: they measure at the end alone.
    """
    from dflash_jax.trainer.curve import BestDrafter, HeldOut

    watch = Watch.of(begun.report)
    recipe = begun.recipe
    entries, _ = begun.held_out()
    if not recipe.measure_every or not entries or distributed.current().size > 1:
        return watch, None
    drafter = TrainedDrafter(begun.config, {}, {}, begun.model)
    if begun.own is not None:
        drafter = dataclasses.replace(drafter, module=begun.own.module, block=recipe.block)
    write = functools.partial(write_trained, begun)
    best = BestDrafter(begun.out, HeldOut(drafter, entries, recipe), write)
    return dataclasses.replace(watch, held_out=best), best


def write_best(begun: BegunRun, trained: Fitted, best: "BestDrafter | None") -> None:
    """Write the drafter of the run: the best one that was measured, the last one without any."""
    folder = begun.out / "drafter"
    kept = best.kept() if best else {}
    if best and kept and kept["step"] < trained.steps:
        begun.report(
            f"the drafter after step {kept['step']} of {trained.steps} accepted most of the"
            f" held-out prompts, {kept[HELD_OUT]:.3f}; it is the result"
        )
        best.move_to(folder)
        return
    write_trained(begun, folder, trained.params)
    if best:
        best.forget()


def write_trained(begun: BegunRun, folder: Path, params: Any) -> None:
    """Write a drafter with the parameters into a folder."""
    if begun.config is not None:
        write_drafter(folder, begun.config, params)
        return
    with saved_as(folder, folder=True) as partial:
        write_params(partial / PARAMS, params)


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


def stored_rows(
    out: Path,
    model: TargetModel,
    training: Sequence[data.Example],
    recipe: Recipe,
    report: Report,
    usage: Usage,
    *,
    recording: regenerate.Recording | None = None,
    decoder: regenerate.Decoder | None = None,
) -> list[TokenRows]:
    """Return the training rows, making them on the first call.

    Unused lines are counted in `usage` and reported before the target answers.

    Args:
      recording: where to save the features of answers while they are decoded.
      decoder: decodes the answers; by default this process, with `recording`.

    Raises:
      ConfigError: the data cannot be encoded, or holds unknown token ids.
      CheckpointError: stored answers or rows are damaged.
    """
    path = out / "rows.npz"
    longest = recipe.buckets[-1].length
    decoder = decoder or regenerate.local_decoder(model, recording, weights=recipe.target_weights)
    if not path.is_file():
        asked, kept = data.split_by_answers(training, recipe)
        more = len(training) - len(asked) - len(kept)
        limits = f"prompts={recipe.prompts}, given={recipe.given}"
        usage.leave_out(more, f"more than the recipe asks for ({limits})")
        ends = model.config.eos_token_ids
        learnt = [data.as_given([one], model.tokenizer, ends, longest) for one in kept]
        usage.leave_out(learnt.count([]), "without an assistant's turn to learn")
        rows = [*itertools.chain.from_iterable(learnt)]
        prompts = data.prompts(asked, model.tokenizer, recipe, ends) if asked else []
        usage.answer(asked, prompts, recipe)
        if usage:
            report(str(usage))
        if prompts:
            rows += regenerate.answer(
                out / "answers.jsonl",
                decoder,
                prompts,
                recipe.answer_buckets,
                report=report,
                temperature=recipe.temperature,
                seed=recipe.seed,
            )
        check_ids((document.ids for document in rows), model.config)
        if cut := len([document for document in rows if len(document.ids) > longest]):
            report(f"{cut} of {len(rows)} rows cut to {longest} tokens, the longest of buckets")
        random.Random(recipe.seed).shuffle(rows)
        packing.save(path, packing.one_per_row(rows, recipe.buckets, fill=0))
    return packing.load(path)


def answer_recording(begun: BegunRun) -> regenerate.Recording | None:
    """Return how features are recorded while the target answers; None if they cannot be.

    Recording has the taps of greedy answers, but no distributions. Their last bits are those of
    decoding, so nothing is recorded for a recipe whose steps would compute features.
    """
    pair = begun.pair
    recipe = begun.recipe
    if recipe.features != CACHE or recipe.temperature or objective.wants_distribution(recipe):
        return None
    store = feature_store(begun.out, pair, begun.model, recipe)
    if store is None or not pair.taps:
        return None
    layers = tuple(tap - 1 for tap in pair.taps)
    return regenerate.Recording(store, layers, recipe.buckets[-1].length)


def write_huggingface(
    folder: Path, config: AttentionConfig, params: dict[str, Any], **fields: Any
) -> None:
    """Write a model as a folder that transformers loads, rounded to bfloat16.

    Args:
      fields: fields of its config.json, in place of those that follow from `config`.
    """
    from dflash_jax.converters import export
    from dflash_jax.converters.tree_source import TreeSource

    weights = export.Weights(config, TreeSource(params, config), fields=fields)
    export.write_huggingface(weights, folder, "bfloat16")


def measured(
    out: Path,
    target: str | TargetModel,
    entries: Sequence[dict[str, Any]],
    recipe: Recipe,
    report: Report,
    *,
    drafter: TrainedDrafter | None = None,
) -> dict[str, Any]:
    """Return the acceptance lengths on held-out prompts, measured once into results.json.

    Args:
      drafter: by default, the one in the run's folder.
    """
    path = out / "results.json"
    if not path.is_file():
        if not entries:
            report("no line was held out; acceptance length was not measured")
            return {}
        with saved_as(out / "heldout.jsonl") as partial:
            lines = (json.dumps(entry) + "\n" for entry in entries)
            partial.write_text("".join(lines), encoding="utf-8")
        engine = evaluate.engine_of(
            target,
            drafter or out / "drafter",
            dtype=recipe.dtype,
            weights=recipe.target_weights,
        )
        scores = evaluate.evaluate(
            engine,
            out / "heldout.jsonl",
            max_tokens=recipe.held_out_tokens,
            report=report,
        )
        with saved_as(path) as partial:
            write_json(partial, scores)
    with sound(path):
        return dict(json.loads(path.read_text(encoding="utf-8")).items())
