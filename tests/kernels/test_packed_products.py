"""Products with packed and column-major weights against products with arrays."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.graph.build import jit
from dflash_jax.kernels import products
from dflash_jax.kernels.native.build import library
from dflash_jax.kernels.pallas_products import COLUMNS, multiply
from dflash_jax.nn.layers import project
from dflash_jax.quant import layouts
from dflash_jax.quant.formats import E2M1
from dflash_jax.quant.layouts import FLOAT, KINDS, MATRIX, TABLE, Interleaved, Joined, Packed
from dflash_jax.testing import packed_bytes

D, N = 512, 2 * COLUMNS


def packed(kind: str, depth: int = D, columns: int = N) -> Packed:
    """Return random codes and scales for weights of about 1 / sqrt(D)."""
    rng = np.random.default_rng(3)
    arrays = {}
    for name, (rows, dtype) in KINDS[kind].arrays(depth).items():
        if np.dtype(dtype).kind in "iu":
            most = {"sub": 64, "sub_low": 64, "zero": 16}.get(name, 256)
            low, high = (-60, 60) if dtype == "int8" else (0, most)
            arrays[name] = rng.integers(low, high, (rows, columns)).astype(dtype)
        else:
            size = 0.002 / (30 if KINDS[kind].sub else 1)
            arrays[name] = (size * rng.standard_normal((rows, columns))).astype(dtype)
    return Packed(arrays, kind, (depth, columns))


def inputs(rows: int, dtype: str, depth: int = D) -> jax.Array:
    drawn = np.random.default_rng(4).standard_normal((rows, depth))
    return jnp.asarray(drawn.astype(jnp.dtype(dtype)))


def expected(x: jax.Array, w: Packed) -> np.ndarray:
    """Return the product in float64, with the weights rounded as the product rounds them."""
    full = layouts.dequantise(w.arrays, w.kind)
    if w.kind != "int8":
        full = full.astype(x.dtype)
    return np.asarray(x).astype(np.float64) @ full.astype(np.float64)


def assert_near(found: jax.Array, wanted: np.ndarray) -> None:
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, atol=3e-6 * np.abs(wanted).max())


def test_floats_of_four_bits_are_computed_from_their_codes() -> None:
    found = products.of_code(jnp.arange(16, dtype=jnp.uint8))
    np.testing.assert_array_equal(found, E2M1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_product_is_that_of_the_unpacked_weights(kind: str, dtype: str) -> None:
    w, x = packed(kind), inputs(5, dtype)
    wanted = expected(x, w)
    assert_near(jit(functools.partial(products.multiply_unpacked, kind=kind))(x, w.arrays), wanted)
    assert_near(jit(products.contract)(x.reshape(1, 5, D), w)[0], wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_column_slices_match_the_whole_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SLICE_SIZE", 64 * D)
    w, x = packed(kind, columns=64 * 3 - 8), inputs(5, "float32")
    assert_near(
        jit(functools.partial(products.multiply_by_slices, kind=kind))(x, w.arrays), expected(x, w)
    )


@pytest.mark.sample(*(f"{kind}-float32" for kind in KINDS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "int8"])
def test_the_kernel_matches_the_whole_product(kind: str, dtype: str) -> None:
    w, product = packed(kind), jit(functools.partial(multiply, kind=kind, interpret=True))
    for rows in (3, 70):  # one tile of rows, and two
        x = inputs(rows, dtype)
        assert_near(product(x, w.arrays), expected(x, w))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "int8"])
def test_the_kernel_lowers_for_a_gpu(kind: str) -> None:
    """It becomes one Triton call, and nothing is unpacked outside of it."""
    w, x = packed(kind), inputs(16, "bfloat16")
    kernel = Packed(w.arrays, kind, w.shape, kernel=True)
    traced = jit(products.contract).trace(x, kernel)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert not re.search(rf"tensor<{D}x{N}x(bf16|f32|f16)>", text)


def test_joined_parts_are_concatenated() -> None:
    first, second = packed("Q4_K", columns=64), packed("Q6_K", columns=32)
    third = np.random.default_rng(5).standard_normal((D, 2, 16)).astype(np.float32) / 16
    parts = (
        Packed(first.arrays, "Q4_K", (D, 2, 32)),
        Packed(second.arrays, "Q6_K", (D, 2, 16)),
        jnp.asarray(third),
    )
    x = inputs(4, "float32")
    found = jit(products.contract)(x, Joined(parts, 2, (D, 2, 64)))
    full = [layouts.dequantise(w.arrays, w.kind).reshape(D, 2, -1) for w in (first, second)]
    whole = np.concatenate([*full, third], axis=2)
    assert_near(found, np.einsum("md,dgn->mgn", np.asarray(x, np.float64), whole))


@pytest.mark.parametrize("kind", ["int8", "Q8_0", "int4z", "Q4_K", "Q6_K"])
def test_a_table_gives_its_rows(kind: str) -> None:
    w = packed(kind)
    ids = jnp.asarray([[3, 0], [N - 1, 3]])
    found = jit(lambda w, ids: products.gather(w, ids, jnp.dtype("float32")))(w, ids)
    np.testing.assert_array_equal(found, layouts.dequantise(w.arrays, kind).T[np.asarray(ids)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8])
def test_no_unpacked_copy_of_a_weight_is_ever_in_memory(kind: str, rows: int) -> None:
    depth, columns = 1024, 8192
    abstract = products.abstract((depth, columns), (1, ((kind, columns),)), jnp.dtype("bfloat16"))
    x = jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16)
    compiled = jit(products.contract).lower(x, abstract).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < depth * columns  # one byte per weight
    packed_size = packed_bytes(kind, (depth, columns))
    inside = compiled.memory_analysis().argument_size_in_bytes - rows * depth * 2
    assert inside == packed_size


def test_a_rows_product_does_not_depend_on_the_other_rows() -> None:
    """R1, R9: equality of speculative and plain decoding at block width rests on it."""
    w = packed("Q4_K")
    product = jit(functools.partial(products.multiply_by_slices, kind="Q4_K"))
    x = inputs(8, "bfloat16")
    other = x.at[1:].set(jnp.asarray(7, jnp.bfloat16))
    np.testing.assert_array_equal(product(x, w.arrays)[0], product(other, w.arrays)[0])


@pytest.mark.optimised
@pytest.mark.parametrize("columns", [1, 2, 9, 762])
def test_a_weight_gives_a_token_the_same_bits_at_every_place(columns: int) -> None:
    """A single column gates a shared expert; a matrix-vector product would fail here."""
    rng, multiply = np.random.default_rng(7), jit(project)
    w = jnp.asarray(rng.standard_normal((256, columns)), jnp.float32)
    x = rng.standard_normal((12, 256)).astype(np.float32)
    out = np.asarray(multiply(jnp.asarray(x), w))
    for places in range(1, 12):
        moved = multiply(jnp.asarray(np.roll(x, places, axis=0)), w)
        np.testing.assert_array_equal(moved, np.roll(out, places, axis=0))
    assert_near(jnp.asarray(out), x.astype(float) @ np.asarray(w).astype(float))


@pytest.mark.skipif(not library(), reason="no native kernels are compiled here")
def test_matrices_of_a_tree_are_interleaved_in_place_and_back() -> None:
    table, norm = jnp.arange(6.0).reshape(2, 3), jnp.ones(2)
    packed_one = packed("int8", 32, 8)
    tree = {"mlp": {"down": table, "o": packed_one}, "norm": norm, "embed": table}
    forms = {"mlp/down": MATRIX, "mlp/o": MATRIX, "embed": TABLE}
    products.set_weight_layout(tree, forms, native=True)
    for name, kind, shape in (("down", FLOAT, (2, 3)), ("o", "int8", (32, 8))):
        made = tree["mlp"][name]
        assert isinstance(made, Interleaved)
        assert (made.kind, made.shape) == (kind, shape)
    np.testing.assert_array_equal(np.asarray(tree["mlp"]["down"]), table)
    products.set_weight_layout(tree, forms, native=False)
    np.testing.assert_array_equal(tree["mlp"]["down"], table)
    assert jax.tree.structure(tree["mlp"]["o"]) == jax.tree.structure(packed_one)
    for ours, theirs in zip(*map(jax.tree.leaves, (tree["mlp"]["o"], packed_one)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "uint8"])
def test_columns_taken_slice_by_slice_are_those_that_are_gathered(dtype: str) -> None:
    table = jnp.asarray(np.random.default_rng(5).integers(-100, 100, (6, 23))).astype(dtype)
    ids = jnp.array([[3, 22, 0], [40, -1, 3]])  # two are past the ends
    found = jit(products.take_slices)(table, ids)
    np.testing.assert_array_equal(found, jnp.take(table, ids, axis=1, mode="clip"))
