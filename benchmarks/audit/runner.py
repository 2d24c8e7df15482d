"""Execution of scenarios: each request alone without drafting, then the whole scenario.

The answers of both are compared.
"""

import collections
import concurrent.futures
import dataclasses
import math
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax

import dflash_jax as dj
from benchmarks.audit.models import AuditedEngine
from benchmarks.audit.scenario import AuditRequest, Failure, Scenario
from dflash_jax.engine.engine import Engine, RequestHandle
from dflash_jax.engine.result import Stats, TokenLogprob
from dflash_jax.engine.scheduler import StepPacer
from dflash_jax.engine.state_machine.speculation import UNKNOWN, BreakEven
from dflash_jax.errors import DFlashError
from dflash_jax.graph.state import StepOutput
from dflash_jax.testing import OWN, force_acceptance, set_row_scripts

Counts = collections.Counter[str]
MOST_TURNS = 1500  # turns in which no request ends; the longest requests take some hundreds


class StalledError(Exception):
    """Requests did not finish, or an engine leaked resources of finished ones."""


class InjectedInterrupt(KeyboardInterrupt):
    """A simulated Ctrl-C."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a request, with the reasons why it may be incomplete.

    Attributes:
      pieces: ids and text of the streamed pieces, joined.
      traced: ids of its trace; None if it has none.
      error: the error that ended the request, if one did.
      failures: how often the device failed while the request ran.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    pieces: tuple[tuple[int, ...], str]
    stats: Stats
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    traced: tuple[int, ...] | None = None
    error: str | None = None
    failures: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A request's answers alone, one if it is greedy, and its answers."""

    request: AuditRequest
    references: list[Answer]
    answers: list[Answer]


def run_scenario(
    audited: AuditedEngine,
    scenario: Scenario,
    folder: Path,
    counts: Counts,
    ended: Callable[[int], object],
) -> list[Outcome]:
    """Run a scenario to its end.

    Args:
      folder: an empty prefix folder.
      counts: updated with counts of events by name.
      ended: called with the number of requests of a session that have ended, when it changes.

    Raises:
      StalledError: requests did not finish, or resources leaked.
    """
    alone = audited.opened()
    alone.core.pacer = ScriptedPacer((alone.plan.steps_per_call,))
    references = [_references(alone, request) for request in scenario.requests]
    answers: dict[int, list[Answer]] = {}
    for number in range(scenario.sessions):
        session = _Session(audited, scenario, number, folder, references, counts)
        answers |= session.run(ended)
    return [
        Outcome(request, references[i], answers[i]) for i, request in enumerate(scenario.requests)
    ]


def _references(engine: Engine, request: AuditRequest) -> list[Answer]:
    """Return the answers to a request alone, without drafting; greedy ones are all alike."""
    options = _options(request) | {"speculative": False, "block_size": None}
    if request.greedy:
        return [_reference(engine, request, options)]
    seeds = (options["seed"] + i for i in range(request.answers))
    return [_reference(engine, request, options | {"seed": seed}) for seed in seeds]


def _reference(engine: Engine, request: AuditRequest, options: dict[str, Any]) -> Answer:
    live = engine.submit(request.prompt, **cast(Any, options))
    for _ in range(MOST_TURNS):
        if live.done:
            return _answer(live)
        engine.advance()
    raise StalledError(f"a request does not end although it runs alone: {request}")


def _options(request: AuditRequest) -> dict[str, Any]:
    options = dict(request.options)
    if options.get("recovery") is not None:
        options["recovery"] = dj.Recovery(**options["recovery"])
    return options


def _answer(live: RequestHandle) -> Answer:
    result = None
    error = None
    try:
        result = live.result()
    except DFlashError as raised:
        error = f"{type(raised).__name__}: {raised}"
    ids = tuple(i for piece in live.pieces for i in piece.token_ids)
    trace = result.trace if result else ()
    assert live.finish_reason is not None
    return Answer(
        token_ids=tuple(live.token_ids),
        text=result.text if result else None,
        finish_reason=live.finish_reason,
        pieces=(ids, "".join(piece.text for piece in live.pieces)),
        stats=live.stats,
        logprobs=result.logprobs if result else None,
        prompt_logprobs=result.prompt_logprobs if result else None,
        traced=tuple(i for traced in trace for i in traced.tokens) if trace else None,
        error=error,
        failures=live.sequence.failures,
    )


class _Session:
    """One session of a scenario: its engines, from opening to closing."""

    def __init__(
        self,
        audited: AuditedEngine,
        scenario: Scenario,
        number: int,
        folder: Path,
        references: list[list[Answer]],
        counts: Counts,
    ):
        self._scenario = scenario
        self._references = references
        self._counts = counts
        self._folder = folder if scenario.folder else None
        due = [i for i, request in enumerate(scenario.requests) if request.session == number]
        self._due = collections.deque(sorted(due, key=lambda i: scenario.requests[i].turn))
        self._turn = 0
        self._last_end = 0  # turn in which a request ended or was submitted
        self._lives: dict[int, list[RequestHandle]] = {}  # handles of requests that run
        self._answers: dict[int, list[Answer]] = {}  # answers of requests that have ended
        self._cells: dict[int, dj.CancelCell] = {}
        self._ends: dict[int, int] = {}  # turn of each cancellation
        self._scripts: dict[int, list[float]] = {}  # by running request
        self._reads: list[DelayedReads] = []
        self._engines = [self._opened(audited, number, i) for i in range(scenario.engines)]
        self._scripted: list[list[int]] = [[] for _ in self._engines]  # requests by row

    def run(self, ended: Callable[[int], object]) -> dict[int, list[Answer]]:
        while self._due or self._lives:
            if self._turn > self._last_end + MOST_TURNS:
                raise StalledError(f"{len(self._lives)} requests run after {self._turn} turns")
            self._submit()
            self._cancel()
            for number, engine in enumerate(self._engines):
                self._advance(number, engine)
            for reads in self._reads:
                reads.tick()
            self._turn += 1
            if self._collect():
                ended(len(self._answers))
        for number, engine in enumerate(self._engines):
            self._close(number, engine)
        return self._answers

    # -- engines ------------------------------------------------------------------------------

    def _opened(self, audited: AuditedEngine, session: int, number: int) -> Engine:
        scenario = self._scenario
        engine = audited.opened(
            segments=scenario.segments, folder=self._folder, drafter_seed=scenario.drafter_seed
        )
        engine.core.pacer = ScriptedPacer(scenario.rounds)
        plan = engine.plan
        most = scenario.break_even if plan.exact else 0.0
        blocks = (2, *(block for block in (4, 8, plan.block) if 2 < block <= plan.block))
        lengths = tuple(1 + (most - 1) * block / plan.block for block in blocks)
        engine.core.meter.use(BreakEven((1,), (0,), blocks, ((lengths,),)) if most else UNKNOWN)
        wanted = (session, number)
        failures = [x for x in scenario.failures if (x.session, x.engine) == wanted]
        calls = InterceptedCalls(failures, self._counts)
        engine.core.runner.compiled.executables = {
            key: calls.intercepting(str(key), program)
            for key, program in engine.core.runner.executables.items()
        }
        self._programs = len(engine.core.runner.executables)
        if self._folder is not None:
            self._reads.append(DelayedReads(engine, scenario.disk_turns))
        return engine

    def _advance(self, number: int, engine: Engine) -> None:
        numbers = [x.number if x else 0 for x in engine.core.scheduler.rows]
        if numbers != self._scripted[number] and self._scripts:
            scripts = {}
            for row, running in enumerate(numbers):
                if script := self._scripts.get(running):
                    scripts[row] = script
            set_row_scripts(engine, scripts)
            self._scripted[number] = numbers
        try:
            engine.advance()
        except InjectedInterrupt:
            self._counts["interrupts"] += 1
        self._counts["turns"] += 1

    def _close(self, number: int, engine: Engine) -> None:
        for _ in range(4):  # in-flight steps of finished requests are still read
            self._advance(number, engine)
        if engine.core.busy or engine.core.active or engine.core.queued:
            raise StalledError(
                f"after its requests ended, an engine has {engine.core.active} in rows and"
                f" {engine.core.queued} in its queue; busy: {engine.core.busy}"
            )
        engine.close()
        self._counts["programs compiled"] += len(engine.core.runner.executables) - self._programs
        if engine.core.prefix_cache is not None:
            counters = engine.core.prefix_cache.counters
            self._counts["prefix hits"] += counters.hits
            self._counts["prefix tokens restored"] += counters.hit_tokens
            self._counts["prefix evictions"] += counters.evictions
        disk = engine.core.runner.prefixes.disk if engine.core.runner.prefixes else None
        if disk is not None:
            for name in ("read", "written", "spoiled", "failed"):
                self._counts[f"prefix segments {name}, disk"] += getattr(disk.counters, name)

    # -- requests -----------------------------------------------------------------------------

    def _collect(self) -> bool:
        """Keep the answers of requests that have ended; return whether there are any."""
        done = [n for n, lives in self._lives.items() if all(live.done for live in lives)]
        for number in done:
            self._answers[number] = list(map(_answer, self._lives.pop(number)))
            self._ends.pop(number, None)
        if done:
            self._last_end = self._turn
        return bool(done)

    def _submit(self) -> None:
        requests = self._scenario.requests
        most = self._scenario.waiting or len(requests)
        if self._due and not self._lives:  # skip idle turns
            self._turn = max(self._turn, requests[self._due[0]].turn)
        while self._due and requests[self._due[0]].turn <= self._turn and len(self._lives) < most:
            number = self._due.popleft()
            request = requests[number]
            engine = self._engines[request.engine]
            cell = self._cells[number] = dj.CancelCell()
            options = cast(Any, _options(request))
            lives = engine.prepare(
                request.prompt,
                n=request.answers,
                cancel=cell,
                trace=number % 2 == 0,  # a trace changes no token
                **options,
            )
            engine.enqueue(lives)
            self._lives[number] = lives
            self._last_end = self._turn
            if request.cancellation:
                self._ends[number] = self._turn + request.cancellation.turns
            if script := _script(
                request, self._references[number][0], engine.graph.config.vocab_size
            ):
                self._scripts |= {live.number: script for live in lives}

    def _cancel(self) -> None:
        for number in [n for n, turn in self._ends.items() if turn <= self._turn]:
            del self._ends[number]
            lives = self._lives[number]
            cancellation = self._scenario.requests[number].cancellation
            assert cancellation is not None
            how = cancellation.how
            running = [live for live in lives if not live.done]
            self._counts[f"cancelled by {how}"] += len(running)
            if how == "cell":
                self._cells[number].cancel()
                continue
            for live in lives:
                end_request(live, how)


def end_request(live: RequestHandle, how: str) -> None:
    """End a request as its caller would: "close" it, or "drop" an iterator over its pieces."""
    if how == "close":
        live.close()
    elif live.pieces:
        pieces: Any = iter(live)
        next(pieces)
        pieces.close()


def _script(request: AuditRequest, reference: Answer, vocab: int) -> list[float]:
    """Return the scripted drafts by position; empty for the drafter's own."""
    if not request.accepted:
        return []
    truth = [*request.prompt, *reference.token_ids]
    start = len(request.prompt)
    script: list[float] = [*force_acceptance(truth, start, request.accepted, vocab)]
    for place in request.broken:
        script += [OWN] * (start + place + 1 - len(script))
        script[start + place] = math.nan
    return script


# -- injected events ----------------------------------------------------------------------------


class ScriptedPacer(StepPacer):
    """Numbers of steps that successive decoding calls make, whatever time they take."""

    def __init__(self, rounds: tuple[int, ...]):
        super().__init__(max(rounds))
        self._all = rounds
        self._calls = 0
        self.num_steps = rounds[0]

    def record(self, num_steps: int, dispatched: float) -> None:
        """Go on to the next number; the times are ignored."""
        self._calls += 1
        self.num_steps = self._all[self._calls % len(self._all)]


class LostAnswer:
    """A replacement for a step's result whose reading raises a device error."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: made to fail as its answer is read")

    def copy_to_host_async(self) -> None:
        """Do nothing; the replaced array starts a copy here."""


class InterceptedCalls:
    """Counts an engine's program calls and makes some fail.

    A failing call runs first, so that its donated state is deleted.
    """

    def __init__(self, failures: list[Failure], counts: Counts):
        self._failures = {failure.call: failure for failure in failures}
        self._counts = counts
        self._calls = 0

    def intercepting(self, name: str, program: Callable[..., Any]) -> Any:
        """Return the program wrapped for an engine."""

        def call(*arguments: Any) -> Any:
            failure = self._failures.get(self._calls)
            self._calls += 1
            self._counts[f"calls of {name}"] += 1
            made = program(*arguments)
            return made if failure is None else self._fail(failure, made)

        return call

    def _fail(self, failure: Failure, made: Any) -> Any:
        self._counts[f"failed by {failure.how}"] += 1
        if failure.how == "interrupt":
            raise InjectedInterrupt
        if failure.how == "answer" and isinstance(made, tuple) and isinstance(made[-1], StepOutput):
            return *made[:-1], dataclasses.replace(made[-1], packed=LostAnswer())
        raise jax.errors.JaxRuntimeError("INTERNAL: made to fail")


class DelayedReads:
    """Delays reads from an engine's prefix folder by turns instead of seconds."""

    def __init__(self, engine: Engine, turns: int):
        assert engine.core.runner.prefixes is not None
        assert engine.core.runner.prefixes.disk is not None
        self._disk = engine.core.runner.prefixes.disk
        self._turns = turns
        self._read = self._disk.read
        self._disk.read = self._delayed  # type: ignore[method-assign]
        self._waiting: list[tuple[int, concurrent.futures.Future[Any], Any]] = []

    def tick(self) -> None:
        """Count a turn, and end the reads whose turns are over."""
        self._disk.flush()
        waiting = []
        for turns, later, segment in self._waiting:
            if turns > 1:
                waiting.append((turns - 1, later, segment))
            else:
                later.set_result(segment)
        self._waiting = waiting

    def _delayed(self, *arguments: Any, **options: Any) -> Any:
        self._disk.flush()
        reading = self._read(*arguments, **options)
        if reading is None:
            return None
        segment = reading.result()
        later: concurrent.futures.Future[Any] = concurrent.futures.Future()
        if self._turns:
            self._waiting.append((self._turns, later, segment))
        else:
            later.set_result(segment)
        return later


# -- comparison --------------------------------------------------------------------------------


def run_case(
    audited: AuditedEngine, scenario: Scenario, ended: Callable[[int], object] = lambda count: None
) -> tuple[list[str], Counts]:
    """Run a scenario and compare its answers with plain decoding.

    Args:
      ended: called with the number of requests of a session that have ended, when it changes.

    Returns:
      Descriptions of the differences, and counts of events by name.
    """
    counts: Counts = collections.Counter(cases=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run_scenario(audited, scenario, Path(folder), counts, ended)
    except Exception:  # any error of an engine is a finding
        return [traceback.format_exc()], counts
    for outcome in outcomes:
        counts += _counted(outcome)
    return list(map(str, differences(outcomes))), counts


def _counted(outcome: Outcome) -> Counts:
    """Count the events of a request."""
    options = outcome.request.options
    counts: Counts = collections.Counter({"requests": 1, "answers": len(outcome.answers)})
    if "structured" in options:
        counts["structured answers"] = len(outcome.answers)
    for answer in outcome.answers:
        stats = answer.stats
        kind = "greedy" if outcome.request.greedy else "sampled"
        counts[f"{kind} answers"] += 1
        counts[f"{kind} tokens"] += len(answer.token_ids)
        counts["tokens"] += len(answer.token_ids)
        counts[f"ended by {answer.finish_reason}"] += 1
        counts["rounds"] += stats.rounds
        counts["drafts"] += stats.drafted
        counts["accepted drafts"] += stats.accepted
        counts["plain steps"] += stats.plain_steps
        counts["prompt tokens from prefixes"] += stats.cached_tokens
        counts |= collections.Counter()
        counts.update({f"recovery: {name}": n for name, n in stats.recovery.items()})
        counts.update({f"fallback: {name}": n for name, n in stats.fallbacks.items()})
    return counts


# Statistics that depend on scheduling, not on the tokens.
ABOUT_DECODING = ("rebuilt", "cancelled_", "deadline")
TOLERANCE = 1e-5  # of log-probabilities


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
    actual: Any

    def __str__(self) -> str:
        where = f"request {self.request}, answer {self.answer}"
        return f"{where}: {self.what} is {self.actual!r}, expected {self.expected!r}"


def differences(outcomes: list[Outcome]) -> Iterator[Difference]:
    """Return the first difference of each answer that has one."""
    for number, outcome in enumerate(outcomes):
        for place, answer in enumerate(outcome.answers):
            alone = outcome.references[0 if outcome.request.greedy else place]
            mismatch = _first(outcome.request, alone, answer)
            if mismatch is not None:
                what, expected, actual = mismatch
                yield Difference(
                    request=number, answer=place, what=what, expected=expected, actual=actual
                )


Mismatch = tuple[str, Any, Any]  # what differs, the expected value, and the actual one


def _first(request: AuditRequest, alone: Answer, answer: Answer) -> Mismatch | None:
    """Return the first difference of an answer from that of the request alone."""
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
    for what, (expected, actual) in pairs.items():
        if expected != actual:
            return what, expected, actual
    for what in ("logprobs", "prompt_logprobs"):
        if difference := _likelihoods(what, getattr(alone, what), getattr(answer, what)):
            return difference
    return None


def _tokens(expected: tuple[int, ...], actual: tuple[int, ...], cut: bool) -> Mismatch | None:
    """Return the first token that differs; an interrupted answer may end sooner."""
    for place, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            return f"token {place}", a, b
    if len(actual) > len(expected) or (len(actual) < len(expected) and not cut):
        return "the number of tokens", len(expected), len(actual)
    return None


def _events(recovery: Mapping[str, int]) -> dict[str, int]:
    return {k: n for k, n in recovery.items() if n and not k.startswith(ABOUT_DECODING)}


def _likelihoods(
    what: str, expected: list[TokenLogprob] | None, actual: list[TokenLogprob] | None
) -> Mismatch | None:
    if expected is None or actual is None:
        return None if expected is actual else (what, expected, actual)
    for place, (a, b) in enumerate(zip(expected, actual, strict=True)):
        same = a.token_id == b.token_id and [i for i, _ in a.top] == [i for i, _ in b.top]
        if not same or not all(map(_close, _numbers(a), _numbers(b))):
            return f"{what} of token {place}", a, b
    return None


def _numbers(token: TokenLogprob) -> list[float | None]:
    return [token.logprob, *(x for _, x in token.top)]


def _close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
