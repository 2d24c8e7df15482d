"""The rows' penalties, biases and log-probabilities, between requests and the shaped lane."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dflash_jax.decode.logits_processing import Shaping, neutral_shaping
from dflash_jax.engine.prefix.cursor import PromptCursor
from dflash_jax.engine.request import Request
from dflash_jax.engine.result import TokenLogprob
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

    def set_row(
        self, program: Callable[..., Any], row: int, request: Request, output: Sequence[int]
    ) -> None:
        """Set a row's penalties and biases to those of a request with this output so far."""
        params = request.params
        if not params.penalized and row not in self._marked:
            return
        self._marked.add(row) if params.penalized else self._marked.discard(row)
        bias, prompted = np.zeros(self._vocab, np.float32), np.zeros(self._vocab, bool)
        for token, value in (params.logit_bias or {}).items():
            bias[token] = value
        prompted[list(request.prompt)] = True
        said = np.bincount(output, minlength=self._vocab).astype(np.int32)
        penalties = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        numbers = np.array(penalties, np.float32)
        reports = np.bool_(params.logprobs is not None)
        self.keep(program(self.shaping, np.int32(row), bias, prompted, said, numbers, reports))


def token_logprobs_of(output: StepOutput, row: int, request: Request) -> list[TokenLogprob]:
    """Return a row's log-probabilities of a step, with the alternatives the request wants."""
    found, most = output.logprobs, request.params.logprobs
    if found is None or most is None:
        return []
    tokens = np.asarray(output.packed)[row, int(output.reports_odds) : -COLUMNS]
    return _named(tokens.tolist(), found, row, most)


def prompt_logprobs_of(request: Request, cursor: PromptCursor) -> list[TokenLogprob]:
    """Return the log-probability of each token of a prompt that was fed; the first has none."""
    (first, *rest), most = request.prompt, request.params.prompt_logprobs
    known, at = [TokenLogprob(first, None, ())], 0
    for found in cursor.logprobs if most is not None else ():
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
