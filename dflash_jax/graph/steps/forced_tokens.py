"""Tokens that the host decides: a replacement of the pending token, and tokens after it."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from dflash_jax.graph.steps.inputs import ForcedTokensInputs, ReplaceAnchorInputs


@dataclasses.dataclass(frozen=True)
class ForcedTokens:
    """Forced tokens of one row."""

    pending: int  # the pending token, after its replacement
    replaces: bool  # whether it differs from the device's
    ids: tuple[int, ...] = ()  # tokens after it; the last of them is pending afterwards


def replacements(rows: int, forced: Mapping[int, ForcedTokens]) -> ReplaceAnchorInputs:
    """Return the inputs that replace the pending tokens of rows."""
    chosen, anchor = np.zeros((rows,), bool), np.zeros((rows,), np.int32)
    for row, tokens in forced.items():
        chosen[row], anchor[row] = tokens.replaces, tokens.pending
    return ReplaceAnchorInputs(rows=chosen, anchor=anchor)


def blocks(
    rows: int, width: int, forced: Mapping[int, ForcedTokens]
) -> Iterator[ForcedTokensInputs]:
    """Yield the inputs of successive calls, each of up to `width` tokens per row."""
    longest = max((len(tokens.ids) for tokens in forced.values()), default=0)
    for start in range(0, longest, width):
        block = np.zeros((rows, width), np.int32)
        num_fed, anchor = np.zeros((2, rows), np.int32)
        for row, tokens in forced.items():
            line = (tokens.pending, *tokens.ids)
            part = line[start : min(start + width, len(tokens.ids))]
            block[row, : len(part)], num_fed[row] = part, len(part)
            anchor[row] = line[start + len(part)] if part else 0
        yield ForcedTokensInputs(block, num_fed=num_fed, anchor=anchor)
