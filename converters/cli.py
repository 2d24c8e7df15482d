"""The commands about weight files: inspect, convert, compare, export.

`python -m converters` runs them, and `add_commands` adds them to another command line. Modules that
read and write files are imported inside functions, so that `--help` and errors stay fast.
"""

import argparse
import importlib.resources
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_jax.converters import forms
from dflash_jax.converters.taps import AUTO, CHOICES
from dflash_jax.errors import ConfigError
from dflash_jax.utils.command import exit_code
from dflash_jax.utils.progress import time_left
from dflash_jax.utils.sources import SMOLLM2, find_smollm2

if TYPE_CHECKING:
    from dflash_jax.converters.models import StoredModel

CHECK_FAILED = 1
# Shipped models by name, as folders below dflash_jax/data.
SHIPPED = {
    "tiny": "tiny/target",
    "tiny/target": "tiny/target",
    "tiny/drafter": "tiny/drafter",
}
NAMED = "'tiny' is the shipped target, 'tiny/drafter' its drafter; 'smollm2' is SmolLM2-135M"
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


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument(
        "--layer-ids",
        choices=CHOICES,
        default=AUTO,
        help="how a drafter file numbers target layers: as its layout defines (auto), from 0"
        " (zero-based), or from 1 (one-based)",
    )
    return command


def _path(text: str) -> Path:
    """Return a path with ~ expanded, which some shells do not do in --option=~/x."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a path")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user
        return Path(text)


def _model(text: str) -> Path:
    """Return a model's path: an existing one, else that of the model of that name."""
    path = _path(text)
    if text == SMOLLM2 and not path.exists():
        return find_smollm2()
    if text in SHIPPED and not path.exists():
        return Path(str(importlib.resources.files("dflash_jax"))) / "data" / SHIPPED[text]
    return path


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a whole number from 0")
    return int(text)


def _output_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "source",
        type=_model,
        metavar="SRC",
        help=f"folder, checkpoint or .gguf file; {NAMED}",
    )
    command.add_argument(
        "destination", type=_path, metavar="DST", help="what is written: a new name"
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
        "--overwrite", action="store_true", help="replace the file or model that is at DST"
    )


def _inspect_command(commands: Any) -> None:
    command = _command(commands, "inspect", _inspect, "Show what a weight file or folder holds.")
    command.add_argument(
        "path", type=_model, metavar="FILE|DIR", help=f"folder, checkpoint or weight file; {NAMED}"
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
        found = {"outcome": verdict.outcome, "reasons": list(verdict.reasons)}
        _print(options, found, [f"{verdict.outcome}: {'; '.join(verdict.reasons)}"])
        return CHECK_FAILED if verdict.outcome == REFUSE else 0
    report = inspect.inspect(options.path, taps=options.layer_ids)
    _print(options, report, inspect.lines(report))
    return 0


def _convert_command(commands: Any) -> None:
    command = _command(
        commands, "convert", _convert, "Turn any model into plain weights or a GGUF file."
    )
    _output_options(command)
    command.add_argument(
        "--to",
        choices=forms.FORMS,
        help="a Hugging Face folder (safetensors, the default), a checkpoint of ours (orbax), a"
        " GGUF file (the default if DST ends in .gguf), or a checkpoint of MaxText, with single or"
        " scanned layers, or of Tunix",
    )
    command.add_argument(
        "--tokenizer",
        type=_model,
        metavar="DIR|FILE",
        help="folder, or for GGUF also .gguf file, whose tokenizer is copied",
    )
    command.add_argument(
        "--lora", type=_path, metavar="DIR", help="PEFT adapter that is added to the weights"
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
        type=_path,
        metavar="FILE",
        help="importance matrix of the model (dflash-jax imatrix, or llama.cpp's): quantised"
        " matrices err less where inputs are large",
    )
    command.add_argument("--dry-run", action="store_true", help="only account for every tensor")


def _convert(options: argparse.Namespace) -> int:
    from dflash_jax.converters import convert
    from dflash_jax.converters.models import open_model

    model = open_model(options.source, taps=options.layer_ids, lora=options.lora)
    if options.lora:
        convert.keep_apart(options.lora, options.destination)
    named = forms.GGUF if options.destination.suffix.lower() == ".gguf" else forms.SAFETENSORS
    to = options.to or named
    if options.dry_run:
        kind = convert.chosen_dtype(model, options.dtype, gguf=to == forms.GGUF)
        report = convert.inventory(model, kind)
        _print(options, report, convert.lines(report))
        return 0
    with ProgressBar(model) as progress:
        report = convert.convert(
            model,
            options.destination,
            to=to,
            dtype=options.dtype,
            overwrite=options.overwrite,
            tokenizer=options.tokenizer,
            gguf=convert.GgufOptions(options.output_type, options.embedding_type, options.imatrix),
            progress=progress,
        )
    _print(options, report, [*convert.lines(report), f"written to {options.destination}"])
    return 0


def _compare_command(commands: Any) -> None:
    command = _command(
        commands, "compare", _compare, "Compare two renderings of a model, tensor by tensor."
    )
    command.add_argument("first", type=_model, metavar="A", help=f"the more exact one; {NAMED}")
    command.add_argument("second", type=_model, metavar="B", help="the other one")
    command.add_argument("--worst", type=_count, default=20, help="tensors listed (default 20)")


def _compare(options: argparse.Namespace) -> int:
    from dflash_jax.converters import compare
    from dflash_jax.converters.models import open_model

    first, second = (
        open_model(path, taps=options.layer_ids) for path in (options.first, options.second)
    )
    with ProgressBar(first) as progress:
        found = compare.compare(first, second, progress=progress)
    _print(options, found.to_json(), compare.lines(found, options.worst))
    return 0 if found.agree else CHECK_FAILED


def _export_command(commands: Any) -> None:
    command = _command(commands, "export", _export, "Write a model in a layout that others read.")
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
        type=_model,
        metavar="TARGET",
        help="for --format gguf: the target, folder or .gguf file, whose tokenizer is copied"
        " (llama.cpp needs one)",
    )


def _export(options: argparse.Namespace) -> int:
    from dflash_jax.config import DrafterConfig
    from dflash_jax.converters import convert, export
    from dflash_jax.converters.models import open_model

    model = open_model(options.source, taps=options.layer_ids)
    if options.layout == ZLAB and not isinstance(model.config, DrafterConfig):
        raise ConfigError(
            f"{options.source} is a target; the format zlab is for drafters, write it as"
            f" {forms.HUGGING_FACE}"
        )
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
    metadata, notes = convert.gguf_tokenizer(model, options.tokenizer) if gguf else ({}, [])
    weights = export.Weights(
        model.config,
        model.tensors,
        companions={} if gguf else model.companions(),
        tokenizer=metadata,
    )
    with ProgressBar(model) as progress:
        export.export(
            weights,
            options.destination,
            layout=forms.HUGGING_FACE if options.layout == ZLAB else options.layout,
            dtype=dtype,
            overwrite=options.overwrite,
            progress=progress,
        )
    found = {"destination": str(options.destination), "layout": options.layout, "dtype": dtype}
    line = f"written to {options.destination} ({options.layout}, {dtype})"
    _print(options, found | ({"notes": notes} if notes else {}), [*notes, line])
    return 0


def _print(options: argparse.Namespace, report: dict[str, Any], lines: list[str]) -> None:
    print(json.dumps(_plain(report), indent=1) if options.json else "\n".join(lines))


def _plain(value: Any) -> Any:
    """Replace non-finite numbers, which damaged files hold and JSON lacks, by text."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class ProgressBar:
    """The share of a model's weights that is done, shown on standard error if it is a terminal."""

    def __init__(self, model: "StoredModel"):
        shapes = (model.tensors.shape(name) for name in model.tensors.names())
        self._total = max(1, sum(math.prod(shape) for shape in shapes))
        self._done = 0
        self._started, self._shown = time.monotonic(), 0.0
        self._lock = threading.Lock()
        self._live = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> "ProgressBar":
        return self

    def __call__(self, name: str, weights: int) -> None:
        with self._lock:
            self._done += weights
            now = time.monotonic()
            if self._live and now - self._shown > 0.1:
                self._shown = now
                share = min(1.0, self._done / self._total)
                bar = "#" * int(30 * share)
                left = time_left((now - self._started) * (1 - share) / max(share, 1e-9))
                self._show(f"[{bar:30}] {share:4.0%} {left}  {name[:40]}")

    def __exit__(self, *exception: object) -> None:
        if self._live and self._shown:
            self._show("")
            print(end="\r", file=sys.stderr)

    def _show(self, line: str) -> None:
        """Fill at most one terminal line, because a longer one could not be overwritten."""
        width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        width = min(width, 78) if width > 0 else 78
        print(f"\r{line[:width]:{width}}", end="", file=sys.stderr)
