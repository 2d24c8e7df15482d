"""Odds of a tool call at the ends of stalls and of answers, by the shipped target.

    python -m benchmarks.endings

Recovery uses these odds to distinguish stalls from answers. Stalls are texts that announce a step
after a truncated tool output, as the shipped target writes them, with many kinds of punctuation;
controls are answers, questions and refusals. Only texts after which the target's argmax is the end
token count. Takes about ten minutes.
"""

import argparse
import dataclasses
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import dflash_jax as dj
from benchmarks.environment import environment
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.recovery import floor
from dflash_jax.engine.recovery.endings import read_ending
from recipes.tiny.corpus.agents import TRUNCATED, transcript

LONGEST = 420  # tokens of a prompt
MARKS = (".", "...", "\N{HORIZONTAL ELLIPSIS}", " \N{EN DASH}", " - ", ": \N{GRINNING FACE}", ':"',
         ":)", ":\N{NO-BREAK SPACE}", ":\N{ZERO WIDTH SPACE}", "!", " now.", " first.", " next", "",
         ":**", ": \N{WHITE DOWN POINTING BACKHAND INDEX}", ". One moment.", ":\n\n")  # fmt: skip
ANSWERS = ("{}", "{} Anything else?", "{} Shall I go on?", "{} Let me know if you need more.",
           "Done.", "{}\n\nRegards", "Which one do you mean?", "I could not find it.", "Yes.",
           "{}\n\nBest regards:", "{} That is all.", "**{}**", "- {}", "{} :)", "Result: {}",
           'It says "port:"', "The line is `def f(x):`", "Nothing to do", "I'm sorry, I can't.",
           "Should I try again? Please answer with one of these:", "Note: {}", "{} Is that fine?",
           "{} What do you want to do next:")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """An output and its odds of a call.

    Attributes:
      kind: "stall" or "answer".
      lead: logit of the token that leads to a call minus that of the end token.
      call: logit of the call's marker, after the lead, minus the largest.
    """

    kind: str
    text: str
    lead: float
    call: float

    def acted_on(self, threshold: float) -> bool:
        """Return whether recovery would continue at the end of this text."""
        ending = read_ending(self.text)
        wanted = floor.wanted_odds(ending, dj.Recovery(call_odds=threshold))
        return ending.opened_fence or self.lead + self.call >= wanted


class Odds:
    """Odds of a call after texts, by full forward passes of the target."""

    def __init__(self, engine: Engine):
        assert engine.tokenizer is not None
        self._tokenizer = engine.tokenizer
        self._model = dj.TargetModel(engine.target, engine.params["target"], "float32")
        self._call, self._end, self._lead = (
            self.ids(text)[0] for text in ("<tool_call>", "<|im_end|>", "\n")
        )

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text that continues another."""
        return list(self._tokenizer.encode(text, specials=False))

    def cases(self, kind: str, prompt: list[int], texts: Sequence[str]) -> Iterator[Case]:
        """Return the texts after which the target would end, with their odds."""
        ends = zip(texts, self._logits([prompt + self.ids(text) for text in texts]), strict=True)
        ends = [(text, row) for text, row in ends if row.argmax() == self._end]
        if not ends:
            return
        after = self._logits([[*prompt, *self.ids(text), self._lead] for text, _ in ends])
        for (text, row), following in zip(ends, after, strict=True):
            lead = float(row[self._lead] - row[self._end])
            yield Case(kind, text, lead, float(following[self._call] - following.max()))

    def _logits(self, sequences: list[list[int]]) -> list[np.ndarray]:
        width = -(-max(map(len, sequences)) // 128) * 128
        ids = np.zeros((len(sequences), width), np.int32)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
        logits = np.asarray(self._model.forward(ids).logits)
        return [logits[row, len(sequence) - 1] for row, sequence in enumerate(sequences)]


def stalls(engine: Engine, odds: Odds, rng: random.Random) -> Iterator[Case]:
    """Yield announcements after a truncated tool output."""
    conversation = transcript(rng)
    messages = list(conversation.messages)
    places = [
        i
        for i, (before, after) in enumerate(itertools.pairwise(messages))
        if before["role"] == "tool" and after.get("tool_calls") and after["content"].endswith(":")
    ]
    if not places:
        return
    place, cut = places[0], "\n" + TRUNCATED
    text = messages[place + 1]["content"].rstrip(":")
    output = messages[place]["content"].removesuffix(cut) + cut
    messages[place] = messages[place] | {"content": output}
    prompt = engine.chat_ids(messages[: place + 1], tools=list(conversation.tools))
    if len(prompt) <= LONGEST:
        texts = [text + mark for mark in rng.sample(MARKS, 8)]
        yield from odds.cases("stall", prompt, texts)


def answers(engine: Engine, odds: Odds, rng: random.Random) -> Iterator[Case]:
    """Yield the last messages of complete conversations."""
    conversation = transcript(rng)
    *before, last = conversation.messages
    if last["role"] != "assistant" or last["content"].rstrip().endswith(":"):
        return
    prompt = engine.chat_ids(before, tools=list(conversation.tools))
    if len(prompt) <= LONGEST:
        texts = [text.format(last["content"]) for text in rng.sample(ANSWERS, 9)]
        yield from odds.cases("answer", prompt, texts)


def main() -> None:
    """Measure both kinds and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/endings.json"))
    parser.add_argument("--cases", type=int, default=120, help="of each kind")
    parser.add_argument("--seed", type=int, default=34)
    options = parser.parse_args()
    engine = dj.load("tiny", plan=dj.Plan(max_length=1024))
    odds, found = Odds(engine), {}
    for kind, make in (("stall", stalls), ("answer", answers)):
        cases: dict[str, Case] = {}
        for i in range(2000):
            rng = random.Random(f"{options.seed} {kind} {i}")
            cases |= {case.text: case for case in make(engine, odds, rng)}
            if len(cases) >= options.cases:
                break
        found[kind] = list(cases.values())[: options.cases]
        print(f"{kind}: {len(found[kind])} cases", flush=True)
    threshold = dj.Recovery().call_odds
    rates = {
        kind: sum(case.acted_on(threshold) for case in cases) / len(cases)
        for kind, cases in found.items()
    }
    report = {
        "suite": "endings",
        "environment": environment(),
        "call_odds": threshold,
        "acted_on": rates,
        "cases": [dataclasses.asdict(case) for cases in found.values() for case in cases],
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
