"""Valid weight files, and ways to damage them; used by the tests and by the soak run."""

import json
import re
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf_models import Q, finish, hyperparameters, interleave
from hypothesis import strategies as st
from weight_files import raw_safetensors

from dflash_jax.converters.inspect import inspect
from dflash_jax.converters.models import open_model
from dflash_jax.errors import DFlashError
from tests.damage import NUMBERS, apply

CONFIG = {
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
SHAPES = {
    "attn_norm": (32,),
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_norm": (32,),
    "ffn_gate": (32, 32),
    "ffn_up": (32, 32),
    "ffn_down": (32, 32),
}


@dataclass(frozen=True)
class Seed:
    """A valid file and the name it is written under."""

    name: str
    raw: bytes
    interesting: int  # bytes of header, where most damage goes
    fields: tuple[int, ...]  # where its numbers lie


def seeds(folder: Path) -> list[Seed]:
    """A Llama target with a tokenizer, a drafter, and a safetensors file."""
    return [_target(folder / "seed_t.gguf"), _drafter(folder / "seed_d.gguf"), _safetensors()]


def _target(path: Path) -> Seed:
    writer = gguf.GGUFWriter(path, "llama")
    hyperparameters(writer, CONFIG)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(["a", "b", "ab", "<|eot_id|>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    rng = np.random.default_rng(0)
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    writer.add_tensor("token_embd.weight", rng.random((4, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    for name, shape in SHAPES.items():
        array = rng.random(shape, np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"blk.0.{name}.weight", array)
            continue
        array = interleave(array, shape[0] // 16) if name in ("attn_q", "attn_k") else array
        packed = gguf.quants.quantize(array, Q.Q8_0)
        writer.add_tensor(f"blk.0.{name}.weight", packed, raw_dtype=Q.Q8_0)
    return _finished(writer, path, "t.gguf")


def _drafter(path: Path) -> Seed:
    writer = gguf.GGUFWriter(path, "dflash")
    hyperparameters(writer, CONFIG)
    writer.add_uint32("dflash.block_size", 4)
    writer.add_array("dflash.target_layers", [1, 3])
    writer.add_uint32("tokenizer.ggml.mask_token_id", 3)
    writer.add_uint32("dflash.vocab_size", 4)
    writer.add_sliding_window(8)
    writer.add_sliding_window_pattern([True])
    rng = np.random.default_rng(1)
    extra = {"attn_q_norm": (16,), "attn_k_norm": (16,)}
    outer = {"fc": (32, 64), "enc.output_norm": (32,), "output_norm": (32,)}
    inner = {f"blk.0.{name}": shape for name, shape in (SHAPES | extra).items()}
    for name, shape in (outer | inner).items():
        writer.add_tensor(f"{name}.weight", rng.random(shape, np.float32))
    return _finished(writer, path, "d.gguf")


def _finished(writer: gguf.GGUFWriter, path: Path, name: str) -> Seed:
    finish(writer)
    raw = path.read_bytes()
    path.unlink()
    named = [
        m.end()
        for m in re.finditer(rb"(general|llama|dflash|tokenizer)[.a-z_]+|[.a-z_0-9]+weight", raw)
    ]
    fields = [end + step for end in named for step in (0, 4, 8, 12, 20, 24)]
    return Seed(name, raw, raw.rindex(b".weight") + 60, tuple(fields))


def _safetensors() -> Seed:
    header = {"__metadata__": {"format": "pt"}}
    header |= {
        f"layers.{i}.weight": {
            "dtype": d,
            "shape": [4, 8],
            "data_offsets": [32 * n * i, 32 * n * (i + 1)],
        }
        for i, (d, n) in enumerate([("F32", 4)] * 3)
    }
    raw = raw_safetensors(header, bytes(384))
    fields = [m.start() for m in re.finditer(rb"[0-9]", raw)]
    return Seed("x.safetensors", raw, len(raw) - 384, tuple(fields))


def mutated(seed: Seed) -> st.SearchStrategy[bytes]:
    """The file with one to three kinds of damage, mostly to its header."""
    place = st.integers(0, seed.interesting) | st.integers(0, len(seed.raw))
    field = st.sampled_from(seed.fields)
    number = st.sampled_from(NUMBERS) | st.integers(0, 64)
    digits = st.sampled_from(["9" * 30, "-1", "1e9", "null", "[[", "{", "0", "1", "7"])
    subtle = st.one_of(
        st.tuples(st.sampled_from(["u32", "u64"]), field, number),
        st.tuples(st.just("byte"), field, st.binary(min_size=1, max_size=4)),
        st.tuples(st.just("digits"), field, digits),
    )
    rough = st.one_of(
        st.tuples(st.just("byte"), place, st.binary(min_size=1, max_size=4)),
        st.tuples(st.sampled_from(["u32", "u64"]), place, number),
        st.tuples(st.just("cut"), place, st.just(0)),
        st.tuples(st.just("delete"), place, st.integers(1, 64)),
        st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=64)),
        st.tuples(st.just("repeat"), place, st.integers(1, 256)),
    )
    one, some = st.tuples(subtle), st.lists(subtle | rough, min_size=1, max_size=3)
    return st.one_of(one, some).map(lambda found: apply(seed.raw, found))


SLOW = 1.0  # seconds


def exercise(path: Path) -> tuple[str, float]:
    """Opens a file as every command would; returns the outcome and the processor seconds it took.

    A slow run is repeated: only what is slow every time counts, a busy machine does not.
    Any exception other than the named ones goes through.
    """
    outcome, seconds = _once(path)
    for _ in range(3):
        if seconds < SLOW:
            break
        seconds = min(seconds, _once(path)[1])
    return outcome, seconds


def _once(path: Path) -> tuple[str, float]:
    began = time.process_time()
    try:
        json.dumps(inspect(path))
        if path.suffix == ".gguf":
            model = open_model(path)
            model.companions()
            model.load("float32")
        outcome = "read"
    except DFlashError as error:
        outcome = type(error).__name__
    return outcome, time.process_time() - began


def measured(path: Path) -> tuple[str, float, int]:
    """As `exercise`, with the peak of bytes allocated meanwhile."""
    tracemalloc.start()
    try:
        outcome, seconds = exercise(path)
        return outcome, seconds, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
