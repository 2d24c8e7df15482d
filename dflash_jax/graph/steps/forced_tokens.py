"""Tokens that the host decides: a replacement of the pending token, and tokens after it."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from dflash_jax.graph.steps.inputs import ForcedTokensInputs


@dataclasses.dataclass(frozen=True)
class ForcedTokens:
    """Forced tokens of one row."""

    pending: int  # the pending token, which may replace the device's
    ids: tuple[int, ...] = ()  # tokens after it; the last of them is pending afterwards


def blocks(
    rows: int, width: int, forced: Mapping[int, ForcedTokens]
) -> Iterator[ForcedTokensInputs]:
    """Yield the inputs of successive calls, each of up to `width` tokens per row.

    Pending tokens are replaced by the first call, which may feed nothing.
    """
    longest = max((len(tokens.ids) for tokens in forced.values()), default=0)
    for start in range(0, max(longest, 1), width):
        block = np.zeros((rows, width), np.int32)
        num_tokens, anchor = np.zeros((2, rows), np.int32)
        for row, tokens in forced.items():
            line = (tokens.pending, *tokens.ids)
            part = line[start : min(start + width, len(tokens.ids))]
            block[row, : len(part)] = part
            num_tokens[row] = len(part)
            anchor[row] = line[min(start, len(tokens.ids)) + len(part)]
        is_forced = np.isin(np.arange(rows), list(forced))
        yield ForcedTokensInputs(block, num_tokens=num_tokens, forced=is_forced, anchor=anchor)
