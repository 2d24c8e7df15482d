"""ggml's blocks in the packed formats that products multiply by: the same numbers, rearranged."""

from collections.abc import Mapping

import numpy as np

from dflash_jax.converters.formats.quants import DECODERS
from dflash_jax.converters.formats.quants.types import BY_NAME
from dflash_jax.quant.formats import E2M1
from dflash_jax.quant.layouts import FLOAT, KINDS, Arrays, fits, join

# The formats that hold exactly the numbers of each type, the smallest one first.
FORMATS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("Q8_0", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS")},
    **{name: (name,) for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")},
    **dict.fromkeys(("Q4_0", "Q1_0", "Q2_0", "TQ1_0", "TQ2_0"), ("Q4_0", "Q8_0")),
    "Q4_1": ("Q4_1", "int8_16_low"),
    **dict.fromkeys(("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS"), ("int8_16",)),
    **dict.fromkeys(("IQ1_S", "IQ1_M", "NVFP4"), ("int8_16",)),
    "MXFP4": ("MXFP4", "int8_16"),
}
# The code of each number of `E2M1`, from -12 on; of two zeros, the positive one.
CODES = np.zeros(25, np.uint8)
CODES[np.array(E2M1[:8]) + 12] = np.arange(8)
CODES[np.array(E2M1[9:]) + 12] = np.arange(9, 16)


def format_of(kind: str, depth: int) -> str:
    """Return the packed format for a type's matrices with D = `depth`; FLOAT if there is none."""
    return next((each for each in FORMATS.get(kind, ()) if fits(each, depth)), FLOAT)


def unpack_blocks(blocks: np.ndarray, kind: str, packed: str) -> Arrays:
    """Return the arrays of a weight [D, N] from rows of blocks [N, bytes].

    Args:
      kind: type of the blocks.
      packed: format of the weight, one of `FORMATS[kind]`.
    """
    type_ = BY_NAME[kind]
    format_ = KINDS[packed]
    parts = DECODERS[kind](blocks.reshape(-1, type_.block_bytes))
    depth = parts.codes.size // len(blocks)

    def along(values: np.ndarray | None, count: int) -> np.ndarray:
        """Return numbers of blocks as `count` rows along D, [count, N]."""
        assert values is not None, (kind, packed)
        each = values.reshape(len(blocks), -1)
        return np.ascontiguousarray(np.repeat(each, count // each.shape[1], axis=1).T)

    codes = along(parts.codes, depth)
    arrays: Arrays = {"codes": codes}
    if format_.floats:
        arrays["codes"] = join(CODES[codes + 12], 2)
    elif format_.spread == 1:
        arrays["codes"] = codes + np.int8(format_.zero)
    else:
        unsigned = codes.view(np.uint8) + np.uint8(format_.zero)
        arrays["codes"] = join(unsigned & np.uint8(15), 2)
        if format_.high:
            arrays["high"] = join(unsigned >> np.uint8(4), 4)
    with np.errstate(invalid="ignore", over="ignore"):  # scales that are not finite are refused
        if not format_.sub:
            parts = parts._replace(scale=parts.factors, low=parts.offsets)
        for name, (count, dtype) in format_.arrays(depth).items():
            if name not in arrays:
                arrays[name] = along(getattr(parts, name), count).astype(dtype, copy=False)
    return {name: arrays[name] for name in format_.arrays(depth)}
