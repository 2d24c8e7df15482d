"""Compilation of our steps for devices that are not here: bytes and kernels, no times.

    pip install -e '.[tpu]'                                 # for TPUs; J is the version of jax here
    pip install --no-deps --target PLUGIN jax-cuda12-plugin==J jax-cuda12-pjrt==J \\
        nvidia-cuda-nvcc-cu12                               # for GPUs
    python -m benchmarks.compile_for v6e [--models qwen3-8b] [--weights float,int8,int4]
        [--parts] [--variants] [--json OUT]
    python -m benchmarks.compile_for H200 --cuda PLUGIN
    python -m benchmarks.compile_for v5e-8 --mesh 1x8       # or v5e:2x4, by its topology
    python -m benchmarks.compile_for hosts [--json benchmarks/results/collectives.json]

Reports for each program of a full-size model the bytes updated in place, the bytes of temporaries
and of all that it reads and writes, the kernels, and the largest arrays written to memory, which
would include an unpacked weight or a copied cache. It also compares the kernels that sum numbers in
the target between programs: they have to be equal, so that all programs round alike. For several
chips, the collectives are listed. Nothing is run: a real GPU may choose other kernels, as none are
autotuned here, and no program was ever run on a TPU. `hosts` compiles the largest models for
several hosts, by virtual CPU devices, and counts the bytes that one of them reads and sends.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.compile_for import hosts
from benchmarks.compile_for.devices import GPUS, MACHINES, devices, mesh_of
from benchmarks.compile_for.hlo import accessed, counted, launched, target_kernels
from benchmarks.paired import markdown
from dflash_jax.errors import DFlashError

SHOWN = ("plain", "fused")
HEADINGS = (
    "device | model, weights | arguments | temporaries: plain, fused"
    " | bytes accessed over arguments | kernels alike | collectives: plain, fused"
)


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
    depth = 4096
    columns = 24576
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
    """Yield small models of each family: the steps of their programs, in every variant."""
    from benchmarks.gpu_cases import planned
    from dflash_jax.config import TargetConfig
    from dflash_jax.graph.keys import Step
    from dflash_jax.graph.programs import declare
    from dflash_jax.plan import Plan
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
    plan = Plan(rows=2, dtype="bfloat16", max_length=512, block=8, chunk=64)
    in_float32 = dataclasses.replace(plan, dtype="float32")
    models: dict[str, tuple[TargetConfig, str, Plan]] = {  # target, kind of drafter, plan
        "dense": (dense, "dflash", plan),
        "wide, float32": (wide, "dflash", dataclasses.replace(in_float32, rows=3)),
        "dense, DFlash 2": (dense, "dflash2", plan),
        "dense, DSpark": (dense, "dspark", plan),
        "dense, Domino": (dense, "domino", plan),
        "dense, kernels": (dense, "dflash", dataclasses.replace(plan, kernels="pallas")),
        "dense, int4, int8 caches": (
            dense,
            "dflash",
            dataclasses.replace(plan, weights="int4", kv_dtype="int8"),
        ),
        "dense, float32, float16 caches": (
            dense,
            "dflash",
            dataclasses.replace(in_float32, kv_dtype="float16"),
        ),
        "experts": (tiny_moe(), "dflash", plan),
        "hybrid": (tiny_hybrid(), "dflash", plan),
        "gpt-oss": (tiny_gpt_oss(), "dflash", plan),
        "gemma": (tiny_gemma(), "dflash", plan),
    }
    for name, (target, kind, own_plan) in models.items():
        drafter = tiny_drafter(target, kind, block_size=8, target_layer_ids=(0,))
        graph = planned((target, drafter), own_plan, memory=AMPLE)
        kinds = (Step.PREFILL, Step.PLAIN, Step.SPECULATIVE, Step.VERIFY, Step.FORCED_TOKENS)
        programs = declare(graph)
        yield name, {key: p for key, p in programs.items() if key.step in kinds}


def report(executable: Any) -> dict[str, Any]:
    """Return the bytes, kernels and largest written arrays of a compiled program."""
    text = executable.compiled.as_text()
    operations = list(launched(text))
    largest = sorted(operations, key=lambda k: -k[2])[:6]
    moved = accessed(text)
    return {
        "program": str(executable.key),
        "argument_bytes": executable.argument_bytes,
        "donated_bytes": executable.donated_bytes,
        "aliased_bytes": executable.aliased_bytes,
        "temporary_bytes": executable.temporary_bytes,
        "accessed_bytes": sum(moved.values()),
        "operations": len(operations),
        "by_kind": dict(collections.Counter(kind for _, kind, _, _ in operations)),
        "largest_written": [f"{name} {size}" for name, _, size, _ in largest],
        "largest_moved": [f"{x} {moved[x]}" for x in sorted(moved, key=lambda x: -moved[x])[:6]],
        "compile_s": round(executable.seconds, 1),
    }


def arguments(words: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_for", description=__doc__.splitlines()[0]
    )
    parser.add_argument("device", help="e.g. H200, v6e, v5e-8, v5e:2x4; or hosts")
    parser.add_argument("--cuda", type=Path, metavar="PLUGIN", help="folder of JAX's plugin")
    parser.add_argument("--models", default="qwen3-8b")
    parser.add_argument("--weights", default="float,int8,int4")
    parser.add_argument("--programs", default="plain1,plain,verify,draft,fused")
    parser.add_argument("--mesh", help="DATAxMODEL; by default all chips split heads and widths")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--parts", action="store_true", help="single products and attention too")
    parser.add_argument(
        "--variants", action="store_true", help="also small models in every variant"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="add to the results in OUT")
    parser.add_argument("--hlo", type=Path, metavar="FOLDER", help="keep the optimised HLO")
    return parser.parse_args(words)


def compiled(program: Any, device: Any) -> Any:
    """Return a program, compiled for a device if it is not placed on a mesh."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from dflash_jax.graph.build import compile_programs

    if program.placement is None:
        where = SingleDeviceSharding(device)
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), program.arguments
        )
        program = dataclasses.replace(program, arguments=arguments)
    return compile_programs([program])[program.key]


def rows(options: argparse.Namespace, where: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield what is reported of each program."""
    from dflash_jax.graph.keys import ProgramKey, Step, Variant

    if options.parts:
        for program in parts():
            yield report(compiled(program, where[0]))
    small = small_models() if options.variants else iter(())
    for name, programs in small:
        kernels = {
            key: target_kernels(compiled(p, where[0]).compiled.as_text())
            for key, p in programs.items()
        }
        for key, there in kernels.items():
            like = Step.PREFILL if key.step == Step.PREFILL else Step.PLAIN
            row = {"model": name, "program": str(key), "kernels": sum(there.values())}
            greedy = kernels[ProgramKey(like, Variant.GREEDY)]
            # Forced tokens need no head.
            alike = there <= greedy if key.step == Step.FORCED_TOKENS else there == greedy
            yield row | {f"target_as_in_{like}": alike}
    for name in filter(None, options.models.split(",")):
        for weights in options.weights.split(","):
            yield from steps(name, weights, options, where)


def steps(
    name: str, weights: str, options: argparse.Namespace, where: list[Any]
) -> Iterator[dict[str, Any]]:
    """Yield what is reported of the decode steps of a full-size model."""
    import jax

    from benchmarks.gpu_cases import full, part_programs, planned
    from dflash_jax.plan import Plan

    kind = re.split("[-:]", options.device)[0]
    chips = len(where)
    plan = Plan(
        rows=options.rows,
        max_length=options.context + 256,
        weights=weights,
        kernels=options.kernels,
    )
    graph = planned(
        full(name),
        plan,
        platform="gpu" if kind in GPUS else "tpu",
        memory=1 << 50,  # the compiler says what does not fit
        mesh=mesh_of(options.mesh, where),
    )
    products: dict[str, Any] = {}
    for key, program in part_programs(graph).items():
        if key not in options.programs.split(","):
            continue
        row: dict[str, Any] = {"model": name, "weights": weights}
        row["kernels"] = graph.plan.kernels
        if chips > 1:
            row["mesh"] = list(graph.plan.mesh)
        try:
            built = compiled(program, where[0])
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = re.search(r"Used .*? of .*?\.", str(error))
            yield row | {"program": key, "does_not_fit": reason[0] if reason else str(error)[:200]}
            continue
        text = built.compiled.as_text()
        if options.hlo:
            file = options.hlo / f"{options.device}-{name}-{weights}-{key}.txt"
            file.write_text(text, encoding="utf-8")
        row |= report(built)
        products[key] = target_kernels(text)
        if "plain" in products and products[key]:  # drafting alone has none
            row["target_as_in_plain"] = products[key] == products["plain"]
        if chips > 1 and kind in MACHINES:
            row["traffic"] = counted(text, MACHINES[kind], chips)
        yield row


def main(words: list[str] | None = None) -> int:
    """Compile the programs and report on them."""
    options = arguments(words)
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if options.device == "hosts":
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={hosts.DEVICES}"
        return hosts.measure(options.json)
    if options.cuda:
        nvcc = options.cuda / "nvidia" / "cuda_nvcc"
        os.environ["PATH"] = f"{nvcc / 'bin'}:{os.environ['PATH']}"
        flags = f" --xla_gpu_cuda_data_dir={nvcc} --xla_gpu_autotune_level=0"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags
    try:
        for row in rows(options, devices(options.device, options.cuda)):
            print(json.dumps(row), flush=True)
            if options.json:
                add(options.json, options.device, options.context, row)
    except DFlashError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def table(cases: Mapping[str, Any]) -> list[str]:
    """Return the table of docs/benchmarks.md: a line for each full-size model on each device."""
    lines = []
    for device, case in cases.items():
        models: dict[tuple[str, str], dict[str, Any]] = {}
        for row in case["programs"]:
            known = "accessed_bytes" in row or "does_not_fit" in row
            if known and row["program"] in SHOWN and row["kernels"] != "pallas":
                of = models.setdefault((row["model"], row["weights"]), {})
                of[row["program"]] = row
        for (model, weights), of in models.items():
            fits = [row for row in of.values() if "does_not_fit" not in row]
            if not fits:
                reason = next(iter(of.values()))["does_not_fit"]
                sizes = re.findall(r"\(([\d.]+)G\)", reason)
                reason = f"does not fit: {' of '.join(sizes)} GiB" if sizes else reason
                lines.append([device, f"{model}, {weights}", reason, "", "", "", ""])
                continue
            calls = [row["traffic"]["calls"]["local"] for row in fits if "traffic" in row]
            cells = [
                f"{fits[-1]['argument_bytes'] / 1e9:.1f} GB",
                ", ".join(f"{row['temporary_bytes'] / 2**20:.1f}" for row in fits) + " MiB",
                ", ".join(f"{row['accessed_bytes'] / row['argument_bytes']:.2f}" for row in fits),
                "yes" if all(row.get("target_as_in_plain", True) for row in fits) else "no",
                ", ".join(str(sum(counts.values())) for counts in calls) or "-",
            ]
            lines.append([device, f"{model}, {weights}", *cells])
    return markdown(HEADINGS, lines)


def add(path: Path, device: str, context: int, row: dict[str, Any]) -> None:
    """Add a row to a file of results, in place of one of the same program."""
    from benchmarks.environment import environment

    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    result = {"suite": "compile_for", "cases": {}} | kept
    flags = {"xla_flags": "--xla_gpu_autotune_level=0" if device[0] in "HB" else ""}  # no paths
    same = ("model", "weights", "kernels", "mesh", "program")
    of = result["cases"].setdefault(device, {"programs": []})
    others = [x for x in of["programs"] if any(x.get(name) != row.get(name) for name in same)]
    about = {"environment": environment() | flags, "context": context}
    result["cases"][device] = about | {"programs": [*others, row]}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
