"""`dflash-jax explain`: memory, programs and rooflines of a plan, without weights."""

import argparse
import dataclasses
import json
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.errors import RequestError
from dflash_jax.serve_options import PREFIX_CACHE
from dflash_jax.utils.progress import announced, is_shown

FENCED = "JSON in a code fence at the end of an output (fenced_calls=False: as text)"


def add_command(commands: Any) -> None:
    """Add `explain` to the command line."""
    command = shared.new_command(
        commands, "explain", run, "Show plan, memory, programs and rooflines."
    )
    command.add_argument("--device", help="roofline for this device, e.g. H200 (default: this one)")
    command.add_argument(
        "--compile",
        action="store_true",
        help="compile the programs, and also show their scratch memory and costs",
    )
    command.add_argument(
        "--server",
        action="store_true",
        help="with the defaults of `serve`: a prefix cache of 256 MiB, and contexts of 4096 tokens"
        " where the model has as many",
    )
    command.add_argument("--params", action="store_true", help="list every parameter")
    command.add_argument(
        "--stablehlo", metavar="PROGRAM", help="print a program's StableHLO instead"
    )
    command.add_argument(
        "--hlo", metavar="PROGRAM", help="print a program's optimised HLO instead; compiles it"
    )
    command.add_argument("--json", action="store_true")
    shared.model_options(command)


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax explain`."""
    from dflash_jax.graph.explain import EXPLAINED

    with announced("planning", shown=is_shown()):
        graph = _graph(options)
        programs = graph.programs(EXPLAINED)
    if name := options.stablehlo or options.hlo:
        programs = {str(key): program for key, program in programs.items()}
        if name not in programs:
            raise RequestError(f"no program {name!r}; this plan has {', '.join(programs)}")
        print(_text(programs[name], optimised=not options.stablehlo))
        return 0
    if options.compile:
        shared.use_compilation_cache()
    what = f"compiling {len(programs)} programs" if options.compile else "counting"
    patience = 0 if options.compile else None
    with announced(what, shown=is_shown(), patience=patience):
        explanation = graph.explain(compile=options.compile)
    calls, warning = _tool_calls(options.target)
    if options.json:
        notes = {"tool_calls": calls, "warnings": [warning] if warning else []}
        print(json.dumps(explanation.to_json() | notes))
    else:
        print(explanation)
        if calls:
            print(f"tool calls: {calls}")
        if warning:
            print(f"warning: {warning}")
    if options.params and not options.json:
        for name, (shape, dtype) in explanation.parameters.items():
            print(f"{name:50} {dtype:10} {'x'.join(map(str, shape))}")
    return 0


def _tool_calls(target: str) -> tuple[str, str | None]:
    """Return how calls of tools are read, and why tools have no effect with the template, or None.

    Without a chat template there are neither.
    """
    from dflash_jax.loading import locate
    from dflash_jax.tokenizer import Tokenizer
    from dflash_jax.tool_parsers import syntax_of, tools_warning

    path = locate(target, "target")
    if path.is_dir():
        tokenizer = Tokenizer.from_directory(path)
    else:
        from dflash_jax.converters.models import open_model

        tokenizer = Tokenizer.from_files(open_model(path).companions(), where=str(path))
    if tokenizer is None or not tokenizer.template:
        return "", None
    warning = tools_warning(tokenizer.teaches)
    syntax = syntax_of(tokenizer.teaches)
    if syntax is None or warning:
        return "", warning
    fences = "" if syntax.channels else f"; with recovery also {FENCED}"
    return f"{syntax.name}{fences}", None


def _graph(options: argparse.Namespace) -> Any:
    from dflash_jax.cli.describe import describe, have_weights
    from dflash_jax.graph import Graph
    from dflash_jax.graph.roofline import DEVICES
    from dflash_jax.server.configuration import served_plan

    if options.device and options.device not in DEVICES:
        raise RequestError(f"device {options.device!r} is unknown; known: {', '.join(DEVICES)}")
    plan = shared.chosen_plan(options)
    drafts = None if options.drafter == "none" else options.drafter
    if options.server:
        plan = dataclasses.replace(plan, prefix_cache=plan.prefix_cache or PREFIX_CACHE)
    if plan.weights == "packed" or have_weights(options.target, drafts):
        opened = shared.open_pair(options)
        pair = opened.pair
        plan = opened.with_stored(plan)
    else:
        pair = describe(options.target, drafts, taps_at=options.taps_at)
    if options.server:
        plan = served_plan(plan, pair.target.config)
    return Graph(pair, plan, device=options.device or "")


def _text(program: Any, *, optimised: bool) -> str:
    from dflash_jax.graph.build import compile_programs
    from dflash_jax.graph.explain import stablehlo

    if not optimised:
        return stablehlo(program)
    shared.use_compilation_cache()
    with announced("compiling", shown=is_shown(), patience=0):
        return compile_programs([program])[program.key].compiled.as_text() or ""
