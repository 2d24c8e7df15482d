"""Variants of programs, and compiling them in one thread of low priority."""

import concurrent.futures
import gc
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dflash_jax import Plan
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import PlanError
from dflash_jax.graph import background, build, compile_process
from dflash_jax.graph.background import NICENESS, BackgroundCompiler
from dflash_jax.graph.build import CompiledPrograms, compile_programs
from dflash_jax.graph.graph import Graph
from dflash_jax.graph.keys import STEP_VARIANTS, ProgramKey, Step, Variant, serving
from dflash_jax.graph.programs import Program, declare
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.networks import build_target
from dflash_jax.testing import tiny_target

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
SHARED = Step.CLEAR_ROWS  # needed by all of `STEP_VARIANTS`


def programs(*variants: Variant) -> CompiledPrograms:
    """A program of each of these variants, and one that all of them share."""
    keys = [ProgramKey(SHARED), *(ProgramKey(Step.PLAIN, variant) for variant in variants)]
    return CompiledPrograms({key: Program(key, jnp.sin, (NUMBER,)) for key in keys})


def until_begun(compiled: CompiledPrograms) -> None:
    """Waits until the first greedy program is being compiled."""
    while compiled.progress["greedy"]["state"] != "compiling":
        time.sleep(0.001)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Opens when programs may be compiled."""
    opened, compile_program = threading.Event(), build._compile

    def held(program: Program, stored: Any) -> Any:
        assert opened.wait(60)
        return compile_program(program, stored)

    monkeypatch.setattr(build, "_compile", held)
    return opened


def test_every_program_is_of_a_variant_and_a_variant_has_all_that_its_requests_use(
    tiny: Engine,
) -> None:
    found = tiny.core.runner.compiled.variants
    assert set().union(*found.values()) == set(tiny.core.runner.compiled.programs)
    forced = {ProgramKey(Step.FORCED_TOKENS)}
    scored, logits = ProgramKey(Step.PROMPT_LOGPROBS), ProgramKey(Step.SET_LOGITS_STATE)
    for variant in STEP_VARIANTS:
        steps = serving(variant, tiny.plan.kernels), None
        needed = {key for key in tiny.core.runner.compiled.programs if key.variant in steps}
        others = forced | {scored}
        if variant not in (Variant.PENALIZED, Variant.CONSTRAINED):
            others |= {logits}
        assert set(found[variant]) == needed - others
        assert found[variant][0].step == Step.PLAIN  # decides on a GPU which kernels others take
    assert set(found[Variant.RECOVERY]) == forced
    assert found[Variant.PROMPT] == (scored,)


def test_what_a_request_waits_for_comes_before_what_nobody_asked_for(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="dflash_jax")
    compiled, compiler = programs(*STEP_VARIANTS), BackgroundCompiler()
    compiled.label = "tiny"
    compiled.want(STEP_VARIANTS)  # for the count
    wanted = [compiler.want(compiled, [variant]) for variant in STEP_VARIANTS]
    until_begun(compiled)
    urgent = compiler.want(compiled, [Variant.CONSTRAINED], urgent=True)
    gate.set()
    assert not concurrent.futures.wait([*wanted, urgent], 60).not_done
    said = [text for x in caplog.records if "tiny: program" in (text := x.getMessage())]
    assert [re.sub(r"compiled in [0-9.]+ s|read from the cache", "ready", x) for x in said] == [
        "tiny: program 1 of 5 ready: plain[greedy]",  # it had begun
        "tiny: program 2 of 5 ready: plain[constrained]",
        "tiny: program 3 of 5 ready: clear_rows",
        "tiny: program 4 of 5 ready: plain[sampled]",
        "tiny: program 5 of 5 ready: plain[penalized]",
    ]
    assert compiled.executables[ProgramKey(Step.PLAIN, Variant.CONSTRAINED)](0.0) == 0.0


def test_progress_says_what_is_ready_compiled_wanted_and_broken(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = programs(Variant.GREEDY, Variant.SAMPLED, Variant.PENALIZED)

    def said() -> dict[str, tuple[str, int, int]]:
        found = compiled.progress
        return {name: (x["state"], x["compiled"], x["of"]) for name, x in found.items()}

    assert said()["greedy"] == ("on demand", 0, 2)
    compiler = BackgroundCompiler()
    ready = compiler.want(compiled, [Variant.GREEDY])
    later = compiler.want(compiled, [Variant.SAMPLED])
    until_begun(compiled)
    assert said()["sampled"] == ("waiting", 0, 2)
    assert said()["penalized"] == ("on demand", 0, 2)
    assert compiled.estimate_s([Variant.GREEDY]) > 0
    gate.set()
    ready.result(60)
    later.result(60)
    assert said()["sampled"] == ("ready", 2, 2)
    assert compiled.estimate_s([Variant.GREEDY]) == 0

    def broken(program: Program, stored: Any) -> None:
        raise PlanError("no room")

    monkeypatch.setattr(build, "_compile", broken)
    with pytest.raises(PlanError, match="no room"):
        compiler.want(compiled, [Variant.PENALIZED]).result(60)
    assert compiled.progress["penalized"] == {
        "state": "failed", "compiled": 1, "of": 2, "error": "no room"
    }  # fmt: skip


def test_a_stopped_compiler_ends_with_the_program_it_is_compiling(gate: threading.Event) -> None:
    compiled, compiler = programs(Variant.GREEDY), BackgroundCompiler()
    future = compiler.want(compiled, [Variant.GREEDY])
    [thread] = [t for t in threading.enumerate() if t.name == "compiler"]
    until_begun(compiled)
    compiler.stop()
    assert future.cancelled()
    gate.set()
    thread.join(60)
    assert not compiler.compiling
    assert len(compiled.executables) == 1
    assert compiler.want(compiled, [Variant.GREEDY]).cancelled()


def test_a_process_compiles_for_one_caller_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[int] = []
    running = threading.Semaphore(9)
    compile_program = build._compile

    def counted(program: Program, stored: Any) -> Any:
        with running:
            beside.append(running._value)
            return compile_program(program, stored)

    monkeypatch.setattr(build, "_compile", counted)
    compiler = BackgroundCompiler()
    pair = [programs(*STEP_VARIANTS) for _ in range(2)]
    futures = [compiler.want(pair[0], [variant]) for variant in STEP_VARIANTS]
    pair[1].compile(STEP_VARIANTS, workers=1)
    assert not concurrent.futures.wait(futures, 60).not_done
    assert beside == [8] * 10


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own there")
def test_the_thread_has_a_lower_priority_than_those_that_decode(gate: threading.Event) -> None:
    own, found = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), []
    compiler = BackgroundCompiler()
    future = compiler.want(programs(Variant.GREEDY), [Variant.GREEDY])
    future.add_done_callback(
        lambda _: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    )
    gate.set()
    future.result(60)
    [thread] = [t for t in threading.enumerate() if t.name == "compiler"] or [None]
    if thread:
        thread.join(60)
    assert found == [min(own + NICENESS, 19)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


@pytest.mark.exhaustive
def test_traces_are_dropped_once_a_program_is_compiled(tiny: Engine) -> None:
    """Millions of objects would stop every thread for each full garbage collection."""

    def operations() -> int:
        gc.collect()
        return sum(type(x).__name__ == "JaxprEqn" for x in gc.get_objects())

    made = [compile_programs([tiny.core.runner.compiled.programs[tiny.graph.key(Step.PLAIN)]])]
    before = operations()  # those of functions that programs share are kept, and few
    made.append(
        compile_programs([tiny.core.runner.compiled.programs[tiny.graph.key(Step.PREFILL)]])
    )
    assert operations() - before < 200


# -- the process that compiles ---------------------------------------------------------------------


def real_programs() -> CompiledPrograms:
    """Return the programs of a small engine, which can be kept on disk."""
    target = tiny_target(num_layers=1, vocab_size=61)
    planned = Graph(
        Pair(build_target(target)), Plan(max_length=32, chunk=8, block=2, prefix_cache=0)
    )
    return CompiledPrograms(declare(planned))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keep programs in an empty folder, and let the other process have any of them."""
    before = jax.config.values["jax_compilation_cache_dir"]
    tmp_path.chmod(0o700)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    monkeypatch.setattr(background, "WORTH_A_PROCESS", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


# The other process, without its low priority: beside other tests it would not get any time.
AT_ONCE = """
from dflash_jax.graph import compile_process
compile_process.lowest_priority = lambda: None
compile_process.main()
"""


@pytest.mark.usefixtures("kept")
def test_what_nobody_waits_for_is_compiled_by_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [sys.executable, "-c", AT_ONCE]
    monkeypatch.setattr(compile_process, "python_command", lambda *_: command)
    lowered: list[ProgramKey] = []
    lower = build.lower
    monkeypatch.setattr(build, "lower", lambda x: lowered.append(x.key) or lower(x))
    compiled, compiler = real_programs(), BackgroundCompiler()
    compiler.want(compiled, [Variant.RECOVERY]).result(100)
    assert ProgramKey(Step.FORCED_TOKENS) in compiled.executables
    assert not lowered
    compiler.stop()
    again, other = real_programs(), BackgroundCompiler()
    monkeypatch.setattr(compile_process, "python_command", None)  # it is on disk
    other.want(again, [Variant.RECOVERY]).result(100)
    assert again.executables.keys() == compiled.executables.keys()
    assert not lowered


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("code", ["", "import time; time.sleep(100)"], ids=["ends", "hangs"])
def test_a_process_that_fails_or_is_slow_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(compile_process, "python_command", lambda *_: command)
    compiled, compiler = real_programs(), BackgroundCompiler()
    ahead = compiler.want(compiled, [Variant.RECOVERY])
    if not code:
        ahead.result(100)  # by this process
        assert compiled.executables
    urgent = compiler.want(compiled, [Variant.PROMPT], urgent=True)
    urgent.result(100)
    assert ProgramKey(Step.PROMPT_LOGPROBS) in compiled.executables
    compiler.stop()
    assert ahead.done()
