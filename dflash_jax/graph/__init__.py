"""The graph builder: any target and drafter, planned, lowered and compiled as fused steps.

`graph.py` has `Graph`, `protocols.py` what modules must provide, `steps/` the steps as pure
functions, `programs.py` the programs of a plan, `build.py` their compilation. This is the only
package that turns functions into executables.
"""

from dflash_jax.graph.build import Executable, jit
from dflash_jax.graph.check import check
from dflash_jax.graph.graph import Graph, GraphPrograms, Output
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.graph.protocols import (
    CacheMaker,
    Draft,
    Drafter,
    DraftSampler,
    ModelConfig,
    SharedLayers,
    Target,
    TargetOutput,
    Verification,
)
from dflash_jax.graph.roofline import DEVICES
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.kernels.caches import LayerCache, RecurrentCache

__all__ = [
    "DEVICES",
    "CacheMaker",
    "Draft",
    "DraftSampler",
    "Drafter",
    "Executable",
    "Graph",
    "GraphPrograms",
    "LayerCache",
    "ModelConfig",
    "Output",
    "Pair",
    "ProgramKey",
    "RecurrentCache",
    "SharedLayers",
    "Step",
    "Target",
    "TargetOutput",
    "Variant",
    "Verification",
    "check",
    "jit",
]
