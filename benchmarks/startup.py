"""Seconds from the start of a process to its first token, phase by phase, and resident memory.

The stage `startup` of `benchmarks.llama_cpp`. Every mode of a GGUF file starts with an empty
compilation cache ("cold") and with a filled one ("warm"), next to llama.cpp. Files are in the page
cache and the native kernels are compiled already. "python" is what no other phase accounts for: the
interpreter and the first request. Seconds of tracing, lowering and compiling are sums over
programs, which may overlap. Memory is that of the process after each phase; `jax_alone_mb` is that
of one that only imported JAX.
"""

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.llama_cpp import LLAMA, PROMPT, Setting, long_prompt
from benchmarks.paired import spread
from benchmarks.workers import Worker, jax_memory

MODES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "weights": "float"},
    "bfloat16": {"dtype": "bfloat16", "weights": "float"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "packed": {"weights": "packed"},
}
FLOATS = ("f32", "f16", "bf16")  # types without blocks
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "DFLASH_PROGRESS": "off"}


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a process: seconds by phase, and memory in MB."""

    seconds: dict[str, float]
    resident_mb: dict[str, float]
    compiling: dict[str, float]
    programs: dict[str, float]


def measure(setting: Setting, command: list[str], cache: Path | None = None) -> Start:
    """Start a worker, ask for a token, then for a few more.

    Args:
      cache: the folder of compiled programs.
    """
    environment = ENVIRONMENT | ({"DFLASH_COMPILATION_CACHE": str(cache)} if cache else {})
    ids = long_prompt(setting, PROMPT)
    started = time.perf_counter()
    with Worker(command, setting.cores, environment=environment) as worker:
        worker.ask(setting.request("plain", 1, ids))
        total = time.perf_counter() - started
        ready = worker.memory()
        worker.ask(setting.request("plain", 64, ids))
        memory, first = worker.memory(), worker.first
    phases = dict(first.get("phases_s", {}))
    rest = {
        "first_request": total - worker.ready_s,
        "python": worker.ready_s - sum(phases.values()),
    }
    resident = first.get("resident_mb", {}) | {"first_token": ready.resident_mb}
    resident |= {"65_tokens": memory.resident_mb, "peak": memory.peak_mb}
    programs = {f"{name}": s for name, s in first.get("programs_s", {}).items()}
    seconds = {"first_token": total} | phases | (rest if phases else {"load": worker.ready_s})
    return Start(seconds, resident, first.get("compiling", {}), programs)


def compare(setting: Setting, rounds: int) -> dict[str, Any]:
    """Return the figures of llama.cpp and of every mode, cold and warm, in turn."""
    starts: dict[str, list[Start]] = {}
    modes = {n: f for n, f in MODES.items() if n != "packed" or setting.kind not in FLOATS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            llama = measure(setting, setting.llama(256, drafted=False))
            starts.setdefault(LLAMA, []).append(llama)
            for name, fields in modes.items():
                plan = fields | {"max_length": 256, "exact": False}
                command = setting.ours(plan, drafted=False)
                cache = Path(folder, f"{name}-{turn}")
                for state in ("cold", "warm"):
                    one = measure(setting, command, cache)
                    starts.setdefault(f"{name}, {state}", []).append(one)
    return {"jax_alone_mb": dataclasses.asdict(jax_memory()), "series": _spreads(starts)}


def _spreads(starts: dict[str, list[Start]]) -> dict[str, Any]:
    def of_field(ended: list[Start], field: str) -> dict[str, Any]:
        names = getattr(ended[-1], field)
        return {
            n: spread([getattr(one, field).get(n, 0.0) for one in ended]).to_json() for n in names
        }

    fields = [field.name for field in dataclasses.fields(Start)]
    return {
        series: {field: of_field(ended, field) for field in fields}
        for series, ended in starts.items()
    }


def table(key: str, found: dict[str, Any]) -> list[str]:
    """Return a line for each series: medians of seconds by phase, and of memory."""
    out = [f"{key}: JAX alone {found['jax_alone_mb']['resident_mb']:.0f} MB"]
    for series, figures in found["series"].items():
        seconds, memory, compiling = (
            {name: value["median"] for name, value in figures[field].items()}
            for field in ("seconds", "resident_mb", "compiling")
        )
        total = seconds.pop("first_token")
        shown = [f"{name} {value:.2f}" for name, value in seconds.items()]
        shown += [f"({name} {value:.3g})" for name, value in compiling.items()]
        out.append(f"  {series:15} {total:6.2f} s: {', '.join(shown)}")
        shown = [f"{name} {value:.0f}" for name, value in memory.items()]
        out.append(f"  {'':15} MB: {', '.join(shown)}")
    return out
