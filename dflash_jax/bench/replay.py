"""Replay of recorded turns with and without drafting, with the class of each answer."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.result import Result
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.state_machine import Recovery
from dflash_jax.errors import RequestError
from dflash_jax.tool_parsers import CallState, Syntax, syntax_of
from dflash_jax.tool_parsers.calls import calls_of
from dflash_jax.tool_parsers.malformed_calls import is_arguments_object
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.tool_schema import Tool, tools_of

CLASSES = ("empty", "tool call", "prose", "bounded length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One recorded turn: a conversation up to the assistant's answer.

    Attributes:
      id: its name in reports.
      kind: the row of the table that counts it.
      messages, prompt_ids: the prompt, exactly one of the two.
      variables: further variables of the chat template.
      expected: expected class of the answer with recovery on; None accepts any.
    """

    id: str = "turn"
    kind: str = "turn"
    messages: tuple[dict[str, Any], ...] = ()
    prompt_ids: tuple[int, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: Any = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_tokens: int = 160
    expected: str | None = None


@dataclasses.dataclass(frozen=True)
class ReplayedTurn:
    """The answers to a turn with and without drafting."""

    turn: Turn
    speculative: Result
    plain: Result
    outcome: str

    @property
    def equal(self) -> bool:
        """Whether both answers have the same tokens and finish reason."""
        a = self.speculative
        b = self.plain
        return (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)

    def to_json(self) -> dict[str, Any]:
        """Return one line of a report."""
        return {
            "id": self.turn.id,
            "kind": self.turn.kind,
            "expected": self.turn.expected,
            "outcome": self.outcome,
            "equal_to_plain": self.equal,
            "finish_reason": self.speculative.finish_reason,
            "output_tokens": len(self.speculative.token_ids),
            "recovery": dict(self.speculative.stats.recovery),
            "token_ids": self.speculative.token_ids,
        }


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(each) is kind for each in value)


# Fields of a line: a check of the value, and its description in errors.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (lambda value: type(value) in (str, int), "a text"),
    "kind": (lambda value: isinstance(value, str), "a text"),
    "messages": (_is_list_of(dict), 'a list like [{"role": "user", "content": "..."}]'),
    "prompt_ids": (_is_list_of(int), "a list of token ids"),
    "tools": (_is_list_of(dict), "a list of tools as in OpenAI's API"),
    "tool_choice": (lambda value: isinstance(value, str | dict), "a text or an object"),
    "variables": (
        lambda value: isinstance(value, dict) and not value.keys() & {"messages", "tools"},
        "an object without messages and tools, which are fields of their own",
    ),
    "max_tokens": (lambda value: type(value) is int and value > 0, "an integer of at least 1"),
    "expected": (lambda value: value in CLASSES, f"one of {', '.join(CLASSES)}"),
}


def read_turns(path: Path) -> list[Turn]:
    """Return the turns of a file with one JSON object per line.

    A line has `messages` or `prompt_ids`; all other fields may be missing or null. A turn without
    `id` is named by its line.

    Raises:
      RequestError: the file cannot be read, or a line, which the message names, is no turn.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error
    turns = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            turns.append(_turn(json.loads(line), f"line {number}"))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path}, line {number}, is no turn: {error}") from error
    if not turns:
        raise RequestError(f"{path} holds no turn; write one JSON object a line")
    return turns


def _turn(fields: Any, name: str) -> Turn:
    """Return the turn of a line, with `name` as the default id; ValueError if it is invalid."""
    if not isinstance(fields, dict):
        raise ValueError("expected a JSON object")
    if unknown := [field for field in fields if field not in FIELDS]:
        raise ValueError(f"{unknown[0]!r} is not known; a turn has the fields {', '.join(FIELDS)}")
    values: dict[str, Any] = {"id": name}
    for field, value in fields.items():
        if value is None:
            continue
        fits, expected = FIELDS[field]
        if not fits(value):
            raise ValueError(f"{field} is {json.dumps(value)[:60]}; expected {expected}")
        values[field] = tuple(value) if isinstance(value, list) else value
    if bool(values.get("messages")) == bool(values.get("prompt_ids")):
        raise ValueError("expected either messages or prompt_ids")
    return Turn(**values | {"id": str(values["id"])})


def prompt_of(turn: Turn, engine: Engine) -> list[int]:
    """Return the token ids of the prompt."""
    if turn.prompt_ids:
        return list(turn.prompt_ids)
    return engine.chat_ids(turn.messages, tools=list(turn.tools) or None, **turn.variables)


def play(engine: Engine, turn: Turn, recovery: Recovery | None) -> ReplayedTurn:
    """Answer a turn greedily, with and without drafting."""
    prompt = prompt_of(turn, engine)
    params = SamplingParams(
        tools=turn.tools,
        tool_choice=turn.tool_choice,
        max_tokens=turn.max_tokens,
        recovery=recovery,
    )
    fast = engine.generate(prompt, params)
    slow = engine.generate(prompt, params.with_options(speculative=False))
    return ReplayedTurn(turn, fast, slow, outcome_of(engine, turn, fast))


def outcome_of(engine: Engine, turn: Turn, result: Result) -> str:
    """Return the class of an answer; a call counts if it is complete and fits its schema."""
    tokenizer = engine.tokenizer
    if tokenizer is not None:
        if not (result.text or "").strip():
            return "empty"
        text = tokenizer.raw(result.token_ids)
        syntax = syntax_of(tokenizer.teaches)
        if syntax and is_valid_call(text, syntax, tools_of(turn.tools)):
            return "tool call"
    return "bounded length" if result.finish_reason == "length" else "prose"


def is_valid_call(text: str, syntax: Syntax, tools: Sequence[Tool]) -> bool:
    """Return whether the text has only complete calls of declared tools with valid arguments."""
    if syntax.call_state(text) is not CallState.COMPLETE:
        return False
    parser = OutputParser(syntax, tools, lenient=False)
    named = {tool.name: tool for tool in tools}
    calls = calls_of([*parser.push(text), *parser.finish()])
    fit = [
        name in named and is_arguments_object(named[name], arguments or "{}")
        for name, arguments, _ in calls
    ]
    return bool(fit) and all(fit) and not parser.unreadable


def table(played: Iterable[ReplayedTurn]) -> list[dict[str, Any]]:
    """Count the classes of answers by kind of turn; the last row is the total."""
    rows: dict[str, dict[str, Any]] = {}
    columns = ("turns", *CLASSES, "equal to plain", "as expected")
    for one in played:
        for kind in (one.turn.kind, "total"):
            row = rows.setdefault(kind, {"kind": kind} | dict.fromkeys(columns, 0))
            row["turns"] += 1
            row[one.outcome] += 1
            if one.equal:
                row["equal to plain"] += 1
            if one.turn.expected in (None, one.outcome):
                row["as expected"] += 1
    return sorted(rows.values(), key=lambda row: row["kind"] == "total")
