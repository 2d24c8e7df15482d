"""A weight file under canonical names: what each tensor is called and how it is read."""

import dataclasses
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dflash_jax.converters.formats import quants
from dflash_jax.converters.formats.quants.types import BY_NAME
from dflash_jax.converters.formats.slots import Slot
from dflash_jax.converters.formats.source import Rows, TensorSource, as_rows, mapped_files
from dflash_jax.errors import CheckpointError

MOST_LINES = 60


@dataclass(frozen=True)
class StoredRows:
    """Outputs of a canonical tensor that are rows of a stored one.

    Outputs are counted over all axes of the canonical tensor but that of its inputs.
    """

    name: str
    rows: np.ndarray | range | None  # as in `Origin`
    outputs: slice | np.ndarray  # the output that each of these rows is


@dataclass(frozen=True)
class Origin:
    """The source of a canonical tensor: a stored tensor, or some of its rows in some order.

    Rows of a tensor with more than two axes are numbered across all but the last axis.
    """

    name: str
    rows: np.ndarray | range | None = None  # a range has step 1
    change: str = ""  # the conversion in words, for the report
    columns: np.ndarray | None = None  # chosen from its last axis, in order
    values: Callable[[np.ndarray], np.ndarray] | None = None  # conversion of each value
    reshaped: tuple[int, ...] | None = None  # small tensors only, which are read whole
    offset: float = 0.0  # size of what `values` subtracts; errors are relative to values with it

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors it is made of."""
        return (self.name,)

    @property
    def whole(self) -> bool:
        """Whether it is a stored tensor without changes."""
        changes = (self.rows, self.columns, self.values, self.reshaped)
        return self.as_stored and all(change is None for change in changes)

    @property
    def as_stored(self) -> bool:
        """Whether its values are those of one stored tensor, in some order."""
        return True

    def pieces(self, source: TensorSource) -> tuple[StoredRows, ...]:
        """Return where stored rows go that hold its numbers as they are; none if they do not."""
        changes = (self.columns, self.values, self.reshaped)
        if not self.as_stored or any(change is not None for change in changes):
            return ()
        return (StoredRows(self.name, self.rows, slice(None)),)

    def shape(self, source: TensorSource) -> tuple[int, ...]:
        """Return the canonical shape."""
        shape = source.shape(self.name)
        if self.reshaped is not None:
            fits = math.prod(self.reshaped) == math.prod(shape)
            return self.reshaped if fits else shape
        if self.columns is not None:
            shape = (*shape[:-1], len(self.columns))
        return shape if self.rows is None else (len(self.rows), *shape[1:][-1:])

    def dtype(self, source: TensorSource) -> np.dtype:
        """Return the dtype of `read_rows`."""
        stored = source.dtype(self.name)
        plain = self.values is None or stored.kind in "iu"
        return stored if plain else np.dtype(np.float32)

    def read_rows(self, source: TensorSource, rows: Rows) -> np.ndarray:
        """Return chosen canonical rows as [rows, last axis]."""
        if self.reshaped is not None:
            everything = self._changed(source, slice(None))
            return as_rows(everything.reshape(self.shape(source)))[rows]
        return self._changed(source, rows)

    def _changed(self, source: TensorSource, rows: Rows) -> np.ndarray:
        array = source.read_rows(self.name, _stored_rows(self.rows, rows))
        if self.columns is not None:
            array = array[:, self.columns]
        return array if self.values is None else self.values(array.astype(self.dtype(source)))


@dataclass(frozen=True, eq=False)
class Computed(Origin):
    """A tensor that follows from the configuration."""

    array: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors it is made of: none."""
        return ()

    @property
    def whole(self) -> bool:
        """False: it is no stored tensor."""
        return False

    def pieces(self, source: TensorSource) -> tuple[StoredRows, ...]:
        """Return none: it is no stored tensor."""
        return ()

    def shape(self, source: TensorSource) -> tuple[int, ...]:
        """Return the canonical shape."""
        return self.array.shape

    def dtype(self, source: TensorSource) -> np.dtype:
        """Return the dtype of `read_rows`."""
        return self.array.dtype

    def read_rows(self, source: TensorSource, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        return as_rows(self.array)[rows]


@dataclass(frozen=True)
class Separated(Origin):
    """Stacked experts [E, in, parts x out] whose outputs alternate, as one part [E, out, in].

    The inverse of `Alternating`.
    """

    part: int = 0
    parts: int = 1

    @property
    def whole(self) -> bool:
        """False: its axes are exchanged."""
        return False

    def pieces(self, source: TensorSource) -> tuple[StoredRows, ...]:
        """Return none: a stored row has numbers of several of its rows."""
        return ()

    def shape(self, source: TensorSource) -> tuple[int, ...]:
        """Return the canonical shape."""
        experts, into, width = source.shape(self.name)
        return experts, width // self.parts, into

    def read_rows(self, source: TensorSource, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]; reads whole experts."""
        experts, out, into = self.shape(source)
        chosen = np.arange(experts * out)[rows]
        if not len(chosen):
            return np.empty((0, into), self.dtype(source))
        first = int(chosen.min()) // out
        last = int(chosen.max()) // out + 1
        stored = source.read_rows(self.name, slice(first * into, last * into))
        own = stored.reshape(last - first, into, out, self.parts)[..., self.part]
        return own.transpose(0, 2, 1).reshape(-1, into)[chosen - first * out]


@dataclass(frozen=True)
class Stacks(Origin):
    """Stacked experts made of more than one stored tensor."""

    others: tuple[str, ...] = ()  # the stored parts after the first

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors it is made of."""
        return (self.name, *self.others)

    @property
    def as_stored(self) -> bool:
        """False: it is made of more than one tensor."""
        return False


@dataclass(frozen=True)
class Alternating(Stacks):
    """Stacked experts [E, out, in], presented as [E, in, parts x out] with alternating outputs.

    Vectors [E, out] become [E, parts x out].
    """

    stacked: int = 1  # parts stacked along the outputs of each stored tensor

    def pieces(self, source: TensorSource) -> tuple[StoredRows, ...]:
        """Return where the rows of each stored tensor go; none of vectors."""
        experts, *into, width = self.shape(source)
        if not into:
            return ()
        outputs = np.arange(experts * width).reshape(experts, -1, len(self.names), self.stacked)
        own = (outputs[:, :, i].swapaxes(1, 2).reshape(-1) for i in range(len(self.names)))
        return tuple(StoredRows(n, None, each) for n, each in zip(self.names, own, strict=True))

    def shape(self, source: TensorSource) -> tuple[int, ...]:
        """Return the canonical shape."""
        experts, out, *into = source.shape(self.name)
        return (experts, *into, len(self.names) * out)

    def read_rows(self, source: TensorSource, rows: Rows) -> np.ndarray:
        """Return chosen canonical rows as [rows, last axis]."""
        experts, *into, width = self.shape(source)
        chosen = np.arange(math.prod((experts, *into)))[rows]
        if not len(chosen):
            return np.empty((0, width), self.dtype(source))
        step = math.prod(into)
        out = width // len(self.names)
        # The range of rows of one stored tensor.
        first = int(chosen.min()) // step
        last = int(chosen.max()) // step + 1
        stored = slice(first * out, last * out) if into else slice(first, last)
        shape = (last - first, self.stacked, out // self.stacked, step)
        parts = [source.read_rows(name, stored).reshape(shape) for name in self.names]
        together = np.concatenate(parts, axis=1)  # [e, parts, out, in]
        by_row = together.transpose(0, 3, 2, 1).reshape(-1, width)
        return by_row[chosen - first * step]


@dataclass(frozen=True)
class Below(Stacks):
    """Stacked experts [E, out, in] of two or more parts, concatenated to [E, parts x out, in]."""

    def pieces(self, source: TensorSource) -> tuple[StoredRows, ...]:
        """Return where the rows of each stored tensor go."""
        experts, height, _ = self.shape(source)
        outputs = np.arange(experts * height).reshape(experts, len(self.names), -1)
        own = (outputs[:, i].reshape(-1) for i in range(len(self.names)))
        return tuple(StoredRows(n, None, each) for n, each in zip(self.names, own, strict=True))

    def shape(self, source: TensorSource) -> tuple[int, ...]:
        """Return the canonical shape."""
        experts, out, into = source.shape(self.name)
        return experts, len(self.names) * out, into

    def read_rows(self, source: TensorSource, rows: Rows) -> np.ndarray:
        """Return chosen canonical rows as [rows, last axis]."""
        experts, height, into = self.shape(source)
        out = height // len(self.names)
        expert, row = np.divmod(np.arange(experts * height)[rows], height)
        result = np.empty((len(row), into), self.dtype(source))
        for i, name in enumerate(self.names):
            own = row // out == i
            result[own] = source.read_rows(name, expert[own] * out + row[own] % out)
        return result


@dataclass(frozen=True)
class Concatenated(Stacks):
    """Matrices [out, in] of any heights, concatenated to [sum of out, in], rows in some order."""

    def shape(self, source: TensorSource) -> tuple[int, ...]:
        """Return the canonical shape."""
        shapes = [source.shape(name) for name in self.names]
        return sum(shape[0] for shape in shapes), *shapes[0][1:]

    def read_rows(self, source: TensorSource, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        height, into = self.shape(source)
        order = np.arange(height) if self.rows is None else self.rows
        chosen = np.asarray(order)[rows]
        start = 0
        result = np.empty((len(chosen), into), self.dtype(source))
        for name in self.names:
            end = start + source.shape(name)[0]
            own = (chosen >= start) & (chosen < end)
            result[own] = source.read_rows(name, chosen[own] - start)
            start = end
        return result


@dataclass(frozen=True)
class Piled(Stacks):
    """Tensors [out, in] of one shape, one for each expert, stacked to [E, out, in]."""

    def shape(self, source: TensorSource) -> tuple[int, ...]:
        """Return the canonical shape."""
        return len(self.names), *source.shape(self.name)

    def read_rows(self, source: TensorSource, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        experts, out, into = self.shape(source)
        expert, row = np.divmod(np.arange(experts * out)[rows], out)
        result = np.empty((len(row), into), self.dtype(source))
        for i in np.unique(expert):
            result[expert == i] = source.read_rows(self.names[i], row[expert == i])
        return result


class Canonical:
    """A `TensorSource` under canonical names."""

    def __init__(
        self, source: TensorSource, origins: Mapping[str, Origin], ignored: Mapping[str, str]
    ):
        self.source = source
        self.origins = dict(origins)
        self.ignored = dict(ignored)  # stored name: why it is not needed

    @property
    def buffers(self) -> tuple[mmap.mmap, ...]:
        """Return the mapped files."""
        return mapped_files(self.source)

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, in file order."""
        return tuple(self.origins)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost axis first."""
        return self.origins[name].shape(self.source)

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of `read`."""
        return self.origins[name].dtype(self.source)

    def kind(self, name: str) -> str:
        """Return the stored type, as its format spells it."""
        return self.source.kind(self.origins[name].name)

    def offset(self, name: str) -> float:
        """Return the size of what a conversion subtracts from stored values."""
        return self.origins[name].offset

    def pieces(self, name: str) -> tuple[StoredRows, ...]:
        """Return where stored rows go that hold a tensor's numbers as they are; none if absent."""
        origin = self.origins.get(name)
        return origin.pieces(self.source) if origin else ()

    def nbytes(self, name: str) -> int:
        """Return the number of bytes in the file."""
        stored = self.origins[name].names
        whole = sum(self.source.nbytes(n) for n in stored)
        weights = sum(math.prod(self.source.shape(n)) for n in stored)
        return whole * math.prod(self.shape(name)) // max(weights, 1)

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor."""
        origin = self.origins[name]
        if origin.whole:
            return self.source.read(origin.name)
        return self.read_rows(name, slice(None)).reshape(self.shape(name))

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        return self.origins[name].read_rows(self.source, rows)


def _stored_rows(kept: np.ndarray | range | None, rows: Rows) -> Rows:
    """Translate `rows` of the kept rows into stored rows."""
    if kept is None:
        return rows
    if not isinstance(kept, range):
        return kept[rows]
    if isinstance(rows, slice):
        part = kept[rows]
        return slice(part.start, part.stop, part.step)
    return rows + kept.start


def check(slots: list[Slot], tensors: Canonical, *, where: str) -> None:
    """Check that a source fills exactly these parameters, with types that can be decoded.

    Raises:
      CheckpointError: it does not; the message lists every difference.
    """
    wanted = {part.name: part.shape for slot in slots for part in slot.parts}
    whole = {part.name for slot in slots for part in slot.parts if slot.integer}
    present = set(tensors.names())
    lines = [
        f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in present
    ]
    lines += [
        f"left over: {name} {list(tensors.shape(name))}" for name in sorted(present - set(wanted))
    ]
    for name in sorted(present & set(wanted)):
        if tensors.shape(name) != wanted[name]:
            lines.append(
                f"wrong shape: {name} is {list(tensors.shape(name))},"
                f" the configuration asks for {list(wanted[name])}"
            )
        if (tensors.dtype(name).kind in "iub") != (name in whole):
            expected = "integers" if name in whole else "floating point"
            lines.append(f"wrong type: {name} holds {tensors.kind(name)}, expected {expected}")
    if lines:
        shown = lines[:MOST_LINES]
        if len(lines) > MOST_LINES:
            shown.append(f"... and {len(lines) - MOST_LINES} more")
        raise CheckpointError(
            f"{where} does not match its configuration ({len(lines)} differences);"
            " give the weights that belong to this configuration\n  " + "\n  ".join(shown)
        )
    stored = {name for used in wanted for name in tensors.origins[used].names}
    kinds = {name: tensors.source.kind(name) for name in sorted(stored)}
    coded = [n for n, kind in kinds.items() if kind in BY_NAME and kind not in quants.READABLE]
    if coded:
        more = f" and {len(coded) - 1} more" if len(coded) > 1 else ""
        why = quants.unreadable(kinds[coded[0]])
        raise CheckpointError(f"{where}: {coded[0]}{more}: {why}")
