"""Decoding and converting speed of `converters`, paired with the gguf package in one run.

    python -m benchmarks.convert [--rows 16384] [--repeats 20] [--out FILE]

Each repeat times gguf's `dequantize` and ours in turn on the same bytes and one core; both return a
new float32 array. Then a GGUF file is read as bfloat16 on all cores, with its peak memory, and
converted to a folder. GB/s refer to float32 output.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from benchmarks.environment import environment
from dflash_jax.converters import quants
from dflash_jax.converters.convert import convert
from dflash_jax.converters.gguf import open_gguf
from dflash_jax.converters.load import read_as
from dflash_jax.converters.models import open_model
from dflash_jax.converters.quants.types import BY_NAME

COLUMNS = 4096
GOALS = {"Q4_K": 3.0, "Q6_K": 3.0, "Q8_0": 2.0}
HALF_AT = {  # offsets of float16 scales in each block, which are kept finite
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
MEMORY_ALLOWANCE = 256 << 20


def blocks(name: str, rows: int) -> np.ndarray:
    """Return random blocks [rows, bytes] with small finite scales."""
    kind = BY_NAME[name]
    rng = np.random.default_rng(kind.number)
    shape = (rows * COLUMNS // kind.block_size, kind.block_bytes)
    raw = rng.integers(0, 256, shape, np.uint8)
    if name == "MXFP4":
        raw[:, 0] = rng.integers(110, 130, len(raw), np.uint8)
    elif name == "IQ1_M":
        raw[:, 55] &= 0x1F  # the sign and the exponent's upper half
    else:
        for at in HALF_AT.get(name, (0,)):
            scale = rng.uniform(1e-3, 1e-2, len(raw)).astype(np.float16)
            raw[:, at : at + 2] = scale[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the tenth and ninetieth percentiles."""
    p10, p90 = np.percentile(values, [10, 90])
    return {"median": round(statistics.median(values), 4), "p10": float(p10), "p90": float(p90)}


def paired(name: str, rows: int, repeats: int) -> dict[str, Any]:
    """Time both decoders in turn on one core, with paired ratios."""
    raw, kind = blocks(name, rows), BY_NAME[name]
    theirs_kind = gguf.GGMLQuantizationType[name]

    def ours() -> np.ndarray:
        out = np.empty((rows, COLUMNS), np.float32)
        quants.decode(kind, raw, out)
        return out

    def theirs() -> np.ndarray:
        return gguf.quants.dequantize(raw, theirs_kind)

    equal = bool(np.array_equal(ours().view(np.uint32), theirs().view(np.uint32)))
    pairs = [(seconds(theirs), seconds(ours)) for _ in range(repeats)]
    size = rows * COLUMNS * 4 / 1e9
    found = {
        "bit_equal": equal,
        "gguf_gb_per_s": spread([size / a for a, _ in pairs]),
        "ours_gb_per_s": spread([size / b for _, b in pairs]),
        "ratio": spread([a / b for a, b in pairs]),
    }
    if name in GOALS:
        found["goal"] = GOALS[name]
        found["reached"] = found["ratio"]["median"] >= GOALS[name]
    return found


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_file(path: Path, name: str, rows: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", blocks(name, rows), raw_dtype=gguf.GGMLQuantizationType[name])
    finish(writer)


def streamed(name: str, rows: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Decode a file's tensor to bfloat16 on all cores; return speed and peak memory."""
    path = folder / f"{name}.gguf"
    write_file(path, name, rows)
    source, kind = open_gguf(path), np.dtype(ml_dtypes.bfloat16)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        read_as(source, "x", kind, pool)
        times = [seconds(lambda: read_as(source, "x", kind, pool)) for _ in range(repeats)]
        tracemalloc.start()
        array = read_as(source, "x", kind, pool)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    path.unlink()
    size = rows * COLUMNS * 4 / 1e9
    return {
        "gb_per_s": spread([size / t for t in times]),
        "output_bytes": array.nbytes,
        "peak_bytes": peak,
        "above_output_bytes": peak - array.nbytes,
        "within_allowance": peak <= array.nbytes + MEMORY_ALLOWANCE,
    }


def converted(folder: Path, rows: int) -> dict[str, Any]:
    """Convert a one-layer Llama of Q4_K and Q6_K with `rows` tokens to a bfloat16 folder."""
    path, inner, pair = folder / "layer.gguf", 14336, 1024
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(4096)
    writer.add_embedding_length(COLUMNS)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(COLUMNS // 128)
    writer.add_head_count_kv(pair // 128)
    writer.add_layer_norm_rms_eps(1e-5)
    heights = {"attn_q": COLUMNS, "attn_k": pair, "attn_v": pair, "attn_output": COLUMNS}
    heights |= {"ffn_gate": inner, "ffn_up": inner}
    listed = {f"blk.0.{name}": ("Q4_K", height) for name, height in heights.items()}
    listed |= {"token_embd": ("Q4_K", rows), "output": ("Q6_K", rows)}
    for name, (kind, height) in listed.items():
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", blocks(kind, height), raw_dtype=number)
    down = blocks("Q6_K", inner).reshape(COLUMNS, -1)
    writer.add_tensor("blk.0.ffn_down.weight", down, raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(COLUMNS, np.float32))
    finish(writer)
    model = open_model(path)
    took = seconds(lambda: convert(model, folder / "plain", dtype="bfloat16"))
    tracemalloc.start()
    convert(model, folder / "again", dtype="bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = (folder / "plain" / "model.safetensors").stat().st_size
    largest = max(rows, inner) * COLUMNS * 2
    return {
        "output_bytes": size,
        "seconds": round(took, 2),
        "gb_per_s_of_bfloat16_written": round(size / took / 1e9, 3),
        "largest_tensor_bytes": largest,
        "peak_bytes": peak,
        "within_allowance": peak <= largest + MEMORY_ALLOWANCE,
    }


def opening(folder: Path, words: int = 248_320) -> dict[str, float]:
    """Return the seconds that ours and the gguf package take to open a large vocabulary."""
    path = folder / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token{i}" for i in range(words)])
    writer.add_token_merges([f"to ken{i}" for i in range(words)])
    writer.add_tensor("x", np.zeros(4, np.float32))
    finish(writer)
    ours = [seconds(lambda: open_gguf(path)) for _ in range(5)]
    return {
        "ours_s": round(statistics.median(ours), 4),
        "gguf_s": round(seconds(lambda: gguf.GGUFReader(path)), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16384, help=f"of {COLUMNS} weights")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    found: dict[str, Any] = {"environment": environment(), "gguf": gguf_version()}
    found["load_average_before"] = os.getloadavg()
    found |= {"weights": options.rows * COLUMNS, "repeats": options.repeats}
    os.sched_setaffinity(0, cores[:1])
    found["one_core"] = {}
    for name in (known for known in quants.DECODERS if hasattr(gguf.quants, known)):
        repeats = options.repeats if name in GOALS else max(3, options.repeats // 4)
        found["one_core"][name] = paired(name, options.rows, repeats)
        print(name, json.dumps(found["one_core"][name]["ratio"]), file=sys.stderr)
    os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        found["streamed_to_bfloat16"] = {
            name: streamed(name, options.rows, max(3, options.repeats // 2), place)
            for name in GOALS
        }
        found["converted"] = converted(place, 2 * options.rows)
        found["open_large_vocabulary"] = opening(place)
    found["load_average_after"] = os.getloadavg()
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    reached = all(v.get("reached", True) for v in found["one_core"].values())
    return 0 if reached else 1


def gguf_version() -> str:
    from importlib.metadata import version

    return version("gguf")


if __name__ == "__main__":
    sys.exit(main())
