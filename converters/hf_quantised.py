"""Quantised Hugging Face weights, decoded on reading: FP8 and INT8 with scales, and MXFP4.

Rows are decoded when they are read, with float32 products.
"""

import abc
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.converters.quants.codebooks import E2M1_TABLES, halved_power
from dflash_jax.converters.source import Rows, TensorSource
from dflash_jax.errors import CheckpointError, ConfigError

SCALED_KINDS = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
SCALE_NAMES = ("_scale_inv", "_scale")  # both multiply, despite the first name
ACTIVATION_SCALES = (".input_scale", ".k_scale", ".v_scale", ".activation_scale")
COMPRESSED_FORMATS = frozenset({"float-quantized", "int-quantized", "naive-quantized"})
BLOCKS, SCALES = "_blocks", "_scales"


def dequantised(source: TensorSource, settings: Any, *, where: str) -> TensorSource:
    """Return the source with its weights decoded according to `quantization_config`.

    Raises:
      ConfigError: the quantisation is not supported.
      CheckpointError: a scale does not fit its weights.
    """
    if settings is None:
        return source
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}: quantization_config is {settings!r}; expected an object")
    method, form = settings.get("quant_method"), settings.get("format")
    if method == "mxfp4":
        return MicroScaled(source)
    if method == "fp8" or (method == "compressed-tensors" and form in COMPRESSED_FORMATS):
        return Scaled(source, _block_shape(settings, where))
    raise ConfigError(
        f"{where}: weights quantised by {method!r} (format {form!r}) are not supported; fp8, mxfp4"
        f" and compressed-tensors {', '.join(sorted(COMPRESSED_FORMATS))} are. Use the original"
        " weights"
    )


def _block_shape(settings: Mapping[str, Any], where: str) -> tuple[int, int]:
    block = settings.get("weight_block_size") or [1, 1]
    good = isinstance(block, list) and len(block) == 2
    if not good or not all(type(b) is int and b > 0 for b in block):
        raise ConfigError(
            f"{where}: weight_block_size is {block!r}; expected two positive integers"
        )
    return block[0], block[1]


class _Wrapped(abc.ABC):
    """A source with some tensors decoded and the others unchanged."""

    def __init__(self, source: TensorSource, decoded: dict[str, str], hidden: set[str]):
        self._source, self._decoded = source, decoded  # name: stored name
        self._names = [n for n in source.names() if n not in hidden]
        self._names += [n for n in decoded if n not in set(self._names)]

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name in self._decoded else self._source.dtype(name)

    def kind(self, name: str) -> str:
        return self._source.kind(self._decoded.get(name, name))

    def nbytes(self, name: str) -> int:
        return self._source.nbytes(self._decoded.get(name, name))

    def read(self, name: str) -> np.ndarray:
        if name not in self._decoded:
            return self._source.read(name)
        shape = self.shape(name)
        rows = math.prod(shape[:-1])
        return self.read_rows(name, slice(0, rows)).reshape(shape)

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        if name not in self._decoded:
            return self._source.read_rows(name, rows)
        return self._decode(name, rows)

    @abc.abstractmethod
    def _decode(self, name: str, rows: Rows) -> np.ndarray:
        """Return rows of a decoded tensor as float32 [rows, last axis]."""


class Scaled(_Wrapped):
    """One-byte weights with a scale for the tensor, for each row, or for each block."""

    def __init__(self, source: TensorSource, block: tuple[int, int]):
        names = set(source.names())
        decoded, hidden = {}, {n for n in names if n.endswith(ACTIVATION_SCALES)}
        self._block = block
        self._scales: dict[str, str] = {}
        for name in source.names():
            if source.kind(name) not in SCALED_KINDS:
                continue
            scale = next((f"{name}{s}" for s in SCALE_NAMES if f"{name}{s}" in names), None)
            if scale is None or len(source.shape(name)) != 2:
                raise CheckpointError(
                    f"{name} is {source.kind(name)} {list(source.shape(name))} without a scale"
                    f" ({name}{' or '.join(SCALE_NAMES)}); the weights are incomplete"
                )
            decoded[name], self._scales[name] = name, scale
            hidden.add(scale)
            self._check(source, name, scale)
        super().__init__(source, decoded, hidden)

    def _check(self, source: TensorSource, name: str, scale: str) -> None:
        (rows, columns), found = source.shape(name), source.shape(scale)
        allowed = [(), (1,), (rows, 1), (rows,), (1, 1)]
        down, across = self._block
        allowed.append((-(-rows // down), -(-columns // across)))
        if found not in allowed:
            raise CheckpointError(
                f"{scale} has the shape {list(found)}, which fits neither {name}"
                f" {[rows, columns]} nor its blocks {self._block}"
            )

    def _decode(self, name: str, rows: Rows) -> np.ndarray:
        values = self._source.read_rows(name, rows).astype(np.float32)
        scale = self._source.read(self._scales[name]).astype(np.float32)
        if scale.size == 1:
            return values * scale.reshape(())
        height, width = self._source.shape(name)
        chosen = np.arange(height)[rows]
        if scale.shape in ((height,), (height, 1)):
            return values * scale.reshape(-1, 1)[chosen]
        down, across = self._block
        by_column = np.repeat(scale[chosen // down], across, axis=1)
        return values * by_column[:, :width]


class MicroScaled(_Wrapped):
    """MXFP4 as gpt-oss publishes it: [E, out, in / 32, 16] bytes and a power of two for each 16.

    Element 2i is in the low nibble of byte i, 2i + 1 in the high one. Presented like the experts
    of unquantised files: [E, in, out].
    """

    def __init__(self, source: TensorSource):
        names = set(source.names())
        decoded, hidden = {}, set()
        for name in source.names():
            stem = name.removesuffix(BLOCKS)
            if stem == name or source.kind(name) != "U8":
                continue
            shape, scales = source.shape(name), f"{stem}{SCALES}"
            whole = scales in names and len(shape) == 4 and shape[-1] == 16
            if not whole or source.shape(scales) != shape[:-1]:
                raise CheckpointError(
                    f"{name} {list(shape)} needs {scales} of shape {list(shape[:-1])}, experts,"
                    " rows, blocks and 16 bytes to a block; the weights are incomplete"
                )
            decoded[stem] = name
            hidden |= {name, scales}
        super().__init__(source, decoded, hidden)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost axis first."""
        if name not in self._decoded:
            return self._source.shape(name)
        experts, out, blocks, _ = self._source.shape(self._decoded[name])
        return experts, blocks * 32, out

    def _decode(self, name: str, rows: Rows) -> np.ndarray:
        experts, into, out = self.shape(name)
        chosen = np.arange(experts * into)[rows]
        packed = self._source.read(self._decoded[name])  # [E, out, blocks, 16]
        exponents = self._source.read(f"{name}{SCALES}")
        found = np.empty((len(chosen), out), np.float32)
        order = np.argsort(chosen, kind="stable")
        blocks, starts = np.unique(chosen[order] // 32, return_index=True)
        for block, places in zip(blocks, np.split(order, starts[1:]), strict=False):
            expert, block = divmod(block, into // 32)
            values = _inputs_first(packed[expert, :, block])
            values *= halved_power(exponents[expert, :, block])
            found[places] = values[chosen[places] % 32]
        return found


def _inputs_first(packed: np.ndarray) -> np.ndarray:
    """Return doubled values, float32 [32, out], from bytes [out, 16] of one block an output."""
    codes = packed.T.tobytes()
    low, high = (np.frombuffer(codes.translate(table), np.int8) for table in E2M1_TABLES)
    values = np.stack([low.reshape(16, -1), high.reshape(16, -1)], axis=1)
    return values.reshape(32, -1).astype(np.float32)
