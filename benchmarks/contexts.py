"""Acceptance length by tokens of context, of a drafter that sees all of it or a window.

    python -m benchmarks.contexts [--target smollm2] [--drafter auto] [--windows 0,256,1024]
        [--longest 4096] [--conversations 3] [--json OUT]

Conversations grow turn by turn, by prompts of `prompts.jsonl` and the target's answers, each in
another order, so that a context length has prompts of all kinds. Every window answers every turn
greedily; the answers are compared. Nothing is timed.
"""

import argparse
import bisect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.acceptance import CONVERSATIONS
from benchmarks.paired import markdown

EDGES = (0, 512, 1024, 2048, 4096, 8192)  # tokens of context
PREFIXES = 2**28  # bytes, so that a turn feeds its own tokens only


def orders(count: int) -> Iterator[list[str]]:
    """Yield prompts in different orders, one of every category after another."""
    entries = [json.loads(line) for line in CONVERSATIONS.read_text("utf-8").splitlines()]
    kinds = list(dict.fromkeys(entry["category"] for entry in entries))
    of_kind = [[e["turns"][0] for e in entries if e["category"] == kind] for kind in kinds]
    turns = [kind[i] for i in range(min(map(len, of_kind))) for kind in of_kind]
    for number in range(count):
        first = number * len(turns) // count
        yield turns[first:] + turns[:first]


def measure(
    engines: dict[int, Any], turns: Sequence[str], tokens: int
) -> Iterator[tuple[int, dict[int, list[int]]]]:
    """Yield the context of each turn, and the tokens of its rounds by window.

    Raises:
      SystemExit: the answers of two windows differ.
    """
    first = next(iter(engines.values()))
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        ids = first.chat_ids(messages)
        if len(ids) + tokens > first.plan.max_length:
            return
        answers = {window: e.generate(ids, max_tokens=tokens) for window, e in engines.items()}
        if len({tuple(answer.token_ids) for answer in answers.values()}) > 1:
            raise SystemExit(f"the answers to {turn!r} after {len(ids)} tokens differ")
        yield len(ids), {w: answer.stats.acceptance_lengths for w, answer in answers.items()}
        messages.append({"role": "assistant", "content": answers[next(iter(engines))].text})


def main(words: Sequence[str] | None = None) -> int:
    """Measure every conversation; print acceptance lengths by context and window."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--windows", default="0,256,1024", help="0 for no window")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of a conversation")
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    import dflash_jax as dj
    from benchmarks.environment import write_result
    from dflash_jax.utils.allocator import tune_allocator

    tune_allocator()
    windows = [int(word) for word in options.windows.split(",")]
    plan: dict[str, Any] = {"weights": options.weights, "max_length": options.longest}
    engines = {}
    for window in windows:
        made = dj.Plan(**plan, draft_window=window, prefix_cache=PREFIXES)
        engines[window] = dj.load(options.target, options.drafter, plan=made)
        engines[window].measures_drafting = False
    found: dict[str, dict[str, list[int]]] = {}
    for turns in orders(options.conversations):
        for context, rounds in measure(engines, turns, options.tokens):
            print(f"a conversation of {context:,} tokens", end="\r", file=sys.stderr, flush=True)
            place = bisect.bisect_right(EDGES, context)
            bin_ = f"{EDGES[place - 1]} to {EDGES[place]}"
            for window, lengths in rounds.items():
                found.setdefault(bin_, {}).setdefault(str(window), []).extend(lengths)
    means = {
        name: {window: sum(lengths) / len(lengths) for window, lengths in of.items()}
        for name, of in found.items()
    }
    ordered = sorted(means.items(), key=lambda item: int(item[0].split()[0]))
    rows = [[name, *(f"{of[str(window)]:.2f}" for window in windows)] for name, of in ordered]
    names = ["all" if window == 0 else str(window) for window in windows]
    print("\n".join(markdown(" | ".join(["context", *names]), rows)))
    counts = {name: {w: len(lengths) for w, lengths in of.items()} for name, of in found.items()}
    write_result(options.json, "contexts", {"acceptance_length": means, "rounds": counts} | plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
