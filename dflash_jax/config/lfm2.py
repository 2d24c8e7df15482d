"""LFM2 and LFM2.5, dense: gated short convolutions, and attention in some layers."""

import dataclasses
from typing import Any

from dflash_jax.config.base import FULL, TargetConfig, at_least, dense_fields, layer_count
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields
from dflash_jax.errors import ConfigError

CONV = "conv"  # in layer_types
# Fields of training, and others that transformers does not read.
UNUSED = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "theta",  # repeats rope_theta
    "use_pos_enc",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2Config(TargetConfig):
    """A target whose layers are short convolutions or attention."""

    recurrent: tuple[bool, ...]  # per layer: whether it is a convolution
    conv_kernel: int
    conv_bias: bool = False  # of the convolution and of its projections

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.recurrent) != self.num_layers:
            raise ConfigError(
                f"{len(self.recurrent)} layer kinds for {self.num_layers} layers; give one each"
            )
        at_least(self, 2, "conv_kernel")

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Descriptions of the layers."""
        conv = f"convolution over {self.conv_kernel}"
        return tuple(conv if recurrent else "full attention" for recurrent in self.recurrent)


def from_hf(f: Fields) -> Lfm2Config:
    """Return the config of a dense LFM2.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    count = layer_count(f)
    f.must_be("attention_bias", False)
    usual: dict[str, Any] = {
        "intermediate_size": _width(f),
        "rms_norm_eps": f.number("norm_eps", 1e-5),
        "layer_types": None,
        "rope_theta": f.number("rope_theta", 1000000.0),
        "tie_word_embeddings": f.get("tie_embedding", f.flag("tie_word_embeddings", True)),
    }
    reader = Fields(f.values | usual, f.where)
    fields = dense_fields(reader)
    f.used.update((*reader.used - usual.keys(), *UNUSED))
    return Lfm2Config(
        **fields,
        qk_norm=True,
        recurrent=_kinds(f, count),
        conv_kernel=f.integer("conv_L_cache", 3),
        conv_bias=f.flag("conv_bias", False),
    )


def _width(f: Fields) -> int:
    """Return the width of MLPs: unless it is given as such, two thirds of a field, rounded up.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    inner = f.integer("block_ff_dim", f.integer("intermediate_size", 12288))
    factor = f.number("block_ffn_dim_multiplier", 1.0)
    multiple = f.integer("block_multiple_of", 256)
    if not f.flag("block_auto_adjust_ff_dim", True):
        return inner
    if multiple < 1:
        raise ConfigError(f"{f.where}: block_multiple_of is {multiple}; expected 1 or more")
    return -(-int(factor * int(2 * inner / 3)) // multiple) * multiple


def _kinds(f: Fields, count: int) -> tuple[bool, ...]:
    """Return which layers are convolutions: by `layer_types`, or all that are not listed."""
    listed = f.get("full_attn_idxs", list(range(count)))
    if not isinstance(listed, list):
        raise ConfigError(f"{f.where}: full_attn_idxs is {listed!r}; expected a list of layers")
    kinds = f.get("layer_types", [FULL if i in listed else CONV for i in range(count)])
    known = isinstance(kinds, list) and all(kind in (FULL, CONV) for kind in kinds)
    if not known or len(kinds) != count:
        raise ConfigError(
            f"{f.where}: layer_types is {kinds}; expected {count} entries of {FULL!r} or {CONV!r}"
        )
    return tuple(kind == CONV for kind in kinds)


FAMILY = Family(
    config=Lfm2Config,
    from_hf=from_hf,
    any_width=True,
    model_types=("lfm2",),
    gguf=("lfm2",),
    defaults={"lfm2": {"max_position_embeddings": 128_000, "num_key_value_heads": 8}},
)
