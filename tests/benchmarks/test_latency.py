"""The benchmark of latency: its marks, its client and its table."""

from types import SimpleNamespace
from typing import Any

from benchmarks.latency import BODIES, of_bare, table
from benchmarks.latency_server import STAGES, Marks


def test_a_mark_is_noted_once_for_each_request() -> None:
    marks = Marks()
    owner: Any = SimpleNamespace(work=lambda number: number + 1)
    marks.at(owner, "work", "routed", if_any=lambda number: number > 1)
    assert owner.work(5) == 6
    assert marks.requests == []
    marks.begin()
    owner.work(1)
    assert list(marks.requests[0]) == ["received"]
    owner.work(2)
    first = dict(marks.requests[0])
    owner.work(3)
    assert marks.requests == [first]
    assert list(first) == ["received", "routed"]


def test_the_bare_route_answers_the_client() -> None:
    assert all(of_bare(path, 2) > 0 for path in BODIES)


def test_the_table_has_a_line_for_each_stage_and_a_column_for_each_version() -> None:
    now = dict.fromkeys([*STAGES, "in all", "our part"], 1.0)
    lines = table({"bare": 0.5, "now": now, "before": dict.fromkeys(now, 2.0)})
    assert lines[0] == "| ms, median | before | now |"
    assert lines[-2:] == ["| our part | 2.00 | 1.00 |", "| bare Starlette, in all |  | 0.50 |"]
    assert len(lines) == len(now) + 3
