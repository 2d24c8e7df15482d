"""A trained drafter in memory: its parameters, its figures, and the target that it drafts for."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from dflash_jax.config import DrafterConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.graph import Graph
from dflash_jax.graph.abstract import cast_params
from dflash_jax.graph.steps.pair import Params
from dflash_jax.models import build_pair
from dflash_jax.plan import Plan
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer.decoding import packed_params


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedDrafter:
    """A drafter that `dj.train` made.

    Attributes:
      config: its config.
      params: its parameters in bfloat16, as NumPy arrays: `engine.update_params({"drafter": ...})`
        and graphs take them.
      results: acceptance length and more for each kind of held-out prompt; empty if there is none.
      target: the target that it was trained for, where it is.
    """

    config: DrafterConfig
    params: dict[str, Any] = dataclasses.field(repr=False)
    results: dict[str, Any]
    target: TargetModel = dataclasses.field(repr=False)

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
        plan = dataclasses.replace(plan, dtype=self.target.dtype)
        graph = Graph(build_pair(self.target.config, self.config), plan, mesh=mesh)
        drafter = cast_params(self.params, self.target.dtype)
        params: Params = {"target": self.target.params, "drafter": drafter}
        return Engine(graph, packed_params(params, graph), tokenizer=self.target.tokenizer)

    def save(
        self, path: str | os.PathLike[str], *, layout: str = "", overwrite: bool = False
    ) -> None:
        """Write the drafter as a folder that `dj.load`, vLLM, SGLang and others read.

        Args:
          layout: "huggingface", as z-lab publishes drafters, or "speculators"; by default the
            second for a drafter with a vocabulary of its own, which the first cannot hold.
          overwrite: replace an existing folder.

        Raises:
          CheckpointError: the folder exists or cannot be written; nothing is left of it.
          ConfigError: the layout is unknown or cannot hold the drafter.
        """
        write_drafter(Path(path), self.config, self.params, layout=layout, overwrite=overwrite)


def read_drafter(folder: Path, target: TargetModel, results: dict[str, Any]) -> TrainedDrafter:
    """Return a drafter that `write_drafter` wrote."""
    from dflash_jax.converters.models import open_model
    from dflash_jax.loading import expect

    found = open_model(folder, role="drafter")
    config = expect(DrafterConfig, found.config)
    return TrainedDrafter(config, found.load("bfloat16"), results, target)


def write_drafter(
    path: Path,
    config: DrafterConfig,
    params: dict[str, Any],
    *,
    layout: str = "",
    overwrite: bool = True,
) -> None:
    """Write a drafter as `write_weights` does."""
    from dflash_jax.converters import export
    from dflash_jax.converters.tree_source import TreeSource

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
