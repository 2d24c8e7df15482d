"""Bytes and collectives of decode steps on several hosts, read from compiled programs.

Every case compiles the plain and the speculative step for a mesh of virtual CPU devices, without
weights. The parameters of a compiled program are one device's shares
of weights and caches; its optimised HLO has the collectives. Nothing is timed.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.compile_for.hlo import H100, V5E, Machine, counted
from benchmarks.paired import markdown

ROWS = 16  # requests decoded together
LENGTH = 8192  # slots of each


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
)
_PLACES = (
    ("2 hosts of 8 H100", H100, 2, 8),
    ("2 hosts of 8 H100", H100, 1, 16),
    ("4 hosts of 8 H100", H100, 4, 8),
    ("v5e-16", V5E, 2, 8),
    ("v5e-16", V5E, 1, 16),
)
CASES = tuple(Case(model, *place) for model in ("Qwen3-32B", "gpt-oss-120b") for place in _PLACES)
DEVICES = max(case.data * case.split for case in CASES)  # virtual ones that are needed
# Fields of the published configs. No drafter of Qwen3-32B is published: this one has the shape of
# z-lab/Qwen3.5-27B-DFlash, whose target has the same width and depth.
CONFIGS = Path(__file__).with_name("large_models.json")


def compiled_steps(case: Case) -> Iterator[tuple[str, str]]:
    """Yield the name and the optimised HLO of the plain and of the speculative step.

    Experts and attention take the forms that devices other than a CPU run.
    """
    import jax

    from benchmarks.gpu_cases import planned
    from dflash_jax.config import check_pair
    from dflash_jax.families.configs import drafter_config, target_config
    from dflash_jax.graph.build import OPTIONS, lower
    from dflash_jax.graph.keys import ProgramKey, Step, Variant
    from dflash_jax.plan import Plan

    jax.lax.platform_dependent = lambda *arguments, default, **forms: default(*arguments)
    outer, inner = json.loads(CONFIGS.read_text(encoding="utf-8"))[case.model]
    target = target_config(outer)
    drafter = drafter_config(inner)
    check_pair(target, drafter)
    plan = Plan(rows=ROWS, max_length=LENGTH, mesh=(case.data, case.split))
    graph = planned((target, drafter), plan, memory=1 << 50)
    programs = graph.programs(variants=(Variant.GREEDY,))
    for step in (Step.PLAIN, Step.SPECULATIVE):
        lowered = lower(programs[ProgramKey(step, Variant.GREEDY)])
        yield step.value, lowered.compile(compiler_options=OPTIONS).as_text() or ""


def table(cases: Mapping[str, Any]) -> list[str]:
    """Return a line for each step of each case, in Markdown."""
    rows = []
    for name, case in cases.items():
        model, where, mesh = name.split(", ")
        for step, figures in case["steps"].items():
            sent = figures["sent"]
            held = f"{figures['held'] / 1e9:.1f} GB"
            cells = [
                f"{model}, {where}",
                mesh,
                step,
                held if figures["held"] < case["memory"] else f"{held}: does not fit",
                f"{figures['weights'] / 1e9:.2f} GB, {figures['caches'] / 1e9:.2f} GB",
                ", ".join(str(sum(figures["calls"][kept].values())) for kept in sent),
                ", ".join(_size(n) for n in sent.values()),
            ]
            rows.append(cells)
    return markdown(HEADINGS, rows)


def _size(n: float) -> str:
    """Return a number of bytes in words."""
    if n == 0:
        return "0"
    return f"{n / 1e6:.1f} MB" if n >= 1e5 else f"{n / 1e3:.1f} kB"


def measure(path: Path | None) -> int:
    """Count every case, print its table, and write all of them."""
    from benchmarks.environment import write_result

    cases: dict[str, Any] = {}
    for case in CASES:
        devices = case.data * case.split
        steps = {step: counted(hlo, case.machine, devices) for step, hlo in compiled_steps(case)}
        about = {"machine": case.machine.name, "memory": case.machine.memory}
        cases[case.name] = about | {"steps": steps}
        print("\n".join(table({case.name: cases[case.name]})), flush=True)
    write_result(path, "collectives", {"cases": cases})
    return 0
