import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dflash_jax.converters.error_limits import LIMITS
from dflash_jax.converters.formats import quants
from dflash_jax.converters.formats.quants import decoders
from dflash_jax.converters.formats.quants.encode import ENCODERS, encode
from dflash_jax.converters.formats.quants.types import BY_NAME, TYPES

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


SAME_BITS = ("Q8_0", "Q4_0", "Q4_1")  # as ggml's encoders; the others search their scales
SEARCHED = [name for name in ENCODERS if name not in SAME_BITS]


def drawn_rows(columns: int = 512) -> np.ndarray:
    """Weights of rows and columns of unlike size."""
    rng = np.random.default_rng(1)
    sizes = np.exp(0.5 * rng.standard_normal((64, 1))) * np.exp(0.5 * rng.standard_normal(columns))
    return (0.02 * sizes * rng.standard_normal((64, columns))).astype(np.float32)


def error_of(name: str, rows: np.ndarray, blocks: np.ndarray, factors: np.ndarray | float = 1):
    """Root of the mean square of errors over that of weights."""
    errors = decoded(name, blocks, rows.shape[1]) - rows
    return np.sqrt((factors * np.square(errors)).sum() / (factors * np.square(rows)).sum())


@pytest.mark.parametrize("name", SAME_BITS)
def test_weights_encode_to_the_bits_of_ggml(name):
    blocks = encode(BY_NAME[name], GOLDEN["values"].reshape(2, -1))
    np.testing.assert_array_equal(blocks.reshape(-1), GOLDEN[f"{name}.blocks"])


@pytest.mark.parametrize("name", SEARCHED)
def test_searched_scales_err_no_more_than_those_of_ggml(name):
    values = GOLDEN["values"].reshape(2, -1)
    ours = encode(BY_NAME[name], values)
    theirs = GOLDEN[f"{name}.blocks"].reshape(ours.shape)
    assert error_of(name, values, ours) < error_of(name, values, theirs)


@pytest.mark.parametrize("name", [n for n in SEARCHED if n in ("Q5_0", "Q5_1", "MXFP4")])
def test_searched_scales_err_less_than_plain_rounding(name):
    rows = drawn_rows()
    plain = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name])
    assert error_of(name, rows, encode(BY_NAME[name], rows)) < 0.99 * error_of(name, rows, plain)


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "Q8_0"])
def test_importance_moves_errors_to_weights_that_count_less(name):
    rows, kind = drawn_rows(), BY_NAME[name]
    factors = np.exp(np.random.default_rng(2).standard_normal(rows.shape[1])).astype(np.float32)
    factors = np.broadcast_to(factors, rows.shape)
    steered = error_of(name, rows, encode(kind, rows, factors), factors)
    assert steered < error_of(name, rows, encode(kind, rows), factors)


@pytest.mark.parametrize("name", ENCODERS)
def test_equal_importance_errs_no_more_than_none(name):
    rows, kind = drawn_rows(), BY_NAME[name]
    equal = error_of(name, rows, encode(kind, rows, np.ones_like(rows)))
    assert equal <= 1.001 * error_of(name, rows, encode(kind, rows))


@pytest.mark.parametrize("name", SAME_BITS)
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


# The largest error of a weight, in units of the largest weight of its block.
MOST = {
    "Q2_K": 0.4,
    "Q3_K": 0.26,
    "MXFP4": 0.25,
    "Q4_0": 0.13,
    "IQ4_NL": 0.13,
    "IQ4_XS": 0.15,
}

# Weights that may become zeros: float16 scales of scales are no smaller than 2 ** -24, and stand
# for 32 steps of up to 128 codes.
LOST = 2.0**-24 * 32 * 128


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_row_of_any_kind_is_decoded_to_something_else(name, data):
    """Zeros, equal weights, one sign, single outliers, tiny ones."""
    size = BY_NAME[name].block_size
    some = st.floats(-3000, 3000, width=32)
    few = st.sampled_from([np.float32(x) for x in (0, 1, -1, 7.5, 1e-3, -1e-20)])
    rows = data.draw(arrays(np.float32, (1, size), elements=st.one_of(some, few), fill=few))
    factors = data.draw(st.sampled_from([None, np.ones_like(rows), 1e3 * np.abs(rows)]))
    blocks = encode(BY_NAME[name], rows, factors)
    again = decoded(name, blocks, size)
    assert np.isfinite(again).all()
    error = np.abs(again - rows)
    worst = error.max()
    if factors is not None and (factors > 0).any():  # a weight may give way to those that count
        worst = np.sqrt(np.average(np.square(error, dtype=np.float64), weights=factors))
    assert worst <= MOST.get(name, 0.11) * np.abs(rows).max() + LOST


@pytest.mark.parametrize("tiny", [1, 31])
@pytest.mark.parametrize("name", ["Q4_1", "Q5_1"])
def test_weights_that_hardly_count_keep_their_value_beside_those_that_do(name, tiny):
    """In float32 the sums of a least squares fit would not know of them."""
    rows = np.ones((1, 32), np.float32)
    rows[0, :tiny] = -1e-20
    blocks = encode(BY_NAME[name], rows, 1e3 * np.abs(rows))
    assert np.abs(decoded(name, blocks, 32) - rows).max() < 0.07


@pytest.mark.parametrize("name", SAME_BITS)
def test_decoded_blocks_encode_to_themselves(name):
    rows, kind = drawn_rows(), BY_NAME[name]
    blocks = encode(kind, rows)
    np.testing.assert_array_equal(encode(kind, decoded(name, blocks, rows.shape[1])), blocks)


@pytest.mark.parametrize("name", SEARCHED)
def test_decoded_blocks_change_little_when_they_are_encoded_again(name):
    rows, kind = drawn_rows(), BY_NAME[name]
    once = decoded(name, encode(kind, rows), rows.shape[1])
    assert error_of(name, once, encode(kind, once)) < 0.1 * LIMITS[name].warn


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "MXFP4"])
def test_a_scale_outside_float16_is_not_stored(name):
    for largest in (1e9, 3e38):
        with pytest.raises(OverflowError):
            encode(BY_NAME[name], np.full((1, 256), largest, np.float32))


def test_a_weight_past_all_types_is_not_stored():
    with pytest.raises(OverflowError):
        encode(BY_NAME["MXFP4"], np.full((1, 256), 3e38, np.float32))
