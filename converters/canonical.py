"""A weight file seen through canonical names: what each tensor is called and how it is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from converters.names.slots import Slot
from converters.source import Rows, TensorSource
from dflash_jax.errors import CheckpointError

MOST_LINES = 60


@dataclass(frozen=True)
class Origin:
    """Where a canonical tensor comes from: a stored tensor, or some of its rows in some order.

    The rows of a tensor with more than two axes are numbered through.
    """

    name: str
    rows: np.ndarray | range | None = None  # a range has step 1
    change: str = ""  # what is done to it, in words, for the report


class Canonical:
    """A source under canonical names; see `converters.source.TensorSource`."""

    def __init__(
        self, source: TensorSource, origins: Mapping[str, Origin], ignored: Mapping[str, str]
    ):
        self.source = source
        self.origins = dict(origins)
        self.ignored = dict(ignored)  # stored name: why it is not needed

    def names(self) -> tuple[str, ...]:
        return tuple(self.origins)

    def shape(self, name: str) -> tuple[int, ...]:
        origin = self.origins[name]
        shape = self.source.shape(origin.name)
        return shape if origin.rows is None else (len(origin.rows), *shape[1:][-1:])

    def dtype(self, name: str) -> np.dtype:
        return self.source.dtype(self.origins[name].name)

    def kind(self, name: str) -> str:
        return self.source.kind(self.origins[name].name)

    def nbytes(self, name: str) -> int:
        stored = self.origins[name].name
        whole, shape = self.source.nbytes(stored), self.source.shape(stored)
        return whole * math.prod(self.shape(name)) // max(math.prod(shape), 1)

    def read(self, name: str) -> np.ndarray:
        origin = self.origins[name]
        if origin.rows is None:
            return self.source.read(origin.name)
        return self.read_rows(name, slice(None)).reshape(self.shape(name))

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        origin = self.origins[name]
        return self.source.read_rows(origin.name, _stored_rows(origin.rows, rows))


def _stored_rows(kept: np.ndarray | range | None, rows: Rows) -> Rows:
    """Which stored rows are meant by `rows` of those that are kept."""
    if kept is None:
        return rows
    if not isinstance(kept, range):
        return kept[rows]
    if isinstance(rows, slice):
        part = kept[rows]
        return slice(part.start, part.stop, part.step)
    return rows + kept.start


def check(slots: list[Slot], found: Canonical, *, where: str) -> None:
    """Refuses a source that does not fill exactly these parameters, naming every difference."""
    wanted = {part.name: part.shape for slot in slots for part in slot.parts}
    whole = {part.name for slot in slots for part in slot.parts if slot.integer}
    present = set(found.names())
    lines = [
        f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in present
    ]
    lines += [
        f"left over: {name} {list(found.shape(name))}" for name in sorted(present - set(wanted))
    ]
    for name in sorted(present & set(wanted)):
        if found.shape(name) != wanted[name]:
            lines.append(
                f"wrong shape: {name} is {list(found.shape(name))},"
                f" the configuration asks for {list(wanted[name])}"
            )
        if (found.dtype(name).kind in "iub") != (name in whole):
            expected = "integers" if name in whole else "floating point"
            lines.append(f"wrong type: {name} holds {found.kind(name)}, expected {expected}")
    if lines:
        shown = (
            lines[:MOST_LINES]
            + [f"... and {len(lines) - MOST_LINES} more"][: len(lines) > MOST_LINES]
        )
        raise CheckpointError(
            f"{where} does not match its configuration ({len(lines)} differences);"
            " give the weights that belong to this configuration\n  " + "\n  ".join(shown)
        )
