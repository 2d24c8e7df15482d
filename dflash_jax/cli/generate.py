"""`dflash-jax generate`: streamed text with statistics, or a timed comparison to plain decoding."""

import argparse
import json
import sys
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.cli.terminal import bracketed, columns, has_colours, note
from dflash_jax.errors import RequestError
from dflash_jax.show import legend, marked, precision
from dflash_jax.utils.command import INTERRUPTED


def add_command(commands: Any) -> None:
    """Add `generate` to the command line."""
    text = "Generate text, streamed, with statistics."
    command = shared.new_command(commands, "generate", run, text, check=check)
    shared.prompt_options(command)
    output = command.add_argument_group("output")
    shared.sampling_options(output)
    output.add_argument(
        "--compare",
        action="store_true",
        help="time speculative against plain decoding; prints the text, then a table",
    )
    shared.add_show_drafts(output)
    output.add_argument("--json", action="store_true", help="print one JSON object at the end")
    output.add_argument("--quiet", action="store_true", help="no statistics on standard error")
    shared.model_options(command)


def check(options: argparse.Namespace) -> None:
    """Check the options before JAX is imported or a model is opened."""
    if options.compare and options.show_drafts:
        raise RequestError("--compare shows no drafts; drop it or --show-drafts")
    options.report_drafts |= options.show_drafts
    shared.check_request(options)


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax generate`; with --compare, exit code 1 if the outputs differ."""
    params = shared.sampling_params(options).with_options(trace=options.show_drafts)

    def check_fits(engine: Any, prompts: list[list[int]]) -> None:
        if options.compare and engine.graph.drafter_config is None:
            raise RequestError("--compare needs a drafter; give --drafter")
        if options.compare and options.temperature > 0:
            raise RequestError("--compare is for greedy decoding; leave --temperature at 0")
        engine.check(prompts[0], params)

    engine, [prompt] = shared.load_engine(
        options,
        lambda tokenizer: [shared.prompt_ids(options, tokenizer)],
        quiet=options.json,
        check=check_fits,
        measure=not options.compare,
    )
    if options.compare:
        return _compare(engine, prompt, options)
    stream = engine.submit(prompt, params)
    code = 0
    try:
        for piece in stream:
            if options.show_drafts:
                text = "".join(marked(x, colours=has_colours()) for x in piece.trace)
            else:
                text = piece.text or _as_ids(piece, engine)
            if not options.json:
                print(text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
        code = INTERRUPTED
    if options.json:
        print(json.dumps(stream.result().to_json()))
    else:
        print()
        if options.show_drafts:
            print(legend(stream.result().stats, colours=has_colours()))
        if not options.quiet:
            note(statistics(stream.result(), engine.core.runner.compiled.seconds))
    return code


def _compare(engine: Any, prompt: list[int], options: argparse.Namespace) -> int:
    from dflash_jax.bench.compare import compare

    with shared.report_progress("timing", quiet=options.json):
        request = shared.chosen_sampling(options)
        request.pop("speculative", None)
        comparison = compare(engine, prompt, **request)
    result = comparison.check.speculative
    if options.json:
        speeds = {n: getattr(comparison, n) for n in ("speculative", "plain", "plain1")}
        print(
            json.dumps(
                result.to_json()
                | {
                    "equal": comparison.check.equal,
                    "precision": precision(engine.plan),
                    "tokens_per_s": speeds,
                    "baseline": comparison.baseline,
                    "speedup": comparison.speedup,
                }
            )
        )
        return 0 if comparison.check.equal else 1
    print(result.text if result.text is not None else " ".join(map(str, result.token_ids)))
    wide = engine.plan.plain_width > 1
    labels = {
        "speculative": "speculative",
        "plain": "plain, block-wide" if wide else "plain",
        "plain1": "plain, one token" if wide else "plain, no drafter",
    }
    for name, label in labels.items():
        speeds = sorted(getattr(comparison, name))
        print(f"{label:18} {speeds[len(speeds) // 2]:9.1f} tok/s")
    verdict = (
        "equal" if comparison.check.equal else f"DIFFER at {comparison.check.first_difference}"
    )
    print(
        f"tokens {verdict}; speculative is {comparison.speedup:.2f}x as fast as"
        f" {labels[comparison.baseline]!r}, {precision(engine.plan)}"
    )
    if not options.quiet:
        note(statistics(result, engine.core.runner.compiled.seconds, timed=False))
    return 0 if comparison.check.equal else 1


def _as_ids(piece: Any, engine: Any) -> str:
    """Return the ids as text if there is no tokenizer, else nothing."""
    return "" if engine.tokenizer else "".join(f"{i} " for i in piece.token_ids)


def statistics(result: Any, compile_s: float, *, timed: bool = True) -> str:
    """Return the statistics of a finished request, wrapped to the width of the terminal.

    Args:
      timed: include the speed of the request.
    """
    s = result.stats
    parts = [f"{s.output_tokens} tokens ({result.finish_reason})"]
    if timed:
        parts += [f"{s.tokens_per_s:.1f} tok/s", f"first token {s.first_token_s * 1e3:.0f} ms"]
    if s.rounds:
        shares = " ".join(f"{n / s.rounds:.2f}" for n in s.accepted_per_position)
        parts += [f"acceptance length {s.acceptance_length:.2f}", f"per position {shares}"]
    elif s.plain_steps:
        parts.append("plain decoding")
    parts.append(f"compile {compile_s:.1f} s")
    return bracketed(parts, columns(sys.stderr))
