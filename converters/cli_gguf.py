"""The commands that change GGUF files without reading their weights: edit, split, merge."""

import argparse
from pathlib import Path
from typing import Any

from dflash_jax.converters.command_parts import (
    ProgressBar,
    add_command,
    count_of,
    path_of,
    print_report,
    size_of,
)
from dflash_jax.errors import ConfigError


def add_commands(commands: Any) -> None:
    """Add the commands to the result of `add_subparsers`."""
    _edit_command(commands)
    _split_command(commands)
    _merge_command(commands)


def _edit_command(commands: Any) -> None:
    command = add_command(
        commands, "edit", _edit, "Change the metadata of a GGUF file, without touching its weights."
    )
    command.add_argument("path", type=path_of, metavar="FILE", help=".gguf file, or first of a set")
    command.add_argument("--name", metavar="TEXT", help="name of the model (general.name)")
    command.add_argument("--license", metavar="ID", help="licence, as apache-2.0 (general.license)")
    command.add_argument("--chat-template", metavar="TEXT", help="chat template, in Jinja")
    command.add_argument(
        "--chat-template-file",
        type=path_of,
        metavar="FILE",
        help="the same from a .jinja file, or from a tokenizer_config.json",
    )
    command.add_argument(
        "--special-token",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "TEXT"),
        help="special token by its text: eos, bos, eot, eom, pad, unk, sep, mask, fim_pre, ...",
    )
    command.add_argument(
        "--special-token-by-id",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "ID"),
        help="special token by its id",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key; its type stays, and is str, int, float, bool, u8 to f64 in KEY=TYPE:VALUE"
        " for new ones; a JSON list for an array",
    )
    command.add_argument(
        "--remove", action="append", default=[], metavar="KEY", help="take a key away"
    )
    command.add_argument(
        "--output", type=path_of, metavar="NEW", help="write a changed copy; FILE stays as it is"
    )
    command.add_argument("--overwrite", action="store_true", help="replace the file that is at NEW")
    command.add_argument("--dry-run", action="store_true", help="only say what would change")


def _edit(options: argparse.Namespace) -> int:
    from dflash_jax.converters import edit
    from dflash_jax.converters.export import check_name
    from dflash_jax.converters.gguf.tokenizer_export import TEMPLATE

    values: dict[str, str] = {}
    if options.name is not None:
        values["general.name"] = f"str:{options.name}"
    if options.license is not None:
        values["general.license"] = f"str:{options.license}"
    if options.chat_template is not None and options.chat_template_file is not None:
        raise ConfigError("--chat-template and --chat-template-file both give one; leave one out")
    template = options.chat_template
    if options.chat_template_file is not None:
        template = edit.template_of(options.chat_template_file)
    if template is not None:
        values[TEMPLATE] = f"str:{template}"
    for entry in options.set:
        key, separator, value = entry.partition("=")
        if not separator:
            raise ConfigError(f"--set {entry!r} has no '='; expected KEY=VALUE")
        if key in values:
            raise ConfigError(f"{key} is given twice; leave one out")
        values[key] = value
    changes = edit.Changes(
        values=values,
        token_texts=options.special_token,
        token_ids=options.special_token_by_id,
        removed=options.remove,
    )
    if not changes:
        raise ConfigError(
            "nothing to change; give --name, --license, --chat-template-file, --special-token,"
            " --set or --remove"
        )
    if options.output is not None:
        check_name(options.output, folder=False)
        if _same(options.output, options.path):
            raise ConfigError(
                f"{options.output} is the file itself; leave --output out to change it"
            )
    elif options.overwrite:
        raise ConfigError("--overwrite is for --output NEW; without it the file itself is changed")
    report = edit.edit(
        options.path,
        changes,
        output=options.output,
        overwrite=options.overwrite,
        dry_run=options.dry_run,
    )
    print_report(options, report, edit.lines(report))
    return 0


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _split_command(commands: Any) -> None:
    command = add_command(
        commands, "split", _split, "Divide a GGUF file into PREFIX-00001-of-0000N.gguf and so on."
    )
    command.add_argument("path", type=path_of, metavar="FILE", help=".gguf file")
    command.add_argument("prefix", type=path_of, metavar="PREFIX", help="name of the new files")
    command.add_argument(
        "--max-size",
        "--split-max-size",
        type=size_of,
        default=0,
        metavar="SIZE",
        help="of a file, as 2GB, 500M or 2GiB; a larger tensor has a file of its own",
    )
    command.add_argument(
        "--max-tensors",
        "--split-max-tensors",
        type=count_of,
        default=0,
        metavar="N",
        help="in a file (default 128, without --max-size)",
    )
    command.add_argument(
        "--no-tensor-first-split",
        action="store_true",
        help="the first file holds the metadata alone",
    )
    command.add_argument("--dry-run", action="store_true", help="only list the files")


def _split(options: argparse.Namespace) -> int:
    from dflash_jax.converters.formats.gguf.file import open_gguf
    from dflash_jax.converters.gguf.split import Division, split

    division = Division(options.max_size, options.max_tensors, options.no_tensor_first_split)
    with ProgressBar(open_gguf(options.path)) as progress:
        report = split(
            options.path,
            options.prefix,
            division,
            dry_run=options.dry_run,
            progress=progress,
        )
    lines = [f"{x['path']}: {x['tensors']} tensors, {x['bytes']} bytes" for x in report["parts"]]
    print_report(options, report, lines)
    return 0


def _merge_command(commands: Any) -> None:
    command = add_command(commands, "merge", _merge, "Join a set of GGUF files to one.")
    command.add_argument("path", type=path_of, metavar="FIRST", help="first file of the set")
    command.add_argument("output", type=path_of, metavar="NEW", help="the new .gguf file")
    command.add_argument("--overwrite", action="store_true", help="replace the file that is at NEW")


def _merge(options: argparse.Namespace) -> int:
    from dflash_jax.converters.convert import keep_apart
    from dflash_jax.converters.formats.gguf.file import open_gguf
    from dflash_jax.converters.gguf.split import merge

    with ProgressBar(open_gguf(options.path)) as progress:
        keep_apart(options.path, options.output)
        report = merge(options.path, options.output, overwrite=options.overwrite, progress=progress)
    line = f"{report['path']}: {report['tensors']} tensors of {report['parts']} files"
    print_report(options, report, [line])
    return 0
