"""Replays: traces are parsed strictly, outcomes are classified, and the table adds up."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_jax.bench.replay import (
    CLASSES,
    FIELDS,
    ReplayedTurn,
    Turn,
    is_valid_call,
    read_turns,
    table,
)
from dflash_jax.cli import main
from dflash_jax.cli.replay import FORMAT, SHIPPED
from dflash_jax.engine.result import Result, Stats
from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers import SYNTAXES, Syntax
from dflash_jax.tool_parsers.tool_schema import tools_of

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


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=list(SYNTAXES))
def test_calls_of_every_syntax_are_judged_alike(syntax: Syntax) -> None:
    tools = tools_of([TOOL])
    assert is_valid_call("Well:" + syntax.render("move", {"to": "a", "steps": 3}), syntax, tools)
    for wrong in ({"steps": 3}, {"to": "a", "steps": "x"}, {"to": "a", "by": "b"}):
        assert not is_valid_call("Well:" + syntax.render("move", wrong), syntax, tools)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "expected a JSON object"),
        ('{"id": "a", "more": 1}', "'more' is not known; a turn has the fields id, kind, messages"),
        ('{"id": "a", "kind": "b"}', "expected either messages or prompt_ids"),
        ('{"messages": [{}], "prompt_ids": [1]}', "expected either messages or prompt_ids"),
        ('{"prompt_ids": []}', "expected either messages or prompt_ids"),
        ("{", "Expecting property name"),
        ('{"prompt_ids": 5}', "prompt_ids is 5; expected a list of token ids"),
        ('{"prompt_ids": [1, true]}', r"prompt_ids is \[1, true\]; expected a list of token ids"),
        ('{"messages": "x"}', r'messages is "x"; expected a list like \[\{"role": "user"'),
        ('{"messages": [3]}', r"messages is \[3\]; expected a list like"),
        ('{"prompt_ids": [1], "tools": [3]}', r"tools is \[3\]; expected a list of tools"),
        ('{"prompt_ids": [1], "tool_choice": 7}', "tool_choice is 7; expected a text or an obj"),
        ('{"prompt_ids": [1], "variables": 3}', "variables is 3; expected an object"),
        ('{"prompt_ids": [1], "variables": {"tools": []}}', ".*object without messages"),
        ('{"prompt_ids": [1], "max_tokens": "x"}', 'max_tokens is "x"; expected an integer of'),
        ('{"prompt_ids": [1], "max_tokens": 0}', "max_tokens is 0; expected an integer of at"),
        ('{"prompt_ids": [1], "expected": "x"}', 'expected is "x"; expected one of empty, tool'),
        ('{"prompt_ids": [1], "id": [2]}', r"id is \[2\]; expected a text"),
    ],
)
def test_invalid_turns_are_refused_with_their_line(tmp_path: Path, line: str, message: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"id": "a", "kind": "b", "prompt_ids": [1]}\n' + line)
    with pytest.raises(RequestError, match="line 2, is no turn: " + message):
        read_turns(trace)


def test_a_line_needs_a_prompt_alone_and_is_named_by_its_place(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    message = {"role": "user", "content": "Hello!"}
    lines = [{"prompt_ids": [1, 2]}, {"messages": [message], "tools": None, "id": 7, "kind": "b"}]
    trace.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_turns(trace) == [
        Turn(id="line 1", kind="turn", prompt_ids=(1, 2)),
        Turn(id="7", kind="b", messages=(message,)),
    ]


def test_the_help_of_the_command_documents_every_field_and_its_example_is_a_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    shown = capsys.readouterr().out
    assert FORMAT in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    names = {field.name for field in dataclasses.fields(Turn)}
    assert names == FIELDS.keys()
    assert names == set(re.findall(r"^  (\w+)   ?", FORMAT, re.MULTILINE))
    assert f"default {Turn.max_tokens})" in FORMAT
    assert all(f'"{outcome}"' in FORMAT for outcome in CLASSES)
    [example] = re.findall(r"^  (\{.*\})$", FORMAT, re.MULTILINE)
    (tmp_path / "trace.jsonl").write_text(example)
    [turn] = read_turns(tmp_path / "trace.jsonl")
    assert turn.expected == "prose"


def test_empty_and_missing_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_turns(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RequestError, match="holds no turn"):
        read_turns(tmp_path / "empty.jsonl")


def played(
    kind: str, outcome: str, *, equal: bool = True, expected: str | None = None
) -> ReplayedTurn:
    fast = Result([1], "a", "stop", Stats())
    slow = Result([1] if equal else [2], "a", "stop", Stats())
    return ReplayedTurn(
        Turn(id=kind, kind=kind, prompt_ids=(1,), expected=expected), fast, slow, outcome
    )


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
