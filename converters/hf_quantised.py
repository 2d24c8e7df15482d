"""Quantised Hugging Face weights, decoded on reading: FP8 and INT8 with scales, and MXFP4.

AWQ, GPTQ and packed compressed-tensors are in `hf_grouped`. Rows are decoded when they are read,
with float32 products.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.config.fields import (
    MLX,
    Fields,
    has_file,
    neutral,
    read_json,
    take_quantization,
)
from dflash_jax.converters import hf_grouped
from dflash_jax.converters.formats.quants.decoders import E2M1_TABLES, halved_power
from dflash_jax.converters.formats.source import DecodedSource, Rows, TensorSource
from dflash_jax.converters.hf_grouped import WIDTHS, GroupedSource
from dflash_jax.converters.mlx import AffineSource
from dflash_jax.errors import CheckpointError, ConfigError

# Files of folders whose config.json has no quantization_config, and their usual method.
OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
PACK_QUANTIZED = "pack-quantized"
AWQ_VERSIONS = {"gemm": hf_grouped.AWQ_GEMM, "gemv": hf_grouped.AWQ_GEMV}
GPTQ_VERSIONS = {"gptq": hf_grouped.GPTQ, "gptq_v2": hf_grouped.GPTQ_V2}
SCALED_KINDS = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
SCALE_NAMES = ("_scale_inv", "_scale")  # both multiply, despite the first name
FLOAT_KINDS = frozenset({"F64", "F32", "F16", "BF16", "F8_E8M0"})
ZERO_POINT = "_zero_point"

# Scales and zero points of activations and caches, which are not quantised here.
UNUSED_SCALES = re.compile(
    r"\.(?:input|output|activation|[qkv]|kv|prob|[kv]_cache|kv_cache)_(?:scale|zero_point)$"
)
COMPRESSED_FORMATS = frozenset({"float-quantized", "int-quantized", "naive-quantized"})
DENSE = "dense"  # format of folders in which only caches or activations were quantised
BLOCKS = "_blocks"
SCALES = "_scales"

# Settings on which no weight depends: how they were found, and how other engines run them.
UNREAD_SETTINGS = str.split("""
    act_group_aware activation_scheme actorder backend batch_size block_name_to_quantize
    cache_block_outputs damp_auto_increment damp_percent dataset dequantize desc_act device
    disable_exllama do_fuse dynamic exllama_config fmt fuse_max_seq_len global_compression_ratio
    gptaq hyb_act ignore ignored_layers input_activations kv_cache_scheme lm_head max_input_length
    meta model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
    modules_in_block_to_quantize modules_to_fuse modules_to_not_convert mse observer
    observer_kwargs offload_to_disk output_activations pack_dtype packing_format parallel_packing
    quant_method quantization_status registry_requires_subclass run_compressed scale_dtype
    scale_fmt static_groups sym symmetric targets tokenizer true_sequential use_cuda_fp16
    use_exllama weight_block_size zero_point zp_dtype
""")


def quantization(fields: dict[str, Any], folder: Path) -> Any:
    """Take the quantisation settings out of config.json, or read them from their own file.

    Raises:
      CheckpointError, ConfigError: that file cannot be read.
    """
    settings = take_quantization(fields)
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
    method = settings.get("quant_method")
    form = settings.get("format")
    fields = Fields(dict(settings), f"{where}: quantization_config")
    _check_changes(fields)
    decoded = _decoded(WithoutScales(source), method, form, fields)
    if decoded is None:
        formats = ", ".join(sorted({*COMPRESSED_FORMATS, PACK_QUANTIZED}))
        raise ConfigError(
            f"{where}: weights quantised by {method!r} (format {form!r}) are not supported; fp8,"
            f" mxfp4, awq, gptq, MLX's and compressed-tensors {formats} are. Use the original"
            " weights"
        )
    _check_rest(fields)
    return decoded


def unused_scales(source: TensorSource) -> set[str]:
    """Return the scales and zero points of activations and caches of a quantised folder."""
    return {name for name in source.names() if UNUSED_SCALES.search(name)}


def _check_changes(fields: Fields) -> None:
    """Check that weights are neither rotated nor sparse, whatever quantised them.

    Raises:
      ConfigError: they are.
    """
    if fields.get("transform_config", {}) not in ({}, {"config_groups": {}}):
        raise ConfigError(
            f"{fields.where}: transform_config asks for rotations that are not supported; use"
            " weights that were quantised without"
        )
    if fields.inner("sparsity_config").get("format", DENSE) != DENSE:
        raise ConfigError(
            f"{fields.where}: sparse weights are not supported; use the original weights"
        )


def _check_rest(fields: Fields) -> None:
    fields.used.update(("format", *UNREAD_SETTINGS))
    fields.check_rest()


def _decoded(source: TensorSource, method: Any, form: Any, fields: Fields) -> TensorSource | None:
    """Return the source with decoded weights, or None if a method or format is not supported."""
    if method == "mxfp4":
        return MicroScaled(source)
    if method == "fp8":
        return Scaled(source, _blocks(fields.get("weight_block_size"), fields, "weight_block_size"))
    if method == MLX:
        fields.used.update(fields.values)
        return AffineSource(source, fields.values)
    if method == "awq":
        return _awq(source, fields)
    if method == "gptq":
        return _gptq(source, fields)
    if method != "compressed-tensors":
        return None
    if form in (None, DENSE) and neutral(fields.get("config_groups")):
        return source
    if form == PACK_QUANTIZED:
        _check_groups(fields)
        return GroupedSource(source, hf_grouped.COMPRESSED, bits=None, group=None)
    return Scaled(source, _group_blocks(fields)) if str(form) in COMPRESSED_FORMATS else None


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
    for group, weights in _groups(fields):
        group.must_be("format", PACK_QUANTIZED)
        weights.must_be("type", "int")
        weights.must_be("strategy", "group", "channel", "tensor")
        _supported(weights.integer("num_bits"), weights, "num_bits")
        weights.used.update(("group_size", "block_structure"))
        _check_rest(weights)
        _check_rest(group)


def _group_blocks(fields: Fields) -> list[tuple[int, int]]:
    """Return the blocks of all groups of modules with one-byte weights that share a scale.

    Raises:
      ConfigError: something else is done to a group.
    """
    blocks = []
    for group, weights in _groups(fields):
        group.must_be("format", *sorted(COMPRESSED_FORMATS))
        weights.must_be("type", "int", "float")
        weights.must_be("num_bits", 8)
        weights.must_be("strategy", "tensor", "channel", "group", "block")
        if weights.get("strategy") == "block":
            blocks += _blocks(weights.get("block_structure", []), weights, "block_structure")
        if weights.get("strategy") == "group":
            blocks += _blocks([1, weights.integer("group_size")], weights, "group_size")
        weights.used.update(("group_size", "block_structure"))
        _check_rest(weights)
        _check_rest(group)
    return blocks


def _groups(fields: Fields) -> list[tuple[Fields, Fields]]:
    """Return the settings of each group of modules, and of its weights."""
    config_groups = fields.inner("config_groups")
    groups = [config_groups.inner(name) for name in config_groups.values]
    return [(group, group.inner("weights")) for group in groups]


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


def _blocks(block: Any, fields: Fields, name: str) -> list[tuple[int, int]]:
    """Return the rows and columns that share a scale, which are two numbers or a text like 2x4."""
    if block is None:
        return []
    listed = block.split("x") if isinstance(block, str) else block
    texts = [str(n) for n in listed] if isinstance(listed, list) else []
    sizes = [int(text) for text in texts if text.isdecimal() and len(text) < 10]
    if len(texts) != 2 or len(sizes) != 2 or 0 in sizes:
        raise ConfigError(f"{fields.where}: {name} is {block!r}; expected two positive integers")
    return [(sizes[0], sizes[1])]


class WithoutScales(DecodedSource):
    """A source without the scales of activations and caches."""

    def __init__(self, source: TensorSource):
        super().__init__(source, {}, unused_scales(source))

    def _decode(self, name: str, rows: Rows) -> np.ndarray:
        return self._source.read_rows(name, rows)


class Scaled(DecodedSource):
    """One-byte weights with a scale for the tensor, for each row, or for each block.

    Args:
      blocks: rows and columns of blocks; a matrix has those that its scales fit first.
    """

    def __init__(self, source: TensorSource, blocks: list[tuple[int, int]]):
        names = set(source.names())
        decoded = {}
        hidden = set()
        self._scales: dict[str, str] = {}
        self._blocks: dict[str, tuple[int, int]] = {}
        self._zeros = {n.removesuffix(ZERO_POINT): n for n in names if n.endswith(ZERO_POINT)}
        for name in source.names():
            if source.kind(name) not in SCALED_KINDS or name.endswith(ZERO_POINT):
                continue
            scale = next((f"{name}{s}" for s in SCALE_NAMES if f"{name}{s}" in names), None)
            if scale is None or len(source.shape(name)) != 2:
                raise CheckpointError(
                    f"{name} is {source.kind(name)} {list(source.shape(name))} without a scale"
                    f" ({name}{' or '.join(SCALE_NAMES)}); the weights are incomplete"
                )
            decoded[name] = name
            self._scales[name] = scale
            self._blocks[name] = _block_of(source, name, scale, blocks)
            hidden.add(scale)
            if zero := self._zeros.get(name):
                hidden.add(zero)
                if source.shape(zero) != source.shape(scale):
                    raise CheckpointError(
                        f"{zero} has the shape {list(source.shape(zero))}, expected that of"
                        f" {scale}, {list(source.shape(scale))}; fetch the weights again"
                    )
        super().__init__(source, decoded, hidden)

    def _decode(self, name: str, rows: Rows) -> np.ndarray:
        values = self._source.read_rows(name, rows).astype(np.float32)
        if zero := self._zeros.get(name):
            values -= self._spread(name, zero, rows)
        values *= self._spread(name, self._scales[name], rows)
        return values

    def _spread(self, name: str, stored: str, rows: Rows) -> np.ndarray:
        """Return scales or zero points, float32 [], [rows, 1] or [rows, columns]."""
        values = self._source.read(stored).astype(np.float32)
        if values.size == 1:
            return values.reshape(())
        height, width = self._source.shape(name)
        chosen = np.arange(height)[rows]
        down, across = self._blocks[name]
        by_row = values.reshape(-(-height // down), -1)[chosen // down]
        return by_row if by_row.shape[1] == 1 else np.repeat(by_row, across, axis=1)[:, :width]


def _block_of(
    source: TensorSource, name: str, scale: str, blocks: list[tuple[int, int]]
) -> tuple[int, int]:
    """Return the rows and columns of a matrix that share a scale.

    Raises:
      CheckpointError: the scales have another shape, or are no floating-point numbers.
    """
    (rows, columns) = source.shape(name)
    shape = source.shape(scale)
    if source.kind(scale) not in FLOAT_KINDS:
        raise CheckpointError(
            f"{scale} is {source.kind(scale)}; expected floating-point numbers, since scales of"
            " other types are read differently. Use the original weights"
        )
    if shape in ((), (1,), (1, 1)):
        return rows, columns
    if shape in ((rows,), (rows, 1)):
        return 1, columns
    for down, across in blocks:
        if shape == (-(-rows // down), -(-columns // across)):
            return down, across
    raise CheckpointError(
        f"{scale} has the shape {list(shape)}, which fits neither {name} {[rows, columns]} nor its"
        f" blocks {', '.join(map(str, blocks)) or '(the settings name none)'}"
    )


class MicroScaled(DecodedSource):
    """MXFP4 as gpt-oss publishes it: [E, out, in / 32, 16] bytes and a power of two for each 16.

    Element 2i is in the low nibble of byte i, 2i + 1 in the high one. Presented like the experts
    of unquantised files: [E, in, out].
    """

    def __init__(self, source: TensorSource):
        names = set(source.names())
        decoded = {}
        hidden = set()
        for name in source.names():
            stem = name.removesuffix(BLOCKS)
            if stem == name or source.kind(name) != "U8":
                continue
            shape = source.shape(name)
            scales = f"{stem}{SCALES}"
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
        result = np.empty((len(chosen), out), np.float32)
        order = np.argsort(chosen, kind="stable")
        blocks, starts = np.unique(chosen[order] // 32, return_index=True)
        for block, places in zip(blocks, np.split(order, starts[1:]), strict=False):
            expert, block = divmod(block, into // 32)
            values = _inputs_first(packed[expert, :, block])
            values *= halved_power(exponents[expert, :, block])
            result[places] = values[chosen[places] % 32]
        return result


def _inputs_first(packed: np.ndarray) -> np.ndarray:
    """Return doubled values, float32 [32, out], from bytes [out, 16] of one block an output."""
    codes = packed.T.tobytes()
    low, high = (np.frombuffer(codes.translate(table), np.int8) for table in E2M1_TABLES)
    values = np.stack([low.reshape(16, -1), high.reshape(16, -1)], axis=1)
    return values.reshape(32, -1).astype(np.float32)
