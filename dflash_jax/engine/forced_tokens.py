"""Tokens that the host decides: in the place of the pending one, and behind it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from dflash_jax.state import DecodeState

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Dictated:
    """What one row is told.

    Attributes:
      pending: the token that is pending now, once it was replaced.
      replaces: whether the device has to be told of it.
      ids: tokens behind it; the last of them is pending afterwards.
    """

    pending: int
    replaces: bool
    ids: Ids = ()


def replacements(rows: int, dictated: Mapping[int, Dictated]) -> tuple[np.ndarray, np.ndarray]:
    """Arguments of the `replace` program: which rows [B], and their new pending tokens [B]."""
    chosen, anchor = np.zeros((rows,), bool), np.zeros((rows,), np.int32)
    for row, told in dictated.items():
        chosen[row], anchor[row] = told.replaces, told.pending
    return chosen, anchor


def forced_calls(
    rows: int, block: int, dictated: Mapping[int, Dictated]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Arguments of successive `forced` calls: tokens [B, T], how many [B], next pending [B]."""
    longest = max((len(told.ids) for told in dictated.values()), default=0)
    for start in range(0, longest, block):
        tokens = np.zeros((rows, block), np.int32)
        count, anchor = np.zeros((2, rows), np.int32)
        for row, told in dictated.items():
            line = (told.pending, *told.ids)
            part = line[start : min(start + block, len(told.ids))]
            tokens[row, : len(part)], count[row] = part, len(part)
            anchor[row] = line[start + len(part)] if part else 0
        yield tokens, count, anchor


def dictate(
    run: Mapping[str, Callable[..., Any]],
    params: Any,
    state: DecodeState,
    dictated: Mapping[int, Dictated],
    *,
    rows: int,
    block: int,
) -> DecodeState:
    """The state once rows go on behind what they are told (R6, R7); they all stand still."""
    state = run["replace"](state, *replacements(rows, dictated))
    for arguments in forced_calls(rows, block, dictated):
        state, _ = run["forced"](params, state, *arguments)
    return state
