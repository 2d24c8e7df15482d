"""llama.cpp's own quantiser, in a shared library of it.

    python -m benchmarks.llama_cpp.quantiser LIBRARY IN.gguf OUT.gguf TYPE [--imatrix FILE]

LIBRARY is a libllama.so that exports `llama_model_quantize`, with llama.cpp's other libraries
beside it, as in the npm package @node-llama-cpp/linux-x64; PyPI's xllamacpp lacks that function.
"""

import argparse
import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.converters.forms import FILE_TYPES
from dflash_jax.converters.gguf.importance import read_importance

TYPES = {**FILE_TYPES, "iq3_s": 26, "iq3_m": 27}  # by name, `llama_ftype`
SWITCHES = ("allow_requantize", "quantize_head", "only_copy", "pure", "keep_split", "dry_run")
DEFAULTS = (False, True, False, False, False, False)  # of the switches


class Matrix(ctypes.Structure):
    """`llama_model_imatrix_data`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("values", ctypes.POINTER(ctypes.c_float)),
        ("count", ctypes.c_size_t),
    )


class Parameters(ctypes.Structure):
    """`llama_model_quantize_params`, with room for what newer versions add."""

    _fields_ = (
        ("threads", ctypes.c_int32),
        ("file_type", ctypes.c_int32),
        ("head_type", ctypes.c_int32),
        ("embedding_type", ctypes.c_int32),
        *((name, ctypes.c_bool) for name in SWITCHES),
        ("importance", ctypes.POINTER(Matrix)),
        ("others", ctypes.c_void_p * 32),
    )


def library(path: Path) -> Any:
    """Return the C interface, with its processors' kernels loaded."""
    loaded = ctypes.CDLL(str(path))
    loaded.ggml_backend_load_all_from_path(os.fsencode(path.parent))
    loaded.llama_model_quantize_default_params.restype = Parameters
    loaded.llama_model_quantize.restype = ctypes.c_uint32
    counted = ctypes.POINTER(Parameters)
    loaded.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, counted]
    return loaded


def listed(means: Mapping[str, np.ndarray]) -> Any:
    """Return an importance matrix as the quantiser takes it: its last entry has no name."""
    entries = (Matrix * (len(means) + 1))()
    for entry, (name, values) in zip(entries, means.items(), strict=False):
        kept = np.ascontiguousarray(values, np.float32)
        entry.name = name.encode()
        entry.values = (ctypes.c_float * kept.size).from_buffer_copy(kept)
        entry.count = kept.size
    return entries


def quantise(loaded: Any, source: Path, out: Path, kind: str, imatrix: Path | None) -> None:
    """Write a file in a type of `TYPES`."""
    parameters = loaded.llama_model_quantize_default_params()
    switches = tuple(getattr(parameters, name) for name in SWITCHES)
    assert switches == DEFAULTS, f"another layout of parameters: {switches}"
    parameters.file_type = TYPES[kind]
    if imatrix is not None:
        parameters.importance = listed(read_importance(imatrix).means)
    code = loaded.llama_model_quantize(
        os.fsencode(source), os.fsencode(out), ctypes.byref(parameters)
    )
    if code:
        raise SystemExit(f"llama.cpp does not quantise {source} as {kind}: code {code}")


def main(words: Sequence[str] | None = None) -> int:
    """Quantise a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", type=Path, metavar="LIBRARY")
    parser.add_argument("source", type=Path, metavar="IN.gguf")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("kind", choices=TYPES, metavar="TYPE", help=", ".join(TYPES))
    parser.add_argument("--imatrix", type=Path, metavar="FILE", help="importance matrix")
    options = parser.parse_args(words)
    for path in (options.library, options.source):
        if not path.is_file():
            parser.error(f"{path} is no file")
    quantise(library(options.library), options.source, options.out, options.kind, options.imatrix)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
