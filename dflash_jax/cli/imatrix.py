"""`dflash-jax imatrix`: how large the inputs of a target's matrices are over a text."""

import argparse
import json
from pathlib import Path
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.errors import RequestError

CHUNK = 512  # tokens


def add_command(commands: Any) -> None:
    """Add `imatrix` to the command line."""
    text = "Measure the importance of inputs over a text, for convert --imatrix."
    command = shared.new_command(commands, "imatrix", run, text, check=check)
    command.add_argument("text", type=Path, metavar="TEXT", help="a text file, UTF-8")
    command.add_argument(
        "out",
        type=Path,
        metavar="OUT",
        help="what is written: a name that ends in .gguf, or in .dat for llama.cpp's older format",
    )
    command.add_argument("--target", default="tiny")
    command.add_argument("--lora", metavar="DIR", help="PEFT adapter that is added to the weights")
    command.add_argument("--tokenizer", metavar="DIR", help="folder with tokenizer.json")
    command.add_argument("--chunk", type=int, default=CHUNK, help="tokens run at a time")
    command.add_argument("--chunks", type=int, metavar="N", help="run the first N at most")
    command.add_argument("--overwrite", action="store_true", help="replace the file at OUT")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def check(options: argparse.Namespace) -> None:
    """Check names of files and sizes, and the options that `check_values` checks."""
    if options.out.suffix not in (".gguf", ".dat"):
        raise RequestError(f"{options.out} must end in .gguf or .dat")
    if not options.text.is_file():
        raise RequestError(f"{options.text} is no file; give a text of a few hundred kilobytes")
    if options.chunk < 16:
        raise RequestError(f"--chunk is {options.chunk}; expected at least 16 tokens")
    if options.chunks is not None and options.chunks < 1:
        raise RequestError(f"--chunks is {options.chunks}; expected at least 1")
    shared.check_values(options)


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax imatrix`."""
    from dflash_jax import loading
    from dflash_jax.converters.imatrix import Text, by_stored_name
    from dflash_jax.importance import chunks_of, measure
    from dflash_jax.tokenizer import well_formed
    from dflash_jax.utils.atomic import new_path
    from dflash_jax.utils.progress import ShownCount, announced, is_shown

    shared.use_compilation_cache()
    try:
        text = options.text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{options.text} is not UTF-8: {error}; give a text file") from error
    with new_path(options.out, overwrite=options.overwrite) as place:
        model = loading.load_target(options.target, lora=options.lora, tokenizer=options.tokenizer)
        if model.tokenizer is None:
            raise RequestError(
                f"{options.target} has no tokenizer; --tokenizer DIR gives the folder of one"
            )
        size = options.chunk
        if size > model.config.max_length:
            raise RequestError(
                f"--chunk is {size}; {options.target} has contexts of at most"
                f" {model.config.max_length} tokens"
            )
        chunks = chunks_of(model.tokenizer, text, size)
        if not chunks:
            raise RequestError(
                f"{options.text} has fewer tokens than a chunk of {size}; give a longer text, or a"
                " smaller --chunk"
            )
        chunks = chunks[: options.chunks]
        with announced("measuring", shown=is_shown()):
            count = ShownCount(len(chunks), "chunks")
            inputs = measure(model, chunks, done=lambda done: count())
        used = Text(well_formed(options.text.name), len(chunks), size)
        measured = by_stored_name(model.config, inputs, used)
        with place.open("wb") as file:
            measured.write(file, older=options.out.suffix == ".dat")
    report = {"out": str(options.out), "matrices": len(measured.sums), "chunks": len(chunks)}
    unseen = sum(int((counts == 0).sum()) for counts in measured.counts.values())
    report |= {"tokens": len(chunks) * size, "experts_without_tokens": unseen}
    if options.json:
        print(json.dumps(report))
        return 0
    print(f"{report['matrices']} matrices over {report['tokens']} tokens of {options.text.name}")
    if unseen:
        print(f"{unseen} experts' matrices got no token; their inputs count alike")
    print(f"written to {options.out}")
    return 0
