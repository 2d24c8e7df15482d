"""Cells of the tables beside llama.cpp: a model, a GGUF type and a number of cores.

Also the options of commands that choose cells, and the file that keeps their results.
"""

import argparse
import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.llama_cpp.build import llama_version, llama_worker
from benchmarks.llama_cpp.files import BLOCK, MODELS, SHIPPED, TINY, shipped_blocks, write_pair
from benchmarks.llama_cpp.worker import WorkerError, our_command
from dflash_jax.converters.forms import GGUF_TYPES
from dflash_jax.converters.models import open_model
from dflash_jax.tokenizer import Tokenizer

PLAIN = "plain"
ONE_TOKEN = "plain one token"
DRAFTED = "drafted"
LLAMA = "llama.cpp"
# Plans by mode.
MODES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "weights": "float"},
    "float16": {"dtype": "float16", "weights": "float"},
    "bfloat16": {"dtype": "bfloat16", "weights": "float"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "packed": {"weights": "packed"},
}
# Modes by GGUF type; the first keeps the file's precision. Blocks of other types are as "packed".
MODES_OF = {"f32": ("float32",), "f16": ("float16",), "bf16": ("bfloat16",),
            "q8_0": ("packed", "int8")}  # fmt: skip
PACKED = ("packed", "int4")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_jax"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One cell of the table: a model, a GGUF type and a number of cores."""

    model: str
    kind: str
    cores: int
    target: Path
    drafter: Path
    program: Path  # the worker of llama.cpp
    accepted: tuple[int, ...]  # drafts by round; empty for real drafts
    block: int = BLOCK  # of the drafter; llama.cpp verifies all of it
    advised: int = BLOCK  # tokens of it that ours verifies

    def ours(self, plan: Mapping[str, Any], *, drafted: bool) -> list[str]:
        drafter = self.drafter if drafted else None
        return our_command(self.target, plan, drafter=drafter, forced=bool(self.accepted))

    def llama(self, length: int, *, drafted: bool) -> list[str]:
        threads = str(self.cores)
        command = [str(self.program), "-m", str(self.target), "-t", threads, "-c", str(length)]
        if drafted:
            command += ["--spec-type", "draft-dflash", "--spec-draft-model", str(self.drafter)]
            command += ["--spec-draft-n-max", str(self.block - 1), "--spec-draft-threads", threads]
        return command

    def request(self, series: str, count: int, prompt: Sequence[int]) -> str:
        mode = DRAFTED if series.endswith(DRAFTED) else PLAIN
        accepted = ",".join(map(str, self.accepted)) if mode == DRAFTED else "0"
        words = [mode, str(count), ",".join(map(str, prompt))]
        return " ".join([*words, accepted] if self.accepted else words)


def cycle(length: float, block: int) -> tuple[int, ...]:
    """Return accepted drafts by round with a mean of `length` committed tokens, which vary.

    Raises:
      ValueError: no block of that size commits so many.
    """
    if length != int(length) or not 1 <= length <= block:
        raise ValueError(f"--acceptance is {length}; expected a whole number from 1 to {block}")
    mean = int(length) - 1
    spread = min(mean, block - 1 - mean)
    return (mean, mean - spread, mean + spread, mean)


def plans(kind: str) -> dict[str, dict[str, Any]]:
    """Return our plans for a GGUF type, by mode."""
    return {mode: MODES[mode] for mode in MODES_OF.get(kind, PACKED)}


def tokenizer_of(target: Path) -> Any:
    """Return the tokenizer in a GGUF file."""
    tokenizer = Tokenizer.from_files(open_model(target).companions(), where=str(target))
    assert tokenizer
    return tokenizer


def merge(path: Path, key: str, stage: str, figures: dict[str, Any]) -> None:
    """Add a measurement to the JSON file, in place of an older one of the same stage."""
    kept = json.loads(path.read_text("utf-8")) if path.is_file() else {"suite": path.stem}
    kept.setdefault("cases", {}).setdefault(key, {})[stage] = figures
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps(kept, indent=1) + "\n")
    Path(name).replace(path)


def case_parser(
    name: str, text: str, *, models: str, types: str, cores: str
) -> argparse.ArgumentParser:
    """Return a parser of the options that choose settings, with their defaults."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=text.splitlines()[0]
    )
    parser.add_argument(
        "--llama-cpp", type=Path, required=True, metavar="BUILD", help="folder it was built in"
    )
    parser.add_argument("--models", default=models)
    parser.add_argument("--types", default=types, help=", ".join(GGUF_TYPES))
    parser.add_argument("--cores", default=cores)
    parser.add_argument("--rounds", type=int, default=9, help="samples of each series, at least 2")
    parser.add_argument("--acceptance", type=float, default=4, help="forced tokens per round")
    parser.add_argument("--cache", type=Path, default=CACHE / "benchmarks", help="for .gguf files")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser


def chosen_settings(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> Iterator[tuple[str, Setting]]:
    """Check the options, build llama.cpp's worker, and yield each setting and its name.

    The files of a setting are written when it comes. Wrong options end the command.
    """
    models = listed(parser, "models", options.models, MODELS)
    types = listed(parser, "types", options.types, GGUF_TYPES)
    cores = listed(parser, "cores", options.cores, tuple(map(str, range(1, 257))))
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}; expected at least 2")
    try:
        forced = cycle(options.acceptance, BLOCK)
        program = llama_worker(options.llama_cpp, options.cache)
    except (ValueError, WorkerError) as error:
        parser.error(str(error))
    return (
        (
            f"{model}/{kind}/{count}",
            _setting(model, kind, int(count), options.cache, program, forced),
        )
        for model, kind, count in itertools.product(models, types, cores)
    )


def _setting(
    model: str, kind: str, cores: int, cache: Path, program: Path, forced: tuple[int, ...]
) -> Setting:
    pair = write_pair(model, kind, cache)
    accepted = () if model in (TINY, SHIPPED) else forced
    blocks = shipped_blocks() if model == SHIPPED else ()
    return Setting(model, kind, cores, pair.target, pair.drafter, program, accepted, *blocks)


def listed(
    parser: argparse.ArgumentParser, name: str, text: str, known: Sequence[str]
) -> list[str]:
    """Return the words of an option that takes some of `known`, divided by commas."""
    words = text.split(",")
    if wrong := [word for word in words if word not in known]:
        parser.error(f"--{name} has {wrong}; known: {', '.join(known[:12])}")
    return words


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is stored with every measurement: machine, versions and rounds."""
    version = llama_version(options.llama_cpp)
    return {"environment": environment(), "llama_cpp": version, "rounds": options.rounds}
