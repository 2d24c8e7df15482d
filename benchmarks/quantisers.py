"""Our quantised files beside llama.cpp's own: size, errors of tensors, and divergence, by type.

    python -m benchmarks.quantisers FILE.gguf ... --peer PYTHON --library LIBLLAMA
        [--types q6_k,q4_k_m] [--json OUT] [--add]

Each file is decoded to F32, and that is quantised by both: by `convert`, and by the library of
`benchmarks/llama_cpp/quantiser.py`. PYTHON is that of an environment with `pip install xllamacpp`,
which loads the file in F32 and the quantised ones: divergences are those of its next-token
probabilities on English prose, so they hold its rounding of activations, for both alike.
"""

import argparse
import dataclasses
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import WINDOW, logits_of, scores, windows_of
from benchmarks.environment import write_result
from benchmarks.gguf_files import OURS, THEIRS
from benchmarks.llama_cpp.worker import INHERITED, ROOT, Worker, prebuilt_command
from benchmarks.paired import markdown
from dflash_jax.converters.compare import difference
from dflash_jax.converters.convert import convert
from dflash_jax.converters.forms import GGUF_TYPES
from dflash_jax.converters.models import StoredModel, open_model

WINDOWS = 2  # of `WINDOW` tokens
DEFAULT = "q6_k,q5_k_m,q4_k_m,iq4_xs,q3_k_m,q2_k"
# Tensors whose errors the table shows together, by what is in their names.
PARTS = {"embedding": "embed_tokens|lm_head", "attention": r"self_attn\.", "feed-forward": r"mlp\."}


@dataclasses.dataclass(frozen=True)
class Tools:
    """What both sides run: llama.cpp's quantiser, and the peer that loads the files."""

    library: Path
    peer: str
    cores: int

    def command(self, side: str, source: Path, out: Path, kind: str) -> list[str]:
        """Return the command that quantises a file."""
        if side == OURS:
            words = ["converters", "convert", source, out, "--type", kind]
        else:
            words = ["benchmarks.llama_cpp.quantiser", self.library, source, out, kind]
        return [sys.executable, "-m", *map(str, words)]

    def logits(self, file: Path, windows: np.ndarray) -> np.ndarray:
        """Return the peer's logits [W, T, V], with keys and values in float32."""
        command = prebuilt_command(
            self.peer, file, cores=self.cores, context=2 * WINDOW, float32=True
        )
        with Worker(command, self.cores) as worker:
            return logits_of(worker, windows)


def cpu_s(command: Sequence[str]) -> float:
    """Run a command; return its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=INHERITED
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return round(used, 1)


def errors_of(whole: StoredModel, other: StoredModel) -> dict[str, dict[str, Any]]:
    """Return types and mean relative errors of matrices, by what the matrix is in its layer."""
    rms: dict[str, list[float]] = {}
    kinds: dict[str, dict[str, int]] = {}
    for name in whole.tensors.names():
        if len(whole.tensors.shape(name)) < 2:
            continue  # vectors are not quantised
        figure = difference(name, whole.tensors, other.tensors)
        what = re.sub(r"^layers\.\d+\.", "", name.removesuffix(".weight"))
        rms.setdefault(what, []).append(figure.rms)
        counted = kinds.setdefault(what, {})
        counted[figure.kinds[1]] = counted.get(figure.kinds[1], 0) + 1
    return {
        what: {"error": statistics.fmean(each), "types": kinds[what]} for what, each in rms.items()
    }


def measured(
    file: Path, types: Sequence[str], tools: Tools
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of both sides for every type."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        whole = Path(folder, "whole.gguf")
        convert(open_model(file), whole, to="gguf", dtype="f32")
        windows = windows_of("english", whole)[:WINDOWS]
        reference = tools.logits(whole, windows)
        for kind in types:
            sides: dict[str, Any] = {}
            for side in (OURS, THEIRS):
                out = Path(folder, f"{kind}.gguf")
                used = cpu_s(tools.command(side, whole, out, kind))
                near = scores(tools.logits(out, windows), reference, windows)
                sides[side] = {
                    "file_mb": round(out.stat().st_size / 1e6, 1),
                    "cpu_s": used,
                    "tensors": errors_of(open_model(whole), open_model(out)),
                } | dataclasses.asdict(near)
                out.unlink()
            yield kind, sides


def part_error(tensors: Mapping[str, Mapping[str, Any]], part: str) -> float:
    """Return the mean error of the matrices of a part, each as often as it occurs."""
    listed = [
        (figure["error"], sum(figure["types"].values()))
        for name, figure in tensors.items()
        if re.search(PARTS[part], name)
    ]
    return sum(error * count for error, count in listed) / sum(count for _, count in listed)


def unlike(sides: Mapping[str, Any]) -> str:
    """Return in words which matrices have another type on one side than on the other."""
    ours = sides[OURS]["tensors"]
    theirs = sides[THEIRS]["tensors"]
    pairs: dict[str, int] = {}
    for name, figure in ours.items():
        left = figure["types"]
        right = theirs[name]["types"]
        for kind, count in left.items():
            more = count - right.get(kind, 0)
            others = [x for x, n in right.items() if n > left.get(x, 0)]
            if more > 0 and others:
                words = f"{kind} for {', '.join(others)}"
                pairs[words] = pairs.get(words, 0) + more
    return ", ".join(f"{count} {words}" for words, count in pairs.items())


def table(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return every type of every model, ours / llama.cpp's, in Markdown."""

    def both(sides: Mapping[str, Any], key: str, digits: int, factor: float = 1) -> str:
        return " / ".join(f"{factor * sides[side][key]:.{digits}f}" for side in (OURS, THEIRS))

    def error(sides: Mapping[str, Any], part: str) -> str:
        numbers = [100 * part_error(sides[side]["tensors"], part) for side in (OURS, THEIRS)]
        return " / ".join(f"{number:.2f}" for number in numbers)

    rows = [
        [
            model,
            kind,
            both(sides, "file_mb", 0),
            *(error(sides, part) for part in PARTS),
            both(sides, "kl_divergence", 4),
            both(sides, "greedy_agreement", 1, 100),
            both(sides, "cpu_s", 0),
            unlike(sides),
        ]
        for model, types in figures.items()
        for kind, sides in types.items()
    ]
    errors = " | ".join(f"{part}, %" for part in PARTS)
    return markdown(
        f"file | type | MB | {errors} | KL | same token, % | CPU seconds | other types of ours",
        rows,
    )


def main(words: Sequence[str] | None = None) -> int:
    """Measure every file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--peer", required=True, metavar="PYTHON", help="with xllamacpp")
    parser.add_argument("--library", required=True, type=Path, metavar="LIBLLAMA")
    parser.add_argument("--types", default=DEFAULT, help=f"default: {DEFAULT}")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--add", action="store_true", help="to the figures in OUT")
    options = parser.parse_args(words)
    for path in (*options.files, options.library):
        if not path.is_file():
            parser.error(f"{path} is no file")
    types = options.types.split(",")
    if unknown := [kind for kind in types if kind not in GGUF_TYPES]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(GGUF_TYPES)}")
    tools = Tools(options.library.absolute(), options.peer, options.cores)
    figures = json.loads(options.json.read_text("utf-8"))["figures"] if options.add else {}
    for file in options.files:
        for kind, sides in measured(file, types, tools):
            figures.setdefault(file.stem, {})[kind] = sides
            print(*table({file.stem: {kind: sides}})[2:], sep="\n", flush=True)
            write_result(options.json, "quantisers", {"figures": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
