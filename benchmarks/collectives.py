"""Bytes and collectives of decode steps on several hosts, read from compiled programs.

Every case compiles the plain and the speculative step for a mesh of virtual CPU devices, in a
process of its own and without weights. The parameters of a compiled program are one device's shares
of weights and caches; its optimised HLO has the collectives. Nothing is timed: `estimate` divides
bytes by the rates of data sheets.

    python -m benchmarks.collectives --json benchmarks/results/collectives.json
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paired import markdown

# bytes of a number, by HLO's names
ITEM = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
ROWS, LENGTH = 16, 8192  # requests decoded together, and slots of each
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
BY_REDUCTION = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1}
_CALL = re.compile(rf"= (.+?) ({COLLECTIVES})(?:-start)?\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_PARAMETER = re.compile(r"= (\w+\[[\d,]*\])\S* parameter\(\d+\).*op_name=\"([^\"]+)\"")

_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]+)\](?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? "
    r"\{((?:'\w+',?)+)\}"
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates of data sheets, in bytes per second and in one direction.

    Attributes:
      local: devices that share the fast links.
      link: rate of a device to others of its host.
      network: rate of a device to other hosts.
      memory: bytes of a device.
    """

    name: str
    local: int
    read: float
    link: float
    network: float
    memory: float


H100 = Machine("H100", local=8, read=3.35e12, link=450e9, network=50e9, memory=80e9)
# A slice is one domain of links, whatever its hosts; a ring uses two of a chip's four links.
V5E = Machine("v5e", local=16, read=819e9, link=100e9, network=100e9, memory=16e9)
V6E = Machine("v6e", local=16, read=1638e9, link=200e9, network=200e9, memory=32e9)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a machine; data x model is its mesh."""

    model: str
    where: str
    machine: Machine
    data: int
    split: int

    @property
    def name(self) -> str:
        """Key of the results."""
        return f"{self.model}, {self.where}, {self.data} x {self.split}"


HEADINGS = (
    "model and devices | mesh | step | holds | reads: weights, caches"
    " | collectives in a host, between hosts | sends in a host, between hosts"
    " | estimate: memory + links"
)
_PLACES = (
    ("2 hosts of 8 H100", H100, 2, 8),
    ("2 hosts of 8 H100", H100, 1, 16),
    ("4 hosts of 8 H100", H100, 4, 8),
    ("v5e-16", V5E, 2, 8),
    ("v5e-16", V5E, 1, 16),
)
CASES = tuple(Case(model, *place) for model in ("Qwen3-32B", "gpt-oss-120b") for place in _PLACES)

# Fields of the published configs. No drafter of Qwen3-32B is published: this one has the shape of
# z-lab/Qwen3.5-27B-DFlash, whose target has the same width and depth.
CONFIGS = Path(__file__).with_name("large_models.json")


def compiled_steps(case: Case) -> Iterator[tuple[str, str]]:
    """Yield the name and the optimised HLO of the plain and of the speculative step.

    Experts and attention take the forms that devices other than a CPU run.
    """
    import jax

    from benchmarks.gpu_cases import planned
    from dflash_jax.config import check_pair, drafter_config, target_config
    from dflash_jax.graph.build import OPTIONS, lower
    from dflash_jax.graph.keys import ProgramKey, Step, Variant

    jax.lax.platform_dependent = lambda *arguments, default, **forms: default(*arguments)
    outer, inner = json.loads(CONFIGS.read_text(encoding="utf-8"))[case.model]
    target, drafter = target_config(outer), drafter_config(inner)
    check_pair(target, drafter)
    fields = {"rows": ROWS, "max_length": LENGTH, "mesh": (case.data, case.split)}
    graph = planned((target, drafter), memory=1 << 50, **fields)
    programs = graph.programs(variants=(Variant.GREEDY,))
    for step in (Step.PLAIN, Step.SPECULATIVE):
        lowered = lower(programs[ProgramKey(step, Variant.GREEDY)])
        yield step.value, lowered.compile(compiler_options=OPTIONS).as_text() or ""


def groups(text: str, devices: int) -> list[list[int]]:
    """Return the replica groups of a collective, in any of XLA's notations.

    Raises:
      ValueError: the notation is another one.
    """
    if found := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text):
        return [_numbers(part) for part in re.findall(r"\{([\d,]+)\}", found[1])]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        order = np.arange(devices).reshape(_numbers(found[2]))
        if found[3]:
            order = order.transpose(_numbers(found[3]))
        return order.reshape(_numbers(found[1])).tolist()
    if found := _MESH.search(text):
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        names, along = list(axes), re.findall(r"'(\w+)'", found[4])
        order = np.arange(devices)
        if found[2]:
            order = order.reshape(_numbers(found[2])).transpose(_numbers(found[3]))
        kept = [names.index(name) for name in names if name not in along]
        order = order.reshape(list(axes.values())).transpose([*kept, *map(names.index, along)])
        return order.reshape(-1, math.prod(axes[name] for name in along)).tolist()
    if found := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", text):
        return [_numbers(part) for part in re.findall(r"\{([\d,]+)\}", found[1])]
    raise ValueError(f"a collective has unknown groups: {text[:300]}")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def counted(hlo: str, machine: Machine, devices: int) -> dict[str, Any]:
    """Return what one device reads and sends in a step.

    A ring sends (n - 1) / n of the bytes of an all-gather, a reduce-scatter or an all-to-all, and
    twice that for an all-reduce.

    Raises:
      ValueError: a collective is in a loop or a branch, so that its number is not known.
    """
    before, after = hlo.split("\nENTRY ", 1)
    entry, _, after = after.partition("\n}")
    if any(map(_CALL.search, [*before.splitlines(), *after.splitlines()])):
        raise ValueError("a collective is outside of the program's entry")
    read: collections.Counter[str] = collections.Counter()
    Counts = collections.Counter[str]
    calls = {"local": Counts(), "network": Counts()}
    sent, seconds = dict.fromkeys(calls, 0), 0.0
    for line in entry.splitlines():
        if found := _PARAMETER.search(line):
            read[_role(found[2])] += _bytes(found[1])
        if not (found := _CALL.search(line)):
            continue
        kind, members = found[2], groups(line, devices)
        size = len(members[0])
        if size == 1:
            continue
        share = BY_REDUCTION.get(kind, 0) * (size - 1) / size
        whole = _bytes(found[1]) * (size if kind == "reduce-scatter" else 1)
        moved = round(whole * share) if share else whole
        hosts = [{device // machine.local for device in one} for one in members]
        kept = "network" if any(len(one) > 1 for one in hosts) else "local"
        rate = machine.link
        if kept == "network":  # a ring for each adapter of the group's devices
            alike = min(size // len(one) for one in hosts)
            rate = min(machine.link, machine.network * alike)
        calls[kept][kind] += 1
        sent[kept] += moved
        seconds += moved / rate
    by_memory = (read["weights"] + read["caches"]) / machine.read
    return {
        "held": sum(read.values()),
        "weights": read["weights"],
        "caches": read["caches"],
        "calls": {kept: dict(found) for kept, found in calls.items()},
        "sent": sent,
        "estimate": {"memory_ms": 1e3 * by_memory, "links_ms": 1e3 * seconds},
    }


def _role(name: str) -> str:
    """Return what a parameter of a program is: a step reads few rows of an embedding table."""
    if name.startswith("arguments[0]"):
        return "tables" if "embed" in name else "weights"
    return "caches" if re.match(r"arguments\[1\]\.(target|draft)", name) else "others"


def _bytes(shapes: str) -> int:
    """Return the bytes of a shape, or of the shapes of a tuple, in HLO's notation."""
    total = 0
    for dtype, sizes in _SHAPE.findall(shapes):
        total += ITEM[dtype] * math.prod(int(n) for n in sizes.split(",") if n)
    return total


def table(cases: Mapping[str, Any]) -> list[str]:
    """Return the table of docs/serving.md: a line for each step of each case."""
    rows = []
    for name, case in cases.items():
        model, where, mesh = name.split(", ")
        for step, found in case["steps"].items():
            sent, estimate = found["sent"], found["estimate"]
            held = f"{found['held'] / 1e9:.1f} GB"
            cells = [
                f"{model}, {where}",
                mesh,
                step,
                held if found["held"] < case["memory"] else f"{held}: does not fit",
                f"{found['weights'] / 1e9:.2f} GB, {found['caches'] / 1e9:.2f} GB",
                ", ".join(str(sum(found["calls"][kept].values())) for kept in sent),
                ", ".join(_size(n) for n in sent.values()),
                f"{estimate['memory_ms']:.2f} + {estimate['links_ms']:.2f} ms",
            ]
            rows.append(cells)
    return markdown(HEADINGS, rows)


def _size(n: float) -> str:
    unit, by = ("MB", 1e6) if n >= 1e5 else ("kB", 1e3)
    return f"{n / by:.1f} {unit}" if n else "0"


def measure(case: Case) -> dict[str, Any]:
    """Count a case in a process with as many virtual devices."""
    flags = f"--xla_force_host_platform_device_count={case.data * case.split}"
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.collectives", "--case", case.name],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
    )
    return json.loads(found.stdout.splitlines()[-1])


def main(words: Sequence[str] | None = None) -> int:
    """Count every case, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="count this one, in this process, and print JSON")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    if options.case:
        [case] = [case for case in CASES if case.name == options.case]
        devices = case.data * case.split
        steps = {step: counted(hlo, case.machine, devices) for step, hlo in compiled_steps(case)}
        about = {"machine": case.machine.name, "memory": case.machine.memory}
        print(json.dumps(about | {"steps": steps}))
        return 0
    from benchmarks.environment import write_result

    cases: dict[str, Any] = {}
    for case in CASES:
        cases[case.name] = measure(case)
        print("\n".join(table({case.name: cases[case.name]})), flush=True)
    write_result(options.json, "collectives", {"cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
