"""Decode ggml block formats with NumPy, to the same bits as ggml's scalar code."""

from collections.abc import Callable

import numpy as np

from dflash_jax.converters.quants import codebooks, grids, legacy, super_blocks
from dflash_jax.converters.quants.types import TYPES, GgmlType
from dflash_jax.errors import CheckpointError

Decoder = Callable[[np.ndarray, np.ndarray], None]

DECODERS: dict[str, Decoder] = {
    "Q1_0": codebooks.q1_0,
    "Q2_0": codebooks.q2_0,
    "Q4_0": legacy.q4_0,
    "Q4_1": legacy.q4_1,
    "Q5_0": legacy.q5_0,
    "Q5_1": legacy.q5_1,
    "Q8_0": legacy.q8_0,
    "Q2_K": super_blocks.q2_k,
    "Q3_K": super_blocks.q3_k,
    "Q4_K": super_blocks.q4_k,
    "Q5_K": super_blocks.q5_k,
    "Q6_K": super_blocks.q6_k,
    "IQ1_S": grids.iq1_s,
    "IQ1_M": grids.iq1_m,
    "IQ2_XXS": grids.iq2_xxs,
    "IQ2_XS": grids.iq2_xs,
    "IQ2_S": grids.iq2_s,
    "IQ3_XXS": grids.iq3_xxs,
    "IQ3_S": grids.iq3_s,
    "IQ4_NL": codebooks.iq4_nl,
    "IQ4_XS": codebooks.iq4_xs,
    "MXFP4": codebooks.mxfp4,
    "NVFP4": codebooks.nvfp4,
    "TQ1_0": super_blocks.tq1_0,
    "TQ2_0": super_blocks.tq2_0,
}
CHUNK = 1 << 18  # weights decoded at a time: few NumPy calls, temporaries still in cache
READABLE = frozenset(DECODERS) | frozenset(t.name for t in TYPES.values() if t.dtype is not None)


def decode(kind: GgmlType, blocks: np.ndarray, out: np.ndarray) -> None:
    """Decode `blocks` [rows, bytes] into `out` [rows, columns], float32 and contiguous.

    Raises:
      CheckpointError: the type cannot be decoded.
    """
    decoder = DECODERS.get(kind.name)
    if decoder is None:
        raise CheckpointError(unreadable(kind.name))
    source = blocks.reshape(-1, kind.block_bytes)
    target = out.reshape(-1, kind.block_size)
    step = max(1, CHUNK // kind.block_size)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(source), step):
            stop = start + step
            decoder(source[start:stop], target[start:stop])


def unreadable(name: str) -> str:
    """Return why tensors of a known type cannot be decoded, and what to do."""
    return (
        f"the type {name} cannot be decoded; readable types are {', '.join(sorted(READABLE))}."
        " Use a file quantised to one of these"
    )
