"""`dflash-jax bench`: speculative and plain decoding, timed at different concurrencies."""

import argparse
import dataclasses
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.cli.terminal import columns, table
from dflash_jax.errors import RequestError

# Columns of the table, and their explanations below it.
COLUMNS = {
    "at once": "requests at a time",
    "tok/s": "output tokens per second of all requests together",
    "tok/s each": "output tokens per second of one request while it decodes, median",
    "first ms": "time to the first token, median",
    "p95 ms": "time to the first token, 95th percentile",
    "tau": "acceptance length: tokens per round, the target's own included",
    "rate": "draft acceptance rate: accepted over drafted",
}


def add_command(commands: Any) -> None:
    """Add `bench` to the command line."""
    text = "Time speculative against plain decoding."
    command = shared.new_command(commands, "bench", run, text, check=shared.check_request)
    command.add_argument(
        "--data",
        default="heldout",
        help="heldout (shipped, default), a JSONL file of messages, or gsm8k, math500, humaneval,"
        " mbpp, mt-bench with the package datasets",
    )
    command.add_argument("--count", type=int, default=16, help="conversations")
    command.add_argument("-n", "--max-tokens", type=int, default=64)
    command.add_argument("--temperature", type=float, default=0.0)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--concurrency", default="1", metavar="1,2,4", help="requests at a time")
    command.add_argument("--repeats", type=int, default=1, help="medians are reported")
    command.add_argument("--url", help="measure this OpenAI-compatible server instead of an engine")
    command.add_argument("--name", default="", help="with --url: the model; its first by default")
    command.add_argument(
        "--profile",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="show the time of each part of a step; with a folder, store the trace there",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument("--out", type=Path, help="write the JSON object to a file")
    command.add_argument("--plot", type=Path, help="write a picture (extra plot)")
    shared.model_options(command)


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax bench`; exit code 1 if speculative and plain outputs differ."""
    from dflash_jax.bench.prompts import read_prompts
    from dflash_jax.bench.report import (
        InProcess,
        OverHttp,
        RequestSettings,
        check_plot,
        measure,
        plot,
        summary,
    )

    if options.plot:
        check_plot(options.plot)
    for path in filter(None, (options.out, options.plot)):
        if path.is_dir() or not path.parent.is_dir():
            raise RequestError(f"{path} cannot be written; give a file in a folder that exists")
    levels = _levels(options.concurrency)
    if options.count < 1 or options.repeats < 1:
        raise RequestError("--count and --repeats have to be at least 1")
    talks = read_prompts(options.data, options.count)
    asking = RequestSettings(options.max_tokens, options.temperature, options.seed)
    if options.url and options.profile is not None:
        raise RequestError("--profile looks into an engine of this process; leave --url out")
    if options.url:
        runner: Any = OverHttp(options.url, options.name, asking)
        settings: dict[str, Any] = {"url": options.url}
    else:
        engine = _engine(options, max(levels))
        runner = InProcess(engine, asking)
        settings = {"target": options.target, "drafter": options.drafter}
        settings["plan"] = dataclasses.asdict(engine.plan)
    settings |= {"data": options.data, "count": len(talks)} | dataclasses.asdict(asking)
    with shared.report_progress("measuring", quiet=options.json):
        results = summary(measure(runner, talks, levels, options.repeats), settings)
    if options.profile is not None:
        results["profile"] = _profiles(runner.engine, talks[0], options)
    print(json.dumps(results) if options.json else report(results, columns(sys.stdout)))
    if options.out:
        try:
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{options.out} cannot be written: {error}") from error
    if options.plot:
        plot(results, options.plot)
    unequal = any(pair["equal_outputs"] < pair["outputs"] for pair in results["pairs"])
    if unequal and options.exact:
        print("speculative and plain outputs DIFFER", file=sys.stderr)
        return 1
    return 0


def report(results: dict[str, Any], width: int) -> str:
    """Return a summary of `bench.report.summary` as a table with an explanation of its columns."""
    rows = []
    details = []
    for pair in results["pairs"]:
        details.append(
            f"{pair['concurrency']} at once: speculative is {pair['speedup']:.2f}x plain;"
            f" {pair['equal_outputs']} of {pair['outputs']} outputs equal"
        )
    for run in results["runs"]:
        tau = run["acceptance_length"]
        rate = run["draft_acceptance_rate"]
        one = run["tokens_per_s_of_one_request"]
        first = run["first_token_s"]
        rows.append(
            (
                run["lane"],
                str(run["concurrency"]),
                f"{run['tokens_per_s']:.1f}",
                f"{one:.1f}" if one else "-",
                f"{first['median'] * 1e3:.0f}",
                f"{first['p95'] * 1e3:.0f}",
                f"{tau:.2f}" if tau else "-",
                f"{rate:.2f}" if rate is not None else "-",
            )
        )
        if shares := run["accepted_per_position"]:
            places = " ".join(f"{share:.2f}" for share in shares)
            details.append(f"{run['concurrency']} at once: drafts accepted per position {places}")
    explained = [f"{name:10}  {text}" for name, text in COLUMNS.items()]
    parts = [table(("mode", *COLUMNS), rows, width)]
    for lines in details, explained:
        parts.append("\n".join(textwrap.fill(x, width, subsequent_indent="  ") for x in lines))
    return "\n\n".join(parts)


def _profiles(engine: Any, talk: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return profiles of a speculative step, if there is a drafter, and of a plain one."""
    from dflash_jax.bench.profile import profile

    ids = engine.chat_ids(talk.messages, tools=talk.tools or None)
    keep = Path(options.profile) if options.profile else None
    profiles = [
        profile(engine, ids, speculative=speculative, keep=keep)
        for speculative in ((True, False) if engine.graph.drafter_config else (False,))
    ]
    if not options.json:
        print(*profiles, sep="\n")
    return [dataclasses.asdict(each) for each in profiles]


def _levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        raise RequestError(f"--concurrency is {text!r}; expected numbers from 1, like 1,2,4")
    return levels


def _engine(options: argparse.Namespace, rows: int) -> Any:
    with shared.report_progress("loading", quiet=options.json):
        shared.use_compilation_cache()
        pair = shared.open_pair(options)
        plan = dataclasses.replace(shared.chosen_plan(options), rows=max(rows, options.rows))
        if not plan.max_length:
            plan = dataclasses.replace(plan, max_length=min(1024, pair.configs[0].max_length))
        engine = pair.engine(plan)
    with shared.report_progress("compiling", quiet=options.json):
        engine.warm_up("sampled" if options.temperature > 0 else "greedy", "chunks")
    return engine
