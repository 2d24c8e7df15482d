"""The loop: admits requests to rows, dispatches steps, and waits for the answers.

The host stays one step ahead: it dispatches the next step before it reads the last one's
answer. That is safe because the device cuts every row by itself; a row that has ended is
frozen until it is given a new request. Behind a call of several steps it waits for the answer:
the pause is a small part of such a call, and most requests end in one of the next few.
"""

import collections
import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dflash_jax.compiler.plan import Plan
from dflash_jax.compiler.programs import MASKED, repeats
from dflash_jax.compiler.settings import Returned, untraced
from dflash_jax.compiler.variants import Variant
from dflash_jax.engine.events import EventLog
from dflash_jax.engine.feeder import Feeder
from dflash_jax.engine.flight import Flight
from dflash_jax.engine.lanes import variants_of
from dflash_jax.engine.model_runner import Runner
from dflash_jax.engine.output_processor import Teller
from dflash_jax.engine.pace import Pace
from dflash_jax.engine.recovery import controller
from dflash_jax.engine.scheduler import Rows
from dflash_jax.engine.sequence import Live
from dflash_jax.errors import ComputeError, DFlashError, QueueFullError, RequestError
from dflash_jax.state import read_output
from dflash_jax.utils.forking import check_not_forked

PATIENCE = 0.01  # seconds a turn waits for the disk where there is nothing else to do


class Loop:
    """Runs the requests of a queue in turns.

    Any thread may enqueue and cancel. Turns are made by one thread at a time: whoever calls
    `advance` while another does waits for its turn.
    """

    def __init__(self, runner: Runner, plan: Plan):
        self._runner, self._plan = runner, plan
        self.rows = Rows(plan)
        self.events = EventLog()
        self.flights: collections.deque[Flight] = collections.deque()
        self.pace = Pace(plan.steps_per_call)
        self._feeder = Feeder(plan, runner, self.rows)
        self._teller = Teller(plan.block, runner, self.rows, self.flights, self.events)
        self._lock = threading.RLock()  # over queue, rows and requests; never held while waiting
        self._driving = threading.Lock()
        self._left = False  # somebody who made steps was stopped in between

    @property
    def busy(self) -> bool:
        """Whether `advance` has anything to do; dropped and cancelled requests are ended first."""
        check_not_forked()
        with self._lock:
            there = filter(None, (*self.rows.waiting, *self.rows.lives))
            if any(live.dropped or live.handle.cell for live in there):
                self.tidy()
            return bool(self.rows.waiting or self.flights or any(self.rows.lives))

    def enqueue(self, lives: list[Live]) -> list[Live]:
        """Queues requests, all of them or none."""
        check_not_forked()
        with self._lock:
            waiting = self.rows.waiting
            if len(waiting) + len(lives) > self._plan.queue:
                self._end_what_nobody_waits_for()
            if len(waiting) + len(lives) > self._plan.queue:
                raise QueueFullError(
                    f"{len(waiting)} requests wait already and {len(lives)} more were given,"
                    f" but the plan lets {self._plan.queue} wait; try again later, or load with a"
                    " larger queue"
                )
            waiting += lives
        return lives

    def cancel(self, live: Live) -> None:
        """Ends a request wherever it stands; does nothing if it already ended."""
        check_not_forked()
        with self._lock:
            if not live.done:
                live.take(controller.Cancelled())
                self._teller.release(live)
                self._forget_unread()

    def tidy(self) -> None:
        """End dropped, cancelled and overdue requests, as the next turn would."""
        check_not_forked()
        with self._lock:
            self._end_what_nobody_waits_for()
            self._forget_unread()

    def _forget_unread(self) -> None:
        """Do not read calls whose readers have all ended, unless a turn may be reading one now.

        A turn that begins waits for the lock, which is held here, before it looks at them.
        """
        idle = not (self.rows.waiting or any(self.rows.lives))
        if idle and not self._driving.locked():
            self.flights.clear()

    def while_idle(self, work: Callable[[], Returned]) -> Returned:
        """Does what no request may run beside; raises RequestError if one does."""
        check_not_forked()
        with self._driving:
            self._take_over()
            with self._lock:
                self._end_what_nobody_waits_for()
                idle = not (self.rows.waiting or any(self.rows.lives))
                while idle and self.flights:  # behind requests that ended
                    self._read_first()
                try:
                    done = [work()] if idle else []
                except DFlashError:  # refused, and nothing was changed
                    self._left = False
                    raise
            self._left = False
        if not done:
            raise RequestError("requests are running; let them end, or close their streams, first")
        return done[0]

    def break_even(self) -> float:
        """Tokens a drafted round must decide to pay, measured while nothing runs."""
        measure = functools.partial(untraced, lambda: self._runner.break_even(self.rows.rules))
        return self.while_idle(measure)

    def advance(self) -> None:
        """One turn: dispatch a step if any row can use one, then read what is due."""
        check_not_forked()
        with self._driving:
            self._take_over()
            try:
                untraced(self._turn)
            except (ValueError, RuntimeError) as error:  # jax's own are runtime errors
                if self._runner.bereft:
                    raise ComputeError(
                        "the engine's parameters are gone: another program was given them and had"
                        " them donated; let it donate copies, and give the engine others by"
                        " `engine.params = ...`"
                    ) from error
                if not isinstance(error, jax.errors.JaxRuntimeError):
                    raise
                with self._lock:
                    self._rebuild(error)
            self._left = False

    def _take_over(self) -> None:
        """Begins to make steps. Whoever was stopped at it, as by Ctrl-C, may have left without the
        state that a step gave back, or the answer: then all rows are fed anew.

        No context manager of our own does this: one stopped as it begins or ends holds its lock.
        """
        if self._left:
            with self._lock:
                self._rebuild()
        self._left = True

    def _turn(self) -> None:
        with self._lock:
            self._end_what_nobody_waits_for()
            self._teller.retry_calls()
            for live in self.rows.admit():
                self._runner.recall(live)
            waits = self._waits_for_several()
            dispatched = not waits and (
                self._feeder.turn(self._dispatch) or self._dispatch_decode()
            )
            single = dispatched and self.flights[-1].rounds == 1
            lookahead = single and self.rows.work.lane != MASKED
        if not dispatched and not self.flights:
            self._wait_for_others()
        ahead = self._plan.lookahead if lookahead else 0
        while len(self.flights) > ahead:
            prompts = not self.flights[0].decode
            self._read_first()
            if prompts and self._waits_for_several():
                break  # their first tokens are given before the others are waited for

    def _waits_for_several(self) -> bool:
        """Whether nothing but a call of several steps is unread."""
        return len(self.flights) == 1 and self.flights[0].rounds > 1

    def _wait_for_others(self) -> None:
        """Wait a little for what threads read or make for requests in rows."""
        lives = [live for live in self.rows.lives if live]
        work: list[concurrent.futures.Future[Any]] = [
            x for live in lives for x in (live.recall, live.call_grammar) if x
        ]
        if work:
            concurrent.futures.wait(work, PATIENCE, concurrent.futures.FIRST_COMPLETED)

    def _rebuild(self, error: Exception | None = None) -> None:
        """After a failed step its donated state is lost: prompts and outputs are fed anew (R12).

        A request that saw two failures ends, whoever caused them.

        Args:
          error: the failure; None where the device did not fail.
        """
        self.flights.clear()
        self._runner.reset()
        self.rows.changed()
        for live in filter(None, list(self.rows.lives)):
            if live.done or live.fail(error):
                self._teller.release(live)
            elif live.rebuilding:
                needed = {*variants_of(live.request), Variant.FORCED_TOKENS}
                self._runner.compiled.compile(needed, workers=1)

    def _end_what_nobody_waits_for(self) -> None:
        """Cancelled requests and those whose time is up, queued ones included."""
        now = time.perf_counter()
        there = filter(None, (*self.rows.waiting, *self.rows.lives))
        ended = [x for x in there if x.done or x.dropped or x.handle.cell or now > x.deadline]
        for live in ended:
            if live.handle.cell and not live.done:
                live.leave()
            elif live.dropped and not live.done:
                live.take(controller.Cancelled())
            elif not live.done:  # else whoever ended it was stopped before it was let go
                live.stats.recovery["deadline"] += 1
                self._teller.report(live, ("deadline",))
                live.take(controller.Cancelled(controller.Finish.LENGTH))
            self._teller.release(live)

    # -- dispatching --------------------------------------------------------------------------

    def _dispatch_decode(self) -> bool:
        work = self.rows.work
        if not work.decoding or self._may_all_end(work.decoding):
            return False
        name = "speculative" if work.drafting else "plain" if self._plan.exact else "plain1"
        self._dispatch(name, readers=work.decoding, drafting=work.drafting, decode=True)
        return True

    def _may_all_end(self, decoding: dict[int, Live]) -> bool:
        """Whether unread steps may already bring every row to its length limit."""

        def may_end(row: int, live: Live) -> bool:
            unread = (x for x in self.flights if x.readers.get(row) is live)
            most = live.state.emitted + sum(x.most(row, self._plan.block) for x in unread)
            return len(live.request.prompt) + most >= live.limit

        return bool(self.flights) and all(may_end(row, live) for row, live in decoding.items())

    def _dispatch(
        self,
        name: str,
        *arguments: np.ndarray,
        readers: dict[int, Live],
        drafting: frozenset[int] = frozenset(),
        decode: bool = False,
        first: int = 0,
    ) -> None:
        """Dispatches a step; its answer is read later."""
        rows, started = self.rows, time.perf_counter()
        several = decode and repeats(self._plan, rows.work.lane)
        waited_for = rows.waiting or rows.work.feeding
        rounds = self.pace.rounds if several and not waited_for else 1
        output = self._runner.step(
            name,
            rows.work.lane,
            rows.rules,
            *arguments,
            readers=readers,
            rounds=rounds,
            first=first,
        )
        self.flights.append(Flight(started, output, dict(readers), decode, drafting, first, rounds))

    # -- reading ------------------------------------------------------------------------------

    def _read_first(self) -> None:
        """Waits for the oldest call, and has its readers hear it."""
        flight = self.flights[0]
        steps = read_output(flight.output) if flight.readers else []
        if flight.decode:
            self.pace.took(len(steps), flight.started)
        with self._lock:
            for step in steps:
                self._teller.tell(flight, step)
            self.flights.popleft()
