"""Packed layouts hold the numbers of ggml blocks exactly, and quantise to the nearest code."""

import numpy as np
import pytest

from dflash_jax.converters.formats import quants
from dflash_jax.converters.formats.quants.stored import FORMATS, format_of, unpack_blocks
from dflash_jax.converters.formats.quants.types import BY_NAME
from dflash_jax.quant import layouts
from dflash_jax.quant.formats import E2M1
from dflash_jax.quant.layouts import FLOAT, HEAD, KINDS, MATRIX, TABLE
from dflash_jax.testing import packed_bytes

SCALES = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_1": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82)}
SCALES |= {"Q6_K": (208,), "Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,)}
SCALES |= {"MXFP4": (), "NVFP4": (), "IQ1_M": ()}


def random_blocks(kind: str, rows: int, depth: int, seed: int = 0) -> np.ndarray:
    """Return random blocks with finite float16 scales."""
    size, width = BY_NAME[kind].block_bytes, BY_NAME[kind].block_size
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, depth // width, size), np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(100, 140, blocks.shape[:2])
    if kind == "IQ1_M":  # the scale lies in the high halves of four bytes: 0 to 2
        blocks[..., 55] &= 0x3F
    for at in SCALES.get(kind, (0,)):
        scale = rng.standard_normal((rows, depth // width, 1)).astype(np.float16) / 64
        blocks[..., at : at + 2] = scale.astype("<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


def decoded(kind: str, blocks: np.ndarray, depth: int) -> np.ndarray:
    out = np.empty((len(blocks), depth), np.float32)
    quants.decode(BY_NAME[kind], blocks, out)
    return out


@pytest.mark.parametrize(("kind", "packed"), [(k, f) for k in FORMATS for f in FORMATS[k]])
def test_blocks_keep_their_numbers_bit_for_bit(kind: str, packed: str) -> None:
    blocks = random_blocks(kind, 7, 512)
    arrays = unpack_blocks(blocks, kind, packed)
    assert {n: (len(a), str(a.dtype)) for n, a in arrays.items()} == KINDS[packed].arrays(512)
    ours = layouts.dequantise(arrays, packed)
    assert np.isfinite(ours).all()
    np.testing.assert_array_equal(ours.view(np.uint32), decoded(kind, blocks, 512).T.view("u4"))


def test_scales_of_mxfp4_are_exact_from_the_least_to_the_largest() -> None:
    exponents = np.arange(252)  # of larger ones, products are infinite
    blocks = np.zeros((len(exponents), 2, 17), np.uint8)
    blocks[:, :, 0] = exponents[:, None]
    blocks[:, :, 1:] = np.arange(16, dtype=np.uint8) * 17
    blocks = blocks.reshape(len(exponents), -1)
    ours = layouts.dequantise(unpack_blocks(blocks, "MXFP4", "MXFP4"), "MXFP4")
    np.testing.assert_array_equal(ours, decoded("MXFP4", blocks, 64).T)
    wanted = np.ldexp(np.array(E2M1 * 4, np.float64)[:, None], exponents - 128)
    np.testing.assert_array_equal(ours, wanted.astype(np.float32))


def test_every_type_that_can_be_read_has_a_format() -> None:
    assert FORMATS.keys() == quants.DECODERS.keys()
    for kind, packed in FORMATS.items():
        size = BY_NAME[kind].block_size
        assert format_of(kind, size) == (packed[0] if size > 32 else packed[-1])
        assert format_of(kind, 512) == packed[0]
    assert format_of("F16", 512) == FLOAT


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "int4z"])
def test_arrays_have_the_declared_rows_dtypes_and_bytes(kind: str) -> None:
    w = np.random.default_rng(1).standard_normal((512, 3)).astype(np.float32)
    type_ = next((name for name in FORMATS if kind in FORMATS[name]), "")
    arrays = (
        unpack_blocks(random_blocks(type_, 3, 512), type_, kind)
        if type_
        else layouts.quantise(w, kind)
    )
    declared = KINDS[kind].arrays(512)
    found = {name: (len(a), str(a.dtype)) for name, a in arrays.items()}
    assert found == declared
    total = sum(a.nbytes for a in arrays.values())
    assert packed_bytes(kind, (512, 3)) == total
    bits = {"int8": 8, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5, "Q4_K": 4.625, "Q6_K": 6.5625}
    bits |= {"Q5_0": 8.5, "Q5_1": 9, "Q2_K": 5.125, "Q3_K": 4.5625, "Q5_K": 6.625}
    bits |= {"IQ4_NL": 8.5, "IQ4_XS": 8.3125, "MXFP4": 4.5, "int8_16": 10, "int8_16_low": 12}
    scales = 3 * 4 if kind == "int8" else 0
    assert total == 512 * 3 * bits[kind] / 8 + scales


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.012), ("Q4_0", 0.09)])
def test_quantised_weights_are_near_and_not_nearer_than_can_be(kind: str, most: float) -> None:
    w = np.random.default_rng(2).standard_normal((512, 5, 4)).astype(np.float32)
    w[:, 0, 0] = 0
    arrays = layouts.quantise(w, kind)
    found = layouts.dequantise(arrays, kind)
    error = float(np.linalg.norm(found - w) / np.linalg.norm(w))
    assert most / 4 < error < most
    np.testing.assert_array_equal(found[:, 0, 0], 0)
    step = np.abs(w).reshape(-1, 32, 5, 4).max(axis=1, keepdims=True) / 8
    limit = step if kind == "Q4_0" else np.abs(w).max(axis=0, keepdims=True)[None] / 127 / 2
    difference = np.abs(found - w).reshape(-1, 32, 5, 4)
    assert (difference <= limit * 1.002 + 1e-7).all()


def test_which_parameters_are_packed_and_which_are_always_int8() -> None:
    spec = layouts.spec
    assert spec("float", "target", MATRIX, (64, 32)) is None
    assert spec("int4", "target", FLOAT, (64,)) is None
    assert spec("int4", "target", TABLE, (97, 64)) is None
    assert spec("int4", "target", HEAD, (64, 97)) == (1, (("int8", 97),))
    assert spec("int4", "target", MATRIX, (64, 32)) == (1, (("Q4_0", 32),))
    assert spec("int4", "target", MATRIX, (48, 32)) == (1, (("int8", 32),))
    assert spec("int4", "drafter", MATRIX, (64, 32)) == (1, (("int8", 32),))
