"""DFlash speculative decoding for JAX: block-diffusion drafts, lossless verification.

import dflash_jax as dj

engine = dj.load("tiny")
print(engine.generate("Hello", max_tokens=32).text)
"""

import importlib

from dflash_jax.version import __version__

TYPE_CHECKING = False  # as `typing` has it, whose import takes longer than the rest of this file
if TYPE_CHECKING:
    from dflash_jax.config import DrafterConfig, TargetConfig
    from dflash_jax.engine.engine import Engine, RequestHandle
    from dflash_jax.engine.request import CancelCell
    from dflash_jax.engine.result import Piece, Result, RoundTrace, Stats
    from dflash_jax.engine.sampling_params import SamplingParams
    from dflash_jax.engine.state_machine import Recovery
    from dflash_jax.errors import (
        CheckpointError,
        ComputeError,
        ConfigError,
        DFlashError,
        ForkedProcessError,
        PlanError,
        QueueFullError,
        RequestError,
    )
    from dflash_jax.families import register
    from dflash_jax.graph import Graph, Pair
    from dflash_jax.graph.export import load_exported
    from dflash_jax.loading import load, load_target
    from dflash_jax.plan import Plan
    from dflash_jax.random_weights import random_engine
    from dflash_jax.target_model import ForwardOutput, TargetModel
    from dflash_jax.trainer.in_process import train
    from dflash_jax.trainer.measuring import Measurement, measure
    from dflash_jax.trainer.recipes import Recipe, recipe
    from dflash_jax.trainer.recording import Recorded, record
    from dflash_jax.trainer.trained import TrainedDrafter

__all__ = [
    "CancelCell",
    "CheckpointError",
    "ComputeError",
    "ConfigError",
    "DFlashError",
    "DrafterConfig",
    "Engine",
    "ForkedProcessError",
    "ForwardOutput",
    "Graph",
    "Measurement",
    "Pair",
    "Piece",
    "Plan",
    "PlanError",
    "QueueFullError",
    "Recipe",
    "Recorded",
    "Recovery",
    "RequestError",
    "RequestHandle",
    "Result",
    "RoundTrace",
    "SamplingParams",
    "Stats",
    "TargetConfig",
    "TargetModel",
    "TrainedDrafter",
    "__version__",
    "load",
    "load_exported",
    "load_target",
    "measure",
    "random_engine",
    "recipe",
    "record",
    "register",
    "train",
]

# Names are imported on first use, so that `dflash-jax --help` does not wait for JAX.
_MODULES = {
    "config": ("DrafterConfig", "TargetConfig"),
    "families": ("register",),
    "plan": ("Plan",),
    "engine.engine": ("Engine", "RequestHandle"),
    "engine.state_machine": ("Recovery",),
    "engine.request": ("CancelCell",),
    "engine.result": ("Piece", "Result", "RoundTrace", "Stats"),
    "engine.sampling_params": ("SamplingParams",),
    "errors": (
        "CheckpointError",
        "ComputeError",
        "ConfigError",
        "DFlashError",
        "ForkedProcessError",
        "PlanError",
        "QueueFullError",
        "RequestError",
    ),
    "graph": ("Graph", "Pair"),
    "graph.export": ("load_exported",),
    "loading": ("load", "load_target"),
    "trainer.measuring": ("Measurement", "measure"),
    "random_weights": ("random_engine",),
    "trainer.recording": ("Recorded", "record"),
    "target_model": ("ForwardOutput", "TargetModel"),
    "trainer.in_process": ("train",),
    "trainer.recipes": ("Recipe", "recipe"),
    "trainer.trained": ("TrainedDrafter",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name, or a submodule such as `dflash_jax.loading`, on first use."""
    if name in _MODULE_OF:
        from dflash_jax.utils.allocator import fewer_collections

        with fewer_collections():
            module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
        value = globals()[name] = getattr(module, name)
        return value
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
