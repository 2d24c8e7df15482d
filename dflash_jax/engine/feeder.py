"""Prompts on their way to the device, a chunk at a time, in turns with decoding."""

from collections.abc import Callable

import numpy as np

from dflash_jax.compiler.keys import Step
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.scheduler import Rows
from dflash_jax.engine.sequence import Live
from dflash_jax.plan import Plan

Dispatch = Callable[..., None]


class Feeder:
    """Feeds the prompts of the rows."""

    def __init__(self, plan: Plan, runner: ModelRunner, rows: Rows):
        self._plan, self._runner, self._rows = plan, runner, rows
        self._fed_last = False  # the last step fed prompts

    def turn(self, dispatch: Dispatch) -> bool:
        """Feeds the next chunk of every unfinished prompt, unless decoding is next.

        A prompt of which the disk is still being read waits.

        Args:
          dispatch: sends a prefill call on its way: with its tokens, what is to be read, the first
            row. It is not kept: the two would hold each other, and what they hold, in memory.
        """
        work = self._rows.work
        feeding = {r: x for r, x in work.feeding.items() if not x.recall or x.recall.done()}
        if not feeding or (self._fed_last and work.decoding):
            self._fed_last = False
            return False
        self._fed_last = True
        if self._plan.fed_rows < self._plan.rows:
            self._feed_in_turn(feeding, dispatch)
            return True
        for row, live in feeding.items():
            self._runner.restore(row, live)
        self._feed(feeding, dispatch)
        return True

    def _feed_in_turn(self, feeding: dict[int, Live], dispatch: Dispatch) -> None:
        """One chunk of each prompt. Rows of one prompt get it from the first of them that stood
        where they stand; only a last chunk is everyone's own, as it says a token. Whoever asks
        how likely the prompt is feeds it alone.
        """
        fed: dict[tuple[int, int], int] = {}  # rows by prompt and how much of it they had
        for row, live in feeding.items():
            self._runner.restore(row, live)
            start, prompt = live.fed, live.request.prompt
            stand, scored = (id(prompt), start), live.request.scored
            if stand in fed and not scored and start + self._plan.chunk < len(prompt):
                self._runner.copy_row(fed[stand], row)
                live.fed += self._plan.chunk
                self._runner.keep(row, live, start)
            else:
                fed[stand] = row
                self._feed({row: live}, dispatch, first=row)

    def _feed(self, feeding: dict[int, Live], dispatch: Dispatch, first: int = 0) -> None:
        """Dispatches one chunk of some prompts, in a call of rows from `first` on."""
        rows, chunk = self._plan.fed_rows, self._plan.chunk
        tokens, count = np.zeros((rows, chunk), np.int32), np.zeros(rows, np.int32)
        fresh = np.zeros(rows, bool)
        finished: dict[int, Live] = {}
        starts = {}
        for row, live in feeding.items():
            starts[row], at = live.fed, row - first
            part = live.request.prompt[live.fed : live.fed + chunk]
            tokens[at, : len(part)], count[at], fresh[at] = part, len(part), live.fed == 0
            if live.request.scored:
                self._runner.prompt_logprobs(row, live)
            live.fed += len(part)
            if live.fed == len(live.request.prompt):
                finished[row] = live
                self._rows.changed()
                self._runner.set_logits_state(row, live)
        dispatch(Step.PREFILL, tokens, count, fresh, readers=finished, first=first)
        for row, live in feeding.items():
            self._runner.keep(row, live, starts[row])
