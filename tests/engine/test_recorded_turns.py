"""Recorded turns run again in another process, with the same work and the same tokens."""

import copy
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.bench.recorded_turns import TurnRecording, is_recording, replay
from dflash_jax.bench.replay import prompt_of, read_turns
from dflash_jax.cli.replay import SHIPPED
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.turns.recording import record_turns
from dflash_jax.errors import PlanError, RequestError
from dflash_jax.graph import Graph
from dflash_jax.graph.keys import ProgramKey, Step

LONG = [5, 6, 7] * 120


def twin(engine: Engine, **plan: Any) -> Engine:
    """Return a new engine with the programs of another one."""
    made = Engine(Graph(engine.graph.pair, engine.plan), engine.params)
    made.share_programs(engine)
    return made


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_together(*works: Callable[[], object]) -> None:
    """Run functions in threads of their own; raise the first error."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors, errors


def test_turns_of_several_threads_run_again_in_another_process(tmp_path: Path) -> None:
    """Cancelled, dropped, overdue, structured and recovered requests; late compilation."""
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    plan = dj.Plan(rows=2, max_length=1024, prefix_cache=2**22)
    engine = dj.load("tiny", plan=plan)
    engine.warm_up("greedy", "sampled", "penalized", "constrained", "recovery")
    path = tmp_path / "turns.jsonl"
    record_turns(engine, path)
    [turn] = [turn for turn in read_turns(SHIPPED) if turn.id == "agent-7.2"]
    prompt = prompt_of(turn, engine)
    assert engine.tokenizer is not None
    [end] = engine.tokenizer.encode("<|im_end|>", specials=False)
    calls: dict[str, Any] = {"tools": turn.tools, "logit_bias": {end: 12}, "max_tokens": 150}

    def recovered() -> None:
        found = engine.generate(prompt, recovery=dj.Recovery(), **calls)
        assert found.stats.recovery == {"call_retry": 1}
        engine.warm_up("chunks")
        engine.generate(LONG, max_tokens=8)

    def given_up() -> None:
        for length in (1, 9):
            pieces = iter(engine.submit([length, 3], max_tokens=300, ignore_eos=True))
            while length > 0:
                length -= len(next(pieces).token_ids)
            del pieces  # drops the request
        handle = engine.submit(LONG, max_tokens=300, ignore_eos=True)
        next(iter(handle))
        handle.close()
        overdue = dj.Recovery(deadline_s=0.05)
        engine.generate([4], max_tokens=900, ignore_eos=True, recovery=overdue)

    def cancelled() -> None:
        cell = dj.CancelCell()
        handle = engine.submit([8, 8], temperature=1.0, max_tokens=400, cancel=cell)
        next(iter(handle))
        cell.cancel("disconnect")
        engine.generate_many([[1, 2], LONG], n=2, temperature=0.8, max_tokens=20)
        engine.generate([3], structured={"regex": "[a-f]{12}"}, max_tokens=20)

    run_together(recovered, given_up, cancelled)
    engine.close()
    recorded = lines_of(path)
    reasons = {reason for line in recorded for _, reason in line.get("end", ())}
    assert {"closed", "dropped", "overdue", "disconnect"} <= reasons
    assert any("prefill_wide" in line.get("use", ()) for line in recorded)
    assert any(line.get("retry") for line in recorded)
    assert recorded[-1] == {"end_of_recording": "the engine was closed"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = subprocess.run(
        [sys.executable, "-m", "dflash_jax", "replay", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )
    assert again.returncode == 0, (again.stdout, again.stderr)
    turns = sum("work" in line for line in recorded)
    assert again.stdout.startswith(f"{turns:,} turns, ")
    assert ": equal\n" in again.stdout


@pytest.fixture(scope="module")
def recorded(tiny3: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of some requests, one of which was closed."""
    path = tmp_path_factory.mktemp("recorded") / "turns.jsonl"
    engine = twin(tiny3)
    record_turns(engine, path)
    handle = engine.submit([1, 2], max_tokens=60)
    engine.generate_many([[3], list(range(40))], n=2, max_tokens=12, seed=5)
    handle.close()
    engine.close()
    return path


def test_a_recording_runs_again_on_a_new_engine(tiny3: Engine, recorded: Path) -> None:
    assert is_recording(recorded)
    assert not is_recording(SHIPPED)
    assert not is_recording(recorded.parent)
    replayed = replay(twin(tiny3), TurnRecording(recorded))
    assert (replayed.difference, replayed.end) == ("", "the engine was closed")
    assert replayed.requests == 5
    assert replayed.tokens >= 4 * 12


def test_programs_that_no_request_asked_for_are_compiled_before_they_run_again(
    tiny3: Engine, tmp_path: Path
) -> None:
    """Once a program sets penalties, each request sets its own, even if it has none."""
    tiny3.warm_up("penalized")
    path = tmp_path / "turns.jsonl"
    engine = twin(tiny3)
    record_turns(engine, path)
    engine.generate([1, 2], max_tokens=4)
    engine.close()
    assert any("set_logits_state" in line.get("use", ()) for line in lines_of(path))
    new = twin(tiny3)
    new.core.runner.compiled = compiled = copy.copy(tiny3.core.runner.compiled)
    compiled.executables = dict(compiled.executables)
    del compiled.executables[ProgramKey(Step.SET_LOGITS_STATE)]
    assert replay(new, TurnRecording(path)).difference == ""


def edited(recorded: Path, path: Path, edit: Callable[[list[dict[str, Any]]], object]) -> Path:
    lines = lines_of(recorded)
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_first_turn_that_differs_is_told(tiny3: Engine, recorded: Path, tmp_path: Path) -> None:
    lines = lines_of(recorded)
    at = next(i for i, line in enumerate(lines) if line.get("tokens"))
    number, token, *rest = lines[at]["tokens"][0]
    other = edited(
        recorded,
        tmp_path / "other",
        lambda lines: lines[at].update(tokens=[[number, token + 1, *rest]]),
    )
    replayed = replay(twin(tiny3), TurnRecording(other))
    assert replayed.difference.startswith(f"line {at + 1}: the decided tokens is")
    assert f"[[{number}, {token + 1}" in replayed.difference
    at = next(i for i, line in enumerate(lines) if (line.get("work") or {}).get("drafts"))
    other = edited(recorded, other, lambda lines: lines[at]["work"].update(steps=2))
    assert replay(twin(tiny3), TurnRecording(other)).difference.startswith(
        f"line {at + 1}: the scheduled work is"
    )


def test_a_last_turn_that_was_cut_is_left_out(
    tiny3: Engine, recorded: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(recorded.read_bytes()[:-60])
    replayed = replay(twin(tiny3), TurnRecording(cut))
    assert (replayed.difference, replayed.end) == ("", "")
    assert replayed.turns > 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "does not begin as a recording does"),
        ("[1]\n", "does not begin as a recording does"),
        ('{"recording": 1}\n', "does not begin as a recording does"),
        ('{"recording": 9, "plan": {}, "model": {}, "versions": {}}\n', "of version 9; expected 1"),
    ],
)
def test_a_file_that_is_no_recording_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text(text)
    with pytest.raises(RequestError, match=rf"turns\.jsonl .*{expected}"):
        TurnRecording(path)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda lines: lines[0]["model"].update(digest="0"), "another model digest: '0'"),
        (lambda lines: lines[0]["plan"].update(rows=9), "another plan rows: 9, but here it is 3"),
        (lambda lines: lines[0]["versions"].update(jax="0.1"), "another versions jax: '0.1'"),
        (lambda lines: lines.insert(1, {"admits": []}), "line 2, is no turn: expected an object"),
        (lambda lines: lines[1]["admit"][0].pop("seed"), "line 2, is no turn: 'seed'"),
        (lambda lines: lines[1]["admit"][0].update(number="x"), "line 2, is no turn: 'x' is no"),
        (lambda lines: lines[1]["admit"][0].update(prompt=[999]), "out of range"),
        (lambda lines: lines[1]["admit"][0]["params"].update(tempo=1), "'tempo' is no argument"),
        (lambda lines: lines[1].update(end=[[1, "bored"]]), "a request ends by 'bored'"),
        (lambda lines: lines[1].update(steps=99), "steps is 99"),
        (lambda lines: lines[1].update(break_even=[1]), "line 2, is no turn"),
    ],
)
def test_what_is_wrong_with_a_recording_is_named(
    tiny3: Engine,
    recorded: Path,
    tmp_path: Path,
    edit: Callable[[list[dict[str, Any]]], object],
    expected: str,
) -> None:
    path = edited(recorded, tmp_path / "turns.jsonl", edit)
    with pytest.raises(RequestError, match=rf"turns\.jsonl.*{expected}"):
        replay(twin(tiny3), TurnRecording(path))


def test_a_recording_with_another_plan_is_named(recorded: Path, tmp_path: Path) -> None:
    path = edited(recorded, tmp_path / "x", lambda lines: lines[0]["plan"].update(rowz=2))
    with pytest.raises(PlanError, match="x has no plan: 'rowz' is no field"):
        _ = TurnRecording(path).plan


def test_a_recording_has_a_new_file_of_a_limited_size(tiny3: Engine, tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    engine = twin(tiny3)
    with pytest.raises(RequestError, match="cannot be created"):
        record_turns(engine, tmp_path / "missing" / "turns.jsonl")
    record_turns(engine, path, most_bytes=4000)
    with pytest.raises(RequestError, match="exists; give the name of a new file"):
        record_turns(engine, path)
    assert engine.generate([1, 2, 3], max_tokens=100).token_ids
    assert path.stat().st_size < 4200
    assert lines_of(path)[-1] == {"end_of_recording": "the recording has as many bytes as it may"}
    assert replay(twin(tiny3), TurnRecording(path)).difference == ""


def test_a_recording_ends_where_parameters_are_replaced(tiny3: Engine, tmp_path: Path) -> None:
    engine = twin(tiny3)
    record_turns(engine, tmp_path / "turns.jsonl")
    engine.update_params({"target": tiny3.params["target"]})
    engine.generate([1], max_tokens=2)
    last = lines_of(tmp_path / "turns.jsonl")[-1]
    assert last == {"end_of_recording": "the parameters were replaced"}
