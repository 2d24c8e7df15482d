"""The short audit, and seeded faults that it must find; see `benchmarks/audit`."""

import collections
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.audit import __main__ as command
from benchmarks.audit import presets
from benchmarks.audit.models import (
    DRAFTERS,
    FAMILIES,
    SHORT,
    WEIGHTS,
    AuditedEngine,
    Course,
    build,
    draw_setup,
    random_engine,
)
from benchmarks.audit.runner import run_case
from benchmarks.audit.scenario import Scenario, draw_scenario
from dflash_jax.engine.core import EngineCore
from dflash_jax.engine.model_runner import InFlightStep
from dflash_jax.engine.running_request import RunningRequest
from dflash_jax.engine.state_machine.controller import Finish
from dflash_jax.engine.structured.grammars import Grammar
from dflash_jax.families import drafter_kinds, family_of, target_families
from dflash_jax.graph.build import compile_programs
from dflash_jax.graph.keys import Step, Variant
from dflash_jax.graph.programs import declare
from dflash_jax.graph.state import OutputColumn
from dflash_jax.graph.steps import decoding as steps
from dflash_jax.graph.steps import forced_tokens
from dflash_jax.graph.steps.logits_processing import LogitsState
from dflash_jax.plan import Plan
from dflash_jax.testing import planned

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

COURSE = Course(seed=1, short=True)
QWEN3, HYBRID, DSPARK = range(3)  # setups of the short form
HAPPENS = """
    cancelled by cell; cancelled by close; cancelled by drop
    failed by dispatch; failed by answer; failed by interrupt; recovery: rebuilt
    recovery: floor; recovery: repeat; recovery: tool_prefix; recovery: min_tokens
    recovery: thought_closed_by_force; fallback: draft_not_finite; fallback: below_break_even
    fallback: empty_retry; fallback: empty_retry_confirmed_eos
    prefix hits; prefix evictions; prefix segments written, disk; prefix segments read, disk
    calls of copy_row; calls of forced_tokens
    calls of speculative[sampled]; calls of verify[constrained]
    structured answers; sampled tokens
"""


@functools.cache
def audited(number: int) -> AuditedEngine:
    """Return a setup of the short audit, compiled once for all tests here."""
    return build(SHORT[number])


@pytest.fixture(scope="module", autouse=True)
def engines_are_dropped_in_the_end() -> Iterator[None]:
    yield
    audited.cache_clear()


def cases_of(number: int) -> range:
    return COURSE.rest(number * COURSE.cases)


def scenario(case: int) -> Scenario:
    number = case // COURSE.cases
    return draw_scenario(COURSE.seed, case, audited(number).limits)


# -- the short form ----------------------------------------------------------------------------


def test_random_interleavings_give_the_outputs_of_single_requests() -> None:
    happened: collections.Counter[str] = collections.Counter()
    for number in range(len(SHORT)):
        for case in cases_of(number):
            found, counts = run_case(audited(number), scenario(case))
            assert not found, f"case {case}: {found}"
            happened += counts
    assert happened["tokens"] > 1500
    assert happened["accepted drafts"] > 300
    names = [name.strip() for line in HAPPENS.split("\n") for name in line.split(";")]
    assert not [name for name in names if name and not happened[name]]


@pytest.mark.exhaustive
def test_a_case_runs_the_same_way_every_time() -> None:
    """The counts of program calls, rounds and prefix hits are also equal."""
    assert scenario(1) == scenario(1) != scenario(2)
    with_folder = next(case for case in cases_of(HYBRID) if scenario(case).folder)
    for case in (1, with_folder):
        runs = [run_case(audited(case // COURSE.cases), scenario(case)) for _ in range(2)]
        assert runs[0] == runs[1]
        assert sum(runs[0][1].values()) > 50


@pytest.mark.exhaustive
def test_a_scenario_written_as_json_is_the_same_scenario() -> None:
    for case in (*cases_of(QWEN3), *cases_of(DSPARK)):
        assert Scenario.from_json(scenario(case).to_json()) == scenario(case)


@pytest.mark.exhaustive
def test_the_printed_command_repeats_a_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "build", lambda setup: audited(SHORT.index(setup)))
    written = tmp_path / "scenario.json"
    arguments = ["--short", "--seed", str(COURSE.seed), "--case", "2"]
    assert command.main([*arguments, "--write", str(written)]) == 0
    first = capsys.readouterr().out
    assert Scenario.from_json(written.read_text()) == scenario(2)
    assert command.main([*arguments, "--scenario", str(written)]) == 0
    assert capsys.readouterr().out == first
    shifted_segments(monkeypatch, audited(QWEN3))
    cases = [str(case) for case in cases_of(QWEN3)]
    case = next(case for case in cases if command.main([*arguments[:-1], case]) == 1)
    again = f"python -m benchmarks.audit --seed {COURSE.seed} --case {case} --short\n"
    assert again in capsys.readouterr().out


def test_an_interrupted_run_continues_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "build", lambda setup: audited(DSPARK))
    out = ["--out", str(tmp_path / "audit.json"), "--seed", "5"]
    assert command.main([*out, "--cases", "3"]) == 0
    whole = capsys.readouterr().out
    assert command.main([*out, "--cases", "2"]) == 0
    assert command.main([*out, "--cases", "3", "--resume"]) == 0
    assert capsys.readouterr().out.endswith(whole.splitlines()[-1] + "\n")
    with pytest.raises(SystemExit, match="is of seed 5"):
        command.main(["--out", str(tmp_path / "audit.json"), "--seed", "6", "--resume"])


def test_setups_go_through_all_families_drafters_and_weights() -> None:
    drawn = [draw_setup(9, number) for number in range(command.ALL)]
    assert {setup.family for setup in drawn} == {*FAMILIES, "shipped"}
    assert {setup.drafter for setup in drawn} == {*DRAFTERS, ""}
    assert {setup.plan["weights"] for setup in drawn} == set(WEIGHTS)
    assert {setup.plan["dtype"] for setup in drawn} >= {"float32", "bfloat16"}
    assert drawn == [draw_setup(9, number) for number in range(command.ALL)]


@pytest.mark.exhaustive
def test_random_models_are_stored_as_the_plan_of_a_setup_says() -> None:
    drawn = [draw_setup(0, number) for number in range(command.ALL)]
    for weights in WEIGHTS:
        setup = next(x for x in drawn if x.plan["weights"] == weights and x.family != "shipped")
        plan = {name: x for name, x in setup.plan.items() if name not in ("kernels", "activations")}
        engine = random_engine(setup, Plan(**plan))
        assert jax.tree.structure(engine.params) == jax.tree.structure(engine.graph.params)


# -- faults ------------------------------------------------------------------------------------

Fault = Callable[[pytest.MonkeyPatch, AuditedEngine], None]


def first_difference(number: int) -> str | None:
    """Return the first difference found on a setup, with more seeds if needed."""
    engine = audited(number)
    for seed, case in itertools.product(range(COURSE.seed, COURSE.seed + 4), cases_of(number)):
        found, _ = run_case(engine, draw_scenario(seed, case, engine.limits))
        if found:
            return found[0]
    return None


def changed(patch: pytest.MonkeyPatch, engine: AuditedEngine, step: Step, change: Any) -> None:
    """Call `change(program, ...)` in place of a program, in every variant."""
    programs = engine.engine.core.runner.executables
    for key in [key for key in programs if key.step == step]:
        patch.setitem(programs, key, functools.partial(change, programs[key]))


def recompiled(
    patch: pytest.MonkeyPatch, engine: AuditedEngine, variant: Variant = Variant.GREEDY
) -> None:
    """Compile the speculative step again, from patched functions."""
    made = engine.engine
    declared = declare(planned(made.graph.config, made.graph.drafter_config, made.plan))
    step = Step.SPECULATIVE if variant == Variant.GREEDY else Step.VERIFY
    for key, program in compile_programs([declared[made.graph.key(step, variant)]]).items():
        patch.setitem(made.core.runner.executables, key, program)


def shifted_segments(patch: pytest.MonkeyPatch, engine: AuditedEngine) -> None:
    """Cache the chunk before the one that was fed."""
    chunk = engine.limits.chunk

    def take(program: Any, *arguments: Any) -> Any:
        *others, inputs = arguments
        start = np.int32(max(inputs.start - chunk, 0))
        return program(*others, inputs.replace(start=start))

    changed(patch, engine, Step.TAKE_SEGMENT, take)


def stale_rows(patch: pytest.MonkeyPatch, engine: AuditedEngine) -> None:
    """After a cancellation, the next request of the row starts at the old position."""
    release, stale = EngineCore._release, set()

    def noted(self: EngineCore, sequence: RunningRequest) -> None:
        rows = self.scheduler.rows
        if sequence.finish is Finish.CANCELLED and sequence in rows:
            stale.add(rows.index(sequence))
        release(self, sequence)

    def feed(program: Any, *arguments: Any) -> Any:
        *others, inputs = arguments
        if inputs.fresh.any() and int(inputs.row) in stale:
            stale.discard(int(inputs.row))
            inputs = inputs.replace(fresh=np.zeros_like(inputs.fresh))
        return program(*others, inputs)

    patch.setattr(EngineCore, "_release", noted)
    changed(patch, engine, Step.PREFILL, feed)


def wrong_readers(patch: pytest.MonkeyPatch, engine: AuditedEngine) -> None:
    """A new request of a row takes in-flight results of the cancelled one."""
    process = EngineCore._process

    def to_the_row(self: EngineCore, step: InFlightStep) -> None:
        rows = self.scheduler.rows
        for row in () if step.work.prefill else step.work.sequences:
            if (sequence := rows[row]) and sequence.prefilled:
                there = {row: sequence}, {row: sequence.attempt}
                sequences, attempts = step.work.sequences, step.work.attempts
                work = dataclasses.replace(
                    step.work, sequences=sequences | there[0], attempts=attempts | there[1]
                )
                object.__setattr__(step, "work", work)
        process(self, step)

    patch.setattr(EngineCore, "_process", to_the_row)


def short_rebuild(patch: pytest.MonkeyPatch, engine: AuditedEngine) -> None:
    """The position moves by one token too few after forced tokens."""
    blocks = forced_tokens.blocks

    def one_less(*arguments: Any) -> Any:
        for inputs in blocks(*arguments):
            count = inputs.num_tokens
            yield inputs.replace(num_tokens=np.maximum(count - 1, np.minimum(count, 1)))

    patch.setattr(forced_tokens, "blocks", one_less)


def late_masks(patch: pytest.MonkeyPatch, engine: AuditedEngine) -> None:
    """Each draft has the mask of the previous position."""
    fill = Grammar.fill

    def late(self: Grammar, masks: np.ndarray, drafts: list[int]) -> None:
        fill(self, masks, drafts)
        masks[1:] = masks[:-1].copy()

    patch.setattr(Grammar, "fill", late)


def mixed_up_rows(patch: pytest.MonkeyPatch, engine: AuditedEngine) -> None:
    """A row copy goes in the wrong direction."""

    def swapped(program: Any, *arguments: Any) -> Any:
        *others, inputs = arguments
        return program(
            *others, inputs.replace(source=inputs.destination, destination=inputs.source)
        )

    changed(patch, engine, Step.COPY_ROW, swapped)


def one_draft_too_many(patch: pytest.MonkeyPatch, engine: AuditedEngine) -> None:
    accept = steps.accept

    def more(tokens: Any, best: Any, count: Any = None) -> Any:
        return jnp.minimum(accept(tokens, best, count) + 1, tokens.shape[1])

    patch.setattr(steps, "accept", more)
    recompiled(patch, engine)


def one_position_more(patch: pytest.MonkeyPatch, engine: AuditedEngine) -> None:
    commit = steps.commit

    def further(state: Any, target: Any, draft: Any, n: Any, anchor: Any) -> Any:
        return commit(state, target, draft, n + (n > 1).astype(n.dtype), anchor)

    patch.setattr(steps, "commit", further)
    recompiled(patch, engine)


def whole_block_in_the_state(patch: pytest.MonkeyPatch, engine: AuditedEngine) -> None:
    """Recurrent states include rejected drafts."""
    commit, width = steps.commit, engine.limits.block

    def whole(state: Any, target: Any, draft: Any, n: Any, anchor: Any) -> Any:
        after = commit(state, target, draft, jnp.where(n > 0, width, 0), anchor)
        return after.replace(position=state.position + n)

    patch.setattr(steps, "commit", whole)
    recompiled(patch, engine)


def rejected_drafts_are_penalised(patch: pytest.MonkeyPatch, engine: AuditedEngine) -> None:
    count = LogitsState.count

    def all_drafts(self: LogitsState, out: Any) -> LogitsState:
        packed = out.packed.at[:, OutputColumn.NUM_TOKENS].set(out.tokens.shape[1])
        return count(self, out.replace(packed=packed))

    patch.setattr(LogitsState, "count", all_drafts)
    recompiled(patch, engine, Variant.PENALIZED)


SOAK = pytest.mark.soak


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "number"),
    [
        (shifted_segments, HYBRID),
        (stale_rows, HYBRID),
        (short_rebuild, QWEN3),
        (mixed_up_rows, QWEN3),
        (late_masks, QWEN3),
        (wrong_readers, DSPARK),
        (one_draft_too_many, DSPARK),
        pytest.param(one_draft_too_many, HYBRID, marks=SOAK),
        pytest.param(one_position_more, DSPARK, marks=SOAK),
        pytest.param(whole_block_in_the_state, HYBRID, marks=SOAK),
        pytest.param(rejected_drafts_are_penalised, QWEN3, marks=SOAK),
    ],
)
def test_the_audit_finds_a_seeded_fault(
    monkeypatch: pytest.MonkeyPatch, fault: Fault, number: int
) -> None:
    fault(monkeypatch, audited(number))
    assert first_difference(number)


def test_every_family_and_kind_of_drafter_is_soaked() -> None:
    assert {family_of(target.model_type) for target in FAMILIES.values()} == {*target_families()}
    setups = [setup for setup, _ in presets.families(tokens=1)]
    assert {setup.family for setup in setups} == {*FAMILIES}
    assert {DRAFTERS[setup.drafter][0] for setup in setups} == {*drafter_kinds()}


def test_the_grid_of_the_shipped_pair_has_as_many_tokens_as_the_documents_say() -> None:
    draw, tokens = presets.GRIDS["shipped"]
    scenarios = [scenario for _, of in draw(tokens) for scenario in of.values()]
    count = sum(r.options["max_tokens"] for scenario in scenarios for r in scenario.requests)
    path = Path(presets.__file__).parents[1] / "results" / "soak_shipped.json"
    assert count == json.loads(path.read_text(encoding="utf-8"))["tokens"]


@pytest.mark.exhaustive
def test_a_load_gives_the_outputs_of_single_requests_and_compiles_nothing() -> None:
    engine = audited(QWEN3)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 90, 40).tolist()
    prompts = [[*shared[: 16 * i], *rng.integers(0, 90, 3 + 7 * i).tolist()] for i in range(3)]
    load = presets.load_scenario(prompts, requests=60, tokens=20, rows=engine.limits.rows)
    ended: list[int] = []
    found, counts = run_case(engine, load, ended.append)
    assert not found
    assert (counts["answers"], counts["programs compiled"]) == (60, 0)
    assert counts["ended by cancelled"] > 3
    assert counts["prefix tokens restored"] > 0
    assert ended[-1] == 60
    assert ended == sorted(ended)
