"""Token rows: documents packed into buckets of fixed length, and batches by step number."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dflash_jax.trainer.files import saved_as, sound
from dflash_jax.trainer.recipes import Bucket

OPEN_ROWS = 24


@dataclasses.dataclass(frozen=True)
class Document:
    """Token ids, and a mask of the tokens that a model has to produce."""

    ids: np.ndarray  # int32 [n]
    wanted: np.ndarray  # bool [n]


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Rows of one length, padded at the end; padding is never wanted."""

    tokens: np.ndarray  # int32 [N, S]
    wanted: np.ndarray  # bool [N, S]
    real: np.ndarray  # bool [N, S]; False marks padding


def pack(documents: Sequence[Document], buckets: Sequence[Bucket], *, fill: int) -> list[TokenRows]:
    """Pack each document into the shortest bucket that holds it; longer ones are cut.

    Documents share rows (first fit among the most recent rows).
    """
    lengths = [bucket.length for bucket in buckets]
    return [
        padded_rows(packed_rows(group, length), length, fill)
        for group, length in zip(by_length(documents, lengths), lengths, strict=True)
    ]


def one_per_row(
    documents: Sequence[Document], buckets: Sequence[Bucket], *, fill: int
) -> list[TokenRows]:
    """Place each document into a row of its own, in the shortest bucket that holds it."""
    lengths = [bucket.length for bucket in buckets]
    return [
        padded_rows([[document] for document in group], length, fill)
        for group, length in zip(by_length(documents, lengths), lengths, strict=True)
    ]


def by_length(documents: Sequence[Document], lengths: Sequence[int]) -> list[list[Document]]:
    """Group documents by the shortest length that holds them; longer ones join the last."""
    groups: list[list[Document]] = [[] for _ in lengths]
    for document in documents:
        size = min(len(document.ids), lengths[-1])
        groups[next(i for i, length in enumerate(lengths) if size <= length)].append(document)
    return groups


def packed_rows(documents: Sequence[Document], length: int) -> list[list[Document]]:
    """Group documents into rows of at most `length` tokens; a longer one is alone."""
    rows: list[list[Document]] = []
    open_rows: list[tuple[int, list[Document]]] = []  # (room left, row)
    for document in documents:
        size = len(document.ids)
        index = next((i for i, (room, _) in enumerate(open_rows) if room >= size), None)
        if index is None:
            rows.append([])
            open_rows = [*open_rows[-OPEN_ROWS:], (length, rows[-1])]
            index = len(open_rows) - 1
        room, row = open_rows[index]
        row.append(document)
        open_rows[index] = (room - size, row)
    return rows


def padded_rows(rows: Sequence[Sequence[Document]], length: int, fill: int) -> TokenRows:
    """Concatenate the documents of each row and pad to `length`."""
    tokens = np.full((len(rows), length), fill, np.int32)
    wanted = np.zeros((len(rows), length), bool)
    real = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        ids = np.concatenate([document.ids for document in row])[:length]
        tokens[i, : len(ids)] = ids
        wanted[i, : len(ids)] = np.concatenate([document.wanted for document in row])[:length]
        real[i, : len(ids)] = True
    return TokenRows(tokens, wanted, real)


def save(path: Path, buckets: Sequence[TokenRows]) -> None:
    """Write all buckets to one file."""
    arrays = {
        f"{i}.{field.name}": getattr(rows, field.name)
        for i, rows in enumerate(buckets)
        for field in dataclasses.fields(TokenRows)
    }
    with saved_as(path) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)


def load(path: Path) -> list[TokenRows]:
    """Return the buckets written by `save`.

    Raises:
      CheckpointError: the file is damaged.
    """
    names = [field.name for field in dataclasses.fields(TokenRows)]
    with sound(path), path.open("rb") as file, np.load(file) as arrays:
        count = len(arrays.files) // len(names)
        return [TokenRows(*(arrays[f"{i}.{name}"] for name in names)) for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Batches:
    """The rows of each step, a pure function of seed and step: resuming needs no state."""

    buckets: tuple[Bucket, ...]
    rows: tuple[TokenRows, ...]
    seed: int
    _planned: dict[int, list[tuple[int, np.ndarray]]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # the latest epoch's plan: shuffling many rows takes longer than a step

    def plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """Return (bucket, row numbers) of every batch of an epoch, without a short last batch."""
        rng = np.random.default_rng((self.seed, epoch))
        batches = []
        for i, (bucket, rows) in enumerate(zip(self.buckets, self.rows, strict=True)):
            order = rng.permutation(len(rows.tokens))
            whole = len(order) - len(order) % bucket.rows
            batches += [(i, part) for part in order[:whole].reshape(-1, bucket.rows)]
        return [batches[i] for i in rng.permutation(len(batches))]

    @property
    def per_epoch(self) -> int:
        """Batches per epoch."""
        return sum(
            len(rows.tokens) // bucket.rows
            for bucket, rows in zip(self.buckets, self.rows, strict=True)
        )

    def read(self, steps: int) -> list[np.ndarray]:
        """Return the rows of each bucket that the first steps read."""
        seen = [np.zeros(len(rows.tokens), bool) for rows in self.rows]
        for step in range(steps):
            i, chosen = self.chosen(step)
            seen[i][chosen] = True
        return [np.flatnonzero(rows) for rows in seen]

    def chosen(self, step: int) -> tuple[int, np.ndarray]:
        """Return the bucket and the row numbers of a step."""
        epoch, number = divmod(step, self.per_epoch)
        if epoch not in self._planned:
            self._planned.clear()
            self._planned[epoch] = self.plan(epoch)
        return self._planned[epoch][number]

    def at(self, step: int) -> tuple[int, TokenRows]:
        """Return the bucket and the rows of a step."""
        i, chosen = self.chosen(step)
        rows = self.rows[i]
        return i, TokenRows(rows.tokens[chosen], rows.wanted[chosen], rows.real[chosen])


def pieces(ids: np.ndarray, length: int) -> Iterator[Document]:
    """Yield consecutive pieces of token ids; a last one shorter than a quarter is dropped."""
    for start in range(0, len(ids), length):
        part = ids[start : start + length]
        if len(part) * 4 >= length:
            yield Document(part, np.ones(len(part), bool))
