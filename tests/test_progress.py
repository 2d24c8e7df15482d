"""Progress is shown on terminals and in notebooks only."""

import io
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import dflash_jax as dj
from dflash_jax.graph import build
from dflash_jax.graph.build import CompiledPrograms
from dflash_jax.graph.keys import ProgramKey, Step
from dflash_jax.utils import progress
from dflash_jax.utils.progress import announced, is_shown


class Stream(io.StringIO):
    """A stream that may be a terminal, with an event that is set by each write."""

    def __init__(self, *, terminal: bool):
        super().__init__()
        self.terminal, self.written = terminal, threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


class OutStream(Stream):
    """Jupyter's stream, by its name."""

    __module__ = "ipykernel.iostream"


def test_progress_is_shown_on_terminals_and_in_notebooks_but_not_in_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream, shown in (
        (Stream(terminal=True), True),
        (OutStream(terminal=False), True),
        (Stream(terminal=False), False),
        (None, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        assert is_shown() is shown
        for value in ("off", "0", "No"):
            monkeypatch.setenv("DFLASH_PROGRESS", value)
            assert is_shown() is False
        monkeypatch.setenv("DFLASH_PROGRESS", "on")
        assert is_shown() is True
        assert is_shown(False) is False
        monkeypatch.delenv("DFLASH_PROGRESS")
        assert is_shown(True) is True


def test_a_block_is_announced_while_it_runs_and_its_time_is_printed_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with announced("compiling", shown=True, patience=0.01):
        assert stream.written.wait(60)
        assert stream.getvalue() == "compiling ..."
    assert re.fullmatch(r"compiling \.\.\. \d+\.\d s\n", stream.getvalue())


def test_a_short_block_is_not_announced_and_neither_is_a_hidden_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with announced("compiling", shown=True, patience=600):
        pass
    with announced("compiling", shown=False, patience=0):
        pass
    assert stream.getvalue() == ""
    for thread in [t for t in threading.enumerate() if "_tick" in t.name]:
        thread.join(60)  # ended, not waiting for its ten minutes
        assert not thread.is_alive()
    assert stream.getvalue() == ""


def test_a_block_that_fails_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(KeyboardInterrupt), announced("loading", shown=True, patience=0):
        raise KeyboardInterrupt
    assert stream.getvalue().endswith(" s\n")


def test_a_line_shows_the_time_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "TICK", 0.01)
    with announced("compiling", shown=True, patience=0):
        while "1 s" not in stream.getvalue():
            stream.written.clear()
            assert stream.written.wait(60)
    assert "\rcompiling ... 1 s" in stream.getvalue()


def test_a_block_within_another_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with announced("loading", shown=True, patience=0):
        with announced("compiling", shown=True, patience=0):
            progress.ShownCount(4, "programs")(2)
        progress.ShownCount(2)(1)
    lines = [line.rsplit("\r", 1)[-1] for line in stream.getvalue().split("\n")]
    assert [re.sub(r"[\d.]+ s", "T", line) for line in lines] == [
        "loading ...",
        "compiling ... T",
        "loading ... T",
        "",
    ]


@pytest.mark.exhaustive
def test_loading_and_compiling_are_announced_on_a_terminal_alone(
    oracle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0)
    folder, plan = oracle / "drafters" / "target_small", dj.Plan(max_length=32, chunk=8)
    lines = {}
    for shown in (None, True):  # standard error is no terminal here
        engine = dj.load(folder, None, plan=plan, progress=shown)
        engine.generate([1, 2, 3], max_tokens=2)
        dj.load_target(folder, progress=shown).forward([[1, 2]])
        lines[shown] = [line.split(" ...")[0] for line in capsys.readouterr().err.splitlines()]
    loading, compiling = f"dflash_jax: loading {folder}", "dflash_jax: compiling"
    assert lines == {None: [], True: [loading, compiling, loading, compiling]}


def test_a_line_shows_what_is_done_and_the_time_left_in_one_line_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(progress, "GUESS", 0.0)
    monkeypatch.setenv("COLUMNS", "40")
    with announced("compiling", shown=True, patience=0):
        count = progress.ShownCount(4, "programs")
        count(0)
        count()
        count(3)
        progress.ShownCount(50)(25)
    first, *drawn, blank, last = stream.getvalue().split("\r")
    assert first == "compiling ..."
    assert drawn[0] == "compiling ... 0/4 programs"
    assert re.fullmatch(r"compiling \.\.\. 1/4 programs, \d+ s left", drawn[1])
    assert drawn[3].startswith("compiling ... 50%, ")
    assert blank == " " * len(drawn[-1].rstrip())
    assert len(drawn[1]) > len(drawn[0])
    assert max(map(len, drawn)) < 40
    assert re.fullmatch(r"compiling \.\.\. \d+\.\d s\n", last)
    count()  # after the block


def test_details_are_shown_on_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    with announced("compiling", shown=True, patience=0):
        progress.ShownCount(4)(2)
    assert re.fullmatch(r"compiling \.\.\. \d+\.\d s\n", stream.getvalue())


@pytest.mark.parametrize("columns", [12, 30, 50, 52])
def test_a_long_text_is_shortened_for_what_changes(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """A line that a narrow terminal breaks could not be overwritten."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(progress, "TICK", 0.01)
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    started = progress.time.perf_counter() - 42
    with announced("dflash_jax: compiling the native kernels, once", shown=True, patience=0):
        progress._lines[-1]._started = started
        while stream.getvalue().count("42 s") < 2:
            time.sleep(0.01)
    *drawn, end = stream.getvalue().split("\r")
    assert all(len(line) < columns for line in drawn)
    assert drawn[1].startswith("dfl")
    assert re.fullmatch(r"dflash_jax: compiling the native kernels, once \.\.\. 4\d\.\d s\n", end)


def test_compiling_shows_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    compiled = CompiledPrograms({})
    monkeypatch.setattr(build, "compile_programs", lambda programs, workers, begun, ended: {})
    with announced("compiling", shown=True, patience=0):
        compiled._compile([], 1)
        for key in (ProgramKey(Step.COPY_ROW), ProgramKey(Step.CLEAR_ROWS)):
            compiled._begin(SimpleNamespace(key=key))
    assert "1/1 programs" in stream.getvalue()
