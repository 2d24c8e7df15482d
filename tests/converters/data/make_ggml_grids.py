"""Makes formats/quants/grids.npz: the vectors that the IQ1, IQ2 and IQ3 types choose from.

    python make_ggml_grids.py

The values are those of ggml-common.h, as the gguf package (0.19) holds them.
"""

from pathlib import Path

import gguf
import numpy as np

GRIDS = Path(__file__).resolve().parents[3] / "converters" / "formats" / "quants" / "grids.npz"
NAMES = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def grid(name: str) -> np.ndarray:
    """The vectors of a type, int8 [vectors, 4 or 8]."""
    found = getattr(gguf.quants, name)
    found.init_grid()
    return found.grid[0, 0].astype(np.int8)


if __name__ == "__main__":
    np.savez_compressed(GRIDS, **{name: grid(name) for name in NAMES})
