"""Makes ggml_blocks.npz: blocks quantised and decoded by ggml's own C code.

    gcc -O2 -ffp-contract=off -shared -fPIC -I. -I../include -o libquants.so ggml-quants.c
    python make_ggml_blocks.py libquants.so [--check-random N]

The library is ggml/src/ggml-quants.c of llama.cpp (made with llama-cpp-python 0.3.36). With
--check-random, N random blocks of every type are also decoded by both and compared bit by bit.
"""

import argparse
import ctypes
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from dflash_jax.converters.formats import quants  # noqa: E402
from dflash_jax.converters.formats.quants.types import BY_NAME  # noqa: E402

WEIGHTS = 1024
# What the C code prepares by number before it encodes: of a type, or the vectors of a grid.
GRIDS = {name: BY_NAME[name].number for name in quants.DECODERS if name[:3] in ("IQ1", "IQ2")}
GRIDS |= {"IQ3_XXS": 256, "IQ3_S": 512}


def _c_name(name: str) -> str:
    return name.lower().replace("_k", "_K")


def ggml_decode(library: ctypes.CDLL, name: str, raw: np.ndarray, count: int) -> np.ndarray:
    """`count` weights decoded by the C code."""
    out = np.empty(count, np.float32)
    decode = getattr(library, f"dequantize_row_{_c_name(name)}")
    decode.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    decode(raw.ctypes.data, out.ctypes.data, count)
    return out


def ggml_encode(library: ctypes.CDLL, name: str, values: np.ndarray) -> np.ndarray:
    """Blocks made by the C code without an importance matrix, or with one of ones."""
    kind = BY_NAME[name]
    raw = np.empty(len(values) // kind.block_size * kind.block_bytes, np.uint8)
    if name in GRIDS:  # types that want one
        (library.iq3xs_init_impl if "IQ3" in name else library.iq2xs_init_impl)(GRIDS[name])
        encode = getattr(library, f"quantize_{_c_name(name)}")
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        encode.argtypes = (pointer, pointer, count, count, pointer)
        ones = np.ones(len(values), np.float32)
        encode(values.ctypes.data, raw.ctypes.data, 1, len(values), ones.ctypes.data)
        return raw
    encode = getattr(library, f"quantize_row_{_c_name(name)}_ref")
    encode.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    encode(values.ctypes.data, raw.ctypes.data, len(values))
    return raw


def check_random(library: ctypes.CDLL, count: int) -> int:
    """Differences between both decoders over random blocks, NaN payloads aside."""
    wrong = 0
    for name in quants.DECODERS:
        kind = BY_NAME[name]
        raw = np.random.default_rng(0).integers(0, 256, (count, kind.block_bytes), np.uint8)
        ours = np.empty((count, kind.block_size), np.float32)
        quants.decode(kind, raw, ours)
        theirs = ggml_decode(library, name, raw, ours.size).reshape(ours.shape)
        same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (
            np.isnan(ours) & np.isnan(theirs)
        )
        print(f"{name}: {ours.size} weights, {int((~same).sum())} differ")
        wrong += int((~same).sum())
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ggml", type=Path, help="the shared library of ggml")
    parser.add_argument("--check-random", type=int, default=0)
    options = parser.parse_args()
    library = ctypes.CDLL(str(options.ggml.resolve()), mode=1)  # lazily bound
    if options.check_random:
        return 1 if check_random(library, options.check_random) else 0
    values = np.random.default_rng(0).standard_normal(WEIGHTS).astype(np.float32)
    found = {"values": values}
    for name in quants.DECODERS:
        raw = ggml_encode(library, name, values)
        found[f"{name}.blocks"] = raw
        found[f"{name}.decoded"] = ggml_decode(library, name, raw, WEIGHTS)
    np.savez_compressed(HERE / "ggml_blocks.npz", **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
