"""The ggml type table: numbers, names and block sizes. Facts from ggml.h and ggml-common.h."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class GgmlType:
    """A stored type: `block_size` weights in `block_bytes` bytes; plain ones have a dtype."""

    number: int
    name: str
    block_size: int
    block_bytes: int
    dtype: np.dtype | None = None


_BLOCKS = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
_PLAIN = {
    0: ("F32", "<f4"),
    1: ("F16", "<f2"),
    24: ("I8", "<i1"),
    25: ("I16", "<i2"),
    26: ("I32", "<i4"),
    27: ("I64", "<i8"),
    28: ("F64", "<f8"),
    30: ("BF16", ml_dtypes.bfloat16),
}


def _table() -> dict[int, GgmlType]:
    table = {}
    for number, (name, size, nbytes) in _BLOCKS.items():
        table[number] = GgmlType(number, name, size, nbytes)
    for number, (name, dtype) in _PLAIN.items():
        kind = np.dtype(dtype)
        table[number] = GgmlType(number, name, 1, kind.itemsize, kind)
    return table


TYPES = _table()
BY_NAME = {kind.name: kind for kind in TYPES.values()}
REMOVED = frozenset({4, 5, 31, 32, 33, 36, 37, 38})
