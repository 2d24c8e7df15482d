"""The commands about weight files: inspect, convert, compare, export, edit, split, merge.

`python -m converters` runs them, and `add_commands` adds them to another command line. Modules that
read and write files are imported inside functions, so that `--help` and errors stay fast.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax.converters import cli_gguf, forms
from dflash_jax.converters.command_parts import (
    NAMED,
    ProgressBar,
    add_command,
    count_of,
    layer_ids_option,
    model_path,
    path_of,
    print_report,
    size_of,
)
from dflash_jax.errors import ConfigError
from dflash_jax.utils.command import exit_code

CHECK_FAILED = 1
ZLAB = "zlab"  # the authors' name for a drafter in the Hugging Face layout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a failed check or an error, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m converters", description=__doc__)
    add_commands(parser.add_subparsers(required=True, metavar="COMMAND"))

    def run() -> int:
        options = parser.parse_args(arguments)
        return options.run(options)

    return exit_code("converters", run)


def add_commands(commands: Any) -> None:
    """Add the commands to the result of `add_subparsers`; each sets `run`."""
    _inspect_command(commands)
    _convert_command(commands)
    _compare_command(commands)
    _export_command(commands)
    cli_gguf.add_commands(commands)


def _output_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "source",
        type=model_path,
        metavar="SRC",
        help=f"folder, checkpoint or .gguf file; {NAMED}",
    )
    command.add_argument(
        "destination", type=path_of, metavar="DST", help="what is written: a new name"
    )
    command.add_argument(
        "--dtype",
        "--type",
        default=forms.AUTO,
        metavar="TYPE",
        help="float32, bfloat16 or float16; for a .gguf file also "
        f"{', '.join(forms.GGUF_TYPES)}; auto (default) is that of the published weights",
    )
    command.add_argument(
        "--name", metavar="TEXT", help="name of the model (general.name of GGUF files)"
    )
    command.add_argument(
        "--license", metavar="ID", help="licence, as apache-2.0 (general.license of GGUF files)"
    )
    command.add_argument(
        "--shard-size",
        type=size_of,
        default=0,
        metavar="SIZE",
        help="most bytes of a safetensors file, as 5GB or 500M; without, there is one file",
    )
    command.add_argument(
        "--overwrite", action="store_true", help="replace the file or model that is at DST"
    )


def _inspect_command(commands: Any) -> None:
    command = add_command(commands, "inspect", _inspect, "Show what a weight file or folder holds.")
    layer_ids_option(command)
    command.add_argument(
        "path",
        type=model_path,
        metavar="FILE|DIR",
        help=f"folder, checkpoint or weight file; {NAMED}",
    )
    command.add_argument(
        "--check-instruct",
        action="store_true",
        help="only judge whether a GGUF target is instruction-tuned; exit 1 if it is not",
    )


def _inspect(options: argparse.Namespace) -> int:
    from dflash_jax.converters import inspect
    from dflash_jax.converters.inspect import REFUSE

    if options.check_instruct:
        verdict = inspect.instruct(options.path)
        judgement = {"outcome": verdict.outcome, "reasons": list(verdict.reasons)}
        print_report(options, judgement, [f"{verdict.outcome}: {'; '.join(verdict.reasons)}"])
        return CHECK_FAILED if verdict.outcome == REFUSE else 0
    report = inspect.inspect(options.path, taps=options.layer_ids)
    print_report(options, report, inspect.lines(report))
    return 0


def _convert_command(commands: Any) -> None:
    command = add_command(
        commands, "convert", _convert, "Turn any model into plain weights or a GGUF file."
    )
    layer_ids_option(command)
    _output_options(command)
    command.add_argument(
        "--to",
        choices=forms.FORMS,
        help="a Hugging Face folder (safetensors, the default), a checkpoint of ours (orbax), a"
        " GGUF file (the default if DST ends in .gguf), a folder with matrices quantised for MLX"
        " (mlx) or in GPTQ's format (gptq), or a checkpoint of MaxText, with single or scanned"
        " layers, or of Tunix",
    )
    command.add_argument(
        "--tokenizer",
        type=model_path,
        metavar="DIR|FILE",
        help="folder, or for GGUF also .gguf file, whose tokenizer is copied",
    )
    command.add_argument(
        "--lora", type=path_of, metavar="DIR", help="PEFT adapter that is added to the weights"
    )
    command.add_argument(
        "--output-type",
        type=str.lower,
        choices=forms.TENSOR_TYPES,
        metavar="TYPE",
        help="type of the head in a .gguf file, and of an embedding that is the head: "
        + ", ".join(forms.TENSOR_TYPES),
    )
    command.add_argument(
        "--embedding-type",
        type=str.lower,
        choices=forms.TENSOR_TYPES,
        metavar="TYPE",
        help="type of an embedding beside a head, one of the same",
    )
    command.add_argument(
        "--imatrix",
        type=path_of,
        metavar="FILE",
        help="importance matrix of the model (dflash-jax imatrix, or llama.cpp's): quantised"
        " matrices err less where inputs are large",
    )
    command.add_argument(
        "--max-context",
        type=count_of,
        metavar="N",
        help="write the model for contexts of at most N tokens, so that sliding windows of N or"
        " more tokens need no place in the file",
    )
    command.add_argument(
        "--q-bits", type=count_of, metavar="N", help="bits of codes: 4 (default), for mlx also 8"
    )
    command.add_argument(
        "--q-group-size",
        type=count_of,
        metavar="N",
        help="weights of a group: 32, 64 (default of mlx) or 128 (default of gptq)",
    )
    command.add_argument("--dry-run", action="store_true", help="only account for every tensor")


def _convert(options: argparse.Namespace) -> int:
    from dflash_jax.converters import convert, kept_metadata
    from dflash_jax.converters.models import open_model

    model = open_model(options.source, taps=options.layer_ids, lora=options.lora)
    if options.max_context is not None:
        model = convert.limited(model, options.max_context)
    if options.lora:
        convert.keep_apart(options.lora, options.destination)
    named = forms.GGUF if options.destination.suffix.lower() == ".gguf" else forms.SAFETENSORS
    to = options.to or named
    form = None
    if to in convert.FORMS:
        form = convert.quantised_form(to, bits=options.q_bits, group=options.q_group_size)
    elif options.q_bits is not None or options.q_group_size is not None:
        raise ConfigError(f"--q-bits and --q-group-size are for --to mlx and gptq, not for {to}")
    if options.dry_run:
        kind = convert.chosen_dtype(model, options.dtype, gguf=to == forms.GGUF)
        report = convert.inventory(model, kind)
        print_report(options, report, convert.lines(report))
        return 0
    details = convert.Details(
        gguf=convert.GgufOptions(options.output_type, options.embedding_type, options.imatrix),
        shard_size=options.shard_size,
        metadata=kept_metadata.labels(name=options.name, license=options.license),
        form=form,
    )
    with ProgressBar(model.tensors) as progress:
        report = convert.convert(
            model,
            options.destination,
            to=to,
            dtype=options.dtype,
            overwrite=options.overwrite,
            tokenizer=options.tokenizer,
            details=details,
            progress=progress,
        )
    print_report(options, report, [*convert.lines(report), f"written to {options.destination}"])
    return 0


def _compare_command(commands: Any) -> None:
    command = add_command(
        commands, "compare", _compare, "Compare two renderings of a model, tensor by tensor."
    )
    layer_ids_option(command)
    command.add_argument("first", type=model_path, metavar="A", help=f"the more exact one; {NAMED}")
    command.add_argument("second", type=model_path, metavar="B", help="the other one")
    command.add_argument("--worst", type=count_of, default=20, help="tensors listed (default 20)")


def _compare(options: argparse.Namespace) -> int:
    report, lines = comparison(options)
    print_report(options, report, lines)
    return 0 if report["agree"] else CHECK_FAILED


def comparison(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return what `compare` reports, as JSON values and as lines."""
    from dflash_jax.converters import compare
    from dflash_jax.converters.models import open_model

    first, second = (
        open_model(path, taps=options.layer_ids) for path in (options.first, options.second)
    )
    with ProgressBar(first.tensors) as progress:
        result = compare.compare(first, second, progress=progress)
    return result.to_json(), compare.lines(result, options.worst)


def _export_command(commands: Any) -> None:
    command = add_command(
        commands, "export", _export, "Write a model in a layout that others read."
    )
    layer_ids_option(command)
    _output_options(command)
    command.add_argument(
        "--format",
        "--layout",
        dest="layout",
        choices=(*forms.LAYOUTS, ZLAB),
        default=forms.HUGGING_FACE,
        help="a Hugging Face folder (default), for drafters also called zlab; a drafter as"
        " speculators or GGUF file",
    )
    command.add_argument(
        "--tokenizer",
        type=model_path,
        metavar="TARGET",
        help="for --format gguf: the target, folder or .gguf file, whose tokenizer is copied"
        " (llama.cpp needs one)",
    )


def _export(options: argparse.Namespace) -> int:
    from dflash_jax.config import DrafterConfig
    from dflash_jax.converters import convert, export, kept_metadata
    from dflash_jax.converters.models import open_model

    model = open_model(options.source, taps=options.layer_ids)
    if options.layout == ZLAB and not isinstance(model.config, DrafterConfig):
        raise ConfigError(
            f"{options.source} is a target; the format zlab is for drafters, write it as"
            f" {forms.HUGGING_FACE}"
        )
    convert.check_shard_size(options.shard_size, options.layout)
    gguf = options.layout == forms.GGUF
    if options.tokenizer and not gguf:
        raise ConfigError(
            f"--tokenizer {options.tokenizer} is of no use here: a target's tokenizer is copied"
            f" into --format {forms.GGUF}; leave it out, or give that format"
        )
    model.check()
    dtype = convert.chosen_dtype(model, options.dtype, gguf=gguf)
    for source in filter(None, (model.path, options.tokenizer)):
        convert.keep_apart(source, options.destination)
    labels = kept_metadata.labels(name=options.name, license=options.license)
    metadata: dict[str, Any] = {}
    files: dict[str, str | Path] = {}
    notes: list[str] = []
    if gguf:
        metadata, notes = convert.gguf_metadata(model, options.tokenizer, labels)
    else:
        files = model.companions()
        files |= kept_metadata.beside(model, files, labels)
    weights = export.Weights(
        model.config,
        model.tensors,
        companions=files,
        tokenizer=metadata,
        shard_size=options.shard_size,
    )
    with ProgressBar(model.tensors) as progress:
        export.export(
            weights,
            options.destination,
            layout=forms.HUGGING_FACE if options.layout == ZLAB else options.layout,
            dtype=dtype,
            overwrite=options.overwrite,
            progress=progress,
        )
    report = {"destination": str(options.destination), "layout": options.layout, "dtype": dtype}
    if notes:
        report["notes"] = notes
    line = f"written to {options.destination} ({options.layout}, {dtype})"
    print_report(options, report, [*notes, line])
    return 0
