"""Replays: traces are read strictly, outcomes are told apart, and the table adds up."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_jax.cli.replay import SHIPPED
from dflash_jax.engine.replay import Played, Turn, is_valid_call, read_turns, table
from dflash_jax.engine.result import Result, Stats
from dflash_jax.errors import RequestError
from dflash_jax.tools import SYNTAXES
from dflash_jax.tools.declared import tools_of

TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "properties": {"to": {"type": "string"}, "steps": {"type": ["integer", "null"]}},
            "required": ["to"],
        },
    },
}


@pytest.mark.parametrize(
    ("body", "valid"),
    [
        ('{"name": "move", "arguments": {"to": "a", "steps": 3}}', True),
        ('{"name": "move", "arguments": {"to": "a"}}', True),
        ('{"name": "move", "arguments": {"to": "a", "steps": null}}', True),
        ('{"name": "move", "arguments": {"steps": 3}}', False),
        ('{"name": "move", "arguments": {"to": 7}}', False),
        ('{"name": "move", "arguments": {"to": "a", "by": "b"}}', False),
        ('{"name": "run", "arguments": {"to": "a"}}', False),
        ('{"name": "move", "arguments": {"to": "a"', False),
        ("{}", False),
    ],
)
def test_a_call_counts_if_it_is_whole_and_fits_its_schema(body: str, valid: bool) -> None:
    text = f"Let me go:\n<tool_call>\n{body}\n</tool_call>"
    assert is_valid_call(text, SYNTAXES["hermes"], tools_of([TOOL])) is valid
    assert not is_valid_call(text[:-12], SYNTAXES["hermes"], tools_of([TOOL]))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[]", "line 2, is no turn: a turn has only the fields"),
        ('{"id": "a", "kind": "b", "more": 1}', "line 2, is no turn: a turn has only the fields"),
        ('{"id": "a", "kind": "b"}', "either messages or prompt_ids"),
        ('{"kind": "b", "prompt_ids": [1]}', "line 2, is no turn: .*'id'"),
        ("{", "line 2, is no turn"),
        (
            '{"id": "a", "kind": "b", "prompt_ids": [1], "max_tokens": "x"}',
            "line 2, is no turn: max_tokens is 'x'; expected an integer",
        ),
    ],
)
def test_what_is_no_turn_is_refused_by_its_line(tmp_path: Path, line: str, says: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"id": "a", "kind": "b", "prompt_ids": [1]}\n' + line)
    with pytest.raises(RequestError, match=says):
        read_turns(trace)


def test_empty_and_missing_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_turns(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RequestError, match="holds no turn"):
        read_turns(tmp_path / "empty.jsonl")


def played(kind: str, outcome: str, *, equal: bool = True, expected: str | None = None) -> Played:
    fast = Result([1], "a", "stop", Stats())
    slow = Result([1] if equal else [2], "a", "stop", Stats())
    return Played(Turn(id=kind, kind=kind, prompt_ids=(1,), expected=expected), fast, slow, outcome)


def test_the_table_counts_kinds_and_their_total() -> None:
    rows = table(
        [
            played("stall", "tool call", expected="tool call"),
            played("stall", "prose", expected="tool call", equal=False),
            played("chat", "empty"),
        ]
    )
    assert [row["kind"] for row in rows] == ["stall", "chat", "total"]
    assert rows[0]["tool call"] == rows[0]["as expected"] == rows[0]["equal to plain"] == 1
    assert rows[1]["empty"] == rows[1]["as expected"] == 1
    assert rows[2] | {} == {
        "kind": "total",
        "turns": 3,
        "empty": 1,
        "tool call": 1,
        "prose": 1,
        "bounded length": 0,
        "equal to plain": 2,
        "as expected": 2,
    }
    json.dumps(played("chat", "prose").to_json())


def test_the_shipped_turns_are_many_and_of_every_kind() -> None:
    turns = read_turns(SHIPPED)
    kinds: dict[str, Any] = {}
    for turn in turns:
        kinds.setdefault(turn.kind, []).append(turn.expected)
    assert len(turns) >= 55
    assert len({turn.id for turn in turns}) == len(turns)
    assert len(kinds["stall"]) == 17
    assert set(kinds["stall"]) == set(kinds["agent"]) == {"tool call"}
    assert set(kinds["control"]) == set(kinds["chat"]) == {"prose"}
    assert set(kinds["runaway"]) == {"bounded length"}
