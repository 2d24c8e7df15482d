"""`dflash-jax probe`: logits and hidden states of a prompt, or how recovery judges ends."""

import argparse
import json
from pathlib import Path
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.errors import RequestError


def add_command(commands: Any) -> None:
    """Add `probe` to the command line."""
    text = "Write the logits and hidden states of a prompt to a file."
    command = shared.new_command(commands, "probe", run, text, check=check)
    shared.prompt_options(command)
    command.add_argument("--out", type=Path, help="file to write: .safetensors or .npz")
    command.add_argument("--overwrite", action="store_true", help="replace an existing file")
    command.add_argument(
        "--top", type=int, default=5, help="number of most probable next tokens to print"
    )
    command.add_argument("--target", default="tiny")
    command.add_argument("--lora", metavar="DIR", help="PEFT adapter that is added to the weights")
    command.add_argument("--tokenizer", metavar="DIR", help="folder with tokenizer.json")
    command.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    command.add_argument("--json", action="store_true")
    rules = command.add_argument_group("recovery")
    rules.add_argument(
        "--recovery",
        action="store_true",
        help="without a prompt: count the fresh stalls that recovery acts on, and the answers that"
        " it disturbs, by the odds of this target",
    )
    rules.add_argument("--cases", type=int, default=40, help="number of stalls and of answers")
    rules.add_argument("--seed", type=int, default=0, help="of the stalls and answers")
    rules.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="instead of the target's chat template",
    )


def check(options: argparse.Namespace) -> None:
    """Check the output file, and the options that `check_values` checks."""
    if options.recovery:
        _check_recovery(options)
        return
    if options.chat_template:
        raise RequestError("--chat-template has an effect with --recovery only; add that")
    if options.out and options.out.exists() and not options.overwrite:
        raise RequestError(f"{options.out} exists; choose another name or add --overwrite")
    if options.out and options.out.suffix not in (".npz", ".safetensors"):
        raise RequestError(f"{options.out} must end in .safetensors or .npz")
    shared.check_values(options)


def _check_recovery(options: argparse.Namespace) -> None:
    if options.prompt is not None or options.prompt_ids is not None or options.out:
        raise RequestError("--recovery takes no prompt and no --out; leave them out")
    if options.cases < 1:
        raise RequestError(f"--cases is {options.cases}; expected at least 1")
    if options.chat_template and not options.chat_template.is_file():
        raise RequestError(f"{options.chat_template} is no file; give a .jinja file")


def _probe_recovery(options: argparse.Namespace) -> int:
    from dflash_jax import loading
    from dflash_jax.bench import endings
    from dflash_jax.tool_parsers import syntax_of

    model = loading.load_target(
        options.target, dtype=options.dtype, lora=options.lora, tokenizer=options.tokenizer
    )
    if options.chat_template and model.tokenizer:
        model.tokenizer.template = options.chat_template.read_text(encoding="utf-8")
        model.tokenizer.tool_template = None
    cases: list[endings.Case] = []
    for kind in endings.KINDS:
        cases += endings.fresh_cases(kind, options.seed, options.cases)
    judged = list(endings.judge_cases(model, cases))
    figures = endings.summary(judged)
    syntax = syntax_of(model.tokenizer.teaches if model.tokenizer else None)
    if options.json:
        print(json.dumps({"syntax": syntax.name if syntax else None} | figures))
        return 0
    if syntax is None:
        print("The chat template has no tool syntax: tools are dropped, and no stall is acted on.")
    print(endings.line(options.target, figures))
    return 0


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax probe`."""
    shared.use_compilation_cache()
    if options.recovery:
        return _probe_recovery(options)
    import numpy as np

    from dflash_jax import loading

    model = loading.load_target(
        options.target, dtype=options.dtype, lora=options.lora, tokenizer=options.tokenizer
    )
    tokenizer = model.tokenizer
    ids = shared.prompt_ids(options, tokenizer)
    output = model.forward([ids])
    logits = np.asarray(output.logits)[0]
    hidden = np.asarray(output.hidden.astype("float32"))[:, 0]
    if options.out:
        arrays = {"token_ids": np.asarray(ids, np.int32), "logits": logits, "hidden": hidden}
        _write_arrays(options.out, arrays)
    best = np.argsort(-logits[-1], kind="stable")[: max(options.top, 0)]
    shares = np.exp(logits[-1] - logits[-1].max())
    shares /= shares.sum()
    if options.json:
        top = [{"id": int(i), "probability": float(shares[i])} for i in best]
        out = str(options.out) if options.out else None
        print(json.dumps({"tokens": len(ids), "top": top, "out": out}))
        return 0
    print(f"{len(ids)} tokens, logits {logits.shape}, hidden states {hidden.shape}")
    for i in best:
        text = repr(tokenizer.core.id_to_token(int(i))) if tokenizer else ""
        print(f"{i:8}  {shares[i]:7.2%}  {text}")
    if options.out:
        print(f"written to {options.out}")
    return 0


def _write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write to a temporary file and rename it, so that no partial file is left."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    partial = path.with_name(path.name + ".partial")
    try:
        if path.suffix == ".npz":
            with partial.open("wb") as file:
                np.savez(file, **arrays)
        else:
            save_file(arrays, partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path} could not be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
