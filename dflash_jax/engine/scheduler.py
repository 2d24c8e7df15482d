"""Decide which rows the next device call serves, and how."""

import collections
import dataclasses
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dflash_jax.engine.running_request import RowSettings, RunningRequest
from dflash_jax.engine.sampling_params import MIN_TEMPERATURE, OPTIONS
from dflash_jax.engine.state_machine import OFF
from dflash_jax.engine.state_machine.speculation import choose_drafts
from dflash_jax.graph.keys import LOGITS_VARIANTS, STEP_VARIANTS, Variant
from dflash_jax.graph.state import RowRules, idle_arrays
from dflash_jax.plan import ResolvedPlan

_ROW_OPTIONS = OPTIONS.keys() & RowRules.__dataclass_fields__.keys() - {"seed"}
MOST_WIDE = 2  # prompts that are fed in turn in wide calls
BURST = 0.1  # seconds between two results that a reader does not notice as a pause


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One turn's work for the model runner: a prefill of some rows, or decode steps of all."""

    variant: Variant  # of the programs
    rules: RowRules  # of all rows; rows that do not decode have a limit of 0
    sequences: Mapping[int, RunningRequest]  # by row, those the work is for
    epochs: Mapping[int, int]  # of these sequences, by row
    prefill: bool = False  # whether each row is fed the next chunk of its prompt; else rows decode
    wide: bool = False  # whether prefill calls may feed several chunks at once
    drafting: Mapping[int, int] = dataclasses.field(default_factory=dict)  # drafts of each row
    num_steps: int = 1  # most decode steps of the call

    def waits(self, row: int) -> bool:
        """Whether the sequence in a row still waits for results of this work."""
        sequence = self.sequences[row]
        return not sequence.done and sequence.epoch == self.epochs[row]


def steps_of_call(step_seconds: float, max_steps: int) -> int:
    """Return how many steps of a length a call makes: as many as take `BURST` seconds."""
    return max(1, min(max_steps, int(BURST / step_seconds)))


class StepPacer:
    """Chooses the number of decode steps of a call, by the time of a step lately.

    `num_steps` is that of the next call, at most `max_steps`, which is 1 where programs make no
    more.
    """

    def __init__(self, max_steps: int):
        self.max_steps, self.num_steps = max_steps, 1
        self._last_read = 0.0

    def record(self, num_steps: int, dispatched: float) -> None:
        """Record the steps of a call that was read just now, and `dispatched` at a time before."""
        now = time.perf_counter()
        if num_steps:
            busy = now - max(dispatched, self._last_read)  # the device was idle before
            self.num_steps = steps_of_call(busy / num_steps, self.max_steps)
        self._last_read = now


class Scheduler:
    """The queue, the rows, and the order of prefill and decode.

    Prefill and decode alternate: after each call that fed prompts, rows that decode get a call.

    Args:
      put: puts an array on the device, see `Executor`.
    """

    def __init__(self, plan: ResolvedPlan, put: Callable[[Any], Any] = jax.device_put):
        self._plan, self._put = plan, put
        self.waiting: collections.deque[RunningRequest] = collections.deque()  # the oldest first
        self.rows: list[RunningRequest | None] = [None] * plan.rows
        self.pacer = StepPacer(plan.steps_per_call)
        self._prefilled_last = False
        self._rules: RowRules | None = None
        self._rows_of_rules: list[tuple[RowSettings | None, bool, int]] = []
        self._columns: dict[str, tuple[np.ndarray, Any]] = {}

    @property
    def running(self) -> list[RunningRequest]:
        """Requests that have a row."""
        return [sequence for sequence in self.rows if sequence]

    @property
    def unfinished(self) -> bool:
        """Whether any request waits or has a row."""
        return bool(self.waiting or any(self.rows))

    def has_room(self, count: int) -> bool:
        """Return whether the queue has room for more requests."""
        return len(self.waiting) + count <= self._plan.queue

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
        self,
        in_flight: Sequence[SchedulerOutput] = (),
    ) -> SchedulerOutput | None:
        """Return the work of the next call, after that in flight; None if no row can use one."""
        if len(in_flight) == 1 and in_flight[0].num_steps > 1:
            return None  # most requests end in one of the next few steps: wait for the results
        active = {row: x for row, x in enumerate(self.rows) if x and not x.call_grammar}
        prompts = {row: x for row, x in active.items() if not x.prefilled}
        decoding = {row: x for row, x in active.items() if x.prefilled and not x.rebuilding}
        loaded = {row: x for row, x in prompts.items() if x.loaded}
        self._prefilled_last = bool(loaded) and not (self._prefilled_last and decoding)
        wanted = map(variant_of, self.running)
        variant = max(wanted, key=STEP_VARIANTS.index, default=Variant.GREEDY)
        if self._prefilled_last:
            epochs = {row: x.epoch for row, x in loaded.items()}
            # Rows that decode wait for one chunk of each prompt, and prompts for one another.
            return SchedulerOutput(
                variant,
                self.rules(decoding),
                loaded,
                epochs,
                prefill=True,
                wide=len(loaded) <= MOST_WIDE and not decoding,
            )
        if not decoding or self._may_all_end(decoding, in_flight):
            return None
        block = self._plan.block
        drafted = {row: x.drafting(block) for row, x in decoding.items() if x.settings.speculates}
        drafting = choose_drafts(drafted, len(decoding))
        multi_step = variant not in LOGITS_VARIANTS and not (self.waiting or prompts)
        steps = self.pacer.num_steps if multi_step else 1
        epochs = {row: x.epoch for row, x in decoding.items()}
        return SchedulerOutput(
            variant,
            self.rules(decoding, drafting),
            decoding,
            epochs,
            drafting=drafting,
            num_steps=steps,
        )

    def rules(
        self, decoding: Container[int] = (), drafting: Mapping[int, int] | None = None
    ) -> RowRules:
        """Return the rules of all rows, on the device; rows that do not decode have limit 0."""
        drafts = drafting or {}
        rows = [
            (x.settings if x else None, row in decoding, drafts.get(row, 0))
            for row, x in enumerate(self.rows)
        ]
        if self._rules is None or rows != self._rows_of_rules:
            self._rules = make_rules(self._plan, rows, self._columns, self._put)
            self._rows_of_rules = rows
        return self._rules

    def _may_all_end(
        self, decoding: Mapping[int, RunningRequest], in_flight: Sequence[SchedulerOutput]
    ) -> bool:
        """Whether work in flight may already bring every row to its length limit."""

        def may_end(row: int, sequence: RunningRequest) -> bool:
            unread = [x for x in in_flight if x.sequences.get(row) is sequence and x.waits(row)]
            most = [x.num_steps * (1 + x.drafting.get(row, 0)) for x in unread]
            length = len(sequence.request.prompt) + sequence.state.num_decided
            return length + sum(most) >= sequence.settings.limit

        return bool(in_flight) and all(may_end(row, x) for row, x in decoding.items())


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
    request = sequence.request
    forces, scores = request.recovery != OFF, request.params.prompt_logprobs is not None
    others = [Variant.RECOVERY] * forces + [Variant.PROMPT] * scores
    return [variant_of(sequence), *others]


def make_rules(
    plan: ResolvedPlan,
    rows: Sequence[tuple[RowSettings | None, bool, int]],
    columns: dict[str, tuple[np.ndarray, Any]],
    put: Callable[[Any], Any] = jax.device_put,
) -> RowRules:
    """Return the rules of rows, given the settings of each, whether it decodes, and its drafts.

    Args:
      columns: arrays that are on the device already, by field of `RowRules`; updated in place, so
        that only fields that changed are transferred.
      put: as for `Scheduler`.
    """
    host = idle_arrays(plan)
    host["max_drafts"][:] = 0
    for row, (settings, decodes, drafts) in enumerate(rows):
        if settings is None:
            continue
        request, params = settings.request, settings.request.params
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
        if plan.call_odds:
            host["opening"][row] = settings.opening
    for name, column in host.items():
        if name not in columns or not np.array_equal(columns[name][0], column):
            columns[name] = column, put(column)
    return RowRules(**{name: columns[name][1] for name in host})
