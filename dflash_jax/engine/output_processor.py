"""Turn the device's results into output: advance sequences, and collect what rows need next."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from dflash_jax.engine.events import EventLog
from dflash_jax.engine.logits_processing import prompt_logprobs, token_logprobs
from dflash_jax.engine.model_runner import InFlightStep
from dflash_jax.engine.result import Stats
from dflash_jax.engine.running_request import RunningRequest, StepDetails
from dflash_jax.engine.state_machine import controller
from dflash_jax.engine.state_machine.controller import Restart
from dflash_jax.engine.state_machine.trace import CallTime
from dflash_jax.graph.state import RowStep
from dflash_jax.graph.steps.forced_tokens import ForcedTokens

log = logging.getLogger("dflash_jax.engine")


@dataclasses.dataclass(slots=True)
class RowUpdates:
    """What the device, the scheduler and the prefix cache must do after a step, in this order."""

    finished: list[RunningRequest] = dataclasses.field(default_factory=list)
    # Prompts of which nothing in the prefix cache may be used again.
    invalidated: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    cleared: list[int] = dataclasses.field(default_factory=list)  # rows of non-finite numbers
    forced: dict[int, ForcedTokens] = dataclasses.field(default_factory=dict)  # by row


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
            updates.invalidated.append(sequence.request.prompt)
            sequence.restart(use_cache=False)
            return
        if row in step.work.drafting:
            count_round(sequence.stats, len(result.tokens), result.num_drafts, self._block - 1)
            sequence.stats.copied += result.num_drafts * result.copied
        elif not prefill:
            sequence.stats.plain_steps += bool(result.tokens)
        logprobs = []
        if sequence.request.params.logprobs is not None:
            output, place = step.output_of(row)
            logprobs = token_logprobs(output, place, sequence.request)[: len(result.tokens)]
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
            forced = ForcedTokens(pending, effects.replace is not None, effects.force)
            updates.forced[row] = forced
        if sequence.done:
            updates.finished.append(sequence)
        if not result.finite:
            updates.cleared.append(row)
        if not result.finite or effects.restart is Restart.FRESH:
            updates.invalidated.append(sequence.request.prompt)

    def retry_calls(self, running: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Restart requests whose call grammar is ready; return those that end without one."""
        ended = []
        for sequence in running:
            compiled = sequence.call_grammar
            if compiled is None or not compiled.done() or sequence.done:
                continue
            sequence.call_grammar = None
            if error := compiled.exception():
                log.warning("a call is passed on as it is: %s", error)
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
            self._events.report(note, sequence.number, directory=folder, **figures)


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
    drafted = row in step.work.drafting
    drafts, block = (result.num_drafts, step.work.block) if drafted else (0, 0)
    return controller.Stepped(tokens, result.finite, result.draft_finite, best, drafts, odds, block)
