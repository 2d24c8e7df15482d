"""Decode ggml block formats with NumPy, to the same bits as ggml's scalar code."""

from collections.abc import Callable

import numpy as np

from dflash_jax.converters.formats.quants import decoders
from dflash_jax.converters.formats.quants.types import BY_NAME, TYPES, GgmlType
from dflash_jax.errors import CheckpointError

Decoder = Callable[[np.ndarray], decoders.Parts]

# A decoder is the function of its type's name in lower case.
DECODERS: dict[str, Decoder] = {
    name: decoder for name in BY_NAME if (decoder := getattr(decoders, name.lower(), None))
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
            _multiply(decoder(source[start:stop]), target[start:stop])


def _multiply(parts: decoders.Parts, out: np.ndarray) -> None:
    factors = parts.factors
    offsets = parts.offsets
    out[...] = parts.codes
    groups = out.reshape(*factors.shape, -1)
    groups *= factors[:, :, None]
    if offsets is not None:
        groups -= offsets[:, :, None]


def unreadable(name: str) -> str:
    """Return why tensors of a known type cannot be decoded, and what to do."""
    return (
        f"the type {name} cannot be decoded; readable types are {', '.join(sorted(READABLE))}."
        " Use a file quantised to one of these"
    )
