"""Cases: the setup and scenario of a seed and a number, and their execution."""

import collections
import dataclasses
import tempfile
import traceback
from pathlib import Path

from benchmarks.audit.comparison import differences
from benchmarks.audit.models import AuditedEngine
from benchmarks.audit.runner import Outcome, run_scenario
from benchmarks.audit.scenario import Scenario
from benchmarks.audit.setups import SHORT, Setup, draw_setup

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
        """Return the setup of a case."""
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
        stats, kind = answer.stats, "greedy" if outcome.reference else "sampled"
        found[f"{kind} answers"] += 1
        found[f"{kind} tokens"] += len(answer.token_ids)
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
