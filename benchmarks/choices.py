"""Design alternatives of a step, timed against each other on this device.

    python -m benchmarks.choices [--pairs 15] [--only product] [--pin 0]
        [--json benchmarks/results/choices.json]

Attention over the whole of a large cache and over its live pieces; products with packed weights
and with float ones, a few columns at a time and all at once; float matrices in the orders of
`Plan.weight_layout`; native kernels for every kind of weight; the engine with and without
lookahead, and with int8 weights. Samples are taken in turn; a ratio is
over the first form of its group. Temporaries are those of the compiled program.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflash_jax as dj
from benchmarks.environment import environment
from benchmarks.paired import interleaved, ratio, spread
from dflash_jax.graph.build import jit
from dflash_jax.kernels import products
from dflash_jax.kernels.caches import LayerCache
from dflash_jax.kernels.native.build import library
from dflash_jax.kernels.native.interleaved import interleave
from dflash_jax.nn.attention import attend_pieces, attend_whole, slot_positions, visible
from dflash_jax.nn.layers import project
from dflash_jax.quant.layouts import KINDS, Packed

Forms = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
# Tokens per call and matrix sizes: shipped pair, 9M, 60M, prompts.
ORDERS = ((1, 192, 1024), (8, 192, 1024), (8, 512, 192), (16, 256, 1536), (16, 512, 3072))
ORDERS += ((64, 192, 1024), (64, 512, 3072))
WIDTHS = ((576, 1536), (1536, 576), (576, 49152), (2048, 8192))
SHAPES = tuple((tokens, *width) for width in WIDTHS for tokens in (1, 8, 16, 64, 512))
FEW = 8  # tokens of a call that reads more weights than the caches hold


def noise(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    """Return random numbers of a dtype, small for scales."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 60, shape), dtype)
    return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.01, dtype)


def attention(live: int, *, slots: int = 8192, kv: int = 8, groups: int = 4) -> Forms:
    """Return forms of attention of 16 tokens after `live` tokens in 8192 slots, float32."""
    q = noise((1, 16, kv, groups, 128), jnp.float32)
    cache = LayerCache(*(noise((1, kv, slots, 128), jnp.float32, seed) for seed in (1, 2)))
    end = jnp.asarray([live])
    query = end[:, None] - 16 + jnp.arange(16)[None, :]
    seen = visible(query, slot_positions(end, slots), causal=True, window=None)
    forms = {"whole": attend_whole, "pieces": attend_pieces}
    return {
        name: (partial(form, sinks=None, scale=0.1), (q, cache, seen))
        for name, form in forms.items()
    }


def product(rows: int, *, depth: int = 4096, columns: int = 12288) -> Forms:
    """Return forms of x · w: float32, packed kinds, and int4 unpacked at once."""
    x = noise((rows, depth), jnp.float32)
    float32 = jnp.dot, (x, noise((depth, columns), jnp.float32, 1))
    forms: Forms = {"float32": float32}
    for kind in KINDS:
        arrays = {
            name: noise((count, columns), dtype, 3)
            for name, (count, dtype) in KINDS[kind].arrays(depth).items()
        }
        forms[kind] = (partial(products.multiply_by_slices, kind=kind), (x, arrays))
        if kind == "Q4_0":
            forms["Q4_0 at once"] = (partial(products.multiply_unpacked, kind=kind), (x, arrays))
    return forms


def orders(tokens: int, depth: int, columns: int) -> Forms:
    """Return the products of a call with four million weights in each layout."""
    x, count = noise((tokens, depth), jnp.float32), max(1, (1 << 22) // (depth * columns))

    def multiply(x: Any, weights: dict[str, Any]) -> list[Any]:
        return [project(x, layer["down"]) for layer in weights.values()]

    forms: Forms = {}
    for order in ("row_major", "column_major", "tiled"):
        weights = {str(i): {"down": noise((depth, columns), jnp.float32, i)} for i in range(count)}
        products.set_weight_layout(weights, order)
        forms[order] = multiply, (x, weights)
    return forms


def kernels(pairs: int, tokens: int, depth: int, columns: int) -> dict[str, Any]:
    """Return figures of x · w by XLA in float32 and by native kernels, by kind of weight.

    A call multiplies by several weights, of 32 million numbers in total for few tokens. Figures are
    milliseconds of a product, GB/s of weights, and billions of multiplications a second.
    """
    x, count = noise((tokens, depth), jnp.float32), max(1, (1 << 25) // (depth * columns))
    count = count if tokens <= FEW else 1
    forms: Forms = {}
    sizes = {}

    def add(name: str, weight: Any) -> None:
        sizes[name] = sum(array.nbytes for array in jax.tree.leaves(weight))
        copies = [jax.tree.map(partial(jnp.array, copy=True), weight) for _ in range(count)]
        forms[name] = lambda x, copies: [project(x, w) for w in copies], (x, copies)

    for dtype in ("float32", "bfloat16", "float16"):
        for layout in ("row_major", "column_major", "tiled", "native"):
            if dtype == "float32" or layout == "native":
                tree = {"down": noise((depth, columns), dtype, 1)}
                native = layout == "native"
                products.set_weight_layout(tree, "interleaved" if native else layout)
                add(f"{dtype}, {layout}", tree["down"])
    for kind, form in KINDS.items():
        arrays = {
            name: noise((rows, columns), of, 3)
            for name, (rows, of) in form.arrays(depth).items()
            if depth % form.unit == 0
        }
        if arrays:
            add(f"{kind}, native", interleave(Packed(arrays, kind, (depth, columns))))
    found = compare("", forms, pairs, products=count)
    medians = {form: spreads["median"] / 1e3 for form, spreads in found["ms"].items()}
    found["gb_per_s"] = {form: sizes[form] / s / 1e9 for form, s in medians.items()}
    multiplied = tokens * depth * columns / 1e9
    return found | {"gmac_per_s": {form: multiplied / s for form, s in medians.items()}}


def compare(name: str, forms: Forms, pairs: int, *, products: int = 1) -> dict[str, Any]:
    """Return milliseconds and temporaries of each form, and ratios over the first.

    Args:
      products: of a call; milliseconds are those of one.
    """
    calls, temporary = {}, {}
    for form, (function, args) in forms.items():
        compiled = jit(function).lower(*args).compile()
        temporary[form] = compiled.memory_analysis().temp_size_in_bytes

        def run(compiled: Any = compiled, args: tuple[Any, ...] = args) -> float:
            started = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            return (time.perf_counter() - started) * 1e3 / products

        calls[form] = run
    return {"name": name, "temporary_bytes": temporary} | _figures(calls, pairs)


LOOKAHEAD = {f"lookahead {n}": {"lookahead": n} for n in (1, 0)}
INT8 = {
    "float32": {},
    "int8, XLA": {"weights": "int8", "kernels": "xla"},
    "int8, native": {"weights": "int8", "kernels": "native"},
}


def decoding(
    pairs: int, plans: Mapping[str, Mapping[str, Any]], *, speculative: bool = True
) -> dict[str, Any]:
    """Return milliseconds per token of the shipped pair, by the fields of its plan."""
    engines = {n: dj.load(plan=dj.Plan(max_length=512, **plan)) for n, plan in plans.items()}
    for engine in engines.values():
        engine.measures_drafting = False
    prompt = next(iter(engines.values())).chat_ids([{"role": "user", "content": "Count to ten."}])

    def run(engine: Any) -> float:
        options = {"max_tokens": 96, "ignore_eos": True, "speculative": speculative}
        result = engine.generate(prompt, **options)
        return result.stats.decode_s / len(result.token_ids) * 1e3

    calls = {name: partial(run, engine) for name, engine in engines.items()}
    return _figures(calls, pairs)


def _figures(calls: dict[str, Callable[[], float]], pairs: int) -> dict[str, Any]:
    samples = interleaved(calls, pairs)
    first = next(iter(calls))
    return {
        "ms": {form: spread(x).to_json() for form, x in samples.items()},
        "ratio": {form: ratio(samples, form, first).to_json() for form in list(calls)[1:]},
    }


def main() -> int:
    """Measure every group and print a line for each form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", default="", metavar="TEXT", help="groups whose name has it")
    parser.add_argument("--pin", type=int, metavar="CPU", help="keeps to one core")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options, load = parser.parse_args(), os.getloadavg()[0]  # other processes slow all forms
    if options.pin is not None:
        os.sched_setaffinity(0, {options.pin})  # before JAX starts its threads
    groups: dict[str, Callable[[], Forms]] = {
        **{f"attention, {n} of 8192 slots live": partial(attention, n) for n in (256, 2048, 8000)},
        **{f"product 4096 x 12288, {rows} rows": partial(product, rows) for rows in (1, 16)},
        **{"order {}: {} x {}".format(*shape): partial(orders, *shape) for shape in ORDERS},
    }
    decoded: dict[str, Callable[[int], dict[str, Any]]] = {
        **{
            "kernels, {} tokens: {} x {}".format(*s): partial(
                kernels, tokens=s[0], depth=s[1], columns=s[2]
            )
            for s in SHAPES
        },
        "lookahead, shipped pair, a token": partial(decoding, plans=LOOKAHEAD),
        "kernels, shipped pair, a drafted token": partial(decoding, plans=INT8),
        "kernels, shipped pair, a plain token": partial(decoding, plans=INT8, speculative=False),
    }
    if not library():
        left_out = [name for name in decoded if "kernels" in name]
        decoded = {name: measure for name, measure in decoded.items() if name not in left_out}
        skipped = "".join(f"\n  {name}" for name in left_out)
        print(f"skipped, since there are no native kernels ({library().reason}):{skipped}")
    found = [
        compare(name, forms(), options.pairs)
        for name, forms in groups.items()
        if options.only in name
    ]
    found += [
        measure(options.pairs) | {"name": name}
        for name, measure in decoded.items()
        if options.only in name
    ]
    for group in found:
        print(group["name"])
        for form, ms in group["ms"].items():
            over = group["ratio"].get(form, {"median": 1.0})["median"]
            temporary = group.get("temporary_bytes", {}).get(form)
            room = "" if temporary is None else f"  temporaries {temporary / 1e6:.1f} MB"
            speed = group.get("gb_per_s", {}).get(form)
            if speed is not None:
                room = f"  {speed:.1f} GB/s  {group['gmac_per_s'][form]:.0f} GMAC/s"
            print(f"  {form:22} {ms['median']:9.3f} ms  x {over:.2f}{room}")
    if options.json:
        result = {"suite": "choices", "environment": environment(), "pairs": options.pairs}
        result |= {"load_average": [load, os.getloadavg()[0]], "groups": found}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
