"""Hugging Face weight folders: one model.safetensors or shards, plain or quantised."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.config.fields import Fields, has_file, read_json
from dflash_jax.converters import hf_grouped
from dflash_jax.converters.hf_grouped import WIDTHS, GroupedSource
from dflash_jax.converters.quants.decoders import E2M1_TABLES, halved_power
from dflash_jax.converters.safetensors import SafetensorsFile, open_safetensors
from dflash_jax.converters.source import DecodedSource, Rows, TensorSource
from dflash_jax.errors import CheckpointError, ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # a low-rank adapter, to be added to another model
ADAPTER_ADVICE = "it holds an adapter: give its base model, and this folder as --lora or lora="


class ShardedSafetensors:
    """Shards, presented as one `TensorSource`."""

    def __init__(self, path: Path, home: dict[str, SafetensorsFile], notes: tuple[str, ...]):
        self.path = path
        self.notes = notes
        self._home = home

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, in file order."""
        return tuple(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost axis first."""
        return self._shard(name).shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of `read`."""
        return self._shard(name).dtype(name)

    def kind(self, name: str) -> str:
        """Return the stored type, as its format spells it."""
        return self._shard(name).kind(name)

    def nbytes(self, name: str) -> int:
        """Return the number of bytes in the file."""
        return self._shard(name).nbytes(name)

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor."""
        return self._shard(name).read(name)

    def read_rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        return self._shard(name).read_rows(name, rows)

    def _shard(self, name: str) -> SafetensorsFile:
        try:
            return self._home[name]
        except KeyError:
            raise CheckpointError(f"no shard of {self.path} holds a tensor {name!r}") from None


def open_directory(path: str | Path) -> TensorSource:
    """Open the weights of a folder, in one file or in shards.

    Raises:
      CheckpointError: the folder holds no weights, or its shards do not fit their index.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give one that holds {SINGLE}")
    if has_file(path / SINGLE):  # takes precedence over an index, as in transformers
        return open_safetensors(path / SINGLE)
    if has_file(path / INDEX):
        return _open_sharded(path)
    raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}; {_instead(path)}")


def ignored_index(path: Path) -> str:
    """Return a warning about shards that are not read, as a single file has precedence, or ""."""
    if not (has_file(path / SINGLE) and has_file(path / INDEX)):
        return ""
    shards = set(_read_index(path / INDEX)[0].values()) - {SINGLE}
    if not shards:
        return ""
    return (
        f"{path / SINGLE} is read, and the {len(shards)} shards that {INDEX} names are not: remove"
        " the one that is out of date"
    )


def _instead(path: Path) -> str:
    """Return advice for a folder that has no weights under their usual name."""
    names = sorted(p.name for p in path.iterdir())
    if ADAPTER in names:
        return ADAPTER_ADVICE
    if other := [name for name in names if name.endswith(".safetensors")]:
        return f"rename {other[0]} if it holds all weights, or fetch the index of the shards"
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth"))]:
        return f"{pickles[0]} is a pickle, which is never opened: fetch the safetensors files"
    return "fetch one of them, or give the folder that does"


def _open_sharded(path: Path) -> ShardedSafetensors:
    weight_map, total = _read_index(path / INDEX)
    present = {place.name for place in path.iterdir()}
    shards: dict[str, SafetensorsFile] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or file in {".", ".."} or "\\" in file or "\0" in file:
            raise CheckpointError(
                f"{path / INDEX} names the shard {file!r}; a shard must be a plain file name"
            )
        if file not in present:  # compared by name, which may be too long for a path
            raise CheckpointError(f"{path} lacks the shard {file}; fetch it again")
        shards[file] = open_safetensors(path / file)
    _check_map(path, weight_map, shards)
    stored = sum(shard.nbytes(name) for shard in shards.values() for name in shard.names())
    notes = () if total in (None, stored) else (f"index says {total} bytes, shards hold {stored}",)
    return ShardedSafetensors(path, {n: shards[f] for n, f in weight_map.items()}, notes)


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); fetch it again") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or any(type(v) is not str for v in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map of tensor to file; fetch it again")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total


def _check_map(path: Path, weight_map: dict[str, str], shards: dict[str, SafetensorsFile]) -> None:
    stored: dict[str, str] = {}
    for file, shard in shards.items():
        for name in shard.names():
            if name in stored:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is in {stored[name]} and in {file}; keep one"
                )
            stored[name] = file
    wrong = sorted(n for n in set(weight_map) | set(stored) if weight_map.get(n) != stored.get(n))
    if wrong:
        lines = [
            f"  {n}: index says {weight_map.get(n, 'nothing')}, found in {stored.get(n, 'none')}"
            for n in wrong
        ]
        raise CheckpointError(
            f"{path / INDEX} and the shards disagree on {len(wrong)} tensors; fetch them again\n"
            + "\n".join(lines[:50])
        )


# Quantised Hugging Face weights, decoded on reading: FP8 and INT8 with scales, and MXFP4.
#
# AWQ, GPTQ and packed compressed-tensors are in `hf_grouped`. Rows are decoded when they are read,
# with float32 products.


# Files of folders whose config.json has no quantization_config, and their usual method.
OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
PACK_QUANTIZED = "pack-quantized"
AWQ_VERSIONS = {"gemm": hf_grouped.AWQ_GEMM, "gemv": hf_grouped.AWQ_GEMV}
GPTQ_VERSIONS = {"gptq": hf_grouped.GPTQ, "gptq_v2": hf_grouped.GPTQ_V2}

SCALED_KINDS = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
SCALE_NAMES = ("_scale_inv", "_scale")  # both multiply, despite the first name
ACTIVATION_SCALES = (".input_scale", ".k_scale", ".v_scale", ".activation_scale")
COMPRESSED_FORMATS = frozenset({"float-quantized", "int-quantized", "naive-quantized"})
BLOCKS, SCALES = "_blocks", "_scales"


def quantization(fields: dict[str, Any], folder: Path) -> Any:
    """Take the quantisation settings out of config.json, or read them from their own file.

    Raises:
      CheckpointError, ConfigError: that file cannot be read.
    """
    found = [fields.pop(key, None) for key in ("quantization_config", "compression_config")]
    settings = next((value for value in found if value is not None), None)
    for name, method in OWN_FILES.items():
        if settings is None and has_file(folder / name):
            settings = {"quant_method": method} | read_json(folder / name)
    return settings


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
    fields = Fields(dict(settings), f"{where}: quantization_config")
    if method == "mxfp4":
        return MicroScaled(source)
    if method == "fp8" or (method == "compressed-tensors" and str(form) in COMPRESSED_FORMATS):
        return Scaled(source, _block_shape(settings, where))
    if method == "awq":
        return _awq(source, fields)
    if method == "gptq":
        return _gptq(source, fields)
    if method == "compressed-tensors" and form == PACK_QUANTIZED:
        _check_groups(fields)
        return GroupedSource(source, hf_grouped.COMPRESSED, bits=None, group=None)
    formats = ", ".join(sorted({*COMPRESSED_FORMATS, PACK_QUANTIZED}))
    raise ConfigError(
        f"{where}: weights quantised by {method!r} (format {form!r}) are not supported; fp8, mxfp4,"
        f" awq, gptq and compressed-tensors {formats} are. Use the original weights"
    )


def _awq(source: TensorSource, fields: Fields) -> GroupedSource:
    version = str(fields.get("version") or fields.get("format") or "gemm").lower()
    if version not in AWQ_VERSIONS:
        raise ConfigError(
            f"{fields.where}: version is {version!r}; AWQ versions {' and '.join(AWQ_VERSIONS)} are"
            " supported. Use the original weights, or a folder of such a version"
        )
    bits = fields.integer("bits", fields.integer("w_bit", 4))
    if bits != 4:
        raise ConfigError(f"{fields.where}: bits is {bits}; AWQ weights have 4")
    group = _group_size(fields, "group_size", "q_group_size")
    return GroupedSource(source, AWQ_VERSIONS[version], bits=bits, group=group)


def _gptq(source: TensorSource, fields: Fields) -> GroupedSource:
    version = str(fields.get("checkpoint_format") or fields.get("format") or "gptq").lower()
    version = "marlin" if fields.get("is_marlin_format") else version
    if version not in GPTQ_VERSIONS:
        raise ConfigError(
            f"{fields.where}: checkpoint_format is {version!r}; {' and '.join(GPTQ_VERSIONS)} are"
            " supported. Use the original weights, or a folder of such a format"
        )
    bits = _supported(fields.integer("bits"), fields, "bits")
    # Overrides for single modules may name other bits, which the shapes then tell.
    own = None if fields.get("dynamic") else bits
    group = _group_size(fields, "group_size")
    return GroupedSource(source, GPTQ_VERSIONS[version], bits=own, group=group)


def _check_groups(fields: Fields) -> None:
    """Check that all groups of modules have packed integer weights, and nothing else is done."""
    if fields.get("transform_config"):
        raise ConfigError(
            f"{fields.where}: transform_config asks for rotations that are not supported; use"
            " weights that were quantised without"
        )
    if fields.inner("sparsity_config").get("format", "dense") != "dense":
        raise ConfigError(
            f"{fields.where}: sparse weights are not supported; use the original weights"
        )
    groups = fields.inner("config_groups")
    for name in groups.values:
        group = groups.inner(name)
        group.must_be("format", PACK_QUANTIZED)
        weights = group.inner("weights")
        weights.must_be("type", "int")
        weights.must_be("strategy", "group", "channel", "tensor")
        _supported(weights.integer("num_bits"), weights, "num_bits")


def _supported(bits: int, fields: Fields, name: str) -> int:
    if bits not in WIDTHS:
        widths = ", ".join(map(str, WIDTHS))
        raise ConfigError(
            f"{fields.where}: {name} is {bits}; supported are {widths}. Use the original weights"
        )
    return bits


def _group_size(fields: Fields, *names: str) -> int:
    """Return the inputs that share a scale; -1 for all of them."""
    size = next((fields.integer(name) for name in names if fields.get(name) is not None), 128)
    if size < 1 and size != -1:
        raise ConfigError(
            f"{fields.where}: {names[0]} is {size}; expected a positive number, or -1 for one group"
        )
    return size


def _block_shape(settings: Mapping[str, Any], where: str) -> tuple[int, int]:
    block = settings.get("weight_block_size") or [1, 1]
    good = isinstance(block, list) and len(block) == 2
    if not good or not all(type(b) is int and b > 0 for b in block):
        raise ConfigError(
            f"{where}: weight_block_size is {block!r}; expected two positive integers"
        )
    return block[0], block[1]


class Scaled(DecodedSource):
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


class MicroScaled(DecodedSource):
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
