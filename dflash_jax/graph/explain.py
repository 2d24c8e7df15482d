"""Report of a plan: models, memory, programs and their rooflines, without any weights."""

import collections
import dataclasses
import hashlib
import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from dflash_jax.config import AUTO, DrafterConfig, TargetConfig, window_kinds
from dflash_jax.device import default_device
from dflash_jax.graph.abstract import PlannedPair, by_path
from dflash_jax.graph.build import Executable, compile_programs, lower
from dflash_jax.graph.keys import Step, Variant
from dflash_jax.graph.memory import (
    Budget,
    Device,
    Roofline,
    StepWork,
    budget,
    find_device,
    gibi,
    process_rest,
    roofline,
    work,
)
from dflash_jax.graph.programs import Program, declare
from dflash_jax.graph.resolve import wide_block
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.kernels.native.build import library
from dflash_jax.plan import ResolvedPlan
from dflash_jax.quant.layouts import FLOAT, Interleaved, Joined, Packed, StructuredWeight
from dflash_jax.show import table_html

MOST_RUNS = 8
COLUMNS = 80  # of a terminal
Cells = tuple[str, ...]  # of a row of a table
_ROOFLINE = "roofline: m = bound by memory, c = by compute; moves: weights and caches once"
_KINDS = {"dflash": "dflash v1", "dflash2": "dflash 2"}
_WRAPPER = textwrap.TextWrapper(
    COLUMNS, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False
)
EXPLAINED = (Variant.GREEDY, Variant.SAMPLED)  # variants that are reported
_TIMED = (Step.PREFILL, Step.PLAIN, Step.SPECULATIVE)  # steps with a roofline


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """One program. Figures of compiled programs are None when nothing was compiled."""

    name: str
    arguments: int
    donated: int
    work: StepWork | None
    roofline: Roofline | None
    argument_bytes: int | None = None
    aliased_bytes: int | None = None
    temporary_bytes: int | None = None
    compile_s: float | None = None
    stablehlo: str | None = None  # first digits of its hash


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The report that `dflash-jax explain` prints."""

    planned: PlannedPair
    device: Device
    budget: Budget
    programs: tuple[ProgramReport, ...]
    parameters: dict[str, tuple[tuple[int, ...], str]]
    notes: tuple[str, ...]
    forms: dict[str, int]  # bytes of weights by what they are stored as

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        target, drafter = self.planned.config, self.planned.pair.drafter
        return {
            "target": _config_json(target),
            "drafter": None if drafter is None else _config_json(getattr(drafter, "config", None)),
            "plan": dataclasses.asdict(self.planned.plan),
            "device": dataclasses.asdict(self.device),
            "budget": dataclasses.asdict(self.budget)
            | ({"process": self.process} if self.process else {}),
            "programs": tuple(map(dataclasses.asdict, self.programs)),
            "parameters": self.parameters,
            "forms": self.forms,
            "notes": self.notes,
            "versions": {"jax": jax.__version__},
        }

    @property
    def process(self) -> int | None:
        """Resident memory of a process that has used its whole budget; None with a GPU or TPU."""
        if self.device.platform != "cpu":
            return None
        return self.budget.total + process_rest(self.planned)

    def __str__(self) -> str:
        head = [part for line in self._head() for part in _wrapped(line)]
        lines = [*head, "", *itertools.starmap(_row, self._table()), _ROOFLINE]
        if self.compiled:
            lines += ["", *itertools.starmap(_row, self._compiled())]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [table_html((line[:9].strip(), line[9:]) for line in self._head())]
        for cells in [self._table(), *([self._compiled()] if self.compiled else [])]:
            headings, *rows = cells
            parts.append(table_html(rows, headings))
        return "".join([*parts, f"<small>{_ROOFLINE}</small>"])

    @property
    def compiled(self) -> bool:
        """Whether the programs were compiled."""
        return any(program.compile_s is not None for program in self.programs)

    def _head(self) -> Iterable[str]:
        pair, p, t = self.planned.pair, self.planned.plan, self.planned.config
        layer_ids = [i - 1 for i in pair.taps]
        taps = " ".join(map(str, layer_ids)) or "none"
        taps += f" ({p.taps_at})" if layer_ids and p.taps_at != AUTO else ""
        if isinstance(t, TargetConfig):
            mlps = f"  {t.experts_per_token} of {t.num_experts} experts" if t.num_experts else ""
            layers = f"{t.num_layers} layers  {_runs(t.layer_kinds)}{mlps}"
            yield f"target   {t.model_type}  {layers}  taps {taps}"
        else:
            name = type(pair.target).__name__
            yield f"target   {name}  {t.num_layers} layers  taps {taps}"
        if pair.drafter is not None:
            yield f"drafter  {self._drafter()}"
        yield (
            f"plan     rows {p.rows}  max length {p.max_length}  slots {p.slots}  block {p.block}"
            f"  chunk {p.chunk}  {p.dtype}"
            + f"  {p.weights} weights" * (p.weights != "float")
            + f"  {p.weight_layout} matrices" * (p.weight_layout not in ("auto", "row_major"))
            + f"  {p.kv_dtype} keys and values" * (p.kv_dtype != "auto")
            + f"  {'exact' if p.exact else 'inexact'}"
            f"  lookahead {p.lookahead}  steps per call {p.steps_per_call}"
            + (f"  min survival {p.min_survival:g}" * (p.min_survival > 0))
            + "  reports drafts" * p.report_drafts
        )
        yield f"memory   {self.budget}"
        yield "weights  " + "  ".join(f"{name} {gibi(size)}" for name, size in self.forms.items())
        if self.process:
            rest = f"{gibi(process_rest(self.planned))} for Python, JAX, programs and tokenizer"
            yield f"process  {gibi(self.process)}: that total, and {rest}"
        yield (
            f"device   {self.device.name}: {self.device.bytes_per_s / 1e9:,.0f} GB/s,"
            f" {self.device.flops_per_s[p.dtype] / 1e12:,.1f} TFLOP/s {p.dtype}"
            f" ({self.device.source})"
        )
        stops = getattr(t, "eos_token_ids", ())
        ends = [f"ends at {' '.join(map(str, stops))}"] if stops else []
        if said := [*getattr(t, "conventions", ()), *ends]:
            yield f"family   {'; '.join(said)}"
        yield from (f"note     {note}" for note in self.notes)

    def _drafter(self) -> str:
        """Return the drafter's line, its own `describe()` if it has one."""
        drafter = self.planned.pair.drafter
        d, ngram = getattr(drafter, "config", None), self.planned.plan.ngram
        window = self.planned.plan.draft_window
        copies = f"  draft window {window}" * (window > 0)
        copies += f"  copies after {ngram} equal tokens" * (ngram > 0)
        if hasattr(drafter, "describe"):
            return drafter.describe()
        if not isinstance(d, DrafterConfig):
            return type(drafter).__name__ + copies
        kinds = ["causal" if causal else "bidirectional" for causal in d.causal]
        return (
            f"{_KINDS.get(d.kind, d.kind)}  {d.num_layers} layers"
            f"  {_runs(window_kinds(d.windows))}  {_runs(kinds)}  block {d.block_size}"
            f"  mask {d.mask_token_id}  {_shared_layers(self.planned.config, d, self.planned.plan)}"
            f"{copies}"
        )

    def _table(self) -> Iterable[Cells]:
        yield "program", "arguments", "donated", "moves", "GFLOP", "roofline"
        for p in self.programs:
            counted = ["-"] * 3
            if p.work and p.roofline:
                time = f"{p.roofline.seconds * 1e3:.3g} ms {p.roofline.bound[0]}"
                counted = [gibi(p.work.bytes), f"{p.work.flops / 1e9:.3g}", time]
            yield p.name, str(p.arguments), str(p.donated), *counted

    def _compiled(self) -> Iterable[Cells]:
        """Yield the figures of compiled programs."""
        yield "compiled", "arguments", "aliased", "temporary", "StableHLO", "took"
        for p in self.programs:
            sizes = (p.argument_bytes, p.aliased_bytes, p.temporary_bytes)
            took = f"{p.compile_s:.1f} s"
            yield p.name, *(gibi(n or 0) for n in sizes), p.stablehlo or "", took


def explain(planned: PlannedPair, device: Device, *, compile: bool = False) -> Explanation:
    """Report a pair under its plan; with `compile`, with the figures of compiled programs."""
    plan, pair = planned.plan, planned.pair
    programs = declare(planned, variants=EXPLAINED)
    built = compile_programs(programs.values()) if compile else {}
    reports = []
    for key, program in programs.items():
        counted = work(planned, key.step) if key.step in _TIMED else None
        time = roofline(counted, device, plan.dtype) if counted else None
        arguments = len(jax.tree.leaves(program.arguments))
        donated = len(jax.tree.leaves([program.arguments[i] for i in program.donated]))
        figures = _measured(built[key]) if compile else {}
        reports.append(ProgramReport(str(key), arguments, donated, counted, time, **figures))
    leaves = by_path(planned.params, StructuredWeight)
    params = {path: (leaf.shape, _stored_as(leaf)) for path, leaf in leaves.items()}
    wide = wide_block(plan.block, getattr(pair.drafter, "trained_block", None))
    notes = tuple(filter(None, (wide, _about_kernels(plan, device))))
    forms = _bytes_by_form(planned, leaves)
    return Explanation(planned, device, budget(planned), tuple(reports), params, notes, forms)


def explain_here(planned: PlannedPair, *, compile: bool = False) -> Explanation:
    """Report a pair under its plan on the default device; arguments as for `explain`."""
    return explain(planned, find_device(default_device().device_kind), compile=compile)


def _config_json(config: Any) -> Any:
    """Return a config of ours, or another's, as JSON values."""
    if hasattr(config, "to_json"):
        return config.to_json()
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) else repr(config)


def _about_kernels(plan: ResolvedPlan, device: Device) -> str:
    """Return which kernels a CPU uses, and why it has no native ones."""
    if plan.kernels == "native":
        alike = ", one token wide in plain steps" if plan.exact and plan.plain_width == 1 else ""
        if plan.weights == "float":
            return f"native kernels{alike}"
        by = f", {plan.weights} weights by activations in {plan.activations}"
        without = library().no_amx
        amx = f", without AMX: {without}" if without else ", several tokens by AMX"
        return f"native kernels{by}{amx * (plan.activations == 'int8')}{alike}"
    if plan.kernels == "auto" and device.name == "CPU" and not library():
        return f"no native kernels, which are several times as fast: {library().reason}"
    return ""


@isolated_jax_config()
def stablehlo(program: Program) -> str:
    """Return a program as given to XLA, without compiling it."""
    if program.call is not None:
        return "\n".join(map(stablehlo, program.parts))
    return lower(program).as_text() or ""


def _measured(built: Executable) -> dict[str, Any]:
    """Return the figures of a compiled program."""
    sizes = ("argument_bytes", "aliased_bytes", "temporary_bytes")
    digest = hashlib.sha256(built.stablehlo.encode()).hexdigest()
    times = {"compile_s": round(built.seconds, 3), "stablehlo": digest[:8]}
    return {name: getattr(built, name) for name in sizes} | times


def _stored_as(leaf: Any) -> str:
    """Return a dtype, or the kinds of a packed weight's parts."""
    if isinstance(leaf, Joined):
        return "+".join(dict.fromkeys(_stored_as(part) for part in leaf.parts))
    if isinstance(leaf, Packed | Interleaved) and leaf.kind != FLOAT:
        return leaf.kind
    return str(jax.tree.leaves(leaf)[0].dtype)


def _bytes_by_form(planned: PlannedPair, leaves: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of weights by format, the largest first; floats apart in matrices."""
    found: collections.Counter[str] = collections.Counter()
    for path, leaf in leaves.items():
        whole = planned.forms.get(path, FLOAT) != FLOAT
        for part in leaf.parts if isinstance(leaf, Joined) else (leaf,):
            name, arrays = _stored_as(part), jax.tree.leaves(part)
            if name == str(arrays[0].dtype):
                name += " matrices" if whole else " vectors"
            found[name] += sum(a.size * a.dtype.itemsize for a in arrays)
    return dict(found.most_common())


def _shared_layers(target: TargetConfig, drafter: DrafterConfig, plan: ResolvedPlan) -> str:
    """Return the scale of the block's embeddings and the softcap of its logits, as text."""
    scale, cap = drafter.input_embedding_scale or 1.0, drafter.final_logit_softcapping or 0.0
    pairs = ((scale, target.embedding_scale, 1), (cap, target.final_softcap or 0, 0))
    whose = [" (the target's)" * (value == of != none) for value, of, none in pairs]
    if drafter.rounded_embedding_scale:
        scale = float(jax.numpy.dtype(plan.compute_dtype).type(scale))
    return f"embedding x{scale:g}{whose[0]}  softcap {f'{cap:g}' if cap else 'none'}{whose[1]}"


def _row(name: str, *cells: str) -> str:
    widths = (10, 9, 11, 9, 13)
    return f"{name:22}" + "".join(f" {c:>{w}}" for c, w in zip(cells, widths, strict=True))


def _wrapped(line: str) -> list[str]:
    """Break a long line between items, after two spaces, a comma or a semicolon."""
    space = "\N{NO-BREAK SPACE}"
    parts = _WRAPPER.wrap(re.sub(r"(?<=[^ ,;]) (?=[^ ])", space, line))
    if max(map(len, parts)) > COLUMNS:  # an item is too long for a line of its own
        parts = _WRAPPER.wrap(line)
    return [part.replace(space, " ") for part in parts]


def _runs(kinds: Sequence[str]) -> str:
    """Return 'a on 0-3, b on 4', 'a' if all are alike, or '48 a, 16 b' if they alternate."""
    if len(set(kinds)) == 1:
        return kinds[0]
    runs = [list(run) for _, run in itertools.groupby(range(len(kinds)), kinds.__getitem__)]
    if len(runs) > MOST_RUNS:
        return ", ".join(f"{n} {kind}" for kind, n in collections.Counter(kinds).items())
    return ", ".join(
        f"{kinds[run[0]]} on {run[0]}" + f"-{run[-1]}" * (len(run) > 1) for run in runs
    )
