"""L: events in logs and files."""

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from dflash_jax.engine import events
from dflash_jax.engine.events import CAP, NAME, OLD, EventLog


def test_L2_an_event_is_one_record_of_figures(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.INFO, logger="dflash_jax.recovery"):
        EventLog().report("floor", 7, directory=str(tmp_path / "new"), output_tokens=3)
    expected = {"event": "floor", "request": 7, "output_tokens": 3}
    assert [record.dflash for record in caplog.records] == [expected]
    file = tmp_path / "new" / NAME
    assert json.loads(file.read_text()) == expected
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_L3_a_link_is_refused_and_counted(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    log = EventLog()
    log.report("floor", 1, directory=str(tmp_path))
    assert log.failures == 1
    assert (tmp_path / "elsewhere").read_text() == ""


def test_a_failing_handler_and_an_invalid_folder_name_are_each_counted() -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("the handler is broken")

    log, broken = EventLog(), Broken(logging.INFO)
    events.logger.addHandler(broken)
    level = events.logger.level
    events.logger.setLevel(logging.INFO)
    try:
        log.report("floor", 1, directory="a\0b")
    finally:
        events.logger.removeHandler(broken)
        events.logger.setLevel(level)
    assert log.failures == 2


@pytest.mark.parametrize("kind", ["pipe", "folder", "hard link"])
def test_L4_anything_but_a_regular_file_is_refused_without_blocking(
    tmp_path: Path, kind: str
) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / NAME)
    elif kind == "folder":
        (tmp_path / NAME).mkdir()
    else:
        (tmp_path / "other").write_text("")
        os.link(tmp_path / "other", tmp_path / NAME)
    log = EventLog()
    log.report("floor", 1, directory=str(tmp_path))
    assert log.failures == 1


def test_L5_files_stay_below_their_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "CAP", 400)
    log = EventLog()
    for request in range(100):
        log.report("floor", request, directory=str(tmp_path))
    assert log.failures == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [NAME, OLD]
    assert all(p.stat().st_size <= 400 < CAP for p in tmp_path.iterdir())
    last = (tmp_path / NAME).read_text().splitlines()[-1]
    assert json.loads(last)["request"] == 99


def test_a_log_file_that_cannot_be_rotated_is_closed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, close, twice = os.rename, os.close, []

    def swapped(*names: Any, **folders: int) -> None:
        rename(*names, **folders)
        (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")

    def closing(
        number: int,
    ) -> None:  # it may be another thread's file by then
        try:
            close(number)
        except OSError:
            twice.append(number)

    monkeypatch.setattr(events, "CAP", 10)
    monkeypatch.setattr(events.os, "rename", swapped)
    monkeypatch.setattr(events.os, "close", closing)
    log = EventLog()
    log.report("floor", 1, directory=str(tmp_path))
    assert (log.failures, twice) == (1, [])


def test_L6_a_directory_that_cannot_be_created_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = EventLog()
    log.report("floor", 1, directory=str(tmp_path / "file" / "below"))
    assert log.failures == 1
