"""The teller: tells requests what a call says of their rows, and does what they want done."""

import logging
from collections.abc import Sequence

from dflash_jax.engine.events import EventLog
from dflash_jax.engine.flight import Flight
from dflash_jax.engine.forced_tokens import ForcedTokens
from dflash_jax.engine.logits_processing import prompt_logprobs, token_logprobs
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.recovery import controller
from dflash_jax.engine.recovery.controller import Restart
from dflash_jax.engine.result import TokenLogprob
from dflash_jax.engine.scheduler import Rows
from dflash_jax.engine.sequence import Live
from dflash_jax.state import RowStep

log = logging.getLogger("dflash_jax.engine")


class Teller:
    """Tells requests the answers of calls.

    Args:
      block: tokens of a drafted block.
      flights: calls that were not read yet; a request that is fed again hears none of them.
    """

    def __init__(
        self,
        block: int,
        runner: ModelRunner,
        rows: Rows,
        flights: Sequence[Flight],
        events: EventLog,
    ):
        self._block, self._runner, self._rows = block, runner, rows
        self._flights, self._events = flights, events

    def release(self, live: Live) -> None:
        """Lets go of a request that ended, wherever it was."""
        self._rows.release(live)
        self._runner.release(live)

    def tell(self, flight: Flight, steps: list[RowStep]) -> None:
        """Has the readers of a call hear one of its steps."""
        broken = []
        dictated: dict[int, ForcedTokens] = {}
        for row, live in list(flight.readers.items()):
            if live.done:
                continue
            step = steps[flight.place(row)]
            if live.scores and not flight.decode:
                live.prompt_logprobs, live.scores = prompt_logprobs(live), []
            if live.rebuilding and step.finite:
                dictated[row] = live.rebuilt()
                self._rows.changed()
                continue
            if not step.finite and not flight.decode and not live.cleaned:
                live.cleaned = True  # the row may hold what another left: once more in a clean one
                broken.append(row)
                self._feed_again(live, Restart.FRESH)
                continue
            if row in flight.drafting:
                live.stats.count_round(len(step.tokens), step.num_drafts, self._block - 1)
            elif flight.decode:
                live.stats.plain_steps += bool(step.tokens)
            likely = token_logprobs(flight.output, flight.place(row), live)[: len(step.tokens)]
            if told := self._hear(live, flight.event(row, step), likely):
                dictated[row] = told
            if live.done:
                self.release(live)
            if not step.finite:
                broken.append(row)
                self._runner.forget(live)
        if broken:
            self._runner.clear_rows(broken)
        if dictated:
            self._dictate(dictated)

    def _hear(
        self,
        live: Live,
        event: controller.Prefilled | controller.Stepped,
        likely: list[TokenLogprob],
    ) -> ForcedTokens | None:
        """Lets a request judge a step; what it dictates in return."""
        before = live.limit, live.speculates, live.choices, live.opening
        effects = live.hear(event, likely)
        self.report(live, effects.notes)
        if before != (live.limit, live.speculates, live.choices, live.opening):
            self._rows.changed()
        if effects.restart is Restart.SAVED and isinstance(event, controller.Prefilled):
            return self._hear(live, event, likely)  # nothing was fed since: this is the saved state
        if effects.restart is Restart.CALL:
            live.begin_call_retry()
            self._discard_unread(live)
        elif effects.restart:
            self._feed_again(live, effects.restart)
        elif effects.replace is not None or effects.force:
            ids = live.state.ids
            pending = ids[len(ids) - len(effects.force) - 1]
            return ForcedTokens(pending, effects.replace is not None, effects.force)
        return None

    def _feed_again(self, live: Live, restart: Restart) -> None:
        """Has a prompt fed once more; what its row says meanwhile is heard by nobody."""
        fresh = restart is Restart.FRESH
        if fresh:
            self._runner.forget(live)
        live.feed_again(uncached=fresh)
        self._discard_unread(live)

    def _discard_unread(self, live: Live) -> None:
        """Discard results of calls that are still in flight for a request."""
        self._rows.changed()
        for flight in self._flights:
            for row in [row for row, reader in flight.readers.items() if reader is live]:
                del flight.readers[row]

    def retry_calls(self) -> None:
        """Feed rows again whose call grammar is ready; requests without one end as they are."""
        for live in filter(None, list(self._rows.lives)):
            made = live.call_grammar
            if made is None or not made.done() or live.done:
                continue
            live.call_grammar = None
            if error := made.exception():
                log.warning("a call is given as it is: %s", error)
                live.take(controller.Cancelled(controller.Finish.STOP))
                self.release(live)
                continue
            self.report(live, live.retry_call(made.result()).notes)
            self._rows.changed()

    def _dictate(self, dictated: dict[int, ForcedTokens]) -> None:
        """Has rows go on behind tokens the host decided, which the device did not count."""
        self._runner.force_tokens(dictated)
        for row in dictated:
            live = self._rows.lives[row]
            if live and live.request.shaped:
                self._runner.set_logits_state(row, live)

    def report(self, live: Live, notes: Sequence[str]) -> None:
        """Reports what recovery did for a request."""
        for note in notes:
            self._events.report(
                note,
                live.number,
                directory=live.request.recovery.log_directory,
                prompt_tokens=len(live.request.prompt),
                output_tokens=live.state.emitted,
            )
