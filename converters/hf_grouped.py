"""Hugging Face weights packed by AWQ, GPTQ and compressed-tensors, decoded or rearranged."""

import numpy as np

from dflash_jax.converters.hf_layouts import (
    WEIGHT_SHAPE,
    WORD,
    PackedLinear,
    WordLayout,
    described,
)
from dflash_jax.converters.source import DecodedSource, Rows, TensorSource
from dflash_jax.errors import CheckpointError
from dflash_jax.quant.layouts import RUN, Arrays, fits, join

# Place of each of eight outputs in a word of AWQ's gemm layout.
INTERLEAVED = np.array([0, 4, 1, 5, 2, 6, 3, 7])
SYMMETRIC = {4: "Q4_0", 8: "Q8_0"}  # packed formats by bits
WITH_ZEROS = {4: "int4z"}


class GroupedSource(DecodedSource):
    """Integers with a scale for each group of inputs, decoded to `.weight`.

    Args:
      bits: bits of a code; None to find them by the shapes.
      group: inputs of a group; -1 for all of them, None to find them by the shapes.

    Raises:
      CheckpointError: tensors of a matrix are missing or do not fit one another.
    """

    def __init__(
        self, source: TensorSource, layout: WordLayout, *, bits: int | None, group: int | None
    ):
        self._layout = layout
        self._linears: dict[str, PackedLinear] = {}
        names, hidden, decoded = set(source.names()), set(), {}
        codes = layout.tensors[0]
        for name in source.names():
            stem = name.removesuffix(codes)
            if stem == name or not stem.endswith("."):
                continue
            weight = f"{stem}weight"
            if weight in names:
                raise CheckpointError(f"{name} and {weight} are the same matrix; keep one of them")
            self._linears[weight] = described(source, layout, stem, names, bits=bits, group=group)
            decoded[weight] = name
            hidden |= {f"{stem}{tensor}" for tensor in (*layout.tensors, WEIGHT_SHAPE)}
        super().__init__(source, decoded, hidden)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost axis first."""
        found = self._linears.get(name)
        return self._source.shape(name) if found is None else found.shape

    def kind(self, name: str) -> str:
        """Return the stored type; INT4 and the like for decoded matrices."""
        found = self._linears.get(name)
        return self._source.kind(name) if found is None else f"INT{found.bits}"

    def packed_kind(self, name: str) -> str:
        """Return the packed format that holds exactly a matrix, or "".

        Its groups must be neighbouring inputs, and float16 must hold its scales.
        """
        found = self._linears.get(name)
        if found is None or found.order is not None or found.group % RUN:
            return ""
        everything = slice(0, found.shape[0])
        middle = (self._zeros(found, everything) == 1 << found.bits - 1).all()
        kind = (SYMMETRIC if middle else WITH_ZEROS).get(found.bits, "")
        if not kind or not fits(kind, found.shape[1]):
            return ""
        scales = self._scales(found, everything)
        with np.errstate(over="ignore"):
            return kind if np.array_equal(scales, scales.astype(np.float16)) else ""

    def packed(self, name: str) -> Arrays:
        """Return the packed arrays [rows along in, out] of a matrix that has a packed kind."""
        found = self._linears[name]
        everything = slice(0, found.shape[0])
        codes = np.ascontiguousarray(self._codes(found, everything).T)
        joined = join(codes, 2) if found.bits == 4 else (codes ^ np.uint8(128)).view(np.int8)
        groups: Arrays = {"scale": self._scales(found, everything).astype(np.float16)}
        if self.packed_kind(name) in WITH_ZEROS.values():
            groups["zero"] = self._zeros(found, everything).astype(np.uint8)
        spread = {key: np.repeat(a.T, found.group // RUN, axis=0) for key, a in groups.items()}
        return {"codes": joined, **spread}

    def _decode(self, name: str, rows: Rows) -> np.ndarray:
        found = self._linears[name]
        values = self._codes(found, rows).astype(np.float32)
        scales, zeros = self._scales(found, rows), self._zeros(found, rows).astype(np.float32)
        if found.order is not None:
            values -= zeros[:, found.order]
            values *= scales[:, found.order]
            return values
        groups = values.reshape(len(values), found.groups, found.group)
        groups -= zeros[..., None]
        groups *= scales[..., None]
        return values

    def _codes(self, linear: PackedLinear, rows: Rows) -> np.ndarray:
        words = self._words(linear, self._layout.tensors[0])
        return self._unpacked(words, linear, rows, linear.shape[1], self._layout.codes_by_output)

    def _zeros(self, linear: PackedLinear, rows: Rows) -> np.ndarray:
        """Return zero points, integers [rows, groups]."""
        bits, name = linear.bits, f"{linear.stem}{self._layout.tensors[2]}"
        middle = 1 << bits - 1
        if not linear.zeros:
            count = len(range(linear.shape[0])[rows] if isinstance(rows, slice) else rows)
            return np.full((count, linear.groups), middle)
        if self._source.kind(name) == "I8":  # early compressed-tensors did not pack them
            return self._source.read(name).reshape(-1, linear.groups)[rows].astype(int) + middle
        words, offset = self._words(linear, self._layout.tensors[2]), self._layout.zero_offset
        if offset and WORD % bits == 0:
            # Writers subtract from whole words, so that a field of 0 borrows from the next one.
            words = words + np.uint32(sum(offset << i for i in range(0, WORD, bits)))
            offset = 0
        zeros = self._unpacked(words, linear, rows, linear.groups, self._layout.zeros_by_output)
        return zeros + np.uint8(offset) & np.uint8((1 << bits) - 1)

    def _scales(self, linear: PackedLinear, rows: Rows) -> np.ndarray:
        """Return scales, float32 [rows, groups]."""
        scales = self._source.read(f"{linear.stem}{self._layout.tensors[1]}")
        scales = scales.T if self._layout.outputs_last else scales
        if scales.size == 1:
            scales = np.broadcast_to(scales.reshape(1, 1), (linear.shape[0], 1))
        return scales.reshape(linear.shape[0], -1)[rows, : linear.groups].astype(np.float32)

    def _words(self, linear: PackedLinear, tensor: str) -> np.ndarray:
        """Return the words of a tensor, with the axis of the outputs first."""
        words = self._source.read(f"{linear.stem}{tensor}").view(np.uint32)
        return words.T if self._layout.outputs_last else words

    def _unpacked(
        self, words: np.ndarray, linear: PackedLinear, rows: Rows, count: int, by_output: bool
    ) -> np.ndarray:
        """Return chosen rows of packed values as bytes [rows, count]."""
        if not by_output:
            return unpacked(words[rows], linear.bits)[:, :count]
        chosen = np.arange(linear.shape[0])[rows]
        if not len(chosen):
            return np.empty((0, count), np.uint8)
        # 32 values fill whole words, whatever their width.
        first = int(chosen.min()) // WORD
        words = words[first * linear.bits : (int(chosen.max()) // WORD + 1) * linear.bits]
        columns = chosen - first * WORD
        if self._layout.interleaved:
            columns = columns // 8 * 8 + INTERLEAVED[columns % 8]
        return unpacked(words.T, linear.bits).T[columns, :count]


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the values in rows of 32-bit words, as bytes; from the lowest bit on."""
    parts = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return parts
    if bits == 3:  # eight values in three bytes, looked up by half of their bits
        parts = np.pad(parts, ((0, 0), (0, -parts.shape[1] % 3))).astype(np.uint16)
        first, second, third = parts[:, ::3], parts[:, 1::3], parts[:, 2::3]
        halves = first | (second & 15) << 8, second >> 4 | third << 4
        parts = np.stack(halves, axis=-1).reshape(len(parts), 2 * first.shape[1])
    return TABLES[bits][parts].view(np.uint8)


def _table(bits: int, width: int) -> np.ndarray:
    """Return the values in each number of `width` bits, as the bytes of one integer."""
    numbers, starts = np.arange(1 << width)[:, None], np.arange(0, width, bits)
    values = (numbers >> starts & (1 << bits) - 1).astype(np.uint8)
    return values.view(f"u{len(starts)}")[:, 0]


TABLES = {2: _table(2, 8), 3: _table(3, 12), 4: _table(4, 8)}
