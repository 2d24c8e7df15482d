"""Cases: the setup and scenario of a seed and a number, their execution, and what is compared."""

import collections
import dataclasses
import math
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.audit.models import SHORT, AuditedEngine, Setup, draw_setup
from benchmarks.audit.runner import Answer, Outcome, run_scenario
from benchmarks.audit.scenario import AuditRequest, Scenario
from dflash_jax.engine.result import TokenLogprob

CASES = 60  # per setup, whose compilation takes about as long
SHORT_CASES = 8  # per setup of the short form

Counts = collections.Counter[str]


@dataclasses.dataclass(frozen=True)
class Course:
    """The setup of each case.

    Attributes:
      short: the few setups of the short form.
      family: the only family; all if empty.
    """

    seed: int = 0
    short: bool = False
    family: str = ""

    @property
    def cases(self) -> int:
        """Number of successive cases that share a setup."""
        return SHORT_CASES if self.short else CASES

    def setup(self, case: int) -> Setup:
        number = case // self.cases
        if self.short:
            return SHORT[number % len(SHORT)]
        return draw_setup(self.seed, number, family=self.family)

    def rest(self, case: int) -> range:
        """Return the case and the later ones that share its setup."""
        return range(case, (case // self.cases + 1) * self.cases)


def run_case(audited: AuditedEngine, scenario: Scenario) -> tuple[list[str], Counts]:
    """Run a scenario and compare its answers with plain decoding.

    Returns:
      Descriptions of the differences, and counts of events by name.
    """
    counts: Counts = collections.Counter(cases=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run_scenario(audited, scenario, Path(folder), counts)
    except Exception:  # any error of an engine is a finding
        return [traceback.format_exc()], counts
    for outcome in outcomes:
        counts += _counted(outcome)
    return list(map(str, differences(outcomes))), counts


def _counted(outcome: Outcome) -> Counts:
    """Count the events of a request."""
    options = outcome.request.options
    found: Counts = collections.Counter({"requests": 1, "answers": len(outcome.answers)})
    found["structured answers"] = len(outcome.answers) * ("structured" in options)
    for answer in outcome.answers:
        stats, kind = answer.stats, "greedy" if outcome.request.greedy else "sampled"
        found[f"{kind} answers"] += 1
        found[f"{kind} tokens"] += len(answer.token_ids)
        found["tokens"] += len(answer.token_ids)
        found[f"ended by {answer.finish_reason}"] += 1
        found["rounds"] += stats.rounds
        found["drafts"] += stats.drafted
        found["accepted drafts"] += stats.accepted
        found["plain steps"] += stats.plain_steps
        found["prompt tokens from prefixes"] += stats.cached_tokens
        found |= collections.Counter()
        found.update({f"recovery: {name}": n for name, n in stats.recovery.items()})
        found.update({f"fallback: {name}": n for name, n in stats.fallbacks.items()})
    return found


# Statistics that depend on scheduling, not on the tokens.
ABOUT_DECODING = ("rebuilt", "cancelled_", "deadline")
CLOSE = {"rel_tol": 1e-5, "abs_tol": 1e-5}  # of log-probabilities


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference of an answer from the request alone.

    Attributes:
      request, answer: indices in the scenario.
      what: "token 7", "text", "finish reason", "recovery" and the like.
    """

    request: int
    answer: int
    what: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        where = f"request {self.request}, answer {self.answer}"
        return f"{where}: {self.what} is {self.found!r}, expected {self.expected!r}"


def differences(outcomes: list[Outcome]) -> Iterator[Difference]:
    """Return the first difference of each answer that has one."""
    for number, outcome in enumerate(outcomes):
        for place, answer in enumerate(outcome.answers):
            alone = outcome.references[0 if outcome.request.greedy else place]
            found = _first(outcome.request, alone, answer)
            if found is not None:
                what, expected, got = found
                yield Difference(
                    request=number, answer=place, what=what, expected=expected, found=got
                )


Found = tuple[str, Any, Any]


def _first(request: AuditRequest, alone: Answer, answer: Answer) -> Found | None:
    if answer.pieces[0] != answer.token_ids:
        return "the ids of its pieces", answer.token_ids, answer.pieces[0]
    if answer.text is not None and answer.pieces[1] != answer.text:
        return "the text of its pieces", answer.text, answer.pieces[1]
    if answer.traced not in (None, answer.token_ids):
        return "the ids of its trace", answer.token_ids, answer.traced
    cut = request.cancellation is not None and answer.finish_reason == "cancelled"
    cut = cut or (answer.error is not None and answer.failures > 1)
    if (difference := _tokens(alone.token_ids, answer.token_ids, cut)) or cut:
        return difference
    pairs = {
        "error": (alone.error, answer.error),
        "finish reason": (alone.finish_reason, answer.finish_reason),
        "text": (alone.text, answer.text),
        "recovery": (_events(alone.stats.recovery), _events(answer.stats.recovery)),
    }
    for what, (expected, found) in pairs.items():
        if expected != found:
            return what, expected, found
    for what in ("logprobs", "prompt_logprobs"):
        expected, found = getattr(alone, what), getattr(answer, what)
        if difference := _likelihoods(what, expected, found):
            return difference
    return None


def _tokens(expected: tuple[int, ...], found: tuple[int, ...], cut: bool) -> Found | None:
    """Return the first token that differs; an interrupted answer may end sooner."""
    for place, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return f"token {place}", a, b
    if len(found) > len(expected) or (len(found) < len(expected) and not cut):
        return "the number of tokens", len(expected), len(found)
    return None


def _events(recovery: Mapping[str, int]) -> dict[str, int]:
    return {k: n for k, n in recovery.items() if n and not k.startswith(ABOUT_DECODING)}


def _likelihoods(
    what: str, expected: list[TokenLogprob] | None, found: list[TokenLogprob] | None
) -> Found | None:
    if expected is None or found is None:
        return None if expected is found else (what, expected, found)
    for place, (a, b) in enumerate(zip(expected, found, strict=True)):
        same = a.token_id == b.token_id and [i for i, _ in a.top] == [i for i, _ in b.top]
        if not same or not all(map(_close, _numbers(a), _numbers(b))):
            return f"{what} of token {place}", a, b
    return None


def _numbers(token: TokenLogprob) -> list[float | None]:
    return [token.logprob, *(x for _, x in token.top)]


def _close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, **CLOSE)
