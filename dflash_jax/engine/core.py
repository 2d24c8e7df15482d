"""The engine's loop: schedule work, execute it, process its results.

The host stays one call ahead where calls make one step (`Plan.lookahead`): it dispatches the next
before it reads the results of the last. That is safe because the device ends every row by itself,
at stop tokens and length limits, and a row that ended makes no progress until the host acts on it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dflash_jax.engine.break_even import BreakEvenMeter
from dflash_jax.engine.events import EventLog
from dflash_jax.engine.model_runner import InFlightStep, ModelRunner, prompt_logprobs
from dflash_jax.engine.prefix.cache import PrefixCache
from dflash_jax.engine.request import Request
from dflash_jax.engine.result import Stats
from dflash_jax.engine.running_request import RunningRequest, StepDetails
from dflash_jax.engine.scheduler import Scheduler, SchedulerOutput, variants_of
from dflash_jax.engine.state_machine import controller
from dflash_jax.engine.state_machine.controller import Restart
from dflash_jax.engine.state_machine.speculation import NO_HISTORY
from dflash_jax.engine.state_machine.trace import CallTime
from dflash_jax.engine.structured.grammars import CallGrammars, Grammars
from dflash_jax.errors import ComputeError, DFlashError, QueueFullError, RequestError
from dflash_jax.graph.keys import Variant
from dflash_jax.graph.settings import Returned, untraced
from dflash_jax.graph.state import RowStep
from dflash_jax.graph.steps.forced_tokens import ForcedTokens
from dflash_jax.utils import forking

log = logging.getLogger("dflash_jax.engine")

DISK_WAIT = 0.01  # seconds a turn waits for prefixes on disk if there is nothing else to do
Lock = contextlib.AbstractContextManager[Any]
Notify = Callable[[BaseException | None], None]


@dataclasses.dataclass(slots=True)
class RowUpdates:
    """What the device, the scheduler and the prefix cache must do after a step, in this order."""

    finished: list[RunningRequest] = dataclasses.field(default_factory=list)
    # Requests of whose prompts nothing in the prefix cache may be used again.
    invalidated: list[Request] = dataclasses.field(default_factory=list)
    cleared: list[int] = dataclasses.field(default_factory=list)  # rows of non-finite numbers
    forced: dict[int, ForcedTokens] = dataclasses.field(default_factory=dict)  # by row


class EngineCore:
    """Runs queued requests in turns.

    Any thread may add and cancel requests. One thread at a time runs turns; others that call `step`
    wait for it.
    """

    def __init__(self, runner: ModelRunner, call_grammars: CallGrammars):
        self.call_grammars = call_grammars
        self.runner, self._plan, self.events = runner, runner.plan, EventLog()
        self.scheduler = Scheduler(runner.plan, runner.executor.put)
        # Dispatched steps whose results were not processed yet, the oldest first.
        self.in_flight: collections.deque[InFlightStep] = collections.deque()
        self.acceptance = NO_HISTORY
        self.meter = BreakEvenMeter(runner)
        self._processor = OutputProcessor(runner.plan.block, self.events)
        self._lock = threading.RLock()  # for scheduler and sequences; not held while waiting
        self._stepping = threading.Lock()
        self._interrupted = False  # a turn began and did not end

    # -- one turn -----------------------------------------------------------------------------

    def step(self) -> None:
        """Run one turn: dispatch work if any row can use it, then process results that are due.

        Raises:
          ComputeError: parameters were donated to a program outside the engine.
        """
        with self._use(self._stepping):
            self._begin_turn()
            try:
                untraced(self._turn)
            except (ValueError, RuntimeError) as error:  # JAX's own errors are RuntimeErrors
                if self.runner.executor.params_deleted:
                    raise ComputeError(
                        "the engine's parameters are gone: another program was given them and had"
                        " them donated; let it donate copies, or give the engine others by"
                        " `engine.update_params`"
                    ) from error
                if not isinstance(error, jax.errors.JaxRuntimeError):
                    raise
                with self._lock:
                    self._rebuild(error)
            self._interrupted = False

    def _turn(self) -> None:
        with self._lock:
            self._end_abandoned()
            for sequence in self._processor.retry_calls(self.scheduler.running):
                self._release(sequence)
            for sequence in self.scheduler.admit():
                if self.runner.prefixes:
                    self.runner.prefixes.prefetch(sequence.cursor)
            before = [step.work for step in self.in_flight]
            work = self.scheduler.schedule(before)
            if work is not None:
                self.in_flight.append(self.runner.execute(work))
        if not self.in_flight:
            self._wait_for_threads()
        most = self._lookahead(work)
        while len(self.in_flight) > most:
            step = self.in_flight[0]
            self._process(step)
            if step.work.prefill and [x.work.num_steps > 1 for x in self.in_flight] == [True]:
                break  # give out the prompts' first tokens before waiting for several steps
        if self.meter.enabled:
            self._measure()

    def _measure(self) -> None:
        """Measure what drafting gains if that is in doubt for a request."""
        rows, block = enumerate(self.scheduler.rows), self._plan.block
        places = [
            (x.num_tokens, row)
            for row, x in rows
            if x and x.doubts_drafting(self.acceptance, block)
        ]
        decoding = sum(x.prefilled for x in self.scheduler.running)
        if places and self.meter.measure(*max(places), decoding):
            with self._lock:
                for sequence in self.scheduler.running:
                    sequence.learn(self.meter.value)

    def _process(self, step: InFlightStep) -> None:
        """Wait for the oldest step, and process its results."""
        count = 0
        for ended, results in step.results():
            count += 1
            with self._lock:
                updates = self._processor.process(step, results, ended)
                self._apply(updates)
        if not step.work.prefill:
            self.scheduler.pacer.record(count, step.dispatched)
        with self._lock:
            if self.in_flight and self.in_flight[0] is step:
                self.in_flight.popleft()

    def _apply(self, updates: RowUpdates) -> None:
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
        work: list[concurrent.futures.Future[Any]] = []
        for sequence in self.scheduler.running:
            work += filter(None, (sequence.cursor.loading, sequence.call_grammar))
        if work:
            concurrent.futures.wait(work, DISK_WAIT, concurrent.futures.FIRST_COMPLETED)

    def _release(self, sequence: RunningRequest) -> None:
        """Free the queue place or the row of a request that ended."""
        self.scheduler.remove(sequence)
        if not sequence.policy.fixed:  # drafts of sampled requests are accepted at another rate
            self.acceptance = self.acceptance.after_request(sequence.state.drafting)
        if self.runner.prefixes and sequence.cursor.added:
            self.runner.prefixes.release(sequence.cursor, tainted=sequence.tainted)

    # -- for callers --------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do; ends dropped and cancelled requests first."""
        with self._use(self._lock):
            if any(x.dropped or x.cancel for x in self._unfinished()):
                self.tidy()
            return bool(self.in_flight or self.scheduler.unfinished)

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
        return len(self.scheduler.waiting)

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
            waiting, new = len(self.scheduler.waiting), len(sequences)
            raise QueueFullError(
                f"{waiting} requests wait already and {new} more were given, but the plan lets"
                f" {self._plan.queue} wait; try again later, or load with a larger queue"
            )

    def try_add(self, sequences: list[RunningRequest]) -> bool:
        """Queue requests, all of them or none; return whether the queue had room."""
        with self._use(self._lock):
            if not self.scheduler.has_room(len(sequences)):
                self._end_abandoned()
            if room := self.scheduler.has_room(len(sequences)):
                self.scheduler.waiting += sequences
        return room

    def cancel(self, sequence: RunningRequest) -> None:
        """End a request in the queue or in its row; does nothing if it already ended."""
        with self._use(self._lock):
            if not sequence.done:
                sequence.take(controller.Cancelled())
                self._release(sequence)
                self._discard_unread()

    def tidy(self) -> None:
        """End dropped, cancelled and overdue requests, as the next turn would."""
        with self._use(self._lock):
            self._end_abandoned()
            self._discard_unread()

    def update_params(self, params: Mapping[str, Any]) -> None:
        """Replace parameters; arguments and errors as for `Engine.update_params`."""

        def exchange() -> None:
            self.runner.exchange(params)
            self.acceptance = NO_HISTORY

        self.while_idle(exchange)

    def while_idle(self, work: Callable[[], Returned]) -> Returned:
        """Call a function that no request may run next to.

        Raises:
          RequestError: requests are running.
        """
        with self._use(self._stepping):
            self._begin_turn()
            with self._lock:
                self._end_abandoned()
                idle = not self.scheduler.unfinished
                while idle and self.in_flight:  # left over from requests that ended
                    self._process(self.in_flight[0])
                try:
                    if not idle:
                        hint = "let them end, or close them, first"
                        raise RequestError(f"requests are running; {hint}")
                    done = work()
                except DFlashError:  # refused, and nothing was changed
                    self._interrupted = False
                    raise
            self._interrupted = False
        return done

    # -- ends and failures --------------------------------------------------------------------

    def _use(self, lock: Lock) -> Lock:
        if forking.parent:
            forking.check_not_forked()
        return lock

    def _unfinished(self) -> list[RunningRequest]:
        return [*self.scheduler.waiting, *self.scheduler.running]

    def _end_abandoned(self) -> None:
        """End requests that were cancelled or dropped, or whose time is up."""
        now = time.perf_counter()
        for sequence in self._unfinished():
            if not sequence.done:
                if sequence.cancel:
                    sequence.abandon()
                elif sequence.dropped:
                    sequence.take(controller.Cancelled())
                elif now > sequence.deadline:
                    sequence.stats.recovery["deadline"] += 1
                    self._processor.report(sequence, ("deadline",))
                    sequence.take(controller.Cancelled(controller.Finish.LENGTH))
            if sequence.done:  # also one whose release was interrupted
                self._release(sequence)

    def _discard_unread(self) -> None:
        """Drop steps in flight if no request waits for them, unless a turn may be reading one.

        A turn that begins waits for the lock, which is held here, before it looks at them.
        """
        if not self.scheduler.unfinished and not self._stepping.locked():
            self.in_flight.clear()

    def _begin_turn(self) -> None:
        """Rebuild all rows if the last turn was interrupted, as by Ctrl-C.

        The device state it was given back, or results it was reading, may be lost then. This is no
        context manager: one that is interrupted as it begins or ends would keep its lock.
        """
        if self._interrupted:
            with self._lock:
                self._rebuild()
        self._interrupted = True

    def _rebuild(self, error: Exception | None = None) -> None:
        """Start with a new device state: prompts and outputs are fed again.

        A failed step, of which `error` tells, takes the donated state with it.
        """
        self.in_flight.clear()
        self.runner.reset()
        for sequence in self.scheduler.running:
            if not sequence.done:
                sequence.rebuild(error)
            if sequence.done:
                self._release(sequence)
            elif sequence.rebuilding:
                needed = {*variants_of(sequence), Variant.RECOVERY}
                self.runner.compiled.compile(needed, workers=1)


class OutputProcessor:
    """Advances the sequences of a step by what the device decided for their rows."""

    def __init__(self, block: int, events: EventLog):
        self._block, self._events = block, events

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
        sequence, prefill = step.work.sequences[row], step.work.prefill
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
        effects = sequence.process(event, details)
        self.report(sequence, effects.notes)
        if effects.restart is Restart.SAVED and prefill:  # the row is in the saved state
            effects = sequence.process(event, details)
            self.report(sequence, effects.notes)
        if effects.restart is Restart.CALL:
            sequence.begin_call_retry()
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

    def retry_calls(self, running: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Restart requests whose call grammar is ready; return those that end without one."""
        ended = []
        for sequence in running:
            compiled = sequence.call_grammar
            if compiled is None or not compiled.done() or sequence.done:
                continue
            sequence.call_grammar = None
            if error := compiled.exception():
                log.warning("%s: a call is passed on as it is: %s", sequence.label, error)
                sequence.take(controller.Cancelled(controller.Finish.STOP))
                ended.append(sequence)
            else:
                self.report(sequence, sequence.retry_call(compiled.result()).notes)
        return ended

    def report(self, sequence: RunningRequest, notes: Sequence[str]) -> None:
        """Log recovery events of a request."""
        request, length = sequence.request, sequence.state.num_decided
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
    tokens, best, odds = result.tokens, result.next_best, result.call_odds
    if step.work.prefill:
        restored = step.work.sequences[row].cursor.num_cached > 0
        return controller.Prefilled(tokens[0], best, result.finite, restored, odds)
    work = step.work
    drafts, block = 0, 0
    if row in work.drafting:
        drafts, block = result.num_drafts, 1 + work.drafting[row]
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


class TurnDriver:
    """Runs an engine's turns in a thread while requests are awaited in event loops."""

    def __init__(self, core: EngineCore):
        self.core, self._lock = core, threading.Lock()
        self._attached: dict[Notify, RunningRequest] = {}

    def attach(self, sequence: RunningRequest, notify: Notify) -> None:
        """Run turns until a request ended.

        Args:
          notify: called in the thread after every turn, with the error if the turn failed, which
            ends all attached requests.
        """
        with self._lock:
            idle = not self._attached
            self._attached[notify] = sequence
        if idle:  # a daemon, as one turn may compile
            threading.Thread(target=self._run, name="async", daemon=True).start()

    def _run(self) -> None:
        ended = False
        while not ended:
            failure: BaseException | None = None
            try:
                self.core.step()
            except BaseException as error:  # nothing may end this thread silently
                failure = error
            with self._lock:
                told = list(self._attached.items())
                for notify, sequence in told:
                    if failure or sequence.done:
                        del self._attached[notify]
                ended = not self._attached
            for notify, sequence in told:
                try:
                    notify(failure)
                except RuntimeError:  # the event loop is closed
                    sequence.dropped = True
