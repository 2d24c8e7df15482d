"""How recovery judges fresh ends of outputs, by the odds of a target.

Stalls and answers are composed from a seed, each after a conversation with declared tools. Their
texts are in `ending_texts.json`, with places for a file, a folder, a command, a place and a tool;
none of the thresholds of the rules was chosen by them. A forward pass gives the target's odds of a
call after the text, from which the rule for stalls follows as in a request. `natural` cases are
those after which the target itself ends.
"""

import collections
import dataclasses
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.engine.state_machine import Recovery, floor
from dflash_jax.engine.state_machine.announcements import read_ending
from dflash_jax.engine.state_machine.output_vocabulary import OutputVocabulary
from dflash_jax.engine.vocabulary import vocabulary_of
from dflash_jax.errors import RequestError
from dflash_jax.target_model import TargetModel
from dflash_jax.tool_parsers.tool_schema import tools_of

_TEXTS = json.loads(Path(__file__).with_name("ending_texts.json").read_text(encoding="utf-8"))
KINDS: dict[str, dict[str, list[str]]] = {"stall": _TEXTS["stalls"], "answer": _TEXTS["answers"]}
SLOTS: dict[str, list[str]] = _TEXTS["slots"]
PAD = 128  # lengths of forward passes are multiples of this


def _tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {parameter: {"type": "string"}},
        "required": [parameter],
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("read_file", "Read a text file.", "path"),
    _tool("run_command", "Run a shell command.", "command"),
    _tool("search", "Search the files of a folder.", "query"),
    _tool("get_weather", "Weather of a city.", "city"),
)
REQUESTS = (
    "What is wrong with {file}?",
    "Please find out why {place} is slow.",
    "Clean up {folder}, and then tell me what you changed.",
    "Does `{command}` work here?",
)
RESULTS = ("ok", "1 failed, 3 passed\n[output truncated]", "no such file", "4 entries", "")


@dataclasses.dataclass(frozen=True)
class Case:
    """The end of an output after a conversation."""

    kind: str
    language: str
    messages: tuple[dict[str, Any], ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Judged:
    """A case with the target's odds.

    Attributes:
      natural: the target's argmax after the text is an end token.
      odds: log-ratios of the tokens that lead to a call, of which the rule takes the sum; None
        without a tool syntax.
    """

    case: Case
    natural: bool
    odds: tuple[float, ...] | None
    acted_on: bool


def fresh_cases(kind: str, seed: int, count: int) -> list[Case]:
    """Return different cases of a kind, the languages in equal parts but for English with half."""
    rng = random.Random(f"{seed} {kind}")
    texts = KINDS[kind]
    others = [language for language in texts if language != "en"]
    cases: dict[str, Case] = {}
    for i in range(20 * count):
        language = "en" if i % 2 == 0 else others[i // 2 % len(others)]
        slots = {name: rng.choice(values) for name, values in SLOTS.items()}
        slots["tool"] = TOOLS[rng.randrange(3)]["function"]["name"]
        text = rng.choice(texts[language]).format(**slots)
        cases.setdefault(text, Case(kind, language, _conversation(rng, slots), text))
        if len(cases) == count:
            break
    return list(cases.values())


def _conversation(rng: random.Random, slots: dict[str, str]) -> tuple[dict[str, Any], ...]:
    request = {"role": "user", "content": rng.choice(REQUESTS).format(**slots)}
    if rng.random() >= 0.6:
        return (request,)
    call = {"name": "read_file", "arguments": {"path": slots["file"]}}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    result = {"role": "tool", "name": "read_file", "content": rng.choice(RESULTS)}
    return request, answer, result


def judge_cases(
    model: TargetModel, cases: Sequence[Case], recovery: Recovery | None = None
) -> Iterator[Judged]:
    """Yield how recovery judges each case by the odds of a target.

    Raises:
      RequestError: the target has no tokenizer or no end token.
    """
    if model.tokenizer is None:
        raise RequestError("the target has no tokenizer.json; give one with --tokenizer DIR")
    ends = list(model.config.eos_token_ids)
    if not ends:
        raise RequestError("the target's config names no end token; add eos_token_id to it")
    recovery = recovery or Recovery()
    vocabulary = vocabulary_of(model.tokenizer, (), recovery, TOOLS, None)
    for case in cases:
        prompt = model.tokenizer.chat(list(case.messages), tools=list(TOOLS))
        text = model.tokenizer.encode(case.text, specials=False)
        rows = _logits(model, [*prompt, *text, *vocabulary.opening], len(vocabulary.opening) + 1)
        end = max(ends, key=lambda i: rows[0][i])
        odds = _odds(rows, end, vocabulary)
        natural = bool(rows[0].argmax() == end)
        total = None if odds is None else sum(odds)
        acted_on = acts(case.text, total, recovery, has_syntax=bool(vocabulary.calls))
        yield Judged(case, natural, odds, acted_on)


def acts(text: str, odds: float | None, recovery: Recovery, *, has_syntax: bool) -> bool:
    """Return whether recovery continues at the end of a text; see `floor.judge`."""
    ending = read_ending(text, tools_of(TOOLS))
    if ending.opened_fence:
        return True
    if not has_syntax or floor.is_complete(text, recovery):
        return False
    if ending.is_call:
        return True
    if odds is None:
        return floor.stalls_by_text(ending)
    return odds >= floor.wanted_margin(ending, recovery)


def _odds(
    rows: Sequence[np.ndarray], end: int, vocabulary: OutputVocabulary
) -> tuple[float, ...] | None:
    """Return the odds of the lead, against the end token, and of each token of the marker."""
    if not vocabulary.opening:
        return None
    odds = [float(rows[0][vocabulary.opening[0]] - rows[0][end])]
    for row, token in itertools.islice(
        zip(rows, vocabulary.opening, strict=False), vocabulary.lead, None
    ):
        odds.append(float(row[token] - row.max()))
    return tuple(odds)


def _logits(model: TargetModel, ids: list[int], count: int) -> list[np.ndarray]:
    """Return the logits at the last places of a sequence."""
    padded = [*ids, *[0] * (-len(ids) % PAD)]
    logits = np.asarray(model.forward([padded]).logits[0, len(ids) - count : len(ids)])
    return list(logits)


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return how many stalls were acted on and how many answers disturbed, all and natural ones."""
    figures: dict[str, Any] = {}
    for kind, verb in (("stall", "acted_on"), ("answer", "disturbed")):
        for name, keep in (("", False), ("natural_", True)):
            some = [j for j in judged if j.case.kind == kind and (j.natural or not keep)]
            figures[f"{name}{kind}s"] = len(some)
            figures[f"{name}{kind}s_{verb}"] = len([j for j in some if j.acted_on])
    wrong = collections.Counter(
        j.case.language for j in judged if j.acted_on != (j.case.kind == "stall")
    )
    return figures | {"misjudged_by_language": dict(wrong)}


def line(name: str, figures: dict[str, Any]) -> str:
    """Return one line of a table of summaries."""
    parts = (
        f"{figures[f'{natural}stalls_acted_on']:4} of {figures[f'{natural}stalls']:3} acted on,"
        f" {figures[f'{natural}answers_disturbed']:3} of {figures[f'{natural}answers']:3} disturbed"
        for natural in ("", "natural_")
    )
    return f"{name:24} {' | natural: '.join(parts)}"
