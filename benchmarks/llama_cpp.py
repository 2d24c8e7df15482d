"""Decoding and prefill beside llama.cpp, on the same GGUF files and token ids.

    python -m benchmarks.llama_cpp --llama-cpp BUILD [--models 60m] [--types q8_0] [--cores 1,2]
        [--only decode] [--rounds 9] [--json benchmarks/results/llama_cpp.json]

Worker processes of both sides stay alive, pinned to the same cores, and take turns, one request
each in every round. "tiny" and "smollm2-shipped" draft with their shipped drafters, the latter on
our side as many tokens as it advises (llama.cpp would run the drafter on fewer masks then, which it
was not trained for); other models have a random drafter, which runs at full cost while a stated
number of its drafts is accepted, on both sides. llama.cpp runs with its defaults: caches in
float16, flash attention, weights rearranged on loading. A run in parts adds to the JSON.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.acceptance import CONVERSATIONS
from benchmarks.paired import markdown, spreads
from benchmarks.workers import Worker, WorkerError, llama_version, llama_worker

PLAIN, ONE_TOKEN, DRAFTED = "plain", "plain one token", "drafted"
LLAMA = "llama.cpp"
HEADINGS = (
    "model, type, cores | mode | llama.cpp plain | drafted | ours plain | drafted |"
    " plain over plain | best over best | prefill of 512 over llama.cpp's"
)
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
PREFILLS = (128, 512)  # prompt tokens
PROMPT, TOKENS = 128, 64  # of a decoded request
BLOCK = 8  # of the drafters
LEAST = 0.25  # seconds of decoding in a sample; requests are repeated until then
QUESTIONS = (
    "What can you do for me?",
    "Write a function that adds two numbers.",
    "List three colours.",
    "Count to ten.",
)
TEXT = "Tell me a story about a lighthouse keeper who finds a letter in a bottle. " * 40
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
        command = [sys.executable, "-m", "benchmarks.jax_worker", str(self.target)]
        command += ["--plan", json.dumps(plan)]
        if drafted:
            command += ["--drafter", str(self.drafter)]
            command += ["--forced"] if self.accepted else []
        return command

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


def capacity(tokens: int) -> int:
    """Return the row length that the command line chooses for a number of tokens."""
    return max(256, 1 << (tokens - 1).bit_length())


def prompts(setting: Setting) -> list[list[int]]:
    """Return the prompts of a model: questions, or one long prompt of words or random ids."""
    if not setting.accepted:
        tokenizer = tokenizer_of(setting.target)
        texts = QUESTIONS if setting.model == "tiny" else first_turns()
        return [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    return [long_prompt(setting, PROMPT)]


def long_prompt(setting: Setting, count: int) -> list[int]:
    """Return `count` token ids: of a text if the model has words, else random ones."""
    if setting.model.startswith(("tiny", "smollm2")):
        return (tokenizer_of(setting.target).encode(TEXT) * 4)[:count]
    import numpy as np

    return np.random.default_rng(count).integers(3, 1000, count).tolist()


def first_turns() -> list[str]:
    """Return the first turn of the first conversation of each category of `prompts.jsonl`."""
    found: dict[str, str] = {}
    for line in CONVERSATIONS.read_text("utf-8").splitlines():
        conversation = json.loads(line)
        found.setdefault(conversation["category"], conversation["turns"][0])
    return [*found.values()]


def tokenizer_of(target: Path) -> Any:
    """Return the tokenizer in a GGUF file."""
    from dflash_jax.converters.models import open_model
    from dflash_jax.tokenizer import Tokenizer

    found = Tokenizer.from_files(open_model(target).companions(), where=str(target))
    assert found
    return found


@contextlib.contextmanager
def workers(setting: Setting, length: int, *, drafted: bool) -> Iterator[dict[str, Worker]]:
    """Start the workers of all series; those of one plan with drafts serve two series.

    Args:
      drafted: whether drafted series are wanted.
    """
    with contextlib.ExitStack() as stack:

        def start(command: list[str]) -> Worker:
            environment = {"JAX_PLATFORMS": "cpu"}
            return stack.enter_context(Worker(command, setting.cores, environment=environment))

        found = {f"{LLAMA} {PLAIN}": start(setting.llama(length, drafted=False))}
        if drafted:
            found[f"{LLAMA} {DRAFTED}"] = start(setting.llama(length, drafted=True))
        for name, fields in plans(setting.kind).items():
            plan = fields | {"max_length": length, "block": setting.advised}
            inexact = setting.ours(plan | {"exact": False}, drafted=False)
            found[f"{name} {ONE_TOKEN}"] = start(inexact)
            exact = start(setting.ours(plan, drafted=drafted))
            found[f"{name} {PLAIN}"] = exact
            if drafted:
                found[f"{name} {DRAFTED}"] = exact
        yield found


def decode(setting: Setting, rounds: int) -> dict[str, Any]:
    """Return tokens per second of every series, by wall time and by CPU time."""
    given = prompts(setting)
    length = capacity(max(map(len, given)) + TOKENS)
    samples: dict[str, dict[str, list[float]]] = {}
    with workers(setting, length, drafted=True) as found:
        for turn in range(-1, rounds):  # the first is not timed
            for series, worker in found.items():
                answers, seconds = [], 0.0
                while seconds < LEAST:
                    answers += [worker.ask(setting.request(series, TOKENS, ids)) for ids in given]
                    seconds = sum(answer["decode_s"] for answer in answers)
                if turn < 0:
                    samples[series] = {"tokens_per_s": [], "tokens_per_cpu_s": [], "length": []}
                    continue
                tokens = sum(len(answer["tokens"]) - 1 for answer in answers)
                one = samples[series]
                one["tokens_per_s"].append(tokens / seconds)
                one["tokens_per_cpu_s"].append(tokens / sum(a["decode_cpu_s"] for a in answers))
                one["length"].append(tokens / sum(a["rounds"] for a in answers))
        plans_of = {name: worker.first.get("plan") for name, worker in found.items()}
    figures = {
        series: {
            "tokens_per_s": spreads(one["tokens_per_s"]),
            "tokens_per_cpu_s": spreads(one["tokens_per_cpu_s"]),
            "acceptance_length": one["length"][-1],
            "plan": plans_of[series],
        }
        for series, one in samples.items()
    }
    forced = f"forced {setting.accepted}" if setting.accepted else "real"
    return {"series": figures, "acceptance": forced, "prompt_tokens": [*map(len, given)]}


def prefill(setting: Setting, rounds: int) -> dict[str, Any]:
    """Return prompt tokens per second of every plain series, by length of the prompt."""
    length, samples = capacity(max(PREFILLS) + 1), {}
    with workers(setting, length, drafted=False) as found:
        for turn in range(-1, rounds):
            for count in PREFILLS:
                ids = long_prompt(setting, count)
                for series, worker in found.items():
                    if series.endswith(ONE_TOKEN):
                        continue  # prompts are fed in the same chunks
                    answer = worker.ask(setting.request(series, 1, ids))
                    if turn >= 0:
                        by_length = samples.setdefault(series, {})
                        by_length.setdefault(str(count), []).append(count / answer["prefill_s"])
    return {"series": spreads(samples)}


STAGES = {"decode": decode, "prefill": prefill}


def lines(key: str, stage: str, found: dict[str, Any]) -> list[str]:
    """Return the table of one stage; ratios are over llama.cpp's plain decoding."""
    title = f"{key} {stage}"
    out = []
    for series, figures in found["series"].items():
        numbers = {
            name: f"{value['median']:.4g} [{value['low']:.4g} {value['high']:.4g}]"
            for name, value in figures.items()
            if isinstance(value, dict) and "median" in value
        }
        if stage == "decode":
            base = found["series"][f"{LLAMA} {PLAIN}"]["tokens_per_s"]["median"]
            numbers["ratio"] = f"{figures['tokens_per_s']['median'] / base:.2f}"
            numbers["length"] = f"{figures['acceptance_length']:.2f}"
        shown = "  ".join(f"{name} {text}" for name, text in numbers.items())
        out.append(f"{title:24} {series:24} {shown}")
    return out


def table(cases: Mapping[str, Any]) -> list[str]:
    """Return the rows of the table in docs/benchmarks.md: speeds, and ratios of the fastest.

    "Plain" is the faster of the two ways of ours; `cases` are those of the JSON file.
    """
    rows = []
    for key, stages in cases.items():
        if "decode" not in stages:
            continue
        series = stages["decode"]["series"]
        speeds = {name: found["tokens_per_s"]["median"] for name, found in series.items()}
        fills = stages.get("prefill", {}).get("series", {})
        theirs = speeds[f"{LLAMA} {PLAIN}"], speeds.get(f"{LLAMA} {DRAFTED}", 0.0)
        for mode in dict.fromkeys(name.split()[0] for name in speeds if not name.startswith(LLAMA)):
            plain = max(speeds[f"{mode} {PLAIN}"], speeds[f"{mode} {ONE_TOKEN}"])
            drafted = speeds.get(f"{mode} {DRAFTED}", 0.0)
            both = (
                [fills[name]["512"]["median"] for name in (f"{mode} {PLAIN}", f"{LLAMA} {PLAIN}")]
                if fills
                else []
            )
            numbers = [*theirs, plain, drafted]
            ratios = [plain / theirs[0], max(plain, drafted) / max(theirs)]
            cells = [f"{x:,.0f}" for x in numbers] + [f"{x:.2f}" for x in ratios]
            cells.append(f"{both[0] / both[1]:.2f}" if both else "")
            rows.append([key.replace("/", ", "), mode, *cells])
    return markdown(HEADINGS, rows)


def merge(path: Path, key: str, stage: str, found: dict[str, Any]) -> None:
    """Add a measurement to the JSON file, in place of an older one of the same stage."""
    kept = json.loads(path.read_text("utf-8")) if path.is_file() else {"suite": path.stem}
    kept.setdefault("cases", {}).setdefault(key, {})[stage] = found
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps(kept, indent=1) + "\n")
    Path(name).replace(path)


def case_parser(text: str, *, models: str, types: str, cores: str) -> argparse.ArgumentParser:
    """Return a parser of the options that choose settings, with their defaults."""
    from dflash_jax.converters.forms import GGUF_TYPES

    parser = argparse.ArgumentParser(description=text.splitlines()[0])
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
    from benchmarks.llama_models import MODELS
    from dflash_jax.converters.forms import GGUF_TYPES

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
    from benchmarks.llama_models import SHIPPED, TINY, shipped_blocks, write_pair

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
    from benchmarks.environment import environment

    version = llama_version(options.llama_cpp)
    return {"environment": environment(), "llama_cpp": version, "rounds": options.rounds}


def main(words: Sequence[str] | None = None) -> int:
    """Measure every stage of every setting, printing and storing each when it is done."""
    types = "f32,bf16,q8_0,q4_0,q4_1"
    parser = case_parser(__doc__, models="tiny,smollm2,60m,350m", types=types, cores="1,2")
    parser.add_argument("--only", default=",".join(STAGES), metavar="STAGE,...")
    options = parser.parse_args(words)
    stages = listed(parser, "only", options.only, tuple(STAGES))
    for key, setting in chosen_settings(parser, options):
        for stage in stages:
            load = os.getloadavg()[0]
            found = STAGES[stage](setting, options.rounds)
            found |= {"load": [load, os.getloadavg()[0]]} | about(options)
            print("\n".join(lines(key, stage, found)), flush=True)
            if options.json:
                merge(options.json, key, stage, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
