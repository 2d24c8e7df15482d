"""Compilation of our steps for devices that are not here: bytes and kernels, no times.

    pip install -e '.[tpu]'                                 # for TPUs; J is the version of jax here
    pip install --no-deps --target PLUGIN jax-cuda12-plugin==J jax-cuda12-pjrt==J \\
        nvidia-cuda-nvcc-cu12                               # for GPUs
    python -m benchmarks.compile_for v6e [--models qwen3-8b] [--weights float,int8,int4]
        [--parts] [--variants] [--json OUT]
    python -m benchmarks.compile_for H200 --cuda PLUGIN
    python -m benchmarks.compile_for v5e-8 --mesh 1x8       # or v5e:2x4, by its topology

Reports for each program of a full-size model the bytes updated in place, the bytes of temporaries
and of all that it reads and writes, the kernels, and the largest arrays written to memory, which
would include an unpacked weight or a copied cache. It also compares the kernels that sum numbers in
the target between programs: they have to be equal, so that all programs round alike. For several
chips, the collectives are listed. Nothing is run: a real GPU may choose other kernels, as none are
autotuned here, and no program was ever run on a TPU.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.collectives import ITEM, V5E, V6E, counted
from benchmarks.paired import markdown
from dflash_jax.errors import DFlashError, PlanError, RequestError

# Multiprocessors, bytes per second, bytes of L2, GHz, bytes of memory, compute capability.
GPUS = {
    "H100": (132, 3352320000000, 52428800, 1.98, 84942979072, 9),
    "H200": (132, 4800000000000, 52428800, 1.98, 150754820096, 9),
    "B200": (148, 7672320000000, 132644864, 1.965, 191514411008, 10),
}
GPU = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: {}
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {} l2_cache_size: {}
  clock_rate_ghz: {} device_memory_size: {} shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {} minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "NVIDIA {}"
"""
# Topologies by the number of chips. One chip is a part of the smallest.
FLAT = {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
TPUS = {"v5e": FLAT, "v5p": {1: "2x2x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4"}, "v6e": FLAT}
MACHINES = {"v5e": V5E, "v6e": V6E}  # whose collectives are counted
SHOWN = ("plain", "fused")
HEADINGS = (
    "device | model, weights | arguments | temporaries: plain, fused"
    " | bytes accessed over arguments | kernels alike | collectives: plain, fused"
)
NAME = re.compile(r"(\w+?)(?:-(\d+)|:(\d+(?:x\d+)*))?")
LINE = re.compile(r"\s+(?:ROOT )?%([\w.-]+) = \(?(\w+)\[([\d,]*)\].*?[\])}] ([\w-]+)\(")
ON_CHIP = re.compile(r"[^\[]*\[[\d,]*\]\{[^}]*S\(\d\)")  # in a TPU's own memory
CALLED = re.compile(r"(?:to_apply|body|condition|branch_computations)=\{?%([\w.-]+)")
NAMES = re.compile(r",? ?metadata=\{[^}]*\}|%[\w.-]+|(?:params|state|parameter|param)[\w.-]*")
FREE = {"parameter", "bitcast", "get-tuple-element", "constant", "tuple", "iota"}


def devices(name: str, cuda: Path | None = None) -> list[Any]:
    """Return devices to compile for.

    Args:
      name: of a GPU or a TPU, with a number of chips as in "v5e-8" or a topology as in "v5e:2x4".
      cuda: folder with JAX's plugin for GPUs.

    Raises:
      RequestError: the device is unknown, or the package that compiles for it is missing.
      PlanError: there is no such topology.
    """
    found = NAME.fullmatch(name)
    kind, count, topology = found.groups() if found else ("", None, None)
    known = [*GPUS, *TPUS]
    if kind not in known or (topology and kind in GPUS):
        raise RequestError(
            f"device {name!r} is unknown; known: {', '.join(known)}, with a number of chips as in"
            " v6e-8, or the topology of a TPU as in v6e:2x4"
        )
    chips = int(count or 1)
    if kind in GPUS:
        return _gpus(kind, chips, cuda)
    if not topology and chips not in TPUS[kind]:
        sizes = ", ".join(map(str, TPUS[kind]))
        raise PlanError(f"{name} has {chips} chips; expected one of {sizes}")
    made = _tpus(f"{kind}:{topology or TPUS[kind][chips]}")
    return made if topology else made[:chips]


def _gpus(kind: str, chips: int, cuda: Path | None) -> list[Any]:
    from jax._src.lib import xla_client

    library = Path("" if cuda is None else cuda) / "jax_plugins/xla_cuda12/xla_cuda_plugin.so"
    if cuda is None or not library.is_file():
        raise RequestError(f"no {library}; --cuda is the folder of JAX's plugin (see --help)")
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    xla_client.initialize_pjrt_plugin("cuda")
    options = {"target_config": GPU.format(*GPUS[kind], kind), "topology": f"1x1x{chips}"}
    return xla_client.make_c_api_device_topology(api, "", **options)._make_compile_only_devices()


def _tpus(topology: str) -> list[Any]:
    import jax
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise RequestError("libtpu is not installed: pip install -e '.[tpu]'")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no host of a TPU to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no device, so none to lock
    try:
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise PlanError(f"there is no TPU topology {topology}: {reason}") from error


def computations(hlo: str) -> dict[str, str]:
    """Return the text of every computation by name, the entry among them."""
    texts = re.split(r"\n(?=%|ENTRY)", hlo)
    return {found[1]: x for x in texts if (found := re.match(r"(?:ENTRY )?%([\w.-]+)", x))}


def launched(hlo: str) -> Iterator[tuple[str, str, int, str]]:
    """Yield every launched operation: name, kind, bytes written to memory, line of HLO."""
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
            yield found[1], found[4], 0 if ON_CHIP.match(line) else _bytes(found), line


def accessed(hlo: str) -> dict[str, int]:
    """Return the bytes of memory that each launched operation reads and writes.

    Of arrays that are sliced, gathered from or updated in place, only the part that is touched.
    What a TPU keeps on the chip counts where it is fetched, and then not again.
    """
    bodies = {name: list(_operations(text)) for name, text in computations(hlo).items()}
    sizes = {name: size for body in bodies.values() for name, _, size, _ in body}
    found: dict[str, int] = {}
    for name, kind, written, line in launched(hlo):
        if kind.endswith("-done"):  # a slice that was fetched; copies count where they start
            size = LINE.match(line)
            found[name] = _bytes(size) if size and kind == "slice-done" else 0
            continue
        operands = re.findall(r"%([\w.-]+)", line.split(f" {kind}(", 1)[1].split(")", 1)[0])
        called = re.findall(r"calls=%([\w.-]+)", line)
        body = bodies.get(called[0], []) if called else []
        inner = {int(rest.split(")")[0]): of for of, what, _, rest in body if what == "parameter"}
        total = 0
        for i, operand in enumerate(operands):
            uses = [of for of in body if inner.get(i, "-") in _operands(of)]
            while uses and all(of[1] == "bitcast" for of in uses):
                inner[i] = uses[0][0]
                uses = [of for of in body if inner[i] in _operands(of)]
            parts = [_touched(of, sizes) if _operands(of)[0] == inner[i] else None for of in uses]
            whole = not uses or None in parts
            total += sizes.get(operand, 0) if whole else sum(filter(None, parts))
        updates = [_touched(of, sizes) for of in body if of[1] == "dynamic-update-slice"]
        found[name] = total + (sum(filter(None, updates)) if updates else written)
    return found


def _touched(operation: tuple[str, str, int, str], sizes: Mapping[str, int]) -> int | None:
    """Return the bytes of its first operand that an operation touches; None for all of them."""
    _, kind, size, _ = operation
    if kind in ("slice", "dynamic-slice", "gather"):
        return size
    if kind == "dynamic-update-slice":
        return sizes.get(_operands(operation)[1], 0)
    return None


def _operands(operation: tuple[str, str, int, str]) -> list[str]:
    return re.findall(r"%([\w.-]+)", operation[3].split(")", 1)[0])


def _operations(text: str) -> Iterator[tuple[str, str, int, str]]:
    """Yield name, kind, bytes and operands of every operation of a computation."""
    for line in text.splitlines():
        if found := LINE.match(line):
            size = 0 if ON_CHIP.match(line) else _bytes(found)
            yield found[1], found[4], size, line[found.end() :]


def _bytes(found: re.Match[str]) -> int:
    """Return the bytes of an array in a match of `LINE`."""
    return math.prod(int(d) for d in found[3].split(",") if d) * ITEM.get(found[2], 4)


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
        adds = re.search(r" (dot|convolution|reduce|reduce-window|custom-call)\(", body + line)
        if adds and ("/target/" in line or "/head/" in line) and "/draft/" not in line:
            config = re.findall(r"backend_config=(.*)", line)
            if config and "window_config" in config[0]:
                body, config = _tpu_kernel(body or line, config[0])
            made[f"{kind} {NAMES.sub('', body)} {config}"] += 1
    return made


def _tpu_kernel(body: str, config: str) -> tuple[str, list[str]]:
    """Return a TPU's kernel without memory spaces, and without the order of its dimensions.

    XLA keeps some operands in the chip's own memory, as many as fit in a program, and may write the
    heads or the tokens of a result first. Neither changes the order in which numbers are added.
    """
    order = r"\{[\d,]*:[^}]*\}|, (?:window=\{[^}]*\}|dim_labels=[\w>-]+|frontend_attributes=.*)"
    found = re.findall(r'"((?:kernel|output|input)_window_bounds)":(\[[^\]]*\])', config)
    bounds = [f"{name} {sorted(re.findall(r'[0-9]+', of))}" for name, of in found]
    return re.sub(order, "", body), bounds


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
        "dense, Domino": (dense, {"drafter": "domino"}),
        "dense, kernels": (dense, {"kernels": "pallas"}),
        "dense, int4, int8 caches": (dense, {"weights": "int4", "kv_dtype": "int8"}),
        "dense, float32, float16 caches": (dense, {"dtype": "float32", "kv_dtype": "float16"}),
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
    text = executable.compiled.as_text()
    found = list(launched(text))
    largest = sorted(found, key=lambda k: -k[2])[:6]
    moved = accessed(text)
    return {
        "program": str(executable.key),
        "argument_bytes": executable.argument_bytes,
        "donated_bytes": executable.donated_bytes,
        "aliased_bytes": executable.aliased_bytes,
        "temporary_bytes": executable.temporary_bytes,
        "accessed_bytes": sum(moved.values()),
        "operations": len(found),
        "by_kind": dict(collections.Counter(kind for _, kind, _, _ in found)),
        "largest_written": [f"{name} {size}" for name, _, size, _ in largest],
        "largest_moved": [f"{x} {moved[x]}" for x in sorted(moved, key=lambda x: -moved[x])[:6]],
        "compile_s": round(executable.seconds, 1),
    }


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device", help="e.g. H200, v6e, v5e-8, v5e:2x4")
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
    return parser.parse_args(given)


def mesh_of(text: str | None, where: list[Any]) -> Any:
    """Return a mesh of devices, or None for a single one.

    Args:
      text: its shape, as DATAxMODEL.

    Raises:
      PlanError: it does not have as many devices.
    """
    from jax.sharding import Mesh

    from dflash_jax.graph.placement import AXES

    shape = text or f"1x{len(where)}"
    sizes = [int(n) for n in shape.split("x") if n.isdecimal()]
    if len(sizes) != 2 or shape.count("x") != 1 or math.prod(sizes) != len(where):
        raise PlanError(
            f"mesh is {shape!r} for {len(where)} devices; expected DATAxMODEL whose product is that"
        )
    return Mesh(np.asarray(where).reshape(sizes), AXES) if len(where) > 1 else None


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

    for program in parts() if options.parts else ():
        yield report(compiled(program, where[0]))
    for name, programs in small_models() if options.variants else ():
        kernels = {
            key: target_kernels(compiled(p, where[0]).compiled.as_text())
            for key, p in programs.items()
        }
        for key, there in kernels.items():
            like = Step.PREFILL if key.step == Step.PREFILL else Step.PLAIN
            row = {"model": name, "program": str(key), "kernels": sum(there.values())}
            least, forced = kernels[ProgramKey(like, Variant.GREEDY)], Step.FORCED_TOKENS
            alike = there <= least if key.step == forced else there == least
            yield row | {f"target_as_in_{like}": alike}  # forced tokens need no head
    for name in filter(None, options.models.split(",")):
        for weights in options.weights.split(","):
            yield from steps(name, weights, options, where)


def steps(
    name: str, weights: str, options: argparse.Namespace, where: list[Any]
) -> Iterator[dict[str, Any]]:
    """Yield what is reported of the decode steps of a full-size model."""
    import jax

    from benchmarks.gpu_cases import full, part_programs, planned

    kind, chips = re.split("[-:]", options.device)[0], len(where)
    graph = planned(
        full(name),
        platform="gpu" if kind in GPUS else "tpu",
        memory=1 << 50,  # the compiler says what does not fit
        mesh=mesh_of(options.mesh, where),
        rows=options.rows,
        max_length=options.context + 256,
        weights=weights,
        kernels=options.kernels,
    )
    products: dict[str, Any] = {}
    for key, program in part_programs(graph).items():
        if key not in options.programs.split(","):
            continue
        row = {"model": name, "weights": weights, "kernels": graph.plan.kernels}
        row |= {"mesh": list(graph.plan.mesh)} if chips > 1 else {}
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


def main(given: list[str] | None = None) -> int:
    """Compile the programs and report on them."""
    options = arguments(given)
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
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
                ", ".join(str(sum(found.values())) for found in calls) or "-",
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
