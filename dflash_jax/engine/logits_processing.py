"""The logits state of all rows, and log-probabilities as results."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dflash_jax.engine.prefix.cache import PromptCursor
from dflash_jax.engine.request import Request
from dflash_jax.engine.result import TokenLogprob
from dflash_jax.graph.state import Logprobs, StepOutput
from dflash_jax.graph.steps.inputs import SetLogitsStateInputs
from dflash_jax.graph.steps.logits_processing import LogitsState


class LogitsProcessor:
    """Holds the logits state between steps; uses no memory until it is needed.

    A row is set before the last chunk of its prompt is fed, because earlier counts of the device
    belong to other requests, and after forced tokens, which the device does not count.

    Args:
      vocab: size of the vocabulary.
      empty: returns a new state that changes no logits.
    """

    def __init__(self, vocab: int, empty: Callable[[], LogitsState]):
        self._vocab, self._empty = vocab, empty
        self._state: LogitsState | None = None
        self._changed: set[int] = set()  # rows that are not neutral

    @property
    def state(self) -> LogitsState:
        """The state of all rows. A step that it is donated to must `keep` the next one."""
        if self._state is None:
            self._state = self._empty()
        return self._state

    def keep(self, state: LogitsState) -> None:
        """Keep the state that a step returned."""
        self._state = state

    def reset(self) -> None:
        """Drop the state, which a failed step may have consumed."""
        self._state = None
        self._changed.clear()

    def set_row(
        self, program: Callable[..., Any], row: int, request: Request, output: Sequence[int]
    ) -> None:
        """Set a row to the options of a request and its output so far."""
        params = request.params
        if not params.penalized and row not in self._changed:
            return
        self._changed.add(row) if params.penalized else self._changed.discard(row)
        bias, prompt = np.zeros(self._vocab, np.float32), np.zeros(self._vocab, bool)
        for token, value in (params.logit_bias or {}).items():
            bias[token] = value
        prompt[list(request.prompt)] = True
        counts = np.bincount(output[:], minlength=self._vocab).astype(np.int32)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        inputs = SetLogitsStateInputs(
            row=np.int32(row),
            bias=bias,
            prompt=prompt,
            counts=counts,
            penalties=np.array(penalties, np.float32),
            reports=np.bool_(params.logprobs is not None),
        )
        _, self._state, _ = program(None, None, self.state, inputs)


def token_logprobs(output: StepOutput, row: int, request: Request) -> list[TokenLogprob]:
    """Return a row's log-probabilities of a step, with the alternatives the request asks for."""
    found, most = output.logprobs, request.params.logprobs
    if found is None or most is None:
        return []
    packed: Any = np.asarray(output.packed)
    tokens = dataclasses.replace(output, packed=packed).tokens[row]
    return _named(tokens.tolist(), found, row, most)


def prompt_logprobs(request: Request, cursor: PromptCursor) -> list[TokenLogprob]:
    """Return the log-probabilities of a prompt that was fed; its first token has none."""
    (first, *rest), most = request.prompt, request.params.prompt_logprobs
    known, at = [TokenLogprob(first, None, ())], 0
    for found in cursor.logprobs if most is not None else ():
        part = rest[at : at + found.chosen.shape[1]]
        known += _named(part, found, 0, most or 0)
        at += len(part)
    return known


def _named(tokens: Sequence[int], found: Logprobs, row: int, most: int) -> list[TokenLogprob]:
    """Return the log-probabilities of a row's first places, with their tokens."""
    chosen = np.asarray(found.chosen)[row].tolist()
    ids = np.asarray(found.top_ids)[row, :, :most].tolist()
    values = np.asarray(found.top)[row, :, :most].tolist()
    return [
        TokenLogprob(token, logprob, tuple(zip(i, x, strict=True)))
        for token, logprob, i, x in zip(tokens, chosen, ids, values, strict=False)
    ]
