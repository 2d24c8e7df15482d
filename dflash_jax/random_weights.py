"""Engines with random weights, made from configurations alone."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.config import ALWAYS_FLOAT32, DrafterConfig, TargetConfig, check_pair, paired
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import ConfigError
from dflash_jax.families.configs import read_drafter_config, read_target_config
from dflash_jax.graph import Graph, Pair
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.kernels.products import set_weight_layout
from dflash_jax.networks import build_graph
from dflash_jax.plan import LEAST, Plan
from dflash_jax.quant.layouts import pack_tree

Folder = str | os.PathLike[str]
TABLES = ("embed", "predecessor", "successor", "markov_w1")  # gathered by token


def random_engine(
    target: TargetConfig | Folder,
    drafter: DrafterConfig | Folder | None = None,
    *,
    plan: Plan | None = None,
    seed: int = 0,
) -> Engine:
    """Return an engine with random weights, which needs no weight files.

    Shapes, programs, memory and speed are those of the real models; its text means nothing, and
    prompts are token ids.

    Args:
      target: a configuration, or a folder with a config.json in the format of Hugging Face.
      drafter: the same for a drafter; None for none.
      plan: choices that differ from the defaults.
      seed: seed of the weights.

    Raises:
      ConfigError: a configuration is not supported or missing, or the two do not match.
      PlanError: the plan does not fit the models or the memory.
    """
    if not isinstance(target, TargetConfig):
        target = read_target_config(_folder(target))
    plan = plan or Plan()
    if drafter is not None:
        if not isinstance(drafter, DrafterConfig):
            drafter = read_drafter_config(_folder(drafter))
        check_pair(target, drafter, taps_at=plan.taps_at)
        drafter = paired(target, drafter)
    return engine(build_graph(target, drafter, plan), seed=seed)


def _folder(source: Folder) -> Path:
    """Return the folder of a configuration."""
    if not isinstance(source, str | os.PathLike):
        kinds = "a dj.TargetConfig or dj.DrafterConfig, or a folder with a config.json"
        raise ConfigError(f"the configuration is {source!r}; expected {kinds}")
    path = Path(source).expanduser()
    return path.parent if path.name == "config.json" else path


def engine(graph: Graph, *, seed: int = 0) -> Engine:
    """Return an engine with random weights for a graph."""
    plan = graph.plan
    packed = pack_tree(random_params(graph.pair, dtype=plan.dtype, seed=seed), graph.specs)
    set_weight_layout(packed, graph.forms, native=plan.kernels == "native")
    return Engine(graph, jax.device_put(packed))


def random_params(pair: Pair, *, dtype: str = "float32", seed: int = 0) -> dict[str, Any]:
    """Return random weights as NumPy arrays, large enough that every term affects the output."""
    shapes = PlannedPair(pair, LEAST).params
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        stacked = path[-1].key.startswith("experts_")  # [E, in, ...]
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer):  # offsets of a draft vocabulary
            return np.zeros(leaf.shape, leaf.dtype)
        if path[-1].key == "a_log":  # decay over a few to a hundred tokens
            values = np.log(rng.uniform(0.01, 0.5, leaf.shape))
        elif len(leaf.shape) == 1:  # norms
            values = 1 + 0.3 * rng.standard_normal(leaf.shape)
        elif path[-1].key == "embed":  # token by token
            values = rng.standard_normal(leaf.shape[::-1]).T / np.sqrt(leaf.shape[0])
        else:
            values = rng.standard_normal(leaf.shape) / np.sqrt(leaf.shape[stacked])
        always = path[-1].key in ALWAYS_FLOAT32
        return values.astype(np.float32 if always else jax.numpy.dtype(dtype))

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    for tree in params.values():
        for name in tree.keys() & set(TABLES):
            tree[name] = (tree[name] * np.sqrt(len(tree[name]))).astype(tree[name].dtype)
    return params
