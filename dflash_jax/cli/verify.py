"""`dflash-jax verify`: checks that speculative output equals plain output."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.errors import RequestError
from dflash_jax.show import precision


def add_command(commands: Any) -> None:
    """Add `verify` to the command line."""
    text = "Check that speculative output equals plain output."
    command = shared.new_command(commands, "verify", run, text, check=shared.check_request)
    shared.prompt_options(command)
    command.add_argument("--prompts", type=Path, help="file with one prompt per line")
    shared.sampling_options(command.add_argument_group("output"), 64, plain=False)
    command.add_argument("--json", action="store_true")
    shared.model_options(command)


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax verify`; exit code 0 if the tokens of all prompts are equal, else 1."""
    from dflash_jax.bench.compare import check

    asked: Any = {"seed": 0} | shared.chosen_sampling(options)

    def verifiable(engine: Any, prompts: list[list[int]]) -> None:
        if engine.graph.drafter_config is None:
            raise RequestError("there is no drafter, so nothing to verify; give --drafter")
        for ids in prompts:
            engine.check(ids, **asked)

    engine, prompts = shared.load_engine(
        options,
        lambda tokenizer: _prompts(options, tokenizer),
        quiet=options.json,
        check=verifiable,
    )
    checks = []
    for ids in prompts:
        checked = check(engine, ids, **asked)
        checks.append(checked)
        if not options.json:
            print(line(checked), flush=True)
    failed = len([c for c in checks if not c.equal])
    tokens = sum(len(c.plain.token_ids) for c in checks)
    if options.json:
        summary = {
            "prompts": len(checks),
            "tokens": tokens,
            "different": failed,
            "plan": dataclasses.asdict(engine.plan),
            "first_differences": [c.first_difference for c in checks],
        }
        print(json.dumps(summary))
    else:
        verdict = "speculative equals plain" if not failed else f"{failed} prompts DIFFER"
        prompts = "1 prompt" if len(checks) == 1 else f"{len(checks)} prompts"
        print(f"{prompts}, {tokens} tokens, {precision(engine.plan)}: {verdict}")
    return 1 if failed else 0


def line(checked: Any) -> str:
    """Return the line that is printed for a prompt."""
    state = "equal" if checked.equal else f"DIFFER at token {checked.first_difference}"
    tau = checked.speculative.stats.acceptance_length
    return (
        f"prompt {len(checked.prompt):5} tokens  output {len(checked.plain.token_ids):5}"
        f"  acceptance length {'-' if tau is None else f'{tau:.2f}':>4}  {state}"
    )


def _prompts(options: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    if options.prompts is not None:
        if options.prompt is not None or options.prompt_ids is not None:
            raise RequestError("--prompts and a prompt were given; give one of them")
        try:
            lines = options.prompts.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{options.prompts} cannot be read: {error}") from error
        if not any(line.strip() for line in lines):
            raise RequestError(f"{options.prompts} holds no prompt; write one per line")
        return [shared.encode_prompt(line, options, tokenizer) for line in lines if line.strip()]
    if options.prompt is None and options.prompt_ids is None:
        if tokenizer is None:
            raise RequestError("this model ships no tokenizer; give --prompt-ids 1,2,3")
        texts = (
            "Hello!",
            "What is 17 + 25?",
            "List three colours.",
            "Write a function that adds two numbers.",
            "Give me a JSON object with a name and an age.",
        )
        return [shared.encode_prompt(text, options, tokenizer) for text in texts]
    return [shared.prompt_ids(options, tokenizer)]
