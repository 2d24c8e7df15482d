"""`dflash-jax tune`: finds the fastest plan of a model on this machine, and writes it to a file."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.cli.terminal import columns, table
from dflash_jax.errors import RequestError


def add_command(commands: Any) -> None:
    """Add `tune` to the command line."""
    text = "Find the fastest drafts, steps per call and kernels on this machine; write a plan."
    command = shared.new_command(commands, "tune", run, text, check=check)
    command.add_argument("--out", type=Path, default=Path("plan.json"), help="file for `--plan`")
    command.add_argument("--overwrite", action="store_true", help="replace an existing file")
    command.add_argument(
        "--data", default="heldout", help="heldout (shipped, default) or a JSONL file of messages"
    )
    command.add_argument("--count", type=int, default=8, help="conversations")
    command.add_argument("-n", "--max-tokens", type=int, default=64)
    command.add_argument("--temperature", type=float, default=0.0)
    command.add_argument("--rounds", type=int, default=2, help="answers to each conversation")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    shared.model_options(command)


def check(options: argparse.Namespace) -> None:
    """Check the options before anything is measured."""
    shared.check_request(options)
    for name in ("count", "rounds", "max_tokens"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise RequestError(f"--{flag} is {getattr(options, name)}; expected at least 1")
    if options.out.exists() and not options.overwrite:
        raise RequestError(f"{options.out} exists; choose another name or add --overwrite")
    if options.out.is_dir() or not options.out.parent.is_dir():
        raise RequestError(f"{options.out} cannot be written; give a file in a folder that exists")


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax tune`."""
    import dataclasses

    from dflash_jax.bench import tune
    from dflash_jax.bench.prompts import read_prompts
    from dflash_jax.engine.sampling_params import SamplingParams
    from dflash_jax.engine.vocabulary import chat_ids
    from dflash_jax.plan import Plan

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    shared.use_compilation_cache()
    talks = read_prompts(options.data, options.count)
    pair = shared.open_pair(options)
    prompts = [chat_ids(pair.tokenizer, x.messages, {"tools": x.tools or None}) for x in talks]
    plan = shared.chosen_plan(options)
    changed = {k: v for k, v in dataclasses.asdict(plan).items() if v != getattr(Plan, k)}
    room = max(map(len, prompts)) + options.max_tokens
    if not plan.max_length:
        plan = dataclasses.replace(plan, max_length=min(room, pair.configs[0].max_length))
    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=0)
    search = tune.Tuning(
        pair, plan, prompts, params,
        kept=options.out.with_name(options.out.name + ".measured"),
        rounds=options.rounds, report=report,
    )  # fmt: skip
    best = search.run()
    text = tune.plan_file(best, changed)
    tune.write_plan(options.out, text)
    search.forget()
    if options.json:
        rows = [dataclasses.asdict(x) for x in search.measured.values()]
        print(json.dumps({"chosen": str(best), "plan": json.loads(text), "measured": rows}))
        return 0
    lines = [
        (x.candidate, x.beside, f"{x.ratio:.2f}", f"{x.tokens_per_s:,.0f}")
        for x in search.measured.values()
    ]
    print(table(("candidate", "beside", "ratio", "tok/s"), lines, columns(sys.stdout)))
    print(f"\n{reason(best, search)}\nwritten to {options.out}; use it with --plan {options.out}")
    return 0


def reason(best: Any, search: Any) -> str:
    """Return why a candidate was chosen."""
    measured = search.measured.get(str(best))
    if measured is None:
        return f"chosen: {best}; nothing was faster by 2 %"
    return f"chosen: {best}; {measured.ratio:.2f} times as fast as {measured.beside}"
