"""A trained drafter in memory: its parameters, its figures, and the target that it drafts for."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax import checkpoint
from dflash_jax.config import DrafterConfig, paired
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families import drafter_kinds
from dflash_jax.graph import Graph, Pair
from dflash_jax.graph.abstract import by_path, cast_params, path_name
from dflash_jax.graph.steps.pair import Params, StepOptions
from dflash_jax.networks import build_drafter
from dflash_jax.plan import Plan
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer.decoding import packed_params
from dflash_jax.utils.atomic import new_path


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedDrafter:
    """A drafter that `dj.train` made.

    Attributes:
      config: its config; None for a module of your own.
      params: its parameters as NumPy arrays, in bfloat16, those of a module of your own in float32:
        `engine.update_params({"drafter": ...})` and graphs take them.
      results: acceptance length and more for each kind of held-out prompt; empty if there is none.
      target: the target that it was trained for, where it is.
      module: the module of your own that has these parameters.
      block: tokens of the block that it was trained for, if it is one.
    """

    config: DrafterConfig | None
    params: dict[str, Any] = dataclasses.field(repr=False)
    results: dict[str, Any]
    target: TargetModel = dataclasses.field(repr=False)
    module: Any = None
    block: int = 0

    def engine(self, plan: Plan | None = None) -> Engine:
        """Return an engine of the target and this drafter, on the target's mesh if it has one.

        Args:
          plan: choices that differ from the defaults; the dtype is the target's.

        Raises:
          PlanError: the plan does not fit the models or the memory.
        """
        engine = self.unmeasured_engine(plan)
        engine.measures_drafting = True
        return engine

    def unmeasured_engine(self, plan: Plan | None = None) -> Engine:
        """Return the engine of `engine`, which always drafts whole blocks."""
        mesh = self.target.mesh
        plan = plan or Plan(rows=1 if mesh is None else mesh.shape["data"])
        plan = dataclasses.replace(plan, dtype=self.target.dtype, block=plan.block or self.block)
        drafter = self.config if self.module is None else self.module
        graph = Graph(pair_of(self.target, drafter), plan, mesh=mesh)
        drafter = cast_params(self.params, self.target.dtype)
        params: Params = {"target": self.target.params, "drafter": drafter}
        return Engine(graph, packed_params(params, graph), tokenizer=self.target.tokenizer)

    def save(
        self, path: str | os.PathLike[str], *, layout: str = "", overwrite: bool = False
    ) -> None:
        """Write the drafter as a folder that `dj.load`, vLLM, SGLang and others read.

        Of a module of your own the parameters are written, by their paths, to one safetensors file,
        from which `dj.train` goes on (`start=path`).

        Args:
          layout: "huggingface", as z-lab publishes drafters, or "speculators"; by default the
            second for a drafter with a vocabulary of its own, which the first cannot hold. DFlash 2
            with such a vocabulary has neither, and is written as a checkpoint that `dj.load` reads.
          overwrite: replace an existing folder.

        Raises:
          CheckpointError: the folder exists or cannot be written; nothing is left of it.
          ConfigError: the layout is unknown or cannot hold the drafter.
        """
        if self.module is not None:
            if layout:
                name = type(self.module).__name__
                raise ConfigError(
                    f"layout is {layout!r}, but the drafter is {name}, a module of your own;"
                    " expected no layout"
                )
            with new_path(Path(path), overwrite=overwrite) as place:
                write_params(place, self.params)
            return
        assert self.config is not None
        write_drafter(Path(path), self.config, self.params, layout=layout, overwrite=overwrite)


def pair_of(model: TargetModel, drafter: Any) -> Pair:
    """Return a target and its drafter.

    Args:
      drafter: a config, a module, or None.
    """
    if isinstance(drafter, DrafterConfig):
        drafter = build_drafter(paired(model.config, drafter))
    return Pair(model.module, drafter).with_options(StepOptions())


def write_params(path: Path, params: Any) -> None:
    """Write parameters as a safetensors file, by their paths."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(x) for name, x in by_path(params).items()}, path)


def read_params(path: Path, like: Any, name: str) -> Any:
    """Return parameters that `write_params` wrote, as a tree like another.

    Args:
      name: name of the module that has them, for errors.

    Raises:
      CheckpointError: the file is missing or damaged, or its parameters have other paths or shapes.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        params = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read ({reason}); expected a safetensors file of {name}'s parameters,"
            " as `TrainedDrafter.save` writes it"
        ) from error
    shapes = {path: x.shape for path, x in by_path(like).items()}
    have = {path: x.shape for path, x in params.items()}
    differ = [
        f"{part} is {have.get(part, 'missing')}, expected {shapes.get(part, 'none')}"
        for part in sorted(have.keys() | shapes.keys())
        if have.get(part) != shapes.get(part)
    ]
    if differ:
        raise CheckpointError(f"{path} does not hold the parameters of {name}: {differ[0]}")
    return jax.tree_util.tree_map_with_path(lambda path, _: params[path_name(path)], like)


def read_drafter(folder: Path, target: TargetModel, results: dict[str, Any]) -> TrainedDrafter:
    """Return a drafter that `write_drafter` wrote."""
    from dflash_jax.converters.models import open_model
    from dflash_jax.loading import expect

    stored = open_model(folder, role="drafter")
    config = expect(DrafterConfig, stored.config)
    return TrainedDrafter(config, stored.load("bfloat16"), results, target)


def write_drafter(
    path: Path,
    config: DrafterConfig,
    params: dict[str, Any],
    *,
    layout: str = "",
    overwrite: bool = True,
) -> None:
    """Write a drafter as `write_weights` does, or as a checkpoint of ours if it has no other form.

    That is a kind which the layout of speculators does not have, with a reduced vocabulary.
    """
    from dflash_jax.converters import export
    from dflash_jax.converters.tree_source import TreeSource

    kind = drafter_kinds()[config.kind]
    if not layout and config.draft_vocab_size and kind.speculator is None:
        with new_path(path, overwrite=overwrite) as place:
            checkpoint.write(place, config, cast_params(params, "bfloat16"), {})
        return
    weights = export.Weights(config, TreeSource(params, config))
    write_weights(path, weights, layout=layout, overwrite=overwrite)


def write_weights(path: Path, weights: Any, *, layout: str = "", overwrite: bool = True) -> None:
    """Write a drafter, an `export.Weights`, as a folder that other engines read, in bfloat16.

    A reduced vocabulary has a form in the layout of speculators only.
    """
    from dflash_jax.converters import export

    if not layout:
        reduced = weights.config.draft_vocab_size
        layout = export.SPECULATORS if reduced else export.HUGGING_FACE
    export.export(weights, path, layout=layout, dtype="bfloat16", overwrite=overwrite)
