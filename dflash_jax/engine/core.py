"""The engine's loop: schedule work, execute it, process its results.

The host stays one call ahead where calls make one step (`Plan.lookahead`): it dispatches the next
before it reads the results of the last. That is safe because the device ends every row by itself,
at stop tokens and length limits, and a row that ended makes no progress until the host acts on it.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from dflash_jax.engine.break_even import BreakEvenMeter
from dflash_jax.engine.events import EventLog
from dflash_jax.engine.model_runner import InFlightStep, ModelRunner, prompt_logprobs
from dflash_jax.engine.prefix.cache import PrefixCache
from dflash_jax.engine.request import Request
from dflash_jax.engine.result import Stats
from dflash_jax.engine.running_request import RunningRequest, StepDetails
from dflash_jax.engine.sampling_params import Structure
from dflash_jax.engine.scheduler import Inbox, Scheduler, SchedulerOutput, StepPacer, variants_of
from dflash_jax.engine.state_machine import controller
from dflash_jax.engine.state_machine.controller import Restart
from dflash_jax.engine.state_machine.speculation import NO_HISTORY
from dflash_jax.engine.state_machine.trace import CallTime
from dflash_jax.engine.structured.grammars import CallGrammars, Grammar, Grammars
from dflash_jax.engine.turns.turn_events import CallRetry, End, TurnEvents
from dflash_jax.engine.turns.turn_recorder import TurnRecorder
from dflash_jax.errors import ComputeError, DFlashError, HostError, QueueFullError, RequestError
from dflash_jax.graph.keys import ProgramKey, Variant
from dflash_jax.graph.settings import Returned, untraced
from dflash_jax.graph.state import RowStep
from dflash_jax.graph.steps.forced_tokens import ForcedTokens
from dflash_jax.utils import forking

log = logging.getLogger("dflash_jax.engine")

IDLE_WAIT = 0.01  # seconds a turn waits for what threads load if there is nothing else to do
COURTESY = 1e-4  # seconds between two turns in which a thread that waits can go first


@dataclasses.dataclass(slots=True)
class RowUpdates:
    """What the device, the scheduler and the prefix cache must do after a step, in this order."""

    finished: list[RunningRequest] = dataclasses.field(default_factory=list)
    # Requests of whose prompts nothing in the prefix cache may be used again.
    invalidated: list[Request] = dataclasses.field(default_factory=list)
    cleared: list[int] = dataclasses.field(default_factory=list)  # rows of non-finite numbers
    forced: dict[int, ForcedTokens] = dataclasses.field(default_factory=dict)  # by row
    # Requests that wait for the grammar of a call, with the beginning of the call.
    retried: list[tuple[RunningRequest, str]] = dataclasses.field(default_factory=list)


class EngineCore:
    """Runs queued requests in turns.

    Any thread may post requests and their ends, which the next turn takes from the inbox. One
    thread at a time runs turns, and nothing else changes the scheduler and the requests; others
    that call `step` wait for it.
    """

    def __init__(self, runner: ModelRunner, call_grammars: CallGrammars):
        self.call_grammars = call_grammars
        self.runner = runner
        self._plan = runner.plan
        self.events = EventLog()
        self.inbox = Inbox(runner.plan.queue)
        self.scheduler = Scheduler(runner.plan, runner.executor.put)
        self.requests: dict[int, RunningRequest] = {}  # that wait or have a row, by number
        # Dispatched steps whose results were not processed yet, the oldest first.
        self.in_flight: collections.deque[InFlightStep] = collections.deque()
        self.acceptance = NO_HISTORY
        self.pacer = StepPacer(runner.plan.steps_per_call)
        self.meter = BreakEvenMeter(runner)
        self._break_even = self.meter.value  # of which requests were told
        self.recorder: TurnRecorder | None = None
        self._processor = OutputProcessor(runner.plan.block, self.events)
        self._turns = threading.Lock()  # held by the thread that runs a turn
        self._runner = 0  # that thread; 0 while no turn runs
        self._waiting: set[int] = set()  # threads that wait for it
        self._interrupted = False  # a turn began and did not end

    # -- one turn -----------------------------------------------------------------------------

    def step(self, events: TurnEvents | None = None) -> None:
        """Run one turn: dispatch work if any row can use it, then process results that are due.

        Args:
          events: of the turn; by default, what was posted since the last one.

        Raises:
          ComputeError: parameters were donated to a program outside the engine.
          HostError: a program of several hosts failed.
        """
        self._alone(functools.partial(self._step, events))

    def settle(self, events: TurnEvents | None = None) -> None:
        """Apply events as a turn does, and run no work; arguments as for `step`.

        In a turn of this thread it does nothing: the next turn applies what was posted.
        """
        if self._runner != threading.get_ident():
            self._alone(functools.partial(self._apply_only, events), rebuilds=False)

    def _alone(self, work: Callable[[], Returned], *, rebuilds: bool = True) -> Returned:
        """Call a function while no other thread runs turns.

        The lock is entered by `with`, as an interrupted context manager would keep it.

        Args:
          rebuilds: whether to rebuild all rows first if a turn was interrupted, as by Ctrl-C: the
            device state it was given back, or results it was reading, may be lost.
        """
        self._check_not_forked()
        me = threading.get_ident()
        self._waiting.add(me)
        try:
            with self._turns:
                self._waiting.discard(me)
                self._runner = me
                if self._interrupted and rebuilds:
                    self._rebuild()
                    self._interrupted = False
                before = self._interrupted
                self._interrupted = True
                result = work()
                self._interrupted = before
        finally:
            self._waiting.discard(me)
            if self._runner == me:
                self._runner = 0
        if self._waiting:  # the lock alone would let this thread go on first
            time.sleep(COURTESY)
        return result

    def _step(self, events: TurnEvents | None) -> None:
        try:
            untraced(functools.partial(self._run, events))
        except (ValueError, RuntimeError) as error:  # JAX's own errors are RuntimeErrors
            if self.runner.executor.params_deleted:
                raise ComputeError(
                    "the engine's parameters are gone: another program was given them and had"
                    " them donated; let it donate copies, or give the engine others by"
                    " `engine.update_params`"
                ) from error
            if not isinstance(error, jax.errors.JaxRuntimeError):
                raise
            self._rebuild(error)
        if self.recorder:
            self.recorder.end()

    def _apply_only(self, events: TurnEvents | None) -> None:
        self._apply(events)
        if self.recorder:
            self.recorder.end()

    def _run(self, events: TurnEvents | None) -> None:
        steps = self._apply(events).steps
        for sequence in self.scheduler.admit():
            sequence.expect(self.acceptance)
            if self.runner.prefixes:
                self.runner.prefixes.prefetch(sequence.cursor)
        before = [step.work for step in self.in_flight]
        work = self.scheduler.schedule(before, steps)
        if self.recorder:
            self.recorder.scheduled(work)
        if work is not None:
            self.in_flight.append(self.runner.execute(work))
        if not self.in_flight and events is None:
            self._wait_for_threads()
        most = self._lookahead(work)
        while len(self.in_flight) > most:
            step = self.in_flight[0]
            self._process(step)
            if step.work.prefill and [x.work.num_steps > 1 for x in self.in_flight] == [True]:
                break  # give out the prompts' first tokens before waiting for several steps
        if self.meter.enabled:
            self._measure()

    def _posted(self) -> TurnEvents:
        """Return what was posted since the last turn, and what clocks and compilers say now."""
        events = self.inbox.take()
        # After the posts: the programs of a request are compiled before it is posted.
        use: tuple[ProgramKey, ...] = ()
        in_use = self.runner.in_use
        executables = self.runner.executables
        if len(executables) != len(in_use):
            use = tuple(key for key in list(executables) if key not in in_use)
        value = self.meter.value
        break_even = None if value is self._break_even else value
        return events._replace(use=use, steps=self.pacer.num_steps, break_even=break_even)

    def _apply(self, events: TurnEvents | None) -> TurnEvents:
        """Apply events to queue and rows; by default those that were posted. Return them.

        What is interrupted is applied again by the next turn.
        """
        taken = self._posted() if events is None else events
        self.runner.in_use.update(taken.use)
        if taken.break_even is not None:
            self._break_even = taken.break_even
            for sequence in self.requests.values():
                sequence.learn(taken.break_even)
        for sequence in taken.admit:
            self._admit(sequence)
        for end in taken.end:
            self._end(end)
        for retry in taken.retry:
            self._retry(retry)
        if taken.end and not self.requests:
            self.in_flight.clear()  # nobody waits for the results
        if events is None:
            self.inbox.applied(taken)
        if self.recorder:
            self.recorder.begin(taken)
        return taken

    def _admit(self, sequence: RunningRequest) -> None:
        """Queue a request, unless that was done, or it has ended."""
        if sequence.done:
            self.inbox.ended(sequence)
        elif sequence.number not in self.requests:
            sequence.learn(self._break_even)
            if sequence not in self.scheduler.waiting:
                self.scheduler.waiting.append(sequence)
            self.requests[sequence.number] = sequence

    def _end(self, end: End) -> None:
        """End a request in the queue or in its row, unless it has ended."""
        sequence = self.requests.get(end.number)
        if sequence is None:
            return
        if sequence.done:  # as its release was interrupted
            pass
        elif end.reason == "overdue":
            sequence.stats.recovery["deadline"] += 1
            self._processor.report(sequence, ("deadline",))
            sequence.take(controller.Cancelled(controller.Finish.LENGTH))
        elif end.reason in ("closed", "dropped"):
            sequence.take(controller.Cancelled())
        else:
            sequence.abandon(end.reason)
        self._release(sequence)

    def _retry(self, retry: CallRetry) -> None:
        """Restart a request whose call grammar is ready; end it if there is none."""
        sequence = self.requests.get(retry.number)
        if sequence is None or not sequence.retries_call:
            return
        if retry.grammar is None:
            log.warning("%s: a call is passed on as it is: %s", sequence.label, retry.error)
            sequence.take(controller.Cancelled(controller.Finish.STOP))
            self._release(sequence)
        else:
            self._processor.report(sequence, sequence.retry_call(retry.grammar).notes)

    def _measure(self) -> None:
        """Measure what drafting gains if that is in doubt for a request; the next turn is told."""
        rows = enumerate(self.scheduler.rows)
        block = self._plan.block
        places = [
            (x.num_tokens, row)
            for row, x in rows
            if x and x.doubts_drafting(self.acceptance, block)
        ]
        if places:
            decoding = sum(x.prefilled for x in self.scheduler.running)
            self.meter.measure(*max(places), decoding)

    def _process(self, step: InFlightStep) -> None:
        """Wait for the oldest step, and process its results."""
        count = 0
        for ended, results in step.results():
            count += 1
            if self.recorder:
                for row in filter(step.work.waits, results):
                    self.recorder.decided(step.work.sequences[row].number, results[row].tokens)
            self._update(self._processor.process(step, results, ended))
        if not step.work.prefill:
            self.pacer.record(count, step.dispatched)
        self.in_flight.popleft()

    def _update(self, updates: RowUpdates) -> None:
        """Update the scheduler, the prefix cache and the device after a step was processed."""
        for sequence in updates.finished:
            self._release(sequence)
        for request in updates.invalidated:
            if self.runner.prefixes:
                self.runner.prefixes.forget(request.prompt, salt=request.params.cache_salt)
        if updates.cleared:
            self.runner.clear_rows(updates.cleared)
        if updates.forced:
            self.runner.force_tokens(updates.forced)
        for row in updates.forced:
            sequence = self.scheduler.rows[row]
            if sequence and sequence.request.params.penalized:
                self.runner.set_logits_state(row, sequence)
        for sequence, before in updates.retried:
            made = functools.partial(self._grammar_made, sequence.number)
            self.call_grammars.begin(sequence.request, before, made)

    def _grammar_made(
        self, number: int, structure: Structure | None, grammar: Grammar | None, error: str
    ) -> None:
        self.inbox.retry(CallRetry(number, structure, grammar, error))

    def _lookahead(self, work: SchedulerOutput | None) -> int:
        """Return how many steps may stay in flight at the end of a turn that dispatched `work`.

        None stays if the host has to follow each step: grammars are advanced by the last tokens,
        and a call of several steps is waited for, which takes a small part of its time.
        """
        if work is None or work.num_steps > 1 or work.variant is Variant.CONSTRAINED:
            return 0
        return self._plan.lookahead

    def _wait_for_threads(self) -> None:
        """Wait a little for what threads load or compile for running requests."""
        running = self.scheduler.running
        loading = [x.cursor.loading for x in running if x.cursor.loading is not None]
        if loading:
            concurrent.futures.wait(loading, IDLE_WAIT, concurrent.futures.FIRST_COMPLETED)
        elif any(x.retries_call for x in running):
            self.inbox.wait(IDLE_WAIT)

    def _release(self, sequence: RunningRequest) -> None:
        """Free the queue place or the row of a request that ended."""
        self.scheduler.remove(sequence)
        if not sequence.policy.fixed:  # drafts of sampled requests are accepted at another rate
            self.acceptance = self.acceptance.after_request(sequence.state.drafting)
        if self.runner.prefixes and sequence.cursor.added:
            self.runner.prefixes.release(sequence.cursor, not_cacheable=sequence.not_cacheable)
        self.inbox.ended(sequence)
        self.requests.pop(sequence.number, None)

    # -- for callers --------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do; applies what was posted first."""
        self._check_not_forked()
        if not self.inbox.empty:
            if self._runner not in (0, threading.get_ident()):
                return True
            self.settle()
        return bool(self.in_flight or self.requests)

    @property
    def grammars(self) -> Grammars:
        """Compiled grammars; those of an engine with the same tokenizer may be assigned."""
        return self.call_grammars.grammars

    @grammars.setter
    def grammars(self, grammars: Grammars) -> None:
        self.call_grammars.grammars = grammars

    @property
    def queued(self) -> int:
        """Number of requests that wait for a row."""
        return self.inbox.unread + len(self.scheduler.waiting)

    @property
    def active(self) -> int:
        """Number of requests that have a row."""
        return len(self.scheduler.running)

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """Cached prefixes and their counters; None if the plan keeps none."""
        return None if self.runner.prefixes is None else self.runner.prefixes.cache

    def add(self, sequences: list[RunningRequest]) -> None:
        """Queue requests, all of them or none.

        Raises:
          QueueFullError: the queue has no room for all of them.
        """
        if not self.try_add(sequences):
            raise QueueFullError(
                f"{self.queued} requests wait already and {len(sequences)} more were given, but the"
                f" plan lets {self._plan.queue} wait; try again later, or load with a larger queue"
            )

    def try_add(self, sequences: list[RunningRequest]) -> bool:
        """Queue requests, all of them or none; return whether the queue had room."""
        self._check_not_forked()
        if self.inbox.admit(sequences, self.scheduler.waiting):
            return True
        self.settle()  # requests that were dropped may free their places
        return self.inbox.admit(sequences, self.scheduler.waiting)

    def close(self, sequences: Iterable[RunningRequest]) -> None:
        """End requests that still run, in the queue or in their rows."""
        for sequence in sequences:
            if sequence.queued and not sequence.done:
                self.inbox.end(sequence.number, "closed")
            elif not sequence.done:  # no turn knows it
                sequence.take(controller.Cancelled())
        self.settle()

    def update_params(self, params: Mapping[str, Any]) -> None:
        """Replace parameters; arguments and errors as for `Engine.update_params`."""

        if self.recorder and self.recorder.followed:
            raise RequestError(
                "the parameters of a model over several hosts cannot be replaced; start it again"
                " with the other weights"
            )

        def swap_params() -> None:
            self.runner.swap_params(params)
            self.acceptance = NO_HISTORY
            self.stop_recording("the parameters were replaced")

        self.while_idle(swap_params)

    def while_idle(self, work: Callable[[], Returned]) -> Returned:
        """Call a function that no request may run next to.

        Raises:
          RequestError: requests are running.
        """

        def work_if_idle() -> Returned | DFlashError:
            self._apply_only(None)
            if self.requests:
                return RequestError("requests are running; let them end, or close them, first")
            self.in_flight.clear()  # left over from requests that ended
            try:
                return work()
            except DFlashError as error:  # refused, and nothing was changed
                return error

        result = self._alone(work_if_idle)
        if isinstance(result, DFlashError):
            raise result
        return result

    def stop_recording(self, reason: str) -> None:
        """Record no further turns; does nothing if none are recorded."""
        if self.recorder:
            self.recorder.stop(reason)
        self.recorder = None

    # -- failures -----------------------------------------------------------------------------

    def _check_not_forked(self) -> None:
        if forking.parent:
            forking.check_not_forked()

    def _rebuild(self, error: Exception | None = None) -> None:
        """Start with a new device state: prompts and outputs are fed again.

        A failed step, of which `error` tells, takes the donated state with it.

        Raises:
          HostError: programs run on several hosts, which would have to do the same.
        """
        if self.runner.executor.hosts > 1:
            reason = f"failed ({error})" if error else "was interrupted"
            raise HostError(f"a program of all hosts {reason}; start all hosts again") from error
        self.stop_recording(f"a turn failed: {error}" if error else "a turn was interrupted")
        self.in_flight.clear()
        self.runner.reset()
        for sequence in [*self.scheduler.waiting, *self.scheduler.running]:
            if sequence.row is not None and not sequence.done:
                sequence.rebuild(error)
            if sequence.done:
                self._release(sequence)
            elif sequence.rebuilding:
                needed = [*variants_of(sequence), Variant.RECOVERY]
                self.runner.compiled.compile(needed, workers=1)


class OutputProcessor:
    """Advances the sequences of a step by what the device decided for their rows."""

    def __init__(self, block: int, events: EventLog):
        self._block = block
        self._events = events

    def process(
        self, step: InFlightStep, results: Mapping[int, RowStep], time: CallTime
    ) -> RowUpdates:
        """Process the results of one step of a call; return what follows for the rows."""
        updates = RowUpdates()
        for row, result in results.items():
            if step.work.waits(row):
                self._process_row(step, row, result, time, updates)
        return updates

    def _process_row(
        self, step: InFlightStep, row: int, result: RowStep, time: CallTime, updates: RowUpdates
    ) -> None:
        sequence = step.work.sequences[row]
        prefill = step.work.prefill
        if prefill and sequence.cursor.logprobs:
            sequence.prompt_logprobs = prompt_logprobs(sequence.request, sequence.cursor)
        if sequence.rebuilding and result.finite:
            updates.forced[row] = sequence.rebuilt()
            return
        if not result.finite and prefill and not sequence.row_cleared:
            sequence.row_cleared = True  # it may have held another request's numbers
            updates.cleared.append(row)
            updates.invalidated.append(sequence.request)
            sequence.restart(use_cache=False)
            return
        if row in step.work.drafting:
            count_round(sequence.stats, len(result.tokens), result.num_drafts, self._block - 1)
            sequence.stats.copied += result.num_drafts * result.copied
        elif not prefill:
            sequence.stats.plain_steps += bool(result.tokens)
        logprobs = []
        if sequence.request.params.logprobs is not None:
            logprobs = step.logprobs(row)[: len(result.tokens)]
        tops = result.draft_top, result.target_top
        details = StepDetails(logprobs, result.drafts, result.copied, time, tops)
        event = _event(step, row, result)
        effects = sequence.take(event, details)
        self.report(sequence, effects.notes)
        if effects.restart is Restart.SAVED and prefill:  # the row is in the saved state
            effects = sequence.take(event, details)
            self.report(sequence, effects.notes)
        if effects.restart is Restart.CALL:
            updates.retried.append((sequence, sequence.begin_call_retry()))
        elif effects.restart:
            sequence.restart(use_cache=effects.restart is Restart.SAVED)
        elif effects.replace is not None or effects.force:
            pending = sequence.state.ids[-len(effects.force) - 1]
            forced = ForcedTokens(pending, effects.force)
            updates.forced[row] = forced
        if sequence.done:
            updates.finished.append(sequence)
        if not result.finite:
            updates.cleared.append(row)
        if not result.finite or effects.restart is Restart.FRESH:
            updates.invalidated.append(sequence.request)

    def report(self, sequence: RunningRequest, notes: Sequence[str]) -> None:
        """Log recovery events of a request."""
        request = sequence.request
        length = sequence.state.num_decided
        figures = {"prompt_tokens": len(request.prompt), "output_tokens": length}
        folder = request.recovery.log_directory
        for note in notes:
            self._events.report(
                note, sequence.number, label=sequence.label, directory=folder, **figures
            )


def count_round(stats: Stats, num_committed: int, num_drafts: int, max_drafts: int) -> None:
    """Count a draft-verify round; all committed tokens but the last were drafts."""
    if not num_committed:
        return
    stats.rounds += 1
    stats.drafted += num_drafts
    stats.accepted += num_committed - 1
    stats.acceptance_lengths.append(num_committed)
    stats.drafts_per_round.append(num_drafts)
    stats.accepted_per_position = stats.accepted_per_position or [0] * max_drafts
    for position in range(num_committed - 1):
        stats.accepted_per_position[position] += 1


def _event(
    step: InFlightStep, row: int, result: RowStep
) -> controller.Prefilled | controller.Stepped:
    """Return what a result means to the recovery state machine."""
    tokens = result.tokens
    best = result.replacement_token
    odds = result.tool_call_margin
    if step.work.prefill:
        restored = step.work.sequences[row].cursor.num_cached > 0
        return controller.Prefilled(tokens[0], best, result.finite, restored, odds)
    work = step.work
    drafts = 0
    block = 0
    if row in work.drafting:
        drafts = result.num_drafts
        block = 1 + work.drafting[row]
    return controller.Stepped(
        tokens,
        result.finite,
        result.draft_finite,
        best,
        drafts,
        odds,
        block,
        rows=len(work.sequences),
    )
