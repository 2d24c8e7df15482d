"""The formats of packed weights. This module imports neither NumPy nor JAX.

A packed weight [D, N] is multiplied as x · w: D is contracted. D is cut into runs of 32 weights.
`classes` neighbouring runs share bytes, each in its own bits, so that a kernel unpacks whole rows
of bytes with a mask and a shift. All groups extend along D:

| kind | bits per weight | a weight is | groups along D |
| --- | --- | --- | --- |
| int8 | 8 | scale · q | one scale for all |
| Q8_0 | 8.5 | scale · q | 32 |
| Q4_0, int4 | 4.5 | scale · (q - 8) | 32 |
| Q4_1 | 5 | scale · q - low | 32 |
| Q5_0 | 5.5 (8.5) | scale · (q - 16) | 32 |
| Q5_1 | 6 (9) | scale · q - low | 32 |
| int4z | 4.75 | scale · (q - zero) | 32 |
| Q2_K | 5.125 | scale · sub · q - low · sub_low | 16 in 256 |
| Q3_K | 4.5625 | scale · sub · (q - 4) | 16 in 256 |
| Q4_K | 4.625 | scale · sub · q - low · sub_low | 32 in 256 |
| Q5_K | 5.625 (6.625) | the same | 32 in 256 |
| Q6_K | 6.5625 | scale · sub · (q - 32) | 16 in 256 |
| IQ4_NL | 4.5 (8.5) | scale · q, one of the 16 numbers in `IQ4_VALUES` | 32 |
| IQ4_XS | 4.3125 (8.3125) | scale · sub · q, as above | 32 in 256 |
| MXFP4 | 4.5 | scale · the float that q is, scale a bfloat16 | 32 |
| int8_16 | 10 | scale · q, scale a float32 | 16 |
| int8_16_low | 12 | scale · q - low, both float32 | 16 |

Bits in parentheses are those of the layout for XLA, which is also that of GPUs, where they differ
from those of the native kernels' strips.
MXFP4, IQ4_NL, IQ4_XS and those whose names begin with Q hold exactly the numbers of the ggml blocks
of that name; only scales of four or six bits are stored as one byte each, codes of two or three
bits in four, and the scales of MXFP4, powers of two, as bfloat16. All other ggml blocks have one of
these formats, too, exactly: `converters.formats.quants.stored` says which.
int4z holds those of AWQ and other formats with zero points, whose larger groups repeat their scale.
"""

import dataclasses
from collections.abc import Mapping

RUN = 32
# Twice the floats of four bits, so that they are whole: a sign, two bits of the exponent, one more.
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# The numbers of ggml's IQ4_VALUES codes (kvalues_iq4nl of ggml-common.h).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# How a weight [D, ...] is packed: an axis, and the kind and width of its parts along that axis.
Spec = tuple[int, tuple[tuple[str, int], ...]]
Stored = tuple[tuple[str, Spec], ...]  # by path, which begins with the role


@dataclasses.dataclass(frozen=True)
class PackedFormat:
    """A packed format.

    Attributes:
      classes: number of runs that share bytes; of four runs, the two high bits of each code are
        stored in a separate array.
      bits: of a code in the strips of native kernels.
      zero: zero point, subtracted from each code.
      group: weights along D that share a scale; 0 for all of them.
      sub: weights along D that share a second scale within a group; 0 for no second scales.
      zeros: whether each group has a zero point of its own, also subtracted.
      low: whether an offset is subtracted from each scaled group, with a second scale if `sub`.
      numbers: what the codes of four bits in strips stand for, where others are numbers.
      floats: whether a code is a float of four bits, of the numbers in `E2M1`, and no whole number.
      scales: dtype of scales and offsets.
    """

    name: str
    classes: int
    bits: int
    zero: int
    group: int
    sub: int = 0
    zeros: bool = False
    low: bool = False
    numbers: tuple[int, ...] = ()
    floats: bool = False
    scales: str = "float16"

    @property
    def high(self) -> bool:
        """Whether the two high bits of each code are stored in a separate array."""
        return self.classes == 4

    @property
    def spread(self) -> int:
        """Rows of D that one row of `codes` holds."""
        return min(self.classes, 2)

    @property
    def run_scales(self) -> int:
        """Scales of a run, of those that are nearest to the weights."""
        return RUN // min(self.sub or self.group, RUN)

    @property
    def unit(self) -> int:
        """Number that D must be a multiple of."""
        return max(self.group, RUN * self.classes)

    def arrays(self, depth: int) -> dict[str, tuple[int, str]]:
        """Return the rows along D and the dtype of each array of a weight with D = `depth`."""
        arrays = {
            "codes": (depth // self.spread, "int8" if self.classes == 1 else "uint8"),
            "scale": (depth // self.group if self.group else 1, self.scales),
        }
        if self.zeros:
            arrays["zero"] = (depth // self.group, "uint8")
        if self.high:
            arrays["high"] = (depth // 4, "uint8")
        if self.sub:
            arrays["sub"] = (depth // self.sub, "uint8" if self.low else "int8")
        if self.low:
            arrays["low"] = arrays["scale"]
        if self.low and self.sub:
            arrays["sub_low"] = arrays["sub"]
        return arrays


KINDS: Mapping[str, PackedFormat] = {
    kind.name: kind
    for kind in (
        PackedFormat("int8", classes=1, bits=8, zero=0, group=0, scales="float32"),
        PackedFormat("Q8_0", classes=1, bits=8, zero=0, group=32),
        PackedFormat("Q4_0", classes=2, bits=4, zero=8, group=32),
        PackedFormat("Q4_1", classes=2, bits=4, zero=0, group=32, low=True),
        PackedFormat("Q5_0", classes=1, bits=5, zero=16, group=32),
        PackedFormat("Q5_1", classes=1, bits=5, zero=0, group=32, low=True),
        PackedFormat("int4z", classes=2, bits=4, zero=0, group=32, zeros=True),
        PackedFormat("Q2_K", classes=2, bits=4, zero=0, group=256, sub=16, low=True),
        PackedFormat("Q3_K", classes=2, bits=4, zero=4, group=256, sub=16),
        PackedFormat("Q4_K", classes=2, bits=4, zero=0, group=256, sub=32, low=True),
        PackedFormat("Q5_K", classes=4, bits=5, zero=0, group=256, sub=32, low=True),
        PackedFormat("Q6_K", classes=4, bits=6, zero=32, group=256, sub=16),
        PackedFormat("IQ4_NL", classes=1, bits=4, zero=0, group=32, numbers=IQ4_VALUES),
        PackedFormat("IQ4_XS", classes=1, bits=4, zero=0, group=256, sub=32, numbers=IQ4_VALUES),
        PackedFormat("MXFP4", classes=2, bits=4, zero=0, group=32, floats=True, scales="bfloat16"),
        PackedFormat("int8_16", classes=1, bits=8, zero=0, group=16, scales="float32"),
        PackedFormat(
            "int8_16_low", classes=1, bits=8, zero=0, group=16, low=True, scales="float32"
        ),
    )
}
