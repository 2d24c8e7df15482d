import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dflash_jax.converters import quants
from dflash_jax.converters.compare import LIMITS
from dflash_jax.converters.quants import decoders
from dflash_jax.converters.quants.encode import ENCODERS, encode
from dflash_jax.converters.quants.types import BY_NAME, TYPES

IN_GGUF = [name for name in quants.DECODERS if hasattr(gguf.quants, name)]  # Q1_0, Q2_0 are newer


def decoded(name: str, raw: np.ndarray, columns: int) -> np.ndarray:
    out = np.empty((len(raw), columns), np.float32)
    quants.decode(BY_NAME[name], raw, out)
    return out


def expected(name: str, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bit for bit; a NaN, which a scale of NaN makes, may carry any payload."""
    numbers = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), ~numbers)
    np.testing.assert_array_equal(ours[numbers].view(np.uint32), theirs[numbers].view(np.uint32))


@pytest.mark.parametrize("name", IN_GGUF)
def test_random_bytes_decode_to_the_bits_gguf_gives(name):
    kind = BY_NAME[name]
    rng = np.random.default_rng(kind.number)
    raw = rng.integers(0, 256, (700, 1024 // kind.block_size * kind.block_bytes), np.uint8)
    assert_same_bits(decoded(name, raw, 1024), expected(name, raw))


@pytest.mark.parametrize("name", IN_GGUF)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_block_decodes_to_the_bits_gguf_gives(name, data):
    kind = BY_NAME[name]
    raw = data.draw(arrays(np.uint8, (2, kind.block_bytes)))
    assert_same_bits(decoded(name, raw, kind.block_size), expected(name, raw))


def test_sizes_agree_with_the_gguf_package():
    sizes = gguf.constants.GGML_QUANT_SIZES
    for number, kind in TYPES.items():
        if number not in set(gguf.GGMLQuantizationType) or kind.name == "Q8_1":
            continue  # gguf 0.19 gives Q8_1 a size its C code does not have
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert sizes[gguf.GGMLQuantizationType(number)] == (kind.block_size, kind.block_bytes)


@pytest.mark.parametrize(("name", "bits"), [("Q1_0", 1), ("Q2_0", 2)])
def test_every_byte_of_the_newest_types_holds_neighbours_lowest_first(name, bits):
    kind, values = BY_NAME[name], {1: [-1, 1], 2: [-1, 0, 1, 2]}[bits]
    raw = np.arange(256, dtype=np.uint8).reshape(-1, kind.block_bytes - 2)
    scale = np.linspace(-3, 3, len(raw)).astype(np.float16)[:, None]
    theirs = [[values[b >> i & 2**bits - 1] for b in row for i in range(0, 8, bits)] for row in raw]
    ours = decoded(name, np.hstack([scale.view(np.uint8), raw]), kind.block_size)
    assert_same_bits(ours, np.array(theirs, np.float32) * scale.astype(np.float32))


GOLDEN = np.load(Path(__file__).parent / "data" / "ggml_blocks.npz")


@pytest.mark.parametrize("name", quants.DECODERS)
def test_blocks_made_by_ggml_decode_to_the_bits_of_its_c_code(name):
    raw, theirs = GOLDEN[f"{name}.blocks"], GOLDEN[f"{name}.decoded"]
    ours = decoded(name, raw[None], theirs.size)[0]
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", quants.DECODERS)
def test_the_error_of_each_type_lies_within_its_limits(name):
    values, theirs = GOLDEN["values"], GOLDEN[f"{name}.decoded"]
    error = np.linalg.norm(theirs - values) / np.linalg.norm(values)
    assert 0.5 * LIMITS[name].warn < error < LIMITS[name].warn


GRIDS = {  # the vectors as int8, unpacked by the gguf package 0.19: the start of their SHA-256
    "IQ1_S": "07540ffc1aeaf6ad",
    "IQ2_XXS": "05826b5d3e472a3a",
    "IQ2_XS": "06e47aaca60b4dc1",
    "IQ2_S": "e1aa1473412b0552",
    "IQ3_XXS": "46e35f5a997efdee",
    "IQ3_S": "bd1af4945a1717c6",
}


@pytest.mark.parametrize("name", GRIDS)
def test_every_vector_of_a_grid_is_that_of_ggml(name):
    assert hashlib.sha256(decoders.vectors(name).tobytes()).hexdigest()[:16] == GRIDS[name]


ENCODED = Path(__file__).parent / "data" / "ggml_blocks.npz"


@pytest.mark.parametrize("name", ENCODERS)
def test_weights_encode_to_the_bits_of_ggml(name):
    stored = np.load(ENCODED)
    blocks = encode(BY_NAME[name], stored["values"].reshape(2, -1))
    np.testing.assert_array_equal(blocks.reshape(-1), stored[f"{name}.blocks"])


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_row_encodes_to_the_bits_gguf_gives(name, data):
    """Equal weights, zeros, both signs of the largest, weights halfway between codes."""
    sizes = st.one_of(
        st.floats(-30000, 30000, width=32), st.integers(-255, 255).map(lambda i: np.float32(i / 2))
    )
    rows = data.draw(arrays(np.float32, (2, 64), elements=sizes, fill=st.just(np.float32(0))))
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name])
    if (np.abs(rows)[rows != 0] > 1e-30).all():  # else the reciprocal of a scale overflows in C
        np.testing.assert_array_equal(encode(BY_NAME[name], rows), expected)


@pytest.mark.parametrize("name", ENCODERS)
def test_decoded_blocks_encode_to_themselves(name):
    rng, kind = np.random.default_rng(1), BY_NAME[name]
    rows = (rng.standard_normal((400, 256)) * np.exp(rng.standard_normal((400, 1)))).astype("f4")
    blocks = encode(kind, rows)
    np.testing.assert_array_equal(encode(kind, decoded(name, blocks, 256)), blocks)


def test_a_scale_outside_float16_is_not_stored():
    for name in ENCODERS:
        with pytest.raises(OverflowError):
            encode(BY_NAME[name], np.full((1, 32), 1e9, np.float32))
