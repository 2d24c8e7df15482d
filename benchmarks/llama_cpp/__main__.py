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

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.acceptance import CONVERSATIONS
from benchmarks.llama_cpp.settings import (
    DRAFTED,
    LLAMA,
    ONE_TOKEN,
    PLAIN,
    Setting,
    about,
    case_parser,
    chosen_settings,
    listed,
    merge,
    plans,
    tokenizer_of,
)
from benchmarks.llama_cpp.worker import Worker
from benchmarks.paired import markdown, spreads

HEADINGS = (
    "model, type, cores | mode | llama.cpp plain | drafted | ours plain | drafted |"
    " plain over plain | best over best | prefill of 512 over llama.cpp's"
)
PREFILLS = (128, 512)  # prompt tokens
# Numbers of tokens in a decoded request.
PROMPT = 128
TOKENS = 64
LEAST = 0.25  # seconds of decoding in a sample; requests are repeated until then
QUESTIONS = (
    "What can you do for me?",
    "Write a function that adds two numbers.",
    "List three colours.",
    "Count to ten.",
)
TEXT = "Tell me a story about a lighthouse keeper who finds a letter in a bottle. " * 40


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
    return np.random.default_rng(count).integers(3, 1000, count).tolist()


def first_turns() -> list[str]:
    """Return the first turn of the first conversation of each category of `prompts.jsonl`."""
    turns: dict[str, str] = {}
    for line in CONVERSATIONS.read_text("utf-8").splitlines():
        conversation = json.loads(line)
        turns.setdefault(conversation["category"], conversation["turns"][0])
    return [*turns.values()]


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

        by_series = {f"{LLAMA} {PLAIN}": start(setting.llama(length, drafted=False))}
        if drafted:
            by_series[f"{LLAMA} {DRAFTED}"] = start(setting.llama(length, drafted=True))
        for name, fields in plans(setting.kind).items():
            plan = fields | {"max_length": length, "block": setting.advised}
            inexact = setting.ours(plan | {"exact": False}, drafted=False)
            by_series[f"{name} {ONE_TOKEN}"] = start(inexact)
            exact = start(setting.ours(plan, drafted=drafted))
            by_series[f"{name} {PLAIN}"] = exact
            if drafted:
                by_series[f"{name} {DRAFTED}"] = exact
        yield by_series


def decode(setting: Setting, rounds: int) -> dict[str, Any]:
    """Return tokens per second of every series, by wall time and by CPU time."""
    token_ids = prompts(setting)
    length = capacity(max(map(len, token_ids)) + TOKENS)
    samples: dict[str, dict[str, list[float]]] = {}
    with workers(setting, length, drafted=True) as by_series:
        for turn in range(-1, rounds):  # the first is not timed
            for series, worker in by_series.items():
                answers = []
                seconds = 0.0
                while seconds < LEAST:
                    for ids in token_ids:
                        answers.append(worker.ask(setting.request(series, TOKENS, ids)))
                    seconds = sum(answer["decode_s"] for answer in answers)
                if turn < 0:
                    samples[series] = {"tokens_per_s": [], "tokens_per_cpu_s": [], "length": []}
                    continue
                tokens = sum(len(answer["tokens"]) - 1 for answer in answers)
                one = samples[series]
                one["tokens_per_s"].append(tokens / seconds)
                one["tokens_per_cpu_s"].append(tokens / sum(a["decode_cpu_s"] for a in answers))
                one["length"].append(tokens / sum(a["rounds"] for a in answers))
        plans_of = {name: worker.first.get("plan") for name, worker in by_series.items()}
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
    return {"series": figures, "acceptance": forced, "prompt_tokens": [*map(len, token_ids)]}


def prefill(setting: Setting, rounds: int) -> dict[str, Any]:
    """Return prompt tokens per second of every plain series, by length of the prompt."""
    length = capacity(max(PREFILLS) + 1)
    samples = {}
    with workers(setting, length, drafted=False) as by_series:
        for turn in range(-1, rounds):
            for count in PREFILLS:
                ids = long_prompt(setting, count)
                for series, worker in by_series.items():
                    if series.endswith(ONE_TOKEN):
                        continue  # prompts are fed in the same chunks
                    answer = worker.ask(setting.request(series, 1, ids))
                    if turn >= 0:
                        by_length = samples.setdefault(series, {})
                        by_length.setdefault(str(count), []).append(count / answer["prefill_s"])
    return {"series": spreads(samples)}


STAGES = {"decode": decode, "prefill": prefill}


def lines(key: str, stage: str, result: dict[str, Any]) -> list[str]:
    """Return the table of one stage; ratios are over llama.cpp's plain decoding."""
    title = f"{key} {stage}"
    out = []
    for series, figures in result["series"].items():
        numbers = {
            name: f"{value['median']:.4g} [{value['low']:.4g} {value['high']:.4g}]"
            for name, value in figures.items()
            if isinstance(value, dict) and "median" in value
        }
        if stage == "decode":
            base = result["series"][f"{LLAMA} {PLAIN}"]["tokens_per_s"]["median"]
            numbers["ratio"] = f"{figures['tokens_per_s']['median'] / base:.2f}"
            numbers["length"] = f"{figures['acceptance_length']:.2f}"
        shown = "  ".join(f"{name} {text}" for name, text in numbers.items())
        out.append(f"{title:24} {series:24} {shown}")
    return out


def speeds_of(decoded: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return tokens per second of llama.cpp and of each mode of ours, plain and drafted.

    "Plain" is the faster of the two ways of ours; drafted is 0 where it was not measured.
    """
    speeds = {name: one["tokens_per_s"]["median"] for name, one in decoded["series"].items()}
    sides = dict.fromkeys(name.split()[0] for name in speeds)
    return {
        side: (
            max(speeds[f"{side} {PLAIN}"], speeds.get(f"{side} {ONE_TOKEN}", 0.0)),
            speeds.get(f"{side} {DRAFTED}", 0.0),
        )
        for side in sides
    }


def table(cases: Mapping[str, Any]) -> list[str]:
    """Return speeds of both sides, and ratios of the fastest, in Markdown.

    Args:
      cases: those of the JSON file.
    """
    rows = []
    for key, stages in cases.items():
        if "decode" not in stages:
            continue
        fills = stages.get("prefill", {}).get("series", {})
        speeds = speeds_of(stages["decode"])
        theirs = speeds.pop(LLAMA)
        for mode, (plain, drafted) in speeds.items():
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


def main(words: Sequence[str] | None = None) -> int:
    """Measure every stage of every setting, printing and storing each when it is done."""
    types = "f32,bf16,q8_0,q4_0,q4_1"
    parser = case_parser(
        "llama_cpp", __doc__, models="tiny,smollm2,60m,350m", types=types, cores="1,2"
    )
    parser.add_argument("--only", default=",".join(STAGES), metavar="STAGE,...")
    options = parser.parse_args(words)
    stages = listed(parser, "only", options.only, tuple(STAGES))
    for key, setting in chosen_settings(parser, options):
        for stage in stages:
            load = os.getloadavg()[0]
            result = STAGES[stage](setting, options.rounds)
            result |= {"load": [load, os.getloadavg()[0]]} | about(options)
            print("\n".join(lines(key, stage, result)), flush=True)
            if options.json:
                merge(options.json, key, stage, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
