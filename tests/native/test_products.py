"""Products by the native kernels: their numbers, and rows that do not depend on each other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.native import products
from dflash_jax.native.build import library
from dflash_jax.quant import layouts
from dflash_jax.quant.layouts import ColumnMajor, NativePacked, Packed, dequantise, quantise
from dflash_jax.quant.products import contract, gather

pytestmark = pytest.mark.skipif(
    not library(), reason=f"there are no native kernels: {library().reason}"
)
MULTIPLY = jax.jit(contract)
FLOATS = {"float32": 2e-6, "bfloat16": 2e-6, "float16": 2e-6}  # largest relative error
ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 64, 65)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(kind: str, depth: int, columns: int) -> Packed:
    """Return random weights of a kind."""
    w = draw(depth, columns, seed=1)
    if kind in ("int8", "Q4_0"):
        return Packed(quantise(w, kind), kind, w.shape)
    rng = np.random.default_rng(2)
    size = products.BLOCK_BYTES[kind]
    blocks = rng.integers(0, 256, (columns, depth // 32, size), np.uint8)
    for at in (0, 2) if kind == "Q4_1" else (0,):
        scale = rng.standard_normal((columns, depth // 32, 1)).astype(np.float16)
        blocks[..., at : at + 2] = scale.view(np.uint8)
    return Packed(layouts.unpack_blocks(blocks.reshape(columns, -1), kind), kind, w.shape)


def in_int8(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return activations as the kernels quantise them: codes, and the scale of each group."""
    groups = x.reshape(len(x), -1, group)
    most = np.abs(groups).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(most > np.float32(1e-36), np.float32(127) / most, np.float32(0))
    return np.rint(groups * inverse).astype(np.int32), most * np.float32(1 / 127)


def expected(x: np.ndarray, w: Packed) -> np.ndarray:
    """Return the product with quantised activations; integers are summed exactly."""
    codes, scale = in_int8(x, x.shape[1] if w.kind == "int8" else 32)
    if w.kind == "int8":
        sums = codes[:, 0] @ np.asarray(w.arrays["codes"], np.int32)
        return sums.astype(np.float32) * (scale[:, 0] * w.arrays["scale"])
    weights = dequantise(w.arrays, w.kind).astype(np.float64)
    return (codes * scale.astype(np.float64)).reshape(len(x), -1) @ weights


@pytest.mark.parametrize("columns", [1, 3, 4, 33, 70])
@pytest.mark.parametrize("depth", [1, 8, 15, 16, 33, 64, 200])
@pytest.mark.parametrize("dtype", FLOATS)
def test_float_products_are_those_of_float32(dtype: str, depth: int, columns: int) -> None:
    w = jnp.asarray(draw(columns, depth, seed=1)).astype(dtype)
    x = draw(65, depth)
    exact = x.astype(np.float64) @ np.asarray(w.astype(jnp.float32), np.float64).T
    found = MULTIPLY(x, ColumnMajor(w, native=True))
    assert found.dtype == jnp.float32
    limit = FLOATS[dtype] * np.sqrt(depth) * np.abs(exact).max()
    np.testing.assert_allclose(found, exact, atol=limit)


@pytest.mark.parametrize("columns", [1, 33, 70])
@pytest.mark.parametrize("depth", [1, 31, 32, 33, 64, 65, 200])
def test_int8_products_are_exact_sums(depth: int, columns: int) -> None:
    w = packed("int8", depth, columns)
    x = draw(9, depth)
    x[3] = 0
    found = MULTIPLY(x, products.native_packed(w))
    np.testing.assert_array_equal(found, expected(x, w))


@pytest.mark.parametrize("columns", [1, 33, 70])
@pytest.mark.parametrize("depth", [64, 128, 192])
@pytest.mark.parametrize("kind", products.BLOCK_BYTES)
def test_products_with_blocks_quantise_each_32_activations(
    kind: str, depth: int, columns: int
) -> None:
    w = packed(kind, depth, columns)
    x = draw(9, depth)
    x[3] = 0
    exact = expected(x, w)
    found = MULTIPLY(x, products.native_packed(w))
    np.testing.assert_allclose(found, exact, atol=2e-6 * depth * np.abs(exact).max())


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *products.KINDS])
def test_a_row_has_the_same_bits_alone_and_among_others(kind: str) -> None:
    """Columns enough for several threads."""
    depth, columns = 192, 4099
    w: Any
    if kind in FLOATS:
        w = ColumnMajor(jnp.asarray(draw(columns, depth, seed=1)).astype(kind), native=True)
    else:
        w = products.native_packed(packed(kind, depth, columns))
    x = draw(65, depth)
    alone = np.concatenate([MULTIPLY(x[i : i + 1], w) for i in range(len(x))])
    for rows in ROWS:
        np.testing.assert_array_equal(MULTIPLY(x[:rows], w), alone[:rows], err_msg=str(rows))
    again = [np.asarray(MULTIPLY(x, w)) for _ in range(20)]
    for found in again:
        np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("kind", products.KINDS)
def test_packed_weights_change_their_layout_only(kind: str) -> None:
    w = packed(kind, 128, 24)
    reshaped = Packed(w.arrays, kind, (128, 2, 12))
    native = products.native_packed(reshaped)
    assert isinstance(native, NativePacked)
    assert products.native_packed(native) is native
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), native)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), products.abstract(reshaped))
    back = products.packed(native)
    assert (back.kind, back.shape) == (kind, (128, 2, 12))
    for name, array in w.arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array)
    assert MULTIPLY(draw(2, 3, 128), native).shape == (2, 3, 2, 12)


@pytest.mark.parametrize("kind", products.KINDS)
def test_columns_are_gathered_as_floats(kind: str) -> None:
    w = packed(kind, 128, 24)
    found = gather(products.native_packed(w), jnp.array([[3, 23], [0, 3]]), jnp.dtype("float32"))
    scale = w.arrays["scale"] if kind == "int8" else 1
    wanted = (dequantise(w.arrays, kind)).T[np.array([[3, 23], [0, 3]])]
    assert scale is not None
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [1e-30, 1e-36, 1e-38, 1e-41, 1e30])
def test_activations_may_be_tiny_or_huge(size: float) -> None:
    for kind in ("float32", *products.KINDS):
        w: Any = packed(kind, 64, 8) if kind != "float32" else None
        exact = expected if w else lambda x, w: x.astype(np.float64) @ draw(64, 8, seed=1)
        native = products.native_packed(w) if w else ColumnMajor(draw(64, 8, seed=1).T, native=True)
        x = (draw(3, 64) * size).astype(np.float32)
        found, wanted = np.asarray(MULTIPLY(x, native)), exact(x, w)
        assert np.isfinite(found).all(), kind
        np.testing.assert_allclose(found, wanted, atol=max(1e-4 * np.abs(wanted).max(), 1e-32))


def test_numbers_that_are_not_finite_reach_their_own_row_only() -> None:
    for kind in ("float32", *products.KINDS):
        w: Any = packed(kind, 64, 8) if kind != "float32" else None
        w = products.native_packed(w) if w else ColumnMajor(draw(8, 64), native=True)
        x = draw(3, 64)
        clean = np.asarray(MULTIPLY(x, w))
        x[1, 5] = np.nan
        found = np.asarray(MULTIPLY(x, w))
        assert not np.isfinite(found[1]).any(), kind
        np.testing.assert_array_equal(found[[0, 2]], clean[[0, 2]])
