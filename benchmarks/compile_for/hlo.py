"""What is read from the optimised HLO of a program: kernels, bytes, and collectives."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# bytes of a number, by HLO's names
ITEM = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
LINE = re.compile(r"\s+(?:ROOT )?%([\w.-]+) = \(?(\w+)\[([\d,]*)\].*?[\])}] ([\w-]+)\(")
ON_CHIP = re.compile(r"[^\[]*\[[\d,]*\]\{[^}]*S\(\d\)")  # an array in a TPU's own memory
CALLED = re.compile(r"(?:to_apply|body|condition|branch_computations)=\{?%([\w.-]+)")
NAMES = re.compile(r",? ?metadata=\{[^}]*\}|%[\w.-]+|(?:params|state|parameter|param)[\w.-]*")
FREE = {"parameter", "bitcast", "get-tuple-element", "constant", "tuple", "iota"}
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
    """A kind of device.

    Attributes:
      local: devices that share the fast links.
      memory: bytes of a device.
    """

    name: str
    local: int
    memory: float


H100 = Machine("H100", local=8, memory=80e9)
V5E = Machine("v5e", local=16, memory=16e9)  # a slice is one domain of links, whatever its hosts
V6E = Machine("v6e", local=16, memory=32e9)


def computations(hlo: str) -> dict[str, str]:
    """Return the text of every computation by name, the entry among them."""
    by_name = {}
    for text in re.split(r"\n(?=%|ENTRY)", hlo):
        if name := re.match(r"(?:ENTRY )?%([\w.-]+)", text):
            by_name[name[1]] = text
    return by_name


def launched(hlo: str) -> Iterator[tuple[str, str, int, str]]:
    """Yield every launched operation: name, kind, bytes written to memory, line of HLO."""
    named = computations(hlo)
    done = set()
    waiting = [name for name, text in named.items() if text.startswith("ENTRY")]
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        done.add(name)
        for line in named.get(name, "").splitlines():
            match = LINE.match(line)
            if match is None or match[4] in FREE:
                continue
            if match[4] in ("while", "call", "conditional"):
                waiting += CALLED.findall(line)
                continue
            written = 0 if ON_CHIP.match(line) else _size(match)
            yield match[1], match[4], written, line


def accessed(hlo: str) -> dict[str, int]:
    """Return the bytes of memory that each launched operation reads and writes.

    Of arrays that are sliced, gathered from or updated in place, only the part that is touched
    counts. What a TPU keeps on the chip counts where it is fetched, and then not again.
    """
    bodies = {name: list(_operations(text)) for name, text in computations(hlo).items()}
    sizes = {name: size for body in bodies.values() for name, _, size, _ in body}
    moved: dict[str, int] = {}
    for name, kind, written, line in launched(hlo):
        if kind.endswith("-done"):  # a slice that was fetched; copies count where they start
            size = LINE.match(line)
            moved[name] = _size(size) if size and kind == "slice-done" else 0
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
        if updates:
            written = sum(filter(None, updates))
        moved[name] = total + written
    return moved


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
        if match := LINE.match(line):
            size = 0 if ON_CHIP.match(line) else _size(match)
            yield match[1], match[4], size, line[match.end() :]


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
    windows = re.findall(r'"((?:kernel|output|input)_window_bounds)":(\[[^\]]*\])', config)
    bounds = [f"{name} {sorted(re.findall(r'[0-9]+', of))}" for name, of in windows]
    return re.sub(order, "", body), bounds


def groups(text: str, devices: int) -> list[list[int]]:
    """Return the replica groups of a collective, in any of XLA's notations.

    Raises:
      ValueError: the notation is another one.
    """
    if match := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text):
        return [_numbers(part) for part in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        order = np.arange(devices).reshape(_numbers(match[2]))
        if match[3]:
            order = order.transpose(_numbers(match[3]))
        return order.reshape(_numbers(match[1])).tolist()
    if match := _MESH.search(text):
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        names = list(axes)
        along = re.findall(r"'(\w+)'", match[4])
        order = np.arange(devices)
        if match[2]:
            order = order.reshape(_numbers(match[2])).transpose(_numbers(match[3]))
        kept = [names.index(name) for name in names if name not in along]
        order = order.reshape(list(axes.values())).transpose([*kept, *map(names.index, along)])
        return order.reshape(-1, math.prod(axes[name] for name in along)).tolist()
    if match := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", text):
        return [_numbers(part) for part in re.findall(r"\{([\d,]+)\}", match[1])]
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
    sent = dict.fromkeys(calls, 0)
    for line in entry.splitlines():
        if parameter := _PARAMETER.search(line):
            read[_role(parameter[2])] += bytes_of(parameter[1])
        collective = _CALL.search(line)
        if collective is None:
            continue
        kind = collective[2]
        members = groups(line, devices)
        size = len(members[0])
        if size == 1:
            continue
        share = BY_REDUCTION.get(kind, 0) * (size - 1) / size
        whole = bytes_of(collective[1])
        if kind == "reduce-scatter":
            whole *= size
        moved = round(whole * share) if share else whole
        hosts = [{device // machine.local for device in one} for one in members]
        kept = "network" if any(len(one) > 1 for one in hosts) else "local"
        calls[kept][kind] += 1
        sent[kept] += moved
    return {
        "held": sum(read.values()),
        "weights": read["weights"],
        "caches": read["caches"],
        "calls": {kept: dict(counts) for kept, counts in calls.items()},
        "sent": sent,
    }


def _role(name: str) -> str:
    """Return what a parameter of a program is: a step reads few rows of an embedding table."""
    if name.startswith("arguments[0]"):
        return "tables" if "embed" in name else "weights"
    return "caches" if re.match(r"arguments\[1\]\.(target|draft)", name) else "others"


def bytes_of(shapes: str) -> int:
    """Return the bytes of a shape, or of the shapes of a tuple, in HLO's notation."""
    total = 0
    for dtype, sizes in _SHAPE.findall(shapes):
        total += ITEM.get(dtype, 4) * math.prod(int(n) for n in sizes.split(",") if n)
    return total


def _size(line: re.Match[str]) -> int:
    """Return the bytes of an array in a match of `LINE`."""
    return bytes_of(f"{line[2]}[{line[3]}]")
