"""DFlash speculative decoding for JAX: block-diffusion drafts, lossless verification.

import dflash_jax as dj
engine = dj.load("tiny")
print(engine.generate("Hello", max_tokens=32).text)
"""

from dflash_jax.compiler.plan import Plan
from dflash_jax.engine.engine import Engine, Stream
from dflash_jax.engine.recovery import CancelCell, Recovery
from dflash_jax.engine.result import Piece, Result, Stats
from dflash_jax.errors import (
    CheckpointError,
    ComputeError,
    ConfigError,
    DFlashError,
    PlanError,
    QueueFullError,
    RequestError,
)
from dflash_jax.loading import load, load_target
from dflash_jax.target_model import TargetModel
from dflash_jax.version import __version__

__all__ = [
    "CancelCell",
    "CheckpointError",
    "ComputeError",
    "ConfigError",
    "DFlashError",
    "Engine",
    "Piece",
    "Plan",
    "PlanError",
    "QueueFullError",
    "Recovery",
    "RequestError",
    "Result",
    "Stats",
    "Stream",
    "TargetModel",
    "__version__",
    "load",
    "load_target",
]
