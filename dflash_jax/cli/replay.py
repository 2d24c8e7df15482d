"""`dflash-jax replay`: what becomes of captured turns, with recovery and without."""

import argparse
import json
from pathlib import Path
from typing import Any

from dflash_jax.cli.options import load_engine, model_options, new_verb, telling
from dflash_jax.errors import RequestError

SHIPPED = Path(__file__).parents[1] / "data" / "tiny" / "turns.jsonl"


def add_verb(verbs: Any) -> None:
    """Adds `replay` to the command line."""
    verb = new_verb(verbs, "replay", run, "Run captured turns again and say what became of them.")
    verb.add_argument(
        "trace", type=Path, nargs="?", help="one turn a line (default: the shipped set)"
    )
    verb.add_argument("--recovery", choices=("on", "off", "both"), default="both")
    verb.add_argument("--json", action="store_true", help="print one JSON object at the end")
    model_options(verb)


def run(options: argparse.Namespace) -> int:
    """`dflash-jax replay`: exit code 0 if drafting changed nothing and all turns went as expected.

    What a turn expects is judged with recovery on only.
    """
    from dflash_jax.engine import replay
    from dflash_jax.engine.recovery import Recovery

    turns = replay.read_turns(options.trace or SHIPPED)
    options.max_tokens = max(turn.max_tokens for turn in turns)
    engine, _ = load_engine(options, lambda tokenizer: _prompts(turns, tokenizer), quiet=True)
    with telling("compiling recovery", quiet=options.json):
        engine.warm_up(recovery=True)
    settings = {"off": None, "on": Recovery()}
    report: dict[str, Any] = {}
    bad = 0
    for name in settings if options.recovery == "both" else (options.recovery,):
        played = [replay.play(engine, turn, settings[name]) for turn in turns]
        unequal = [p.turn.id for p in played if not p.equal]
        missed = [p.turn.id for p in played if p.turn.expected not in (None, p.outcome)]
        bad += len(unequal) + (len(missed) if name == "on" else 0)
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


def _prompts(turns: list[Any], tokenizer: Any) -> list[list[int]]:
    """Every turn's ids, by which the plan is sized."""
    prompts = []
    for turn in turns:
        if turn.prompt_ids:
            prompts.append(list(turn.prompt_ids))
        elif tokenizer is None:
            raise RequestError("this model ships no tokenizer; give turns with prompt_ids")
        else:
            tools = list(turn.tools) or None
            prompts.append(tokenizer.chat(turn.messages, tools=tools, **turn.variables))
    return prompts


def _print(name: str, rows: list[dict[str, Any]], unequal: list[str], missed: list[str]) -> None:
    columns = list(rows[0])
    widths = [max(len(c), *(len(str(row[c])) for row in rows)) for c in columns]
    print(f"recovery {name}")
    for cells in (columns, *([str(row[c]) for c in columns] for row in rows)):
        first, *rest = [f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)]
        print("  " + "  ".join([first.strip().ljust(widths[0]), *rest]))
    for label, ids in (("different from plain", unequal), ("not as expected", missed)):
        if ids:
            print(f"  {label}: {', '.join(ids)}")
