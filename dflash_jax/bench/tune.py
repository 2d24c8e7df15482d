"""Search for the fastest plan of a model on this machine, by paired measurements of whole answers.

One choice after another is tried: where drafts come from and how many are verified, the steps of
a call, the kernels. Every candidate answers the prompts in turn with the best one so far. Each
plan is lossless; only kernels round differently.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.errors import CheckpointError, PlanError, RequestError
from dflash_jax.loading import OpenPair
from dflash_jax.plan import Plan
from dflash_jax.utils.atomic import new_path

# Sources of drafts.
NONE = "none"
NGRAM = "ngram"
OWN = "own"
BLOCKS = (2, 3, 4, 6, 8, 12, 16)
NGRAM_BLOCKS = (4, 8, 16)
MATCHED = 4  # tokens that match before a copy replaces drafts of the drafter
STEPS = (1, 4, 16)  # steps of a call
MARGIN = 1.02  # a candidate that is not faster by this is not worth another plan


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A source of drafts, and fields of the plan that differ from the user's."""

    drafter: str = NONE
    fields: tuple[tuple[str, Any], ...] = ()

    def changed(self, **fields: Any) -> "Candidate":
        """Return a candidate with other fields."""
        return dataclasses.replace(self, fields=tuple((dict(self.fields) | fields).items()))

    def __str__(self) -> str:
        named = {NONE: "no drafter", NGRAM: "drafts from the text", OWN: "its drafter"}
        return ", ".join([named[self.drafter], *(f"{k}={v}" for k, v in self.fields)])


@dataclasses.dataclass(frozen=True)
class Measured:
    """A candidate's speed beside that of the best one before it.

    Attributes:
      ratio: ratio of the two speeds over all prompts; each prompt counts with its fastest round.
      tokens_per_s: output tokens per second of the candidate, prompts included.
    """

    candidate: str
    beside: str
    ratio: float
    tokens_per_s: float


class Tuning:
    """A search that goes on where it was stopped.

    Args:
      pair: the opened models.
      plan: the user's plan; candidates replace some of its fields.
      prompts: token ids of each prompt.
      params: options of the requests.
      kept: file with what was measured; it is written after each candidate.
      rounds: how often a candidate answers each prompt.
      report: called with lines of progress.

    Raises:
      RequestError: the file belongs to another search.
    """

    def __init__(
        self,
        pair: OpenPair,
        plan: Plan,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        kept: Path,
        rounds: int,
        report: Callable[[str], None],
    ):
        self.measured: dict[str, Measured] = {}
        self._pair = pair
        self._plan = plan
        self._params = params
        self._prompts = prompts
        self._rounds = rounds
        self._kept = kept
        self._report = report
        self._engines: dict[Candidate, Engine] = {}
        about = [str(pair.target.path), plan.to_json(), str(params), rounds, list(prompts)]
        self._about = json.loads(json.dumps(about))
        if kept.exists():
            self._resume()

    def run(self) -> Candidate:
        """Return the fastest candidate.

        Raises:
          CheckpointError: the disk is full.
        """
        best = Candidate()
        begun = time.perf_counter()
        self._report(f"measuring {best}")
        self._seconds_of(best, self._units()[0])
        answered = time.perf_counter()
        once = answered - begun
        for unit in self._units():
            self._seconds_of(best, unit)
        answers = time.perf_counter() - answered
        first = list(self._sources())
        count = len(first) + len(STEPS) + 1 - len(self.measured)
        minutes = max(count, 1) * (once + 2 * (self._rounds + 1) * answers) / 60
        self._report(
            f"about {math.ceil(minutes)} minutes for {max(count, 1)} candidates; what is measured"
            f" is kept in {self._kept}: after Ctrl-C, the same command goes on"
        )
        for stage in (lambda _: iter(first), self._steps, self._kernels):
            for candidate in list(stage(best)):
                try:
                    measured = self._beside(candidate, best)
                except PlanError as error:  # the models or the memory do not allow it
                    self._report(f"left out: {candidate}: {error}")
                    continue
                self._report(
                    f"{measured.ratio:.2f}x, {measured.tokens_per_s:,.0f} tokens/s: {candidate}"
                )
                if measured.ratio >= MARGIN:
                    best = candidate
        return best

    def forget(self) -> None:
        """Remove the file of what was measured."""
        self._kept.unlink(missing_ok=True)

    def _sources(self) -> Iterator[Candidate]:
        if self._pair.drafter is not None:
            most = getattr(self._pair.pair.drafter, "trained_block", None) or BLOCKS[-1]
            for block in sorted({*(x for x in BLOCKS if x < most), most}):
                yield Candidate(OWN).changed(block=block)
            yield Candidate(OWN).changed(block=min(8, most), ngram=MATCHED)
        for block in NGRAM_BLOCKS:
            yield Candidate(NGRAM).changed(block=block)

    def _steps(self, best: Candidate) -> Iterator[Candidate]:
        for count in STEPS:
            if count != self._engine(best).plan.steps_per_call:
                yield best.changed(steps_per_call=count)

    def _kernels(self, best: Candidate) -> Iterator[Candidate]:
        if self._engine(best).plan.kernels == "native":
            yield best.changed(kernels="xla")

    def _units(self) -> list[Sequence[Sequence[int]]]:
        """Return the prompts, as many at a time as are decoded at once."""
        rows = self._plan.rows
        return [self._prompts[i : i + rows] for i in range(0, len(self._prompts), rows)]

    def _beside(self, candidate: Candidate, best: Candidate) -> Measured:
        """Measure a candidate and the best one in turn, unless that was done before."""
        if (known := self.measured.get(str(candidate))) and known.beside == str(best):
            return known
        for engine in [x for x in self._engines if x not in (candidate, best)]:
            del self._engines[engine]
        least: dict[tuple[Candidate, int], float] = {}
        tokens = 0
        for number in range(self._rounds + 1):  # the first one compiles, and fills caches
            for at, unit in enumerate(self._units()):
                for one in (best, candidate) if number % 2 else (candidate, best):
                    seconds, written = self._seconds_of(one, unit)
                    if number:
                        least[one, at] = min(seconds, least.get((one, at), math.inf))
                    if one is candidate and number == 1:
                        tokens += written
        old = sum(seconds for (one, _), seconds in least.items() if one == best)
        new = sum(seconds for (one, _), seconds in least.items() if one == candidate)
        measured = Measured(str(candidate), str(best), old / new, tokens / new)
        self.measured[str(candidate)] = measured
        self._keep()
        return measured

    def _seconds_of(self, candidate: Candidate, unit: Sequence[Sequence[int]]) -> tuple[float, int]:
        engine = self._engine(candidate)
        started = time.perf_counter()
        handles = [engine.submit(list(ids), self._params) for ids in unit]
        results = [handle.result() for handle in handles]
        return time.perf_counter() - started, sum(len(x.token_ids) for x in results)

    def _engine(self, candidate: Candidate) -> Engine:
        if candidate not in self._engines:
            pair = self._pair
            if candidate.drafter != OWN:
                ngram = candidate.drafter == NGRAM
                pair = dataclasses.replace(pair, drafter=None, ngram=ngram)
            engine = pair.engine(dataclasses.replace(self._plan, **dict(candidate.fields)))
            engine.measures_drafting = False
            self._engines[candidate] = engine
        return self._engines[candidate]

    def _keep(self) -> None:
        entries = [dataclasses.asdict(x) for x in self.measured.values()]
        text = json.dumps({"about": self._about, "measured": entries})
        with new_path(self._kept, overwrite=True) as partial:
            partial.write_text(text, encoding="utf-8")

    def _resume(self) -> None:
        try:
            contents = json.loads(self._kept.read_text(encoding="utf-8"))
            about = contents["about"]
            entries = [Measured(**entry) for entry in contents["measured"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RequestError(
                f"{self._kept} cannot be read ({error}); remove it to start over"
            ) from error
        if about != self._about:
            raise RequestError(
                f"{self._kept} was measured with other models, options or prompts; remove it to"
                " start over"
            )
        self.measured = {x.candidate: x for x in entries}
        self._report(f"going on after {len(entries)} candidates in {self._kept}")


def plan_file(best: Candidate, chosen: Mapping[str, Any]) -> str:
    """Return the text of a plan's file, which `--plan` reads.

    Args:
      chosen: fields of the plan that the user chose.
    """
    source = {} if best.drafter == OWN else {"drafter": best.drafter}
    return json.dumps(source | dict(chosen) | dict(best.fields), indent=1) + "\n"


def write_plan(path: Path, text: str) -> None:
    """Write a plan's file.

    Raises:
      RequestError: it cannot be written.
    """
    try:
        with new_path(path, overwrite=True) as partial:
            partial.write_text(text, encoding="utf-8")
    except (OSError, CheckpointError) as error:
        raise RequestError(f"{path} cannot be written: {error}") from error
