"""`dflash-jax replay`: generates captured turns again, or runs a server's recording again."""

import argparse
import contextlib
import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.cli.terminal import columns, filled, table
from dflash_jax.errors import RequestError
from dflash_jax.utils.progress import ShownCount

SHIPPED = Path(__file__).parents[1] / "data" / "tiny" / "turns.jsonl"

FORMAT = """\
A line of TRACE is one JSON object, a turn up to the assistant's answer:
  messages     chat messages, or
  prompt_ids   token ids, in place of messages
and, all of them optional,
  tools        as in OpenAI's API
  tool_choice  "auto", "none", "required" or a tool, as there
  variables    more variables of the chat template
  max_tokens   of the answer (default 160)
  expected     expected kind of answer with recovery on: "empty",
               "tool call", "prose" or "bounded length" (ended by the limit)
  id           its name in the report (default: its line)
  kind         its row in the report (default "turn")
For example:
  {"messages": [{"role": "user", "content": "Hello!"}], "expected": "prose"}

A row of the report counts the turns of a kind by kind of answer. "equal" counts
turns with the same tokens as plain decoding, "as expected" turns whose answer
matches `expected`. The exit code is 0 if all are equal and, with recovery on,
as expected.

TRACE may also be a recording of `dflash-jax serve --record`. It is run again
with its own plan and the models that --target and --drafter name, up to the
first turn that schedules other work or decides other tokens; then the exit
code is 1."""
SHORT = {"bounded length": "bounded", "equal to plain": "equal"}  # headings that fit 80 columns


def add_command(commands: Any) -> None:
    """Add `replay` to the command line."""
    command = shared.new_command(
        commands, "replay", run, "Generate captured turns again, and classify the answers."
    )
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = FORMAT
    command.add_argument(
        "trace",
        type=Path,
        nargs="?",
        metavar="TRACE",
        help="file with one turn per line, see below (default: the shipped turns)",
    )
    command.add_argument("--recovery", choices=("on", "off", "both"), default="both")
    command.add_argument("--json", action="store_true", help="print one JSON object at the end")
    shared.model_options(command)


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax replay`; exit code 0 if all turns are equal to plain and as expected.

    Expected kinds of answers count with recovery on only.
    """
    from dflash_jax.bench import recorded_turns, replay
    from dflash_jax.engine.state_machine import Recovery

    if options.trace is not None and recorded_turns.is_recording(options.trace):
        return _run_recording(options)
    turns = replay.read_turns(options.trace or SHIPPED)
    options.max_tokens = max(turn.max_tokens for turn in turns)
    engine, _ = shared.load_engine(
        options,
        lambda tokenizer: _prompts(turns, tokenizer),
        quiet=options.json,
        check=lambda engine, prompts: _check(engine, turns, prompts),
    )
    with shared.report_progress("compiling recovery", quiet=options.json):
        engine.warm_up("greedy", "recovery")
    settings = {"off": None, "on": Recovery()}
    report: dict[str, Any] = {}
    bad = 0
    for name in settings if options.recovery == "both" else (options.recovery,):
        with shared.report_progress(f"{len(turns)} turns, recovery {name}", quiet=options.json):
            count = ShownCount(len(turns), "turns")
            played = []
            for turn in turns:
                played.append(replay.play(engine, turn, settings[name]))
                count()
        unequal = [p.turn.id for p in played if not p.equal]
        missed = [p.turn.id for p in played if p.turn.expected not in (None, p.outcome)]
        bad += len(unequal)
        if name == "on":
            bad += len(missed)
        rows = replay.table(played)
        report[name] = {
            "table": rows,
            "different_from_plain": unequal,
            "not_as_expected": missed,
            "turns": [p.to_json() for p in played],
        }
        if not options.json:
            _print(name, rows, unequal, missed)
    if options.json:
        print(json.dumps(report))
    return 1 if bad else 0


def _run_recording(options: argparse.Namespace) -> int:
    """Run recorded turns again; exit code 0 if they schedule and decide the same."""
    from dflash_jax.bench import recorded_turns

    recording = recorded_turns.TurnRecording(options.trace)
    with shared.report_progress("loading", quiet=options.json):
        shared.use_compilation_cache()
        pair = shared.open_pair(options)
        engine = pair.engine(recording.plan)
    with shared.report_progress("replaying", quiet=options.json):
        replayed = recorded_turns.replay(engine, recording)
    if options.json:
        print(json.dumps(dataclasses.asdict(replayed)))
        return 1 if replayed.difference else 0
    outcome = "different" if replayed.difference else "equal"
    counts = f"{replayed.turns:,} turns, {replayed.requests:,} requests, {replayed.tokens:,} tokens"
    print(f"{counts}: {outcome}")
    if replayed.difference:
        print(replayed.difference)
    elif replayed.end:
        print(f"the recording ends there: {replayed.end}")
    return 1 if replayed.difference else 0


def _prompts(turns: list[Any], tokenizer: Any) -> list[list[int]]:
    prompts = []
    for turn in turns:
        if turn.prompt_ids:
            prompts.append(list(turn.prompt_ids))
            continue
        if tokenizer is None:
            raise RequestError("this model ships no tokenizer; give turns with prompt_ids")
        tools = list(turn.tools) or None
        with _named(turn):
            prompts.append(tokenizer.chat(turn.messages, tools=tools, **turn.variables))
    return prompts


def _check(engine: Any, turns: list[Any], prompts: list[list[int]]) -> None:
    """Check that the engine can answer the turns, before programs are compiled."""
    for turn, ids in zip(turns, prompts, strict=True):
        with _named(turn):
            engine.check(
                ids, max_tokens=turn.max_tokens, tools=turn.tools, tool_choice=turn.tool_choice
            )


@contextlib.contextmanager
def _named(turn: Any) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError(f"the turn {turn.id!r}: {error}") from error


def _print(name: str, rows: list[dict[str, Any]], unequal: list[str], missed: list[str]) -> None:
    width = columns(sys.stdout)
    headings = [SHORT.get(heading, heading) for heading in rows[0]]
    cells = [[str(cell) for cell in row.values()] for row in rows]
    print(f"recovery {name}")
    print(textwrap.indent(table(headings, cells, width - 2), "  "))
    for label, ids in (("different from plain", unequal), ("not as expected", missed)):
        if ids:
            first, *rest = ids
            print("  " + filled([f"{label}: {first}", *rest], ",", width - 2, indent="    "))
