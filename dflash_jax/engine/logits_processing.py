"""The rows' penalties, biases and log-probabilities, between requests and the shaped lane."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dflash_jax.decode.logits_processing import Shaping, neutral_shaping
from dflash_jax.engine.result import TokenLogprob
from dflash_jax.engine.sequence import Live
from dflash_jax.state import COLUMNS, Logprobs, StepOutput


class Shaper:
    """Holds what the shaped lane carries from step to step; takes no memory until it is used.

    A row is set when the last chunk of its prompt is about to be fed, as what the device counted
    before that was not said; and when tokens were dictated to it, which the device did not count.
    """

    def __init__(self, rows: int, vocab: int):
        self._rows, self._vocab = rows, vocab
        self._shaping: Shaping | None = None
        self._marked: set[int] = set()  # rows that are not neutral

    @property
    def shaping(self) -> Shaping:
        """The rows' shaping, to be donated to a step; give it back with `keep`."""
        if self._shaping is None:
            self._shaping = jax.device_put(neutral_shaping(self._rows, self._vocab))
        return self._shaping

    def keep(self, shaping: Shaping) -> None:
        """Takes back what a step made of the shaping."""
        self._shaping = shaping

    def reset(self) -> None:
        """Forgets what a failed step took with it; rows are set anew as their prompts are fed."""
        self._shaping = None
        self._marked.clear()

    def set_row(self, program: Callable[..., Any], row: int, live: Live) -> None:
        """Makes a row's shaping that of a request as far as it has come."""
        request = live.request
        if not request.shaped and row not in self._marked:
            return
        self._marked.add(row) if request.shaped else self._marked.discard(row)
        bias, prompted = np.zeros(self._vocab, np.float32), np.zeros(self._vocab, bool)
        for token, value in request.logit_bias:
            bias[token] = value
        prompted[list(request.prompt)] = True
        said = np.bincount(live.state.ids[:], minlength=self._vocab).astype(np.int32)
        penalties = (
            request.repetition_penalty,
            request.frequency_penalty,
            request.presence_penalty,
        )
        numbers = np.array(penalties, np.float32)
        reports = np.bool_(request.logprobs is not None)
        self.keep(program(self.shaping, np.int32(row), bias, prompted, said, numbers, reports))


def likely_tokens(output: StepOutput, row: int, live: Live) -> list[TokenLogprob]:
    """A row's log-probabilities of a step, as many alternatives as the request wants."""
    found, most = output.logprobs, live.request.logprobs
    if found is None or most is None:
        return []
    said = np.asarray(output.packed)[row, int(output.reports_odds) : -COLUMNS]
    return _named(said.tolist(), found, row, most)


def likely_prompt(live: Live) -> list[TokenLogprob]:
    """How likely each token of a prompt that was fed is; nothing is said of the first."""
    (first, *rest), most = live.request.prompt, live.request.prompt_logprobs
    known, at = [TokenLogprob(first, None, ())], 0
    for found in live.scores if most is not None else ():
        part = rest[at : at + found.chosen.shape[1]]
        known += _named(part, found, 0, most or 0)
        at += len(part)
    return known


def _named(tokens: Sequence[int], found: Logprobs, row: int, most: int) -> list[TokenLogprob]:
    """The log-probabilities of a row's first places, with the tokens they are of."""
    chosen = np.asarray(found.chosen)[row].tolist()
    ids = np.asarray(found.top_ids)[row, :, :most].tolist()
    values = np.asarray(found.top)[row, :, :most].tolist()
    return [
        TokenLogprob(token, logprob, tuple(zip(i, x, strict=True)))
        for token, logprob, i, x in zip(tokens, chosen, ids, values, strict=False)
    ]
