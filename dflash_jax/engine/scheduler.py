"""An engine's inbox and queue, and the choice of the rows and steps of the next device call."""

import collections
import contextlib
import dataclasses
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import jax
import numpy as np

from dflash_jax.engine.running_request import RowSettings, RunningRequest
from dflash_jax.engine.sampling_params import MIN_TEMPERATURE, SamplingParams
from dflash_jax.engine.state_machine import OFF
from dflash_jax.engine.state_machine.speculation import choose_drafts
from dflash_jax.engine.turns.turn_events import CallRetry, End, EndReason, TurnEvents
from dflash_jax.graph.keys import LOGITS_VARIANTS, STEP_VARIANTS, Variant
from dflash_jax.graph.state import RowRules, idle_arrays
from dflash_jax.plan import ResolvedPlan

# Options of a request that are rules of its row without any change.
_ROW_OPTIONS = SamplingParams.fields().keys() & RowRules.__dataclass_fields__.keys() - {"seed"}
MOST_WIDE = 2  # most prompts that are fed in turn in wide calls
NOTHING = TurnEvents()
BURST = 0.1  # most seconds between two results that a reader does not notice as a pause


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One turn's work for the model runner: a prefill of some rows, or decode steps of all."""

    variant: Variant  # of the programs to run
    rules: RowRules  # of all rows; rows that do not decode have a limit of 0
    sequences: Mapping[int, RunningRequest]  # the requests that the work is for, by row
    attempts: Mapping[int, int]  # attempt of each of these requests, by row
    prefill: bool = False  # whether each row is fed the next chunk of its prompt; else rows decode
    wide: bool = False  # whether prefill calls may feed several chunks at once
    # Number of drafts of each row that drafts.
    drafting: Mapping[int, int] = dataclasses.field(default_factory=dict)
    num_steps: int = 1  # most decode steps of the call

    def waits(self, row: int) -> bool:
        """Whether the sequence in a row still waits for results of this work."""
        sequence = self.sequences[row]
        return not sequence.done and sequence.attempt == self.attempts[row]


def steps_of_call(step_seconds: float, max_steps: int) -> int:
    """Return how many steps of `step_seconds` a call makes: as many as take `BURST` seconds."""
    return max(1, min(max_steps, int(BURST / step_seconds)))


class StepPacer:
    """Chooses the number of decode steps of a call by the time that a step took lately.

    Attributes:
      num_steps: number of steps of the next call, at most `max_steps`.
      max_steps: most steps of a call that the programs can make.
    """

    def __init__(self, max_steps: int):
        self.max_steps = max_steps
        self.num_steps = 1
        self._last_read = 0.0

    def record(self, num_steps: int, dispatched: float) -> None:
        """Record a call that was read just now.

        Args:
          num_steps: number of steps that the call made.
          dispatched: the time at which it was dispatched, in seconds.
        """
        now = time.perf_counter()
        if num_steps:
            device_started = max(dispatched, self._last_read)
            self.num_steps = steps_of_call((now - device_started) / num_steps, self.max_steps)
        self._last_read = now


class Inbox:
    """Posts of any thread to an engine, kept until the engine's loop takes them for a turn.

    Ends are posted without a lock, since handles are dropped wherever garbage is collected.

    Attributes:
      clock: returns the time by which deadlines are due.

    Args:
      most: most requests that may wait for a row.
    """

    def __init__(self, most: int):
        self.clock: Callable[[], float] = time.perf_counter
        self._most = most
        self._posts: queue.SimpleQueue[RunningRequest | End | CallRetry] = queue.SimpleQueue()
        self._taken: list[RunningRequest | End | CallRetry] = []  # posts that no turn applied yet
        self._deadlines: dict[int, float] = {}  # of requests in the engine, by number
        self._unread: dict[int, RunningRequest] = {}  # requests that no turn has queued yet
        self._admitting = threading.Lock()  # no two threads may take the last place

    @property
    def unread(self) -> int:
        """Number of requests that no turn has queued yet."""
        return len(self._unread)

    @property
    def empty(self) -> bool:
        """Whether nothing was posted since the last turn."""
        return self._posts.empty() and not self._taken

    def admit(self, requests: Sequence[RunningRequest], waiting: Sized) -> bool:
        """Post requests, all of them or none; return whether the queue has room for them.

        Args:
          waiting: the requests that wait for a row.
        """
        with self._admitting:
            # Read before `waiting`: a turn queues a request before it leaves `_unread`.
            unread = len(self._unread)
            if unread + len(waiting) + len(requests) > self._most:
                return False
            for request in requests:
                request.queued = True
                self._unread[request.number] = request
                self._posts.put(request)
        for request in requests:
            request.cancel.watch(request.number, functools.partial(self.end, request.number))
        return True

    def end(self, number: int, reason: EndReason) -> None:
        """Post the end of a request; it may have ended already."""
        self._posts.put(End(number, reason))

    def retry(self, retry: CallRetry) -> None:
        """Post the grammar of a call, or why there is none."""
        self._posts.put(retry)

    def wait(self, seconds: float) -> None:
        """Wait until something is posted, but no longer than some seconds."""
        with contextlib.suppress(queue.Empty):
            self._taken.append(self._posts.get(timeout=seconds))

    def take(self) -> TurnEvents:
        """Return the posts since the last turn, and the ends of requests whose time is up."""
        while not self._posts.empty():
            self._taken.append(self._posts.get())
        admit = tuple(post for post in self._taken if isinstance(post, RunningRequest))
        for request in admit:
            if request.deadline < math.inf:
                self._deadlines[request.number] = request.deadline
        now = self.clock() if self._deadlines else 0.0
        for number, deadline in list(self._deadlines.items()):
            if now > deadline:
                self._taken.append(End(number, "overdue"))
                del self._deadlines[number]
        if not self._taken:
            return NOTHING
        end = tuple(post for post in self._taken if isinstance(post, End))
        retry = tuple(post for post in self._taken if isinstance(post, CallRetry))
        return TurnEvents(admit, end, retry)

    def applied(self, events: TurnEvents) -> None:
        """Forget events that a turn has applied. An interrupted turn takes them again."""
        self._taken.clear()
        for request in events.admit:
            self._unread.pop(request.number, None)

    def ended(self, request: RunningRequest) -> None:
        """Forget a request that ended, so that nothing can end it any more."""
        self._deadlines.pop(request.number, None)
        request.cancel.forget(request.number)


class Scheduler:
    """The queue, the rows, and the order of prefill and decode.

    Prefill and decode alternate: after each call that fed prompts, rows that decode get a call.

    Args:
      put: puts an array on the device, see `Executor`.

    Attributes:
      waiting: requests that wait for a row, the oldest first.
      rows: the request of each row.
    """

    def __init__(self, plan: ResolvedPlan, put: Callable[[Any], Any] = jax.device_put):
        self._plan = plan
        self._put = put
        self.waiting: collections.deque[RunningRequest] = collections.deque()
        self.rows: list[RunningRequest | None] = [None] * plan.rows
        self._prefilled_last = False
        self._rules: RowRules | None = None
        self._rows_of_rules: list[RowOfRules] = []  # the rows of which `_rules` are the rules
        self._columns: dict[str, tuple[np.ndarray, Any]] = {}  # see `make_rules`

    @property
    def running(self) -> list[RunningRequest]:
        """Requests that have a row."""
        return [sequence for sequence in self.rows if sequence]

    @property
    def unfinished(self) -> bool:
        """Whether any request waits or has a row."""
        return bool(self.waiting) or any(self.rows)

    def remove(self, sequence: RunningRequest) -> None:
        """Remove a request from the queue or from its row."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self.rows = [None if x is sequence else x for x in self.rows]

    def admit(self) -> list[RunningRequest]:
        """Give free rows to the requests that have waited longest; return those."""
        admitted = []
        for row, sequence in enumerate(self.rows):
            if sequence is None and self.waiting:
                self.rows[row] = first = self.waiting.popleft()
                first.start(row)
                admitted.append(first)
        return admitted

    def schedule(
        self, in_flight: Sequence[SchedulerOutput] = (), steps: int = 1
    ) -> SchedulerOutput | None:
        """Return the work of the next call; None if no row can use one.

        Args:
          in_flight: work that was dispatched, and not read yet.
          steps: most decode steps of a call.
        """
        if len(in_flight) == 1 and in_flight[0].num_steps > 1:
            return None  # most requests end in one of the next few steps: wait for the results
        active = {row: x for row, x in enumerate(self.rows) if x and not x.retries_call}
        prompts = {row: x for row, x in active.items() if not x.prefilled}
        decoding = {row: x for row, x in active.items() if x.prefilled and not x.rebuilding}
        loaded = {row: x for row, x in prompts.items() if x.loaded}
        # Rows that decode wait for one chunk of each prompt, and prompts for one decode call.
        prefills = bool(loaded) and not (self._prefilled_last and decoding)
        self._prefilled_last = prefills
        if prefills:
            return SchedulerOutput(
                self._variant(),
                self.rules(decoding),
                loaded,
                _attempts(loaded),
                prefill=True,
                wide=len(loaded) <= MOST_WIDE and not decoding,
            )
        if not decoding or self._may_all_end(decoding, in_flight):
            return None
        return self._decode(decoding, steps if not prompts else 1)

    def _variant(self) -> Variant:
        """Return the variant of decode programs that serves every request with a row."""
        variants = map(variant_of, self.running)
        return max(variants, key=STEP_VARIANTS.index, default=Variant.GREEDY)

    def _decode(self, decoding: Mapping[int, RunningRequest], steps: int) -> SchedulerOutput:
        """Return decode steps of some rows.

        Args:
          steps: most steps of the call. It makes one if a request waits for a row, or the variant
            has no programs of several steps.
        """
        variant = self._variant()
        if self.waiting or variant in LOGITS_VARIANTS:
            steps = 1
        block = self._plan.block
        facts = {row: x.drafting(block) for row, x in decoding.items() if x.settings.speculates}
        drafts = choose_drafts(facts, len(decoding))
        return SchedulerOutput(
            variant,
            self.rules(decoding, drafts),
            decoding,
            _attempts(decoding),
            drafting=drafts,
            num_steps=steps,
        )

    def rules(
        self, decoding: Container[int] = (), drafts: Mapping[int, int] | None = None
    ) -> RowRules:
        """Return the rules of all rows, on the device; rows that do not decode have limit 0.

        Args:
          decoding: the rows that decode.
          drafts: number of drafts of each row that drafts.
        """
        if drafts is None:
            drafts = {}
        rows = [
            RowOfRules(x.settings if x else None, row in decoding, drafts.get(row, 0))
            for row, x in enumerate(self.rows)
        ]
        if self._rules is None or rows != self._rows_of_rules:
            self._rules = make_rules(self._plan, rows, self._columns, self._put)
            self._rows_of_rules = rows
        return self._rules

    def _may_all_end(
        self, decoding: Mapping[int, RunningRequest], in_flight: Sequence[SchedulerOutput]
    ) -> bool:
        """Return whether work in flight may bring every row to its length limit."""
        if not in_flight:
            return False
        for row, sequence in decoding.items():
            unread = [x for x in in_flight if x.sequences.get(row) is sequence and x.waits(row)]
            most_tokens = sum(x.num_steps * (1 + x.drafting.get(row, 0)) for x in unread)
            if sequence.num_tokens + most_tokens < sequence.settings.limit:
                return False
        return True


def _attempts(sequences: Mapping[int, RunningRequest]) -> dict[int, int]:
    """Return the attempt of each request, by row."""
    return {row: sequence.attempt for row, sequence in sequences.items()}


def variant_of(sequence: RunningRequest) -> Variant:
    """Return the variant of the decode programs that a request needs."""
    if sequence.output.grammar is not None:
        return Variant.CONSTRAINED
    params = sequence.request.params
    if params.penalized:
        return Variant.PENALIZED
    return Variant.SAMPLED if params.temperature > 0 else Variant.GREEDY


def variants_of(sequence: RunningRequest) -> list[Variant]:
    """Return all variants of programs that a request may need."""
    variants = [variant_of(sequence)]
    if sequence.request.recovery != OFF:
        variants.append(Variant.RECOVERY)
    if sequence.request.params.prompt_logprobs is not None:
        variants.append(Variant.PROMPT)
    return variants


class RowOfRules(NamedTuple):
    """Everything that the rules of one device row depend on."""

    settings: RowSettings | None  # None for a row without a request
    decodes: bool
    drafts: int  # number of drafts of the next step


def make_rules(
    plan: ResolvedPlan,
    rows: Sequence[RowOfRules],
    columns: dict[str, tuple[np.ndarray, Any]],
    put: Callable[[Any], Any] = jax.device_put,
) -> RowRules:
    """Return the rules of all rows, on the device.

    Args:
      columns: each array that is on the device already, by field of `RowRules`: its values on the
        host, and the array. It is updated in place, so that only fields that changed are
        transferred.
      put: puts an array on the device, see `Executor`.
    """
    host = idle_arrays(plan)
    host["max_drafts"][:] = 0
    for row, (settings, decodes, drafts) in enumerate(rows):
        if settings is None:
            continue
        request = settings.request
        params = request.params
        host["stop_ids"][row, : len(request.stop_ids)] = sorted(request.stop_ids)
        host["limit"][row] = settings.limit if decodes else 0
        host["max_drafts"][row] = drafts
        for name in _ROW_OPTIONS:
            host[name][row] = getattr(params, name)
        if params.temperature > 0:
            host["temperature"][row] = max(params.temperature, MIN_TEMPERATURE)
        # A pair's own acceptance rule may draw in greedy rows, too.
        host["seed"][row] = divmod(request.seed, 2**32)
        host["choices"][row, : len(settings.choices)] = settings.choices
        if plan.report_tool_call_margin:
            host["opening"][row] = settings.opening
    for name, column in host.items():
        if name not in columns or not np.array_equal(columns[name][0], column):
            columns[name] = column, put(column)
    return RowRules(**{name: columns[name][1] for name in host})
