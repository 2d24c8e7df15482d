"""The error that a stored type may have, as relative RMS.

Measured by quantising matrices of different distributions; IQ1, IQ2 and IQ3 by ggml's own code,
with equal and with log-normal importances. An error above `fail` is damage; above twice `fail` it
is a wrong transform.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Relative RMS up to `warn` is usual; above `fail` it is not caused by the type."""

    warn: float
    fail: float

    @property
    def row(self) -> float:
        """The error of one row of a matrix above which it is not caused by the type."""
        return min(ROW_FACTOR * self.fail, MOST_OF_ROW)

    def shifted(self, offset: float) -> "Limits":
        """Return the limits after a conversion that subtracts something from stored values.

        Args:
          offset: the size of what is subtracted, relative to the result.
        """
        rounding = offset * ROUNDING
        return Limits(*(limit * (1 + offset) + rounding for limit in (self.warn, self.fail)))


EXACT = Limits(0.0, 1e-7)
ROW_FACTOR = 2.5  # limit of a row over that of a tensor; real rows stay below
MOST_OF_ROW = 1.6  # a row that is negated has 2, whatever its type

# Rows that are smaller than this share of a typical row are judged as if they had that size.
SMALL_ROW = 0.25
ROUNDING = 2.0**-23  # error of float32, for a sum and its inverse
UNUSABLE = 0.5  # error from which a model that was not trained for the type answers nonsense
LIMITS = {
    "F64": EXACT,
    "F32": EXACT,
    "F16": Limits(0.0003, 0.0005),
    "BF16": Limits(0.0018, 0.003),
    "Q8_0": Limits(0.008, 0.012),
    "Q6_K": Limits(0.024, 0.032),
    "F8_E4M3": Limits(0.03, 0.04),
    "I8": Limits(0.024, 0.04),
    "INT8": Limits(0.024, 0.04),
    "F8_E5M2": Limits(0.06, 0.08),
    "INT6": Limits(0.045, 0.065),  # of MLX, for groups of 128
    "INT5": Limits(0.09, 0.13),
    "Q5_K": Limits(0.048, 0.065),
    "Q5_1": Limits(0.05, 0.07),
    "Q5_0": Limits(0.062, 0.085),
    "Q4_K": Limits(0.095, 0.13),
    "IQ4_NL": Limits(0.10, 0.14),
    "IQ4_XS": Limits(0.10, 0.14),
    "Q4_1": Limits(0.10, 0.14),
    "Q4_0": Limits(0.125, 0.17),
    "MXFP4": Limits(0.14, 0.18),
    "U8": Limits(0.14, 0.18),  # MXFP4 as gpt-oss stores it
    "NVFP4": Limits(0.14, 0.18),
    "INT4": Limits(0.18, 0.25),  # of AWQ, GPTQ and compressed-tensors, for groups of 128
    "Q3_K": Limits(0.20, 0.27),
    "IQ3_S": Limits(0.22, 0.30),
    "IQ3_XXS": Limits(0.22, 0.30),
    "INT3": Limits(0.37, 0.50),
    "Q2_K": Limits(0.38, 0.50),
    "IQ2_S": Limits(0.45, 0.60),
    "IQ2_XS": Limits(0.45, 0.60),
    "IQ2_XXS": Limits(0.45, 0.60),
    "IQ1_M": Limits(0.60, 0.80),
    "INT2": Limits(0.68, 0.90),
    "IQ1_S": Limits(0.65, 0.85),
    # For weights that were not trained to have these values:
    "Q1_0": Limits(0.80, 1.05),
    "Q2_0": Limits(0.80, 1.05),
    "TQ1_0": Limits(0.90, 1.20),
    "TQ2_0": Limits(0.90, 1.20),
}


def between(first: str, second: str) -> Limits:
    """Return the limits for two forms of the same weights: the coarser type's.

    The errors of two coarse types add up in the worst case.
    """
    both = [LIMITS.get(kind, EXACT) for kind in (first, second)]
    coarse, fine = sorted(both, key=lambda limits: -limits.fail)
    return Limits(coarse.warn + fine.warn, coarse.fail + fine.fail)
