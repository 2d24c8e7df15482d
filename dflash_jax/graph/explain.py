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
from dflash_jax.graph.memory import Budget, budget, gibi, process_rest
from dflash_jax.graph.programs import Program, declare
from dflash_jax.graph.resolve import wide_block
from dflash_jax.graph.roofline import Device, Roofline, StepWork, find_device, roofline, work
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.kernels.native.build import library
from dflash_jax.plan import ResolvedPlan
from dflash_jax.quant.layouts import FLOAT, Joined, StructuredWeight
from dflash_jax.show import table_html

MOST_RUNS = 8
COLUMNS = 80  # width of a terminal
Cells = tuple[str, ...]  # texts of a row of a table
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
        drafter = self.planned.pair.drafter
        sizes = dataclasses.asdict(self.budget)
        if self.process is not None:
            sizes["process"] = self.process
        return {
            "target": _config_json(self.planned.config),
            "drafter": None if drafter is None else _config_json(getattr(drafter, "config", None)),
            "plan": self.planned.plan.to_json(),
            "device": dataclasses.asdict(self.device),
            "budget": sizes,
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
        lines = []
        for line in self._head():
            lines += _wrapped(line)
        lines += ["", *itertools.starmap(_row, self._table()), _ROOFLINE]
        if self.compiled:
            lines += ["", *itertools.starmap(_row, self._compiled())]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [table_html((line[:9].strip(), line[9:]) for line in self._head())]
        tables = [self._table()]
        if self.compiled:
            tables.append(self._compiled())
        for headings, *rows in tables:
            parts.append(table_html(rows, headings))
        return "".join([*parts, f"<small>{_ROOFLINE}</small>"])

    @property
    def compiled(self) -> bool:
        """Whether the programs were compiled."""
        return any(program.compile_s is not None for program in self.programs)

    def _head(self) -> Iterable[str]:
        """Yield lines about models, plan, memory and device; each begins with its subject."""
        yield self._target_line()
        if self.planned.pair.drafter is not None:
            yield f"drafter  {self._drafter()}"
        yield f"plan     {self._plan_line()}"
        yield f"memory   {self.budget}"
        yield "weights  " + "  ".join(f"{name} {gibi(size)}" for name, size in self.forms.items())
        if self.process:
            rest = f"{gibi(process_rest(self.planned))} for Python, JAX, programs and tokenizer"
            yield f"process  {gibi(self.process)}: that total, and {rest}"
        dtype = self.planned.plan.dtype
        yield (
            f"device   {self.device.name}: {self.device.bytes_per_s / 1e9:,.0f} GB/s,"
            f" {self.device.flops_per_s[dtype] / 1e12:,.1f} TFLOP/s {dtype}"
            f" ({self.device.source})"
        )
        conventions = [*getattr(self.planned.config, "conventions", ())]
        if self.planned.stop_tokens:
            conventions.append(f"ends at {' '.join(map(str, self.planned.stop_tokens))}")
        if conventions:
            yield f"family   {'; '.join(conventions)}"
        for note in self.notes:
            yield f"note     {note}"

    def _target_line(self) -> str:
        pair = self.planned.pair
        config = self.planned.config
        layer_ids = [str(state - 1) for state in pair.taps]
        taps = " ".join(layer_ids) or "none"
        if layer_ids and self.planned.plan.taps_at != AUTO:
            taps += f" ({self.planned.plan.taps_at})"
        if not isinstance(config, TargetConfig):
            name = type(pair.target).__name__
            return f"target   {name}  {config.num_layers} layers  taps {taps}"
        layers = f"{config.num_layers} layers  {_runs(config.layer_kinds)}"
        if config.num_experts:
            layers += f"  {config.experts_per_token} of {config.num_experts} experts"
        return f"target   {config.model_type}  {layers}  taps {taps}"

    def _plan_line(self) -> str:
        """Return the choices of the plan; those that are off are left out."""
        plan = self.planned.plan
        items = [
            f"rows {plan.rows}",
            f"max length {plan.max_length}",
            f"slots {plan.slots}",
            f"block {plan.block}",
            f"chunk {plan.chunk}",
            plan.dtype,
        ]
        if plan.weights != "float":
            items.append(f"{plan.weights} weights")
        if plan.kv_dtype != "auto":
            items.append(f"{plan.kv_dtype} keys and values")
        items.append("exact" if plan.exact else "inexact")
        items.append(f"lookahead {plan.lookahead}")
        items.append(f"steps per call {plan.steps_per_call}")
        if plan.confidence_threshold > 0:
            items.append(f"confidence threshold {plan.confidence_threshold:g}")
        if plan.report_drafts:
            items.append("reports drafts")
        return "  ".join(items)

    def _drafter(self) -> str:
        """Return the drafter's line, its own `describe()` if it has one."""
        drafter = self.planned.pair.drafter
        if hasattr(drafter, "describe"):
            return drafter.describe()
        plan = self.planned.plan
        config = getattr(drafter, "config", None)
        copies = ""
        if plan.draft_window > 0:
            copies += f"  draft window {plan.draft_window}"
        if plan.ngram > 0:
            copies += f"  copies after {plan.ngram} equal tokens"
        if not isinstance(config, DrafterConfig):
            return type(drafter).__name__ + copies
        directions = ["causal" if causal else "bidirectional" for causal in config.causal]
        return (
            f"{_KINDS.get(config.kind, config.kind)}  {config.num_layers} layers"
            f"  {_runs(window_kinds(config.windows))}  {_runs(directions)}"
            f"  block {config.block_size}  mask {config.mask_token_id}"
            f"  {_shared_layers(self.planned.config, config, plan)}{copies}"
        )

    def _table(self) -> Iterable[Cells]:
        """Yield a row of headings, and then one for each program."""
        yield "program", "arguments", "donated", "moves", "GFLOP", "roofline"
        for program in self.programs:
            moves = flops = time = "-"
            if program.work and program.roofline:
                moves = gibi(program.work.bytes)
                flops = f"{program.work.flops / 1e9:.3g}"
                time = f"{program.roofline.seconds * 1e3:.3g} ms {program.roofline.bound[0]}"
            yield (
                program.name,
                str(program.arguments),
                str(program.donated),
                moves,
                flops,
                time,
            )

    def _compiled(self) -> Iterable[Cells]:
        """Yield a row of headings, and then the figures of each compiled program."""
        yield "compiled", "arguments", "aliased", "temporary", "StableHLO", "took"
        for program in self.programs:
            yield (
                program.name,
                gibi(program.argument_bytes or 0),
                gibi(program.aliased_bytes or 0),
                gibi(program.temporary_bytes or 0),
                program.stablehlo or "",
                f"{program.compile_s:.1f} s",
            )


def explain(planned: PlannedPair, device: Device, *, compile: bool = False) -> Explanation:
    """Report a pair under its plan; with `compile`, with the figures of compiled programs."""
    plan = planned.plan
    programs = declare(planned, variants=EXPLAINED)
    built = compile_programs(programs.values()) if compile else {}
    reports = [
        _report(planned, device, program, built.get(key)) for key, program in programs.items()
    ]
    leaves = by_path(planned.params, StructuredWeight)
    params = {path: (leaf.shape, _stored_as(leaf)) for path, leaf in leaves.items()}
    wide = wide_block(plan.block, getattr(planned.pair.drafter, "trained_block", None))
    notes = [note for note in (wide, _about_kernels(plan, device)) if note]
    return Explanation(
        planned=planned,
        device=device,
        budget=budget(planned),
        programs=tuple(reports),
        parameters=params,
        notes=tuple(notes),
        forms=_bytes_by_form(planned, leaves),
    )


def explain_here(planned: PlannedPair, *, compile: bool = False) -> Explanation:
    """Report a pair under its plan on the default device; arguments as for `explain`."""
    return explain(planned, find_device(default_device().device_kind), compile=compile)


def _report(
    planned: PlannedPair, device: Device, program: Program, built: Executable | None
) -> ProgramReport:
    """Return the report of a program, with its figures if it was compiled."""
    step_work = None
    time = None
    if program.key.step in _TIMED:
        step_work = work(planned, program.key.step)
        time = roofline(step_work, device, planned.plan.dtype)
    report = ProgramReport(
        name=str(program.key),
        arguments=len(jax.tree.leaves(program.arguments)),
        donated=len(jax.tree.leaves([program.arguments[i] for i in program.donated])),
        work=step_work,
        roofline=time,
    )
    if built is None:
        return report
    return dataclasses.replace(
        report,
        argument_bytes=built.argument_bytes,
        aliased_bytes=built.aliased_bytes,
        temporary_bytes=built.temporary_bytes,
        compile_s=round(built.seconds, 3),
        stablehlo=hashlib.sha256(built.stablehlo.encode()).hexdigest()[:8],
    )


def _config_json(config: Any) -> Any:
    """Return a config of ours, or another's, as JSON values."""
    if hasattr(config, "to_json"):
        return config.to_json()
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) else repr(config)


def _about_kernels(plan: ResolvedPlan, device: Device) -> str:
    """Return which kernels a CPU uses, and why it has no native ones; "" elsewhere."""
    if plan.kernels == "auto" and device.name == "CPU" and not library():
        return f"no native kernels, which are several times as fast: {library().reason}"
    if plan.kernels != "native":
        return ""
    note = "native kernels"
    if plan.weights != "float":
        note += f", {plan.weights} weights by activations in {plan.activations}"
        if plan.activations == "int8":
            without = library().no_amx
            note += f", without AMX: {without}" if without else ", several tokens by AMX"
    if plan.exact and plan.plain_width == 1:
        note += ", one token wide in plain steps"
    return note


@isolated_jax_config()
def stablehlo(program: Program) -> str:
    """Return a program as XLA gets it, without compiling it."""
    if program.call is not None:
        return "\n".join(map(stablehlo, program.parts))
    return lower(program).as_text() or ""


def _stored_as(leaf: Any) -> str:
    """Return a dtype, or the kinds of a packed weight's parts."""
    if isinstance(leaf, Joined):
        return "+".join(dict.fromkeys(_stored_as(part) for part in leaf.parts))
    kind = getattr(leaf, "kind", FLOAT)
    return str(jax.tree.leaves(leaf)[0].dtype) if kind == FLOAT else kind


def _bytes_by_form(planned: PlannedPair, leaves: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of weights by format, the largest first; floats apart in matrices."""
    sizes: collections.Counter[str] = collections.Counter()
    for path, leaf in leaves.items():
        is_matrix = planned.forms.get(path, FLOAT) != FLOAT
        for part in leaf.parts if isinstance(leaf, Joined) else (leaf,):
            name = _stored_as(part)
            arrays = jax.tree.leaves(part)
            if name == str(arrays[0].dtype):
                name += " matrices" if is_matrix else " vectors"
            sizes[name] += sum(a.size * a.dtype.itemsize for a in arrays)
    return dict(sizes.most_common())


def _shared_layers(target: TargetConfig, drafter: DrafterConfig, plan: ResolvedPlan) -> str:
    """Return the scale of the block's embeddings and the softcap of its logits, as text."""
    scale = drafter.input_embedding_scale or 1.0
    cap = drafter.final_logit_softcapping or 0.0
    of_target = " (the target's)"
    whose_scale = of_target if scale == target.embedding_scale != 1 else ""
    whose_cap = of_target if cap == (target.final_softcap or 0) != 0 else ""
    if drafter.rounded_embedding_scale:
        scale = float(jax.numpy.dtype(plan.compute_dtype).type(scale))
    softcap = f"{cap:g}" if cap else "none"
    return f"embedding x{scale:g}{whose_scale}  softcap {softcap}{whose_cap}"


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
    return ", ".join(f"{kinds[run[0]]} on {_span(run)}" for run in runs)


def _span(run: Sequence[int]) -> str:
    """Return the first and the last number of a run, or its only one."""
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
