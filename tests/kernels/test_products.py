"""Products by the native kernels: their numbers, and rows that do not depend on each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.converters.formats.quants.stored import FORMATS, unpack_blocks
from dflash_jax.kernels.native import interleaved
from dflash_jax.kernels.native.build import library
from dflash_jax.kernels.native.layers import gate
from dflash_jax.kernels.native.products import multiply, multiply_by_experts
from dflash_jax.kernels.products import (
    abstract_stack,
    choose_products,
    contract,
    gather,
    set_weight_layout,
)
from dflash_jax.quant import layouts
from dflash_jax.quant.layouts import FLOAT, KINDS, Interleaved, Packed, dequantise
from tests.quant.test_layouts import random_blocks

pytestmark = pytest.mark.skipif(
    not library(), reason=f"there are no native kernels: {library().reason}"
)
MULTIPLY = jax.jit(contract)
BY_EXPERTS = jax.jit(multiply_by_experts)
FLOATS = {"float32": 2e-6, "bfloat16": 2e-6, "float16": 2e-6}  # largest relative error
MOST = {"sub": 64, "sub_low": 64, "zero": 16}  # bounds of unsigned numbers
GROUPED = tuple(kind for kind in KINDS if kind != "int8")
UNITS = {kind: KINDS[kind].unit for kind in GROUPED} | {"int8": 1}  # K is a multiple of them
ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 64, 65)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(kind: str, depth: int, columns: int, seed: int = 1) -> Packed:
    """Return random weights of a kind, with every code and every scale that it can have."""
    rng = np.random.default_rng(seed)
    arrays = {}
    bits = KINDS[kind].bits
    for name, (rows, dtype) in KINDS[kind].arrays(depth).items():
        if np.dtype(dtype).kind in "iu":
            low, high = (-128, 128) if dtype == "int8" else (0, MOST.get(name, 256))
            if name == "codes" and KINDS[kind].spread == 1 and bits < 8:
                low, high = 0, 1 << bits
            arrays[name] = rng.integers(low, high, (rows, columns)).astype(dtype)
            if name == "codes" and KINDS[kind].numbers:
                arrays[name] = np.array(KINDS[kind].numbers, np.int8)[arrays[name]]
            if name == "high" and bits == 5:
                arrays[name] &= np.uint8(0b01010101)
        else:
            arrays[name] = rng.standard_normal((rows, columns)).astype(dtype)
    return Packed(arrays, kind, (depth, columns))


def floats(dtype: str, depth: int, columns: int, seed: int = 1) -> Interleaved:
    """Return random float weights in strips."""
    params = {"down": jnp.asarray(draw(depth, columns, seed=seed)).astype(dtype)}
    set_weight_layout(params, {"down": layouts.MATRIX}, native=True)
    return params["down"]


def weights(kind: str, depth: int, columns: int, seed: int = 1) -> Interleaved:
    """Return random weights of a kind, or of a float dtype, in strips."""
    if kind in FLOATS:
        return floats(kind, depth, columns, seed)
    return interleaved.interleave(packed(kind, depth, columns, seed))


def stack(kind: str, experts: int, depth: int, columns: int) -> Interleaved:
    """Return a stack of such weights."""
    each = [weights(kind, depth, columns, seed) for seed in range(experts)]
    arrays = {name: np.stack([one.arrays[name] for one in each]) for name in each[0].arrays}
    return Interleaved(arrays, each[0].kind, (experts, depth, columns), stacked=True)


def in_int8(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return activations as the kernels quantise them: codes, and the scale of each group."""
    groups = x.reshape(len(x), -1, group)
    most = np.abs(groups).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(most > np.float32(1e-36), np.float32(127) / most, np.float32(0))
    return np.rint(groups * inverse).astype(np.int32), most * np.float32(1 / 127)


def rows_in_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows [M, K] as the kernels quantise them: codes, wide ones of outliers, and scales."""
    codes = np.zeros(x.shape, np.int32)
    scales = np.zeros((len(x), 1), np.float32)
    for row, numbers in enumerate(x):
        sizes = np.abs(numbers)
        order = np.argsort(-sizes, kind="stable")[:5]
        largest, other = sizes[order[0]], sizes[order[4]] if len(order) > 4 else np.float32(0)
        few, rest = order[:0], numbers.copy()
        if 2 * other < largest <= 8192 * other and other > np.float32(1e-36):
            few = order[:4]
            rest[few] = 0
        code, scale = in_int8(rest[None], len(rest))
        codes[row], scales[row] = code[0, 0], scale[0, 0]
        codes[row, few] = np.rint(numbers[few] * (np.float32(127) / other)) if len(few) else 0
    return codes, scales


def expected(x: np.ndarray, w: Packed) -> np.ndarray:
    """Return the product with quantised activations; integers are summed exactly."""
    if w.kind == "int8":
        codes, scale = rows_in_int8(x)
        sums = codes @ np.asarray(w.arrays["codes"], np.int32)
        return sums.astype(np.float32) * (scale * w.arrays["scale"])
    codes, scale = in_int8(x, 32)
    weights = dequantise(w.arrays, w.kind).astype(np.float64)
    return (codes * scale.astype(np.float64)).reshape(len(x), -1) @ weights


@pytest.mark.parametrize(("depth", "columns"), [(1, 70), (8, 1), (15, 33), (33, 3), (200, 70)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_float_products_are_those_of_float32(dtype: str, depth: int, columns: int) -> None:
    w, x = floats(dtype, depth, columns), draw(65, depth)
    exact = x.astype(np.float64) @ np.asarray(w, np.float64)
    found = MULTIPLY(x, w)
    assert found.dtype == jnp.float32
    limit = FLOATS[dtype] * np.sqrt(depth) * np.abs(exact).max()
    np.testing.assert_allclose(found, exact, atol=limit)


@pytest.mark.parametrize(
    ("depth", "columns"), [(1, 70), (31, 33), (32, 1), (33, 70), (64, 33), (65, 1), (200, 70)]
)
def test_int8_products_are_exact_sums(depth: int, columns: int) -> None:
    w = packed("int8", depth, columns)
    x = draw(9, depth)
    x[3] = 0
    x[4, -1:], x[5, :2], x[6, ::7], x[7, 0] = 50, -700, 30, 1e6  # one, two, many; too far away
    found = MULTIPLY(x, interleaved.interleave(w))
    np.testing.assert_array_equal(found, expected(x, w))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("least", [0.9, 1.0, 1.1])
@pytest.mark.parametrize("step", [1, 8, 16, 17])
def test_outliers_are_found_wherever_they_are(step: int, least: float, rows: int) -> None:
    """Up to nine numbers near half of the largest, in one lane of the vectors or in several."""
    w, x = packed("int8", 256, 48), np.zeros((rows, 256), np.float32)
    for row in range(rows):
        x[row] = 0.01 * draw(1, 256)
        places = (row + step * np.arange(row % 9 + 1)) % 256
        x[row, places] = np.float32(least)
        x[row, places[0]] = -2
    np.testing.assert_array_equal(MULTIPLY(x, interleaved.interleave(w)), expected(x, w))
    tiny = x * np.float32(2.0**-126)
    np.testing.assert_array_equal(MULTIPLY(tiny, interleaved.interleave(w)), expected(tiny, w))


def test_int8_products_have_the_bits_of_xlas() -> None:
    """The largest codes, too, whose products would overflow 16 bits in pairs."""
    w, x = packed("int8", 512, 70), draw(9, 512)
    w.arrays["codes"][:, 0], w.arrays["codes"][:, 1] = 127, -128
    x[0], x[1] = 1, -1
    x[2:5, 7], x[4:6, 300] = 60, -9000
    codes, scale = rows_in_int8(x)
    assert np.abs(codes).max() > 100_000

    @jax.jit
    def multiply(codes: jax.Array, scale: jax.Array) -> jax.Array:
        w_codes = w.arrays["codes"].astype(jnp.int32)
        sums = jnp.dot(codes, w_codes, preferred_element_type=jnp.int32)
        return sums.astype(jnp.float32) * (scale * w.arrays["scale"])

    wanted = multiply(codes, scale)
    np.testing.assert_array_equal(MULTIPLY(x, interleaved.interleave(w)), wanted)


def test_outliers_cost_the_others_no_accuracy() -> None:
    w, x = packed("int8", 512, 70), draw(9, 512)
    before = np.abs(MULTIPLY(x, interleaved.interleave(w)) - x @ dequantise(w.arrays, "int8"))
    x[:, [3, 40, 41, 500]] *= 100
    exact = x.astype(np.float64) @ dequantise(w.arrays, "int8")
    error = np.abs(MULTIPLY(x, interleaved.interleave(w)) - exact)
    assert error.mean() < 1.5 * before.mean()


@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (33, 70), (200, 33), (512, 4099)])
def test_int8_weights_are_multiplied_by_floats_on_request(depth: int, columns: int) -> None:
    w, x = packed("int8", depth, columns), draw(17, depth)
    native = choose_products(interleaved.interleave(w), "native", "float")
    exact = x.astype(np.float64) @ dequantise(w.arrays, "int8")
    found = np.asarray(MULTIPLY(x, native))
    np.testing.assert_allclose(found, exact, atol=2e-6 * np.sqrt(depth) * np.abs(exact).max())
    alone = np.concatenate([MULTIPLY(x[i : i + 1], native) for i in range(len(x))])
    np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize(("groups", "columns"), [(1, 33), (2, 1), (3, 70)])
@pytest.mark.parametrize("kind", GROUPED)
def test_other_products_quantise_each_32_activations(kind: str, groups: int, columns: int) -> None:
    depth = groups * UNITS[kind]
    w = packed(kind, depth, columns)
    x = draw(9, depth)
    x[3] = 0
    exact = expected(x, w)
    found = MULTIPLY(x, interleaved.interleave(w))
    size = np.abs(x).max() * np.abs(dequantise(w.arrays, kind)).max()
    np.testing.assert_allclose(found, exact, atol=2e-6 * depth * size)


@pytest.mark.parametrize("rows", [1, 7, 65])
@pytest.mark.parametrize("kind", ["Q5_0", "IQ4_NL"])
def test_narrow_codes_give_the_bits_of_those_of_eight(kind: str, rows: int) -> None:
    narrow = packed(kind, 224, 70)
    codes = narrow.arrays["codes"] - np.int8(KINDS[kind].zero)
    wide = Packed(narrow.arrays | {"codes": codes}, "Q8_0", narrow.shape)
    x = draw(rows, 224)
    found = MULTIPLY(x, interleaved.interleave(narrow))
    np.testing.assert_array_equal(found, MULTIPLY(x, interleaved.interleave(wide)))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *KINDS])
def test_a_row_has_the_same_bits_alone_and_among_others(kind: str) -> None:
    """Columns enough for several threads."""
    depth, columns = 256, 4099
    w, x = weights(kind, depth, columns), draw(65, depth)
    x[::3, 7] *= 50  # outliers, in some rows
    alone = np.concatenate([MULTIPLY(x[i : i + 1], w) for i in range(len(x))])
    for rows in ROWS:
        np.testing.assert_array_equal(MULTIPLY(x[:rows], w), alone[:rows], err_msg=str(rows))
    again = [np.asarray(MULTIPLY(x, w)) for _ in range(20)]
    for found in again:
        np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *KINDS])
def test_rows_of_zeros_are_zeros_wherever_they_are_and_change_no_others(kind: str) -> None:
    """Those of dead tokens; tiles of AMX are used for many live rows only."""
    w, x = weights(kind, 256, 4099), draw(65, 256)
    x[::3, 7] *= 50
    alone = np.concatenate([MULTIPLY(x[i : i + 1], w) for i in range(len(x))])
    rng = np.random.default_rng(0)
    for rows in (1, 2, 9, 17, 65):
        for share in (0.0, 0.1, 0.5, 0.9):
            live = rng.random(rows) < share
            found = np.asarray(MULTIPLY(np.where(live[:, None], x[:rows], -0.0), w))
            wanted = np.where(live[:, None], alone[:rows], 0)
            np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *KINDS])
def test_rows_that_do_not_count_are_not_read_and_nothing_is_added_to_them(kind: str) -> None:
    """Columns for several threads, and an unfilled strip; rows of zeros count, too."""
    w, x, onto = weights(kind, 256, 4099), draw(65, 256), draw(65, 4099)
    x[::3, 7] *= 50
    x[5] = 0
    alone = np.concatenate([MULTIPLY(x[i : i + 1], w) for i in range(len(x))])
    add = jax.jit(lambda x, w, onto, live: multiply(x, w, live=live, onto=onto))
    rng = np.random.default_rng(0)
    for rows in (1, 9, 17, 65):
        live = rng.random(rows) < rng.choice([0.0, 0.2, 0.8])
        given = np.where(live[:, None], x[:rows], np.nan)
        found = np.asarray(multiply(given, w, live=live))
        np.testing.assert_array_equal(found[live], alone[:rows][live])
        wanted = np.where(live[:, None], onto[:rows] + alone[:rows], onto[:rows])
        np.testing.assert_array_equal(add(given, w, onto[:rows], live), wanted)


@pytest.mark.parametrize("kind", [*FLOATS, *KINDS])
def test_a_gate_in_a_product_has_the_bits_of_one_after_it(kind: str) -> None:
    whole = weights(kind, 256, 2 * 144)
    both = dataclasses.replace(whole, shape=(256, 2, 144))
    for activation in ("silu", "gelu_tanh"):
        for rows in (1, 5, 40):
            x = draw(rows, 256, seed=rows)
            x[rows // 2 : rows - 1] = 0
            after = gate(multiply(x, both), gelu=activation == "gelu_tanh")
            np.testing.assert_array_equal(multiply(x, both, activation=activation), after)
    narrow = dataclasses.replace(weights(kind, 256, 40), shape=(256, 2, 20))
    with pytest.raises(jax.errors.JaxRuntimeError, match="does not fit its format"):
        multiply(draw(1, 256), narrow, activation="silu")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", *GROUPED])
def test_a_row_by_its_expert_has_the_bits_of_the_product_with_its_matrix(kind: str) -> None:
    """Alone and among others, live and dead; columns for several threads, and an unfilled strip."""
    experts, columns = 5, 1035
    w, x = stack(kind, experts, 256, columns), draw(65, 256)
    x[::3, 7] *= 50
    of_each = np.stack([MULTIPLY(x, w.expert(e)) for e in range(experts)])
    rng = np.random.default_rng(0)
    for rows in (1, 9, 65):
        for share, most in ((0.0, 5), (0.5, 5), (1.0, 5), (0.8, 1)):
            live, expert = rng.random(rows) < share, rng.integers(0, most, rows)
            given = np.where(live[:, None], x[:rows], np.float32(-0.0))
            found = np.asarray(BY_EXPERTS(given, expert, w))
            wanted = np.where(live[:, None], of_each[expert, np.arange(rows)], 0)
            np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32))


@pytest.mark.parametrize("kind", ["float32", "Q4_0"])
def test_experts_that_do_not_exist_are_clipped_and_stacks_that_do_not_fit_refused(
    kind: str,
) -> None:
    w, x = stack(kind, 3, 64, 24), draw(4, 64)
    x[1, 5] = np.nan
    found = np.asarray(BY_EXPERTS(x, np.array([-7, 2, 3, 1]), w))
    wanted = np.asarray(BY_EXPERTS(x, np.array([0, 2, 2, 1]), w))
    np.testing.assert_array_equal(found, wanted)
    assert np.isfinite(found).all(axis=1).tolist() == [True, False, True, True]
    for depth, columns in ((32, 24), (64, 48)):
        other = dataclasses.replace(w, shape=(3, depth, columns))
        with pytest.raises(Exception, match="shape does not fit its format"):
            jax.block_until_ready(BY_EXPERTS(draw(4, depth), np.zeros(4, np.int32), other))


@pytest.mark.parametrize("dtype", FLOATS)
def test_stacks_are_laid_out_in_strips_and_back(dtype: str) -> None:
    given = draw(3, 10, 2, 21).astype(jnp.dtype(dtype))
    params, forms = {"mlp": {"experts_gate_up": given}}, {"mlp/experts_gate_up": layouts.STACK}
    set_weight_layout(params, forms, native=True)
    made = params["mlp"]["experts_gate_up"]
    assert (made.shape, made.stacked) == (given.shape, True)
    abstract = abstract_stack(given.shape, FLOAT, given.dtype)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), made.arrays) == jax.tree.map(
        lambda a: (a.shape, a.dtype), abstract.arrays
    )
    set_weight_layout(params, forms, native=True)
    assert params["mlp"]["experts_gate_up"] is made
    set_weight_layout(params, forms, native=False)
    np.testing.assert_array_equal(params["mlp"]["experts_gate_up"], given)


@pytest.mark.parametrize("columns", [24, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_change_their_layout_only(kind: str, columns: int) -> None:
    w = packed(kind, 512 if kind != "int8" else 130, columns * 2)
    reshaped = Packed(w.arrays, kind, (w.shape[0], 2, columns))
    native = interleaved.interleave(reshaped)
    found = {name: (a.shape, a.dtype) for name, a in native.arrays.items()}
    assert found == interleaved.shapes(kind, w.shape[0], 2 * columns)
    back = interleaved.deinterleave(native)
    assert (back.kind, back.shape) == (kind, reshaped.shape)
    assert list(back.arrays) == list(w.arrays)
    for name, array in w.arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array)
    assert MULTIPLY(draw(2, 3, w.shape[0]), native).shape == (2, 3, 2, columns)


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_are_moved_to_strips(kind: str) -> None:
    """Rows of several tensors, each with its own columns; row starts are not aligned."""
    packed, blocks = FORMATS[kind][0], random_blocks(kind, 37, 512)
    weight = Packed(unpack_blocks(blocks, kind, packed), packed, (512, 37))
    wanted = interleaved.interleave(weight)
    order = np.random.default_rng(5).permutation(37)
    padded = np.pad(blocks[order], ((0, 0), (1, 2)))[:, 1:-2]
    found = interleaved.empty(packed, (512, 37))
    for rows, columns in ((padded[:20], order[:20]), (padded[20:], order[20:])):
        if kind in interleaved.MOVED:
            interleaved.put_blocks(found, rows, columns, kind)
        else:
            arrays = unpack_blocks(rows, kind, packed)
            part = Packed(arrays, packed, (512, len(columns)))
            interleaved.put_packed(found, part, columns)
    assert (found.kind, found.shape) == (packed, (512, 37))
    assert list(found.arrays) == list(wanted.arrays)
    for name, array in wanted.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (33, 24), (64, 35), (130, 16)])
def test_floats_are_quantised_in_strips(depth: int, columns: int) -> None:
    w = draw(depth, columns)
    w[:, -1] = 0
    wanted = interleaved.interleave(Packed(layouts.quantise(w, "int8"), "int8", w.shape))
    found = interleaved.quantise_int8(w.reshape(depth, 1, columns))
    assert found.shape == (depth, 1, columns)
    for name, array in wanted.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)


@pytest.mark.parametrize("kind", ["bfloat16", *KINDS])
def test_columns_are_gathered_as_floats(kind: str) -> None:
    ids = np.array([[3, 22], [0, 30]])  # the last is past the end
    if kind in FLOATS:
        w = floats(kind, 128, 23)
        full = np.asarray(w)
    else:
        unpacked = packed(kind, 256, 23)
        full, w = dequantise(unpacked.arrays, kind), interleaved.interleave(unpacked)
    found = jax.jit(lambda w, ids: gather(w, ids, jnp.dtype("float32")))(w, ids)
    wanted = full.T[np.minimum(ids, 22)]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-36, 1e-38, 1e-41, 1e30])
def test_activations_may_be_tiny_or_huge(size: float) -> None:
    for kind in ("float32", *KINDS):
        w = packed(kind, 256, 8) if kind in KINDS else None
        native = interleaved.interleave(w) if w else floats(kind, 256, 8)
        x = (draw(3, 256) * size).astype(np.float32)
        wanted = expected(x, w) if w else x.astype(np.float64) @ np.asarray(native, np.float64)
        found = np.asarray(MULTIPLY(x, native))
        assert np.isfinite(found).all(), kind
        limit = 1e-6 * 256 * np.abs(x).max() * (128 * 64 if w else 1)
        np.testing.assert_allclose(found, wanted, atol=max(limit, 1e-32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_reach_their_own_row_only(bad: float) -> None:
    for kind in ("float32", *KINDS):
        w, x = weights(kind, 256, 8), draw(3, 256)
        clean = np.asarray(MULTIPLY(x, w))
        x[1, 5] = bad
        found = np.asarray(MULTIPLY(x, w))
        assert not np.isfinite(found[1]).any(), kind
        np.testing.assert_array_equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("kind", ["float32", *KINDS])
def test_a_weight_of_another_shape_is_refused(kind: str) -> None:
    w = weights(kind, 256, 24)
    for depth, columns in ((252, 24), (256, 48)):
        shape = dataclasses.replace(w, shape=(depth, columns))
        with pytest.raises(Exception, match="shape does not fit its format"):
            jax.block_until_ready(MULTIPLY(draw(2, depth), shape))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_columns_of_a_16_bit_table_are_read_without_converting_it(dtype: str) -> None:
    """Also in a loop, out of which XLA moves what does not change."""
    depth, columns = 64, 2048
    values = jnp.asarray(draw(columns // 16, depth, 16)).astype(dtype)
    table = Interleaved({"values": values}, FLOAT, (depth, columns))

    def loop(table: Interleaved, ids: jax.Array) -> jax.Array:
        def step(_: int, ids: jax.Array) -> jax.Array:
            return (gather(table, ids, jnp.float32).sum(axis=1) * 7).astype(jnp.int32) % columns

        return jax.lax.fori_loop(0, 5, step, ids)

    built = jax.jit(loop).lower(table, jnp.arange(3)).compile()
    assert built.memory_analysis().temp_size_in_bytes < depth * columns
    found = gather(table, jnp.array([5, 2047, 16]), jnp.float32)
    whole = np.asarray(values, np.float32).swapaxes(1, 2).reshape(columns, depth)
    np.testing.assert_array_equal(found, whole[[5, 2047, 16]])
