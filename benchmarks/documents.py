"""Tables and pictures of the documents, made from the files in `benchmarks/results`.

    python -m benchmarks.documents [--record]

A page has `<!-- table: NAME -->` before a table and `<!-- end -->` after it. What stands between
them is replaced by the table of the result of that name, with its machine, versions and command.
Files that are up to date are not written. With --record, the command of the terminal's picture
runs first, and what it prints becomes a result.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import (
    acceptance,
    accuracy,
    decode,
    gguf_files,
    pictures,
    quantisers,
    rows,
    serving,
)
from benchmarks.compile_for import __main__ as compile_for
from benchmarks.compile_for import hosts
from benchmarks.environment import write_result
from benchmarks.llama_cpp import __main__ as llama_cpp
from recipes.smollm2 import comparison, short_runs
from recipes.smollm2.__main__ import DRAFTERS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
PAGES = tuple(ROOT / "docs" / name for name in ("benchmarks.md", "experiments.md"))
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHOWN = 'dflash-jax generate "What can you do for me?" --show-drafts'  # in the terminal's picture
PEERS = {"torch": "PyTorch", "transformers": "transformers", "dflash": "dflash"}
VECTORS = {"avx512f": "(AVX-512)", "avx2": "(AVX2)"}  # by the names of `widest_vectors`
BUILT = "llama-cpp-python 0.3.36"
WITHOUT_AMX = f"{BUILT} built without AMX"
PREBUILT = "xllamacpp 2026.10.11549"
SERVING = "python -m benchmarks.serving ours=COMMAND llama.cpp=COMMAND"

Result = Mapping[str, Any]
Lines = Callable[[Any], list[str]]


class Table(NamedTuple):
    """A table that is made from a result.

    Attributes:
      lines: makes its lines in Markdown from a part of the result.
      part: key of that part.
      command: that measures it.
      peer: package that it is compared with, which the result does not name.
    """

    lines: Lines
    part: str
    command: str
    peer: str = ""


def acceptance_of_all_prompts(tables: Mapping[str, Any]) -> list[str]:
    """Return acceptance over the prompts of all kinds, in Markdown."""
    return acceptance.table({title: {"all": groups["all"]} for title, groups in tables.items()})


def accuracy_of_smollm2(cases: Mapping[str, Any]) -> list[str]:
    """Return the accuracy of SmolLM2's modes, in Markdown."""
    return accuracy.table({"smollm2": cases["smollm2"]})


def shapes(drafters: Mapping[str, Any]) -> list[str]:
    """Return the drafters of several shapes, in Markdown."""
    return comparison.lines({"drafters": drafters}, DRAFTERS)


def changes(runs: Mapping[str, Any]) -> list[str]:
    """Return short runs with changes of the recipe, in Markdown."""
    return short_runs.lines({"runs": runs})


TABLES = {  # by the name of the result
    "acceptance": Table(
        acceptance_of_all_prompts, "tables", "python -m benchmarks.acceptance --target smollm2"
    ),
    "accuracy": Table(accuracy_of_smollm2, "cases", "make llama-cpp", BUILT),
    "collectives": Table(hosts.table, "cases", "python -m benchmarks.compile_for hosts"),
    "compile_for": Table(compile_for.table, "cases", "python -m benchmarks.compile_for DEVICE"),
    "decode": Table(decode.ratios_table, "cases", "python -m benchmarks.decode"),
    "decode_rounds": Table(
        decode.ratios_table,
        "cases",
        "python -m benchmarks.decode --configs tiny --rounds 1,4,8,16 --no-official",
    ),
    "gguf_encoders": Table(
        gguf_files.encoders_table,
        "figures",
        "python -m benchmarks.gguf_files --peer PYTHON --encoders",
        PREBUILT,
    ),
    "gguf_files": Table(
        gguf_files.table,
        "figures",
        "python -m benchmarks.gguf_files FILE.gguf --peer PYTHON",
        PREBUILT,
    ),
    "gguf_logits": Table(
        gguf_files.logits_table,
        "figures",
        "python -m benchmarks.gguf_files FILE.gguf --peer PYTHON --logits",
        PREBUILT,
    ),
    "llama_cpp": Table(llama_cpp.table, "cases", "make llama-cpp"),
    "llama_cpp_amx": Table(llama_cpp.table, "cases", "make llama-cpp", WITHOUT_AMX),
    "quantisers": Table(
        quantisers.table,
        "figures",
        "python -m benchmarks.quantisers FILE.gguf --peer PYTHON --library LIBLLAMA",
        f"llama.cpp's quantiser of @node-llama-cpp/linux-x64 3.22.1, {PREBUILT}",
    ),
    "rows": Table(rows.table, "figures", "python -m benchmarks.rows"),
    "rows_qwen": Table(rows.table, "figures", "python -m benchmarks.rows --target FILE.gguf"),
    "serving_qwen": Table(serving.table, "figures", SERVING, PREBUILT),
    "serving_smollm2": Table(serving.table, "figures", SERVING, PREBUILT),
    "short_runs": Table(
        changes,
        "runs",
        "python -m recipes.smollm2 RUN --preset smollm2-mixture --set anchors=16"
        " short NAME --every 9",
    ),
    "smollm2_shapes": Table(shapes, "drafters", "python -m recipes.smollm2 RUN compare"),
}


@functools.cache
def read(name: str) -> Result:
    """Return the contents of a result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def environments(result: Any) -> Iterator[Result]:
    """Yield the environments that a result names, and those of its parts."""
    if not isinstance(result, Mapping):
        return
    if "environment" in result:
        yield result["environment"]
    for part in result.values():
        yield from environments(part)


def described(environment: Result) -> str:
    """Return a machine and its versions, such as "Intel Xeon (AVX-512), 2 cores, JAX 0.10.2"."""
    words = environment["processor"].replace("(R)", "").replace(" Processor", "").split()
    if words[-1] in VECTORS:
        words[-1] = VECTORS[words[-1]]
    parts = [" ".join(words)]
    cores = environment["cores"]
    parts.append("1 core" if cores == 1 else f"{cores} cores")
    versions = environment["versions"]
    parts.append(f"JAX {versions['jax']}")
    for package, name in PEERS.items():
        if package in versions:
            parts.append(f"{name} {versions[package]}")
    return ", ".join(parts)


def source(name: str) -> str:
    """Return the line below a table: machine, versions, command and file."""
    table = TABLES[name]
    parts = list(dict.fromkeys(map(described, environments(read(name)))))
    if table.peer:
        parts.append(table.peer)
    parts.append(f"`{table.command}`")
    parts.append(f"[{name}.json](../benchmarks/results/{name}.json)")
    return "; ".join(parts)


def page(path: Path) -> str:
    """Return the text of a page with its tables made anew."""

    def block(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise SystemExit(f"{path.name} has a table {name!r}; expected one of {sorted(TABLES)}")
        lines = "\n".join(TABLES[name].lines(read(name)[TABLES[name].part]))
        return f"{match[1]}{lines}\n\n{source(name)}\n{match[3]}"

    return BLOCK.sub(block, path.read_text(encoding="utf-8"))


def terminal() -> str:
    """Return the picture of a terminal with drafts in colour."""
    result = read("terminal")
    return pictures.terminal(result["command"], result["output"])


def speeds() -> str:
    """Return the chart of SmolLM2's speeds with its shipped drafter, beside llama.cpp's."""
    case = read("llama_cpp_amx")["cases"]["smollm2-shipped/q4_1/2"]["decode"]
    by_side = llama_cpp.speeds_of(case)
    theirs = by_side["llama.cpp"]
    ours = by_side["packed"]
    bars = {
        "llama.cpp": (theirs[0], "quiet"),
        "llama.cpp, drafts": (theirs[1], "quiet"),
        "dflash_jax": (ours[0], "target"),
        "dflash_jax, drafts": (ours[1], "drafted"),
    }
    base = max(theirs)
    groups = {
        name: [pictures.Bar(name, speed, f"{speed:.0f} ({speed / base:.2f}x)", kind)]
        for name, (speed, kind) in bars.items()
    }
    notes = (
        f"The same Q4_1 file, drafter and prompts on both sides, in turn."
        f" {described(case['environment'])}, {WITHOUT_AMX}."
    )
    return pictures.chart("SmolLM2-135M, tokens per second", groups, notes)


def drafting() -> str:
    """Return the chart of what drafts gain, by kind of prompt and weights."""
    result = read("acceptance")
    groups: dict[str, list[pictures.Bar]] = {}
    for weights, kind in (("packed", "drafted"), ("int8", "target"), ("float", "forced")):
        table = result["tables"][f"{weights}, temperature 0"]
        best, base = acceptance.fastest(table)
        for prompts, modes in table.items():
            gain = modes[best][f"over {base}"]["median"]
            bar = pictures.Bar(weights, gain, f"{gain:.2f}", kind)
            groups.setdefault(prompts, []).append(bar)
    notes = (
        "SmolLM2-135M with its shipped drafter, one request at temperature 0. The line is plain"
        f" decoding. {described(result['environment'])}."
    )
    return pictures.chart("Speed with drafts over plain decoding", groups, notes, mark=1.0)


def servers() -> str:
    """Return the chart of servers beside llama.cpp's, by clients and time since the start."""
    groups: dict[str, list[pictures.Bar]] = {}
    kinds = {"first minute": "target", "later": "drafted"}
    for model, name in (("SmolLM2", "serving_smollm2"), ("Qwen 0.5B", "serving_qwen")):
        for when, sides in read(name)["figures"].items():
            for clients, ours in sides["ours"]["clients"].items():
                theirs = sides["llama.cpp"]["clients"][clients]
                ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
                bar = pictures.Bar(when, ratio, f"{ratio:.2f}", kinds[when])
                groups.setdefault(f"{model}, {clients}", []).append(bar)
    notes = (
        "Answer tokens per second of all clients together, ours over those of llama.cpp's server,"
        f" which is the line. {described(read('serving_qwen')['environment'])}, {PREBUILT}."
    )
    title = "Servers beside llama.cpp's, by clients"
    return pictures.chart(title, groups, notes, mark=1.0)


PICTURES = {"terminal": terminal, "speeds": speeds, "drafting": drafting, "servers": servers}


def files() -> dict[Path, str]:
    """Return what the pages and pictures should be."""
    pages = {path: page(path) for path in PAGES}
    return pages | {IMAGES / f"{name}.svg": draw() for name, draw in PICTURES.items()}


def record(command: str) -> None:
    """Run a command in a terminal, and store what it prints; its programs are compiled before."""
    words = [sys.executable, "-m", "dflash_jax", *shlex.split(command)[1:]]
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    leader, follower = os.openpty()
    with subprocess.Popen(words, stdout=follower, stderr=subprocess.DEVNULL):
        os.close(follower)
        output = b""
        with contextlib.suppress(OSError):  # the command has ended
            while part := os.read(leader, 4096):
                output += part
    os.close(leader)
    text = output.decode().replace("\r\n", "\n")
    write_result(RESULTS / "terminal.json", "terminal", {"command": command, "output": text})


def main(words: Sequence[str] | None = None) -> int:
    """Write the pages and pictures that are not up to date, and print their names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="run the terminal's command first")
    options = parser.parse_args(words)
    if options.record:
        record(SHOWN)
    for path, text in files().items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
