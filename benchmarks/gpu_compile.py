"""Compilation of our steps for a GPU without having one: bytes and kernels, no times.

    pip install --no-deps --target PLUGIN jax-cuda12-plugin==J jax-cuda12-pjrt==J \\
        nvidia-cuda-nvcc-cu12                               # J is the version of jax here
    python -m benchmarks.gpu_compile PLUGIN [--models qwen3-8b] [--weights float,int8,int4]
        [--parts] [--lanes] [--json OUT]

Reports for each program of a full-size model the bytes updated in place, the bytes of temporaries,
the kernels, and the largest arrays written to memory, which would include an unpacked weight or a
copied cache. It also compares the kernels that sum numbers in the target between programs: they
have to be equal, so that all programs round alike. Kernels are not autotuned here, so a real
device may choose others.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("h200.textproto")
ITEM = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
LINE = re.compile(r"\s+(?:ROOT )?%([\w.-]+) = \(?(\w+)\[([\d,]*)\].*?[\])}] ([\w-]+)\(")
CALLED = re.compile(r"(?:to_apply|body|condition|branch_computations)=\{?%([\w.-]+)")
NAMES = re.compile(r",? ?metadata=\{[^}]*\}|%[\w.-]+|(?:params|state|parameter|param)[\w.-]*")
FREE = {"parameter", "bitcast", "get-tuple-element", "constant", "tuple", "iota"}


def h200(plugin: Path) -> Any:
    """Return a device to compile for."""
    from jax._src.lib import xla_client

    library = plugin / "jax_plugins" / "xla_cuda12" / "xla_cuda_plugin.so"
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    xla_client.initialize_pjrt_plugin("cuda")
    options = {"target_config": TARGET.read_text(encoding="utf-8"), "topology": "1x1x1"}
    topology = xla_client.make_c_api_device_topology(api, "", **options)
    return topology._make_compile_only_devices()[0]


def computations(hlo: str) -> dict[str, str]:
    """Return the text of every computation by name, the entry among them."""
    texts = re.split(r"\n(?=%|ENTRY)", hlo)
    return {found[1]: x for x in texts if (found := re.match(r"(?:ENTRY )?%([\w.-]+)", x))}


def launched(hlo: str) -> Iterator[tuple[str, str, int, str]]:
    """Yield every launched operation: name, kind, bytes written, line of HLO."""
    named, done = computations(hlo), set()
    waiting = [name for name, text in named.items() if text.startswith("ENTRY")]
    while waiting:
        text = named.get(name := waiting.pop(), "")
        if name in done:
            continue
        done.add(name)
        for line in text.splitlines():
            if not (found := LINE.match(line)) or found[4] in FREE:
                continue
            if found[4] in ("while", "call", "conditional"):
                waiting += CALLED.findall(line)
                continue
            size = math.prod(int(d) for d in found[3].split(",") if d)
            yield found[1], found[4], size * ITEM.get(found[2], 4), line


def target_kernels(hlo: str) -> collections.Counter[str]:
    """Return the target's kernels that sum numbers, without names, to compare between programs.

    These are products, norms and softmax, whose rounding depends on the order of summation.
    """
    bodies = computations(hlo)
    made = collections.Counter()
    for _, kind, _, line in launched(hlo):
        body = bodies.get(next(iter(re.findall(r"calls=%([\w.-]+)", line)), ""), "")
        if " scatter(" in body:  # never autotuned, so its operand layout does not matter
            body = "\n".join(row for row in body.splitlines()[1:] if " parameter(" not in row)
        adds = re.search(r" (dot|reduce|reduce-window|custom-call)\(", body + line)
        if adds and ("/target/" in line or "/head/" in line) and "/draft/" not in line:
            config = re.findall(r"backend_config=(.*)", line)
            made[f"{kind} {NAMES.sub('', body)} {config}"] += 1
    return made


def parts() -> Iterator[Any]:
    """Yield products with each kind of weight, and attention over a cache, in all forms."""
    import jax
    import jax.numpy as jnp

    from dflash_jax.graph.keys import ProgramKey
    from dflash_jax.graph.programs import Program
    from dflash_jax.kernels.caches import empty_cache
    from dflash_jax.kernels.pallas_attention import attend_kernel
    from dflash_jax.kernels.products import abstract, choose_products, contract
    from dflash_jax.nn.attention import attend_whole
    from dflash_jax.quant.layouts import KINDS

    half = jnp.dtype("bfloat16")
    depth, columns = 4096, 24576
    x = jax.ShapeDtypeStruct((16, depth), half)
    for kind in KINDS:
        for kernel in (True, False) if kind != "int8" else (False,):
            how = "pallas" if kernel else "xla"
            w = abstract((depth, columns), (1, ((kind, columns),)), half)
            w = choose_products(w, how, "float")
            name = f"product 16 x {depth} x {columns}, {kind} by {how}"
            yield Program(ProgramKey(name), contract, (x, w))
    for dtype in (half, jnp.dtype("int8")):
        for slots in (1280, 8448, 33024):
            q = jax.ShapeDtypeStruct((1, 16, 8, 4, 128), half)
            cache = jax.eval_shape(lambda n=slots, d=dtype: empty_cache(1, 8, n, 128, dtype=d))
            seen = jax.ShapeDtypeStruct((1, 16, slots), jnp.bool_)
            for how, form in (("pallas", attend_kernel), ("xla", attend_whole)):
                run = functools.partial(form, sinks=None, scale=0.1)
                name = f"attention over {slots} slots, {dtype.name} by {how}"
                yield Program(ProgramKey(name), run, (q, cache, seen))


def small_models() -> Iterator[tuple[str, dict[str, Any]]]:
    """A small model of each family: what decodes and what feeds prompts, in every variant."""
    from benchmarks.gpu_cases import planned
    from dflash_jax.config import TargetConfig
    from dflash_jax.graph.keys import Step
    from dflash_jax.graph.programs import declare
    from dflash_jax.testing import (
        AMPLE,
        tiny_drafter,
        tiny_gemma,
        tiny_gpt_oss,
        tiny_hybrid,
        tiny_moe,
        tiny_target,
    )

    dense = tiny_target(windows=(None, 32, 32), hidden_size=256, intermediate_size=512)
    # The product of its head is split over its depth and summed afterwards.
    wide = tiny_target(
        windows=(None,), num_layers=1, hidden_size=512, intermediate_size=1024, vocab_size=2048
    )
    made: dict[str, tuple[TargetConfig, dict[str, Any]]] = {
        "dense": (dense, {}),
        "wide, float32": (wide, {"rows": 3, "dtype": "float32"}),
        "dense, DFlash 2": (dense, {"drafter": "dflash2"}),
        "dense, DSpark": (dense, {"drafter": "dspark"}),
        "dense, kernels": (dense, {"kernels": "pallas"}),
        "dense, int4, int8 caches": (dense, {"weights": "int4", "kv_dtype": "int8"}),
        "experts": (tiny_moe(), {}),
        "hybrid": (tiny_hybrid(), {}),
        "gpt-oss": (tiny_gpt_oss(), {}),
        "gemma": (tiny_gemma(), {}),
    }
    for name, (target, fields) in made.items():
        kind = fields.pop("drafter", "dflash")
        drafter = tiny_drafter(target, kind, block_size=8, target_layer_ids=(0,))
        fields = {"rows": 2, "dtype": "bfloat16"} | fields
        sizes = {"max_length": 512, "block": 8, "chunk": 64}
        graph = planned((target, drafter), memory=AMPLE, **sizes, **fields)
        kinds = (Step.PREFILL, Step.PLAIN, Step.SPECULATIVE, Step.VERIFY, Step.FORCED_TOKENS)
        programs = declare(graph)
        yield name, {key: p for key, p in programs.items() if key.step in kinds}


def report(executable: Any) -> dict[str, Any]:
    """Return the bytes, kernels and largest written arrays of a compiled program."""
    found = list(launched(executable.compiled.as_text()))
    largest = sorted(found, key=lambda k: -k[2])[:6]
    return {
        "program": str(executable.key),
        "argument_bytes": executable.argument_bytes,
        "donated_bytes": executable.donated_bytes,
        "aliased_bytes": executable.aliased_bytes,
        "temporary_bytes": executable.temporary_bytes,
        "operations": len(found),
        "by_kind": dict(collections.Counter(kind for _, kind, _, _ in found)),
        "largest_written": [f"{name} {size}" for name, _, size, _ in largest],
        "compile_s": round(executable.seconds, 1),
    }


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plugin", type=Path)
    parser.add_argument("--models", default="qwen3-8b")
    parser.add_argument("--weights", default="float,int8,int4")
    parser.add_argument("--programs", default="plain1,plain,verify,draft,fused")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--parts", action="store_true", help="single products and attention too")
    parser.add_argument(
        "--lanes", dest="variants", action="store_true", help="also small models in every variant"
    )
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--hlo", type=Path, metavar="FOLDER", help="keep the optimised HLO")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Compile the programs and report on them."""
    options = arguments(given)
    nvcc = options.plugin / "nvidia" / "cuda_nvcc"
    os.environ["PATH"] = f"{nvcc / 'bin'}:{os.environ['PATH']}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = f" --xla_gpu_cuda_data_dir={nvcc} --xla_gpu_autotune_level=0"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags

    import jax
    from jax.sharding import SingleDeviceSharding

    from benchmarks.environment import environment
    from benchmarks.gpu_cases import full, part_programs, planned
    from dflash_jax.graph.build import compile_programs
    from dflash_jax.graph.keys import ProgramKey, Step, Variant

    where = SingleDeviceSharding(h200(options.plugin))

    def placed(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    found: list[dict[str, Any]] = []

    def compiled(program: Any) -> Any:
        arguments = jax.tree.map(placed, program.arguments)
        program = dataclasses.replace(program, arguments=arguments)
        return compile_programs([program])[program.key]

    def add(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        found.append(row)
        if options.json:
            here = environment() | {"xla_flags": "--xla_gpu_autotune_level=0"}  # no paths
            result = {"suite": "gpu_compile", "device": "H200", "environment": here}
            result |= {"context": options.context, "programs": found}
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for program in parts() if options.parts else ():
        add(report(compiled(program)))
    for name, programs in small_models() if options.variants else ():
        kernels = {k: target_kernels(compiled(p).compiled.as_text()) for k, p in programs.items()}
        for key, there in kernels.items():
            like = Step.PREFILL if key.step == Step.PREFILL else Step.PLAIN
            row = {"model": name, "program": str(key), "kernels": sum(there.values())}
            least, forced = kernels[ProgramKey(like, Variant.GREEDY)], Step.FORCED_TOKENS
            alike = there <= least if key.step == forced else there == least
            add(row | {f"target_as_in_{like}": alike})  # forced tokens need no head
    for name in filter(None, options.models.split(",")):
        for weights in options.weights.split(","):
            length = options.context + 256
            fields = {"max_length": length, "weights": weights, "kernels": options.kernels}
            graph = planned(full(name), **fields)
            products: dict[str, Any] = {}
            for key, program in part_programs(graph).items():
                if key not in options.programs.split(","):
                    continue
                built = compiled(program)
                if options.hlo:
                    file = options.hlo / f"{name}-{weights}-{key}.txt"
                    file.write_text(built.compiled.as_text(), encoding="utf-8")
                row = {"model": name, "weights": weights, "kernels": graph.plan.kernels}
                row |= report(built)
                products[key] = target_kernels(built.compiled.as_text())
                if "plain" in products and products[key]:  # drafting alone has none
                    row["target_as_in_plain"] = products[key] == products["plain"]
                add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
