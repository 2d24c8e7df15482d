"""MLX's quantised matrices: groups of codes with a scale and a bias each, read and written.

A weight is scale · code + bias, with a scale and a bias for each output and group of inputs. The
codes of a row, of 2, 3, 4, 5, 6 or 8 bits, are one stream from the lowest bit on, in 32-bit words.
Facts: mlx 0.32.4, mlx-lm 0.32.2.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_jax.converters.formats.safetensors import Planned
from dflash_jax.converters.formats.source import Rows, TensorSource
from dflash_jax.converters.hf_grouped import WORD, PackedSource, unpacked
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.quant.layouts import KINDS, Arrays, fits, join

WIDTHS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
WEIGHT = "weight"
SCALES = "scales"
BIASES = "biases"
# Names of experts in mlx-lm, and in transformers.
STACK = "switch_mlp."
EXPERTS = "experts."
WRITTEN_WIDTHS = (4, 8)
SMALLEST = 1e-7  # scale of a group whose weights are equal
CHUNK = 1 << 20  # weights that are quantised at a time


@dataclass(frozen=True)
class AffineMatrix:
    """One stored matrix [outputs, inputs], or that of one expert in a stack of them."""

    stem: str  # the module's name and a dot
    shape: tuple[int, int]
    bits: int
    group: int
    expert: int | None = None


class AffineSource(PackedSource):
    """Matrices of MLX, decoded under the names of transformers.

    Args:
      settings: the config's `quantization`: the usual group size, and those of modules by name.

    Raises:
      CheckpointError: tensors of a matrix are missing or do not fit one another.
      ConfigError: a setting is not supported.
    """

    def __init__(self, source: TensorSource, settings: Mapping[str, Any]):
        names = set(source.names())
        self._matrices: dict[str, AffineMatrix] = {}
        decoded: dict[str, str] = {}
        hidden: set[str] = set()
        for name in source.names():
            stem = name.removesuffix(SCALES)
            if stem == name or not stem.endswith(".") or f"{stem}{WEIGHT}" not in names:
                continue
            own = settings.get(stem[:-1], settings)
            if not isinstance(own, Mapping):
                own = settings
            hidden |= {f"{stem}{part}" for part in (WEIGHT, SCALES, BIASES)}
            for matrix in _described(source, stem, names, own):
                spelt = stem
                if matrix.expert is not None:
                    spelt = stem.replace(STACK, f"{EXPERTS}{matrix.expert}.")
                self._matrices[f"{spelt}{WEIGHT}"] = matrix
                decoded[f"{spelt}{WEIGHT}"] = f"{stem}{WEIGHT}"
        super().__init__(source, decoded, hidden)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost axis first."""
        matrix = self._matrices.get(name)
        return self._source.shape(name) if matrix is None else matrix.shape

    def kind(self, name: str) -> str:
        """Return the stored type; INT4 and the like for decoded matrices."""
        matrix = self._matrices.get(name)
        return self._source.kind(name) if matrix is None else f"INT{matrix.bits}"

    def nbytes(self, name: str) -> int:
        """Return the number of bytes in the file, without scales."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._source.nbytes(name)
        return math.prod(matrix.shape) * matrix.bits // 8

    def packed_kind(self, name: str) -> str:
        """Return the packed format that holds exactly a matrix, or ""."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return ""
        scales, biases = self._groups(matrix, slice(0, matrix.shape[0]))
        with np.errstate(over="ignore"):
            halves = all(np.array_equal(x, x.astype(np.float16)) for x in (scales, biases))
        if matrix.bits <= 4 and halves and fits("Q4_1", matrix.shape[1]):
            return "Q4_1"
        low = self._low(matrix, scales, biases)
        exact = matrix.bits < 8 or np.array_equal(low, low.astype(np.float32))
        return "int8_16_low" if exact and fits("int8_16_low", matrix.shape[1]) else ""

    def packed(self, name: str) -> Arrays:
        """Return the packed arrays [rows along in, out] of a matrix that has a packed kind."""
        matrix = self._matrices[name]
        kind = KINDS[self.packed_kind(name)]
        every = slice(0, matrix.shape[0])
        codes = np.ascontiguousarray(self._codes(matrix, every).T)
        scales, biases = self._groups(matrix, every)
        if kind.spread == 2:
            joined = join(codes, 2)
        else:
            joined = (codes ^ np.uint8(_middle(matrix))).view(np.int8)
        arrays: Arrays = {"codes": joined}
        low = self._low(matrix, scales, biases) if kind.spread == 1 else -biases
        for key, values in {"scale": scales, "low": low}.items():
            spread = np.repeat(values.T, matrix.group // kind.group, axis=0)
            arrays[key] = spread.astype(kind.scales)
        return arrays

    def _low(self, matrix: AffineMatrix, scales: np.ndarray, biases: np.ndarray) -> np.ndarray:
        """Return what is subtracted from scaled signed codes, exactly, float64 [rows, groups]."""
        return -(biases.astype(np.float64) + _middle(matrix) * scales.astype(np.float64))

    def _decode(self, name: str, rows: Rows) -> np.ndarray:
        matrix = self._matrices[name]
        codes = self._codes(matrix, rows).astype(np.float32)
        scales, biases = self._groups(matrix, rows)
        groups = codes.reshape(len(codes), -1, matrix.group)
        groups *= scales[..., None]
        groups += biases[..., None]
        return codes

    def _codes(self, matrix: AffineMatrix, rows: Rows) -> np.ndarray:
        words = self._part(matrix, WEIGHT)[rows]
        return unpacked(words, matrix.bits)

    def _groups(self, matrix: AffineMatrix, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Return the scales and biases of rows, float32 [rows, groups]."""
        scales = self._part(matrix, SCALES)[rows].astype(np.float32)
        biases = self._part(matrix, BIASES)[rows].astype(np.float32)
        return scales, biases

    def _part(self, matrix: AffineMatrix, part: str) -> np.ndarray:
        whole = self._source.read(f"{matrix.stem}{part}")
        return whole if matrix.expert is None else whole[matrix.expert]


def _middle(matrix: AffineMatrix) -> int:
    """Return what is subtracted from codes to have them in signed bytes."""
    return 128 if matrix.bits == 8 else 0


def _described(
    source: TensorSource, stem: str, names: set[str], settings: Mapping[str, Any]
) -> list[AffineMatrix]:
    """Return a matrix, or those of a stack of experts, after a check that their tensors fit."""
    name = f"{stem}{WEIGHT}"
    if f"{stem}{BIASES}" not in names:
        raise CheckpointError(f"{name} lacks {stem}{BIASES}; the weights are incomplete")
    shapes = [source.shape(f"{stem}{part}") for part in (WEIGHT, SCALES, BIASES)]
    group = settings.get("group_size")
    if type(group) is not int or group not in GROUPS:
        raise ConfigError(
            f"{name}: group_size is {group!r}; supported are {', '.join(map(str, GROUPS))}"
        )
    if settings.get("mode", "affine") != "affine":
        raise ConfigError(
            f"{name}: the quantization mode {settings['mode']!r} of MLX is not supported; affine"
            " is. Use the original weights"
        )
    words = shapes[0][-1]
    groups = shapes[1][-1]
    bits, rest = divmod(words * WORD, max(groups * group, 1))
    alike = shapes[0][:-1] == shapes[1][:-1] and shapes[1] == shapes[2]
    stacked = STACK in stem and len(shapes[0]) == 3
    if (
        source.kind(name) != "U32"
        or not alike
        or rest
        or bits not in WIDTHS
        or settings.get("bits", bits) != bits
        or not (stacked or len(shapes[0]) == 2)
        or 0 in shapes[0]
    ):
        raise CheckpointError(
            f"{name} is {source.kind(name)} {list(shapes[0])}, its scales {list(shapes[1])} and"
            f" biases {list(shapes[2])}; expected 32-bit words for groups of {group} codes of"
            f" {', '.join(map(str, WIDTHS))} bits: fetch the weights again"
        )
    shape = (shapes[0][-2], groups * group)
    experts: Sequence[int | None] = range(shapes[0][0]) if stacked else (None,)
    return [AffineMatrix(stem, shape, bits, group, expert) for expert in experts]


# Writing.


@dataclass(frozen=True)
class MlxForm:
    """How the matrices of a model are quantised for MLX."""

    bits: int = 4
    group: int = 64
    library = "mlx"

    def check(self) -> None:
        """Check the numbers.

        Raises:
          ConfigError: MLX has no such form, or it is not written.
        """
        if self.bits not in WRITTEN_WIDTHS or self.group not in GROUPS:
            raise ConfigError(
                f"MLX weights of {self.bits} bits in groups of {self.group}: written are"
                f" {' and '.join(map(str, WRITTEN_WIDTHS))} bits, in groups of"
                f" {', '.join(map(str, GROUPS))}"
            )

    @property
    def fields(self) -> dict[str, Any]:
        """The settings in config.json, under both names that readers look for."""
        settings = {"group_size": self.group, "bits": self.bits, "mode": "affine"}
        return {"quantization": settings, "quantization_config": settings}

    def takes(self, planned: Planned) -> bool:
        """Return whether a tensor is quantised: matrices whose rows groups divide."""
        matrix = len(planned.shape) == 2 and planned.name.endswith(f".{WEIGHT}")
        return matrix and planned.shape[-1] % self.group == 0

    def planned(self, tensor: Planned) -> list[Planned]:
        """Return the tensors that a quantised matrix becomes."""
        out, into = tensor.shape
        stem = tensor.name.removesuffix(WEIGHT)
        groups = (out, into // self.group)
        return [
            Planned(f"{stem}{WEIGHT}", np.dtype(np.uint32), (out, into * self.bits // WORD)),
            Planned(f"{stem}{SCALES}", tensor.dtype, groups),
            Planned(f"{stem}{BIASES}", tensor.dtype, groups),
        ]

    def quantise(
        self, tensors: TensorSource, name: str, dtype: np.dtype, pool: Executor
    ) -> list[np.ndarray]:
        """Return the words, scales and biases of a matrix.

        Raises:
          CheckpointError: a weight is not finite, or too large for the scales' dtype.
        """
        out, into = tensors.shape(name)
        words = np.empty((out, into * self.bits // WORD), np.uint32)
        scales = np.empty((out, into // self.group), dtype)
        biases = np.empty_like(scales)
        step = max(1, CHUNK // into)

        def run(start: int) -> None:
            rows = slice(start, min(start + step, out))
            values = tensors.read_rows(name, rows).astype(np.float32)
            words[rows], scales[rows], biases[rows] = quantised(values, self, dtype)

        for _ in pool.map(run, range(0, out, step)):
            pass
        if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
            raise CheckpointError(
                f"{name} holds values that are NaN, infinite or too large for {dtype}; fetch the"
                " weights again, or choose bfloat16"
            )
        return [words, scales, biases]


def quantised(
    values: np.ndarray, form: MlxForm, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the words, scales and biases of float32 rows.

    The weight of a group that is farthest from zero is met, and zero has a code, as in MLX; codes
    are those of the rounded scales and biases.
    """
    most = (1 << form.bits) - 1
    groups = values.reshape(len(values), -1, form.group)
    low = groups.min(axis=-1)
    high = groups.max(axis=-1)
    below = np.abs(low) > np.abs(high)
    with np.errstate(invalid="ignore", over="ignore"):
        scale = np.maximum((high - low) / most, SMALLEST)
        scale = np.where(below, scale, -scale)
        edge = np.where(below, low, high)
        start = np.rint(edge / scale)
        scale = np.where(start == 0, scale, edge / np.where(start == 0, 1, start)).astype(dtype)
        bias = np.where(start == 0, 0, edge).astype(dtype)
        by = scale.astype(np.float32)[..., None]
        codes = np.rint((groups - bias.astype(np.float32)[..., None]) / np.where(by == 0, 1, by))
        codes = np.clip(np.nan_to_num(codes), 0, most).astype(np.uint8).reshape(len(values), -1)
    if form.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return np.ascontiguousarray(codes).view(np.uint32), scale, bias
