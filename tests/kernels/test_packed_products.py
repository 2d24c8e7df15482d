"""Products with packed and column-major weights against products with arrays."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.graph.build import jit
from dflash_jax.kernels import products
from dflash_jax.kernels.pallas_products import COLUMNS, multiply
from dflash_jax.nn.layers import project
from dflash_jax.quant import layouts
from dflash_jax.quant.formats import E2M1
from dflash_jax.quant.layouts import KINDS, MATRIX, TABLE, ColumnMajor, Joined, Packed, Tiled
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


def reordered(layout: str, *shape: int, dtype: str = "float32") -> Any:
    drawn = np.random.default_rng(5).standard_normal(shape) / shape[0] ** 0.5
    params = {"down": jnp.asarray(drawn.astype(jnp.dtype(dtype)))}
    products.set_weight_layout(params, layout, {"down": MATRIX})
    return params["down"]


@pytest.mark.optimised
@pytest.mark.parametrize("columns", [1, 2, 9])
def test_a_narrow_weight_gives_a_token_the_same_bits_at_every_place(columns: int) -> None:
    """A single column gates a shared expert; a matrix-vector product would fail here."""
    rng, multiply = np.random.default_rng(7), jit(project)
    w = jnp.asarray(rng.standard_normal((256, columns)), jnp.float32)
    x = rng.standard_normal((12, 256)).astype(np.float32)
    out = np.asarray(multiply(jnp.asarray(x), w))
    for places in range(1, 12):
        moved = multiply(jnp.asarray(np.roll(x, places, axis=0)), w)
        np.testing.assert_array_equal(moved, np.roll(out, places, axis=0))
    assert_near(jnp.asarray(out), x.astype(float) @ np.asarray(w).astype(float))


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("column_major", "float32"), ("column_major", "bfloat16"), ("tiled", "float32")],
)
def test_a_reordered_weight_gives_a_token_the_same_bits_at_every_place(
    layout: str, dtype: str
) -> None:
    w, rng = reordered(layout, 768, 2, 381, dtype=dtype), np.random.default_rng(6)
    multiply, drawn = jit(products.contract), rng.standard_normal((2, 8, 768))
    token, found = drawn[0, 0].copy(), []
    for place in range(16):
        x = 10 * rng.standard_normal((16, 768))
        x[place] = token
        out = multiply(jnp.asarray(x.reshape(2, 8, 768).astype(jnp.dtype(dtype))), w)
        found.append(np.asarray(out).reshape(16, -1)[place])
    assert np.ptp(np.stack(found), axis=0).max() == 0
    x = jnp.asarray(drawn.astype(jnp.dtype(dtype)))
    full = np.asarray(w).astype(float)
    assert_near(multiply(x, w), np.einsum("btd,dgn->btgn", np.asarray(x).astype(float), full))


def test_a_column_major_weight_comes_first_in_its_product() -> None:
    """XLA would transpose it if it saw how the result is used."""
    w, x = reordered("column_major", 128, 256), inputs(8, "float32", 128)
    made = jit(lambda x, w: jax.nn.silu(products.contract(x, w))).lower(x, w).compile()
    assert re.search(r"f32\[256,8\]\{1,0\} dot\(", made.as_text())


@pytest.mark.parametrize(("tokens", "tiled"), [(1, False), (2, True), (32, True), (33, False)])
def test_tiles_are_for_the_few_tokens_of_a_block(tokens: int, tiled: bool) -> None:
    w, x = reordered("tiled", 128, 40), inputs(tokens, "float32", 128)
    multiply = jit(products.contract)
    assert ("f32[3,128,16]" in multiply.lower(x, w).as_text("hlo")) is tiled
    assert_near(multiply(x, w), np.asarray(x).astype(float) @ np.asarray(w).astype(float))


def test_broad_matrices_are_column_major_where_others_are_tiled() -> None:
    assert isinstance(reordered("tiled", 4, 2, 2048), Tiled)
    assert isinstance(reordered("tiled", 4, 4097), ColumnMajor)


@pytest.mark.parametrize(("layout", "kept"), [("column_major", ColumnMajor), ("tiled", Tiled)])
def test_matrices_of_a_tree_are_reordered_in_place_and_back(layout: str, kept: type) -> None:
    table, norm = jnp.arange(6.0).reshape(2, 3), jnp.ones(2)
    packed_one = packed("int8", 32, 8)
    tree = {"mlp": {"down": table, "o": packed_one}, "norm": norm, "embed": table}
    forms = {"mlp/down": MATRIX, "mlp/o": MATRIX, "embed": TABLE}
    products.set_weight_layout(tree, layout, forms)
    down = tree["mlp"]["down"]
    assert isinstance(down, kept)
    assert down.shape == (2, 3)
    assert jax.tree.leaves(down)[-1].shape == {ColumnMajor: (3, 2), Tiled: (1, 2, 16)}[kept]
    assert tree["norm"] is norm
    assert tree["mlp"]["o"] is packed_one
    np.testing.assert_array_equal(np.asarray(down), table)
    ids = jnp.array([[2, 0]])
    rows = products.gather(tree["embed"], ids, jnp.float32)
    np.testing.assert_array_equal(rows[0], np.asarray(table).T[[2, 0]])
    products.set_weight_layout(tree, "row_major", forms)
    np.testing.assert_array_equal(tree["mlp"]["down"], table)


@pytest.mark.parametrize("layout", ["column_major", "tiled"])
def test_small_matrices_that_were_just_read_are_reordered_without_compiling_anything(
    layout: str,
) -> None:
    def tree(module: Any) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        shapes = {"down": (48, 40), "qkv": (40, 2, 4, 8), "head": (40, 130)}
        made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        return {"layers_0": {name: module.asarray(matrix) for name, matrix in made.items()}}

    read, placed = tree(np), tree(jnp)
    forms = {f"layers_0/{name}": MATRIX for name in read["layers_0"]}
    with jax.no_tracing():
        products.set_weight_layout(read, layout, forms)
    products.set_weight_layout(placed, layout, forms)
    assert jax.tree.structure(read) == jax.tree.structure(placed)
    for ours, theirs in zip(*map(jax.tree.leaves, (read, placed)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "uint8"])
def test_columns_taken_slice_by_slice_are_those_that_are_gathered(dtype: str) -> None:
    table = jnp.asarray(np.random.default_rng(5).integers(-100, 100, (6, 23))).astype(dtype)
    ids = jnp.array([[3, 22, 0], [40, -1, 3]])  # two are past the ends
    found = jit(products.take_slices)(table, ids)
    np.testing.assert_array_equal(found, jnp.take(table, ids, axis=1, mode="clip"))
