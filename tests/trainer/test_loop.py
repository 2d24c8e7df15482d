"""The training loop: exact resumption, clean stops, rejection of other runs' states."""

import dataclasses
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import checkpoint
from dflash_jax.errors import CheckpointError, ComputeError
from dflash_jax.trainer import saved
from dflash_jax.trainer.files import remove
from dflash_jax.trainer.loop import TrainingRun, TrainingStopped, fit
from tests.damage import apply
from tests.soak.kills import count_changes


def run(tmp_path, steps: int = 9) -> TrainingRun:
    return TrainingRun(tmp_path / "state", steps, 4, "a run", "test")


def advance(state, step):
    noise = jax.random.normal(jax.random.key(step), (3,))
    return {"x": state["x"] * 0.9 + noise, "n": state["n"] + 1}, {"x": state["x"].mean()}


def start():
    return {"x": jnp.zeros(3), "n": jnp.int32(0)}


def test_a_signal_saves_and_the_same_call_resumes(tmp_path):
    def interrupted(state, step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(state, step)

    with pytest.raises(TrainingStopped, match="step 6 of 9"):
        fit(run(tmp_path), start(), interrupted)
    resumed = fit(run(tmp_path), start(), advance)
    straight = fit(run(tmp_path / "other"), start(), advance)
    np.testing.assert_array_equal(resumed["x"], straight["x"])
    assert resumed["n"] == 9


def test_a_signal_while_a_line_is_written_saves_too(tmp_path):
    asked, whole = dataclasses.replace(run(tmp_path, 30), save_every=30), []

    def interrupted(line):
        whole.append(line)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(TrainingStopped, match=r"step 20 of 30; state saved"):
        fit(asked, start(), advance, report=interrupted)
    assert [path.name for path in asked.path.iterdir()] == ["20"]
    assert len(whole) == 1


def test_a_hook_gets_the_lines_of_the_log_in_order_and_what_is_measured_between(tmp_path):
    seen, lines, log = [], [], tmp_path / "log.jsonl"

    def measured(state, done):
        return {"held_out": 2.0 + done, "held_out_low": 1.0} if done % 3 == 0 else {}

    watched = dataclasses.replace(run(tmp_path), log=log, measured=measured, on_step=seen.append)
    fit(watched, start(), advance, report=lines.append)
    assert [json.loads(line) for line in log.read_text().splitlines()] == seen
    assert [x["step"] for x in seen] == [*range(1, 10)]
    assert {x["step"]: x["held_out"] for x in seen if "held_out" in x} == {3: 5.0, 6: 8.0, 9: 11.0}
    assert ["held_out 5.000" in line for line in lines] == [True, False, False]
    assert "held_out_low" not in "".join(lines)


def test_a_hook_that_raises_ends_the_run_which_goes_on_from_the_state_saved_before(tmp_path):
    def raising(metrics):
        if metrics["step"] == 6:
            raise ZeroDivisionError

    watched = dataclasses.replace(run(tmp_path), on_step=raising)
    with pytest.raises(ZeroDivisionError):
        fit(watched, start(), advance)
    assert [path.name for path in watched.path.iterdir()] == ["4"]
    resumed = fit(run(tmp_path), start(), advance)
    straight = fit(run(tmp_path / "other"), start(), advance)
    np.testing.assert_array_equal(resumed["x"], straight["x"])


def test_a_picture_has_a_curve_for_each_metric_of_a_run(tmp_path):
    def measured(state, done):
        bounds = {"held_out_low": 1.5, "held_out_high": 2.5}
        return {"held_out": 2.0, **bounds} if done % 100 == 0 else {}

    log = tmp_path / "log.jsonl"
    watched = dataclasses.replace(run(tmp_path, 900), save_every=300, log=log, measured=measured)
    lines = []
    fit(watched, start(), with_loss, report=lines.append)
    drawn = ElementTree.parse(tmp_path / "run.svg").getroot()
    ends = [line.get("points").split() for line in drawn.findall(".//{*}polyline")]
    assert [len(points) for points in ends] == [60, 60, 9]  # loss, simulated, held out
    assert len(list(drawn.findall(".//{*}polygon"))) == 1
    assert lines[0].startswith("900 steps of about 0.0")
    assert re.search(r"simulated \d\.\d+ [▁-█]{10,12}  ", lines[-1])


def test_a_resumed_run_draws_all_of_its_steps(tmp_path):
    log = tmp_path / "log.jsonl"
    watched = dataclasses.replace(run(tmp_path), log=log)
    fit(dataclasses.replace(watched, steps=4), start(), with_loss)
    fit(watched, start(), with_loss)
    drawn = ElementTree.parse(tmp_path / "run.svg").getroot()
    lines = [line.get("points").split() for line in drawn.findall(".//{*}polyline")]
    assert [len(points) for points in lines] == [9, 9]


def with_loss(state, step):
    state, _ = advance(state, step)
    return state, {"loss": jnp.exp(-step / 300), "simulated": 2 - jnp.exp(-step / 300)}


def test_a_signal_during_the_last_save_is_not_lost(tmp_path, monkeypatch):
    save = saved.save

    def interrupted(*arguments):
        save(*arguments)
        if arguments[1] == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(saved, "save", interrupted)
    with pytest.raises(TrainingStopped, match=r"step 9 of 9; state saved"):
        fit(run(tmp_path), start(), advance)
    assert fit(run(tmp_path), start(), advance)["n"] == 9


def test_a_signal_while_arrays_are_written_takes_effect_after_them(tmp_path, monkeypatch):
    lazy = checkpoint._lazy

    def interrupted(array):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.1)
        monkeypatch.setattr(checkpoint, "_lazy", lazy)
        return lazy(array)

    monkeypatch.setattr(checkpoint, "_lazy", interrupted)
    with pytest.raises(TrainingStopped, match=r"step 4 of 9; state saved"):
        fit(run(tmp_path), start(), advance)
    assert [path.name for path in run(tmp_path).path.iterdir()] == ["4"]


def test_a_finished_run_is_not_run_again(tmp_path):
    fit(run(tmp_path), start(), advance)

    def never(state, step):
        raise AssertionError(step)

    assert fit(run(tmp_path), start(), never)["n"] == 9


def test_the_state_of_another_run_is_refused(tmp_path):
    fit(run(tmp_path), start(), advance)
    other = dataclasses.replace(run(tmp_path), identity="another run")
    with pytest.raises(CheckpointError, match="another preset or seed"):
        fit(other, start(), advance)


def test_a_damaged_state_is_named_and_the_one_before_it_serves(tmp_path):
    straight = fit(run(tmp_path), start(), advance)
    for file in (tmp_path / "state" / "9" / "arrays").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    for part in ("about.json", "arrays"):
        with pytest.raises(CheckpointError, match=r"9 cannot be read .*remove it"):
            fit(run(tmp_path), start(), advance)
        remove(tmp_path / "state" / "9" / part)
    remove(tmp_path / "state" / "9")
    np.testing.assert_array_equal(fit(run(tmp_path), start(), advance)["x"], straight["x"])


def test_a_finished_run_removes_the_fragment_of_its_last_state(tmp_path):
    straight = fit(run(tmp_path), start(), advance)
    fragment = tmp_path / "state" / ".9.partial-4194304-a0f8aa00"  # of a process that ended
    fragment.mkdir()
    np.testing.assert_array_equal(fit(run(tmp_path), start(), advance)["x"], straight["x"])
    assert not fragment.exists()


def test_no_flipped_bit_of_a_state_is_restored(tmp_path, capfd):
    state = {"x": jax.random.normal(jax.random.key(0), (300,))}  # more than orbax inlines
    saved.save(tmp_path / "state", 9, state, "a run")
    for file in sorted(p for p in (tmp_path / "state").rglob("*") if p.is_file()):
        whole = file.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 4)):
            file.write_bytes(apply(whole, [("byte", place, bytes([whole[place] ^ 4]))]))
            with pytest.raises(CheckpointError, match=r"9 cannot be read .*remove it"):
                saved.newest(tmp_path / "state", state, "a run")
        file.write_bytes(whole)
    step, same = saved.newest(tmp_path / "state", {"x": jnp.zeros(300)}, "a run")
    assert step == 9
    np.testing.assert_array_equal(same["x"], state["x"])
    assert "Traceback" not in capfd.readouterr().err


KILLED = """
import sys
import threading
import time
from pathlib import Path
import jax, jax.numpy as jnp
from dflash_jax.trainer.loop import fit
from tests.soak.kills import kill_at
from tests.trainer import test_loop

kill_at(Path(sys.argv[1]), int(sys.argv[2]))
fit(test_loop.run(Path(sys.argv[1])), test_loop.start(), test_loop.advance)
"""


def test_a_run_killed_at_any_change_of_a_file_resumes_bit_for_bit(tmp_path):
    seen = []
    count_changes(tmp_path / "straight", lambda: seen.append(1))
    straight = fit(run(tmp_path / "straight"), start(), advance)
    assert len(seen) > 20  # three states, each in several files
    number = random.randint(1, len(seen))
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(number)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    resumed = fit(run(tmp_path), start(), advance)
    np.testing.assert_array_equal(resumed["x"], straight["x"], err_msg=f"killed at {number}")
    left = {path.name for path in (tmp_path / "state").iterdir()}
    assert left <= {"4", "8", "9"}, "a fragment of a state stays"
    assert "9" in left


def steps_logged(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(tmp_path):
    def spoilt(state, step):
        state, metrics = advance(state, step)
        return state, metrics | {"x": metrics["x"] * (jnp.nan if step == 6 else 1.0)}

    logged = dataclasses.replace(run(tmp_path), log=tmp_path / "log.jsonl", batch="rows {}".format)
    with pytest.raises(ComputeError, match=r"step 7 gave x nan, at rows 6.*after step 4 is kept"):
        fit(logged, start(), spoilt)
    assert steps_logged(logged.log) == [1, 2, 3, 4]
    assert fit(logged, start(), advance)["n"] == 9
    assert steps_logged(logged.log) == list(range(1, 10))


def test_a_full_disk_is_named_and_what_was_saved_stays(tmp_path):
    def until_full(state, step):
        if step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
        return advance(state, step)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(CheckpointError, match=r"could not be written.*free some space"):
            fit(run(tmp_path), start(), until_full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["4"]
    resumed = fit(run(tmp_path), start(), advance)
    np.testing.assert_array_equal(resumed["x"], fit(run(tmp_path / "o"), start(), advance)["x"])
