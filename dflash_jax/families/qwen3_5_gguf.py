"""Qwen3.5 and Qwen3.6 in GGUF files: metadata, names and forms, both ways.

Files hold norms as 1 + w, decays as -exp(A_log), and value heads tiled over the key heads (head h
reads key head h mod K) where Hugging Face groups them (h // (V / K)).
"""

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_jax.config.base import FULL, LINEAR
from dflash_jax.converters.formats.canonical import Origin
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufArray, GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.tensors import stored_name
from dflash_jax.converters.formats.gguf.writer import BOOL, I32, U32, Typed
from dflash_jax.errors import ConfigError
from dflash_jax.families.entry import TargetGguf

if TYPE_CHECKING:
    from dflash_jax.families.qwen3_5 import HybridConfig

TYPES = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
GGUF_ARCHITECTURES = {model_type: architecture for architecture, model_type in TYPES.items()}
UNAPPLIED = {
    "attention.sliding_window": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
}
MAX_HEADS = 1024
# Canonical stem in a layer: stored stem and suffix.
LAYER = {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
TILED = "value heads: tiled to grouped"


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Qwen3.5."""
    fields.refuse_unless(UNAPPLIED)
    moe = fields.architecture != "qwen35"
    hf_fields = keys.geometry(
        fields, inner=1 if moe else None, partial=True, kv_heads=_kv_heads(fields)
    )
    layers = hf_fields["num_hidden_layers"] - _extra_layers(fields)
    width = hf_fields["head_dim"]
    theta = hf_fields.pop("rope_theta")
    rotated = fields.count("rope.dimension_count", width)
    values = fields.count("ssm.time_step_rank", MAX_HEADS)
    inner = fields.count("ssm.inner_size", 1 << 20)
    if hf_fields.pop("rope_scaling") or inner % values:
        raise ConfigError(
            f"{fields.where}: rotary scaling, or {inner} channels for {values} value heads, is not"
            " supported for this architecture"
        )
    hf_fields |= {
        "model_type": TYPES.get(fields.architecture),
        "num_hidden_layers": layers,
        "layer_types": _kinds(fields, layers),
        "linear_key_head_dim": fields.count("ssm.state_size", 4096),
        "linear_num_key_heads": fields.count("ssm.group_count", MAX_HEADS),
        "linear_num_value_heads": values,
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": fields.count("ssm.conv_kernel", 64),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": rotated / width,
        },
    }
    if not moe:
        return hf_fields
    del hf_fields["intermediate_size"]
    return (
        hf_fields
        | tensors.expert_counts(fields)
        | {
            "moe_intermediate_size": fields.count("expert_feed_forward_length", 524288),
            "shared_expert_intermediate_size": fields.count(
                "expert_shared_feed_forward_length", 524288
            ),
        }
    )


def _extra_layers(fields: GgufFields) -> int:
    """Return the number of multi-token prediction layers, which `block_count` includes."""
    extra = fields.get("nextn_predict_layers") or 0
    if type(extra) is not int or not 0 <= extra < fields.count("block_count", 1024):
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.nextn_predict_layers is {extra!r}; expected a"
            " number of layers below block_count"
        )
    return extra


def _kv_heads(fields: GgufFields) -> int | None:
    """Return the key/value heads of attention layers; recurrent layers may be listed with 0."""
    if not isinstance(fields.get("attention.head_count_kv"), GgufArray):
        return None
    counts = sorted(set(fields.ints("attention.head_count_kv")) - {0})
    if len(counts) != 1 or not 1 <= counts[0] <= MAX_HEADS:
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.attention.head_count_kv lists {counts};"
            " expected one number for all attention layers"
        )
    return counts[0]


def _kinds(fields: GgufFields, layers: int) -> list[str]:
    """Return the kind of each layer: listed, or recurrent except every n-th."""
    if fields.get("attention.recurrent_layers") is None:
        every = fields.count("full_attention_interval", 1024, 4)
        return [FULL if (i + 1) % every == 0 else LINEAR for i in range(layers)]
    listed = fields.ints("attention.recurrent_layers")
    if len(listed) < layers:
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.attention.recurrent_layers has {len(listed)}"
            f" entries for {layers} layers"
        )
    return [LINEAR if recurrent else FULL for recurrent in listed[:layers]]


def gguf_origin(name: str, config: "HybridConfig", shapes: tensors.Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one, and its conversion to Hugging Face's form."""
    if config.num_experts and (origin := tensors.expert_origin(name, config, shapes)):
        return origin
    match = _IN_LAYER.fullmatch(name)
    layer, stem = match.groups() if match else ("", name)
    stored = f"blk.{layer}.{LAYER[stem]}" if stem in LAYER else stored_name(name)
    if stored not in shapes:
        return tensors.fused_origin(name, config, shapes, gated=True)
    if name.endswith("norm.weight") and not stem.startswith("linear_attn."):
        return Origin(stored, change="norm: 1 subtracted", values=_less_one, offset=1.0)
    if stem.startswith("linear_attn."):
        return _recurrent(stem.removeprefix("linear_attn."), stored, config, shapes[stored])
    if stem == "mlp.shared_expert_gate.weight":
        return Origin(stored, reshaped=(1, config.hidden_size))
    return Origin(stored)


def _recurrent(stem: str, stored: str, config: "HybridConfig", shape: tuple[int, ...]) -> Origin:
    """Return a tensor of a recurrent layer, reordered if its size fits."""
    heads = config.value_heads
    width = config.value_width
    tiled = heads != config.key_heads
    kept = 2 * config.key_heads * config.key_width  # queries and keys, which stay
    through = np.concatenate([np.arange(kept), kept + grouped(config, width)])
    said = TILED if tiled else ""
    if stem == "out_proj.weight":
        fits = tiled and shape[-1] == heads * width
        columns = grouped(config, width) if fits else None
        return Origin(stored, change=f"columns of {said}" if fits else "", columns=columns)
    rows = None
    needed = {"in_proj_qkv.weight": through, "conv1d.weight": through}
    needed["in_proj_z.weight"] = grouped(config, width)
    needed |= dict.fromkeys(
        ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"), grouped(config, 1)
    )
    if tiled and stem in needed and shape[0] == len(needed[stem]):
        rows = needed[stem]
    said = said if rows is not None else ""
    if stem == "A_log":
        words = "log of the negated decay" + (f"; {said}" if said else "")
        return Origin(stored, rows, words, values=log_negated, offset=1.0)
    if stem == "conv1d.weight":
        return Origin(stored, rows, said, reshaped=(config.conv_channels, 1, config.conv_kernel))
    return Origin(stored, rows, said)


def grouped(config: "HybridConfig", width: int) -> np.ndarray:
    """Return the row order of value heads in a file that tiles them, `width` rows a head."""
    keys = config.key_heads
    each = config.value_heads // config.key_heads
    heads = np.arange(config.value_heads).reshape(each, keys).T.reshape(-1, 1)
    return (heads * width + np.arange(width)).reshape(-1)


def _less_one(values: np.ndarray) -> np.ndarray:
    return values - np.float32(1)


def log_negated(values: np.ndarray) -> np.ndarray:
    """Return log(-values), in float64 so that `negated_exp` gives the same bits again."""
    with np.errstate(invalid="ignore", divide="ignore"):  # reported as not finite
        return np.log(-values.astype(np.float64)).astype(np.float32)


def gguf_ignored(name: str, config: "HybridConfig") -> str | None:
    """Return why a tensor is not needed, or None if it is unexpected."""
    match = re.match(r"blk\.(\d+)\.", name)
    if match and int(match[1]) >= config.num_layers:
        return "multi-token prediction: not run"
    return None


def to_gguf(config: "HybridConfig") -> keys.Metadata:
    """Return the metadata that is specific to Qwen3.5.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    scaled = f"the rotary embedding {config.rope.kind}"
    biases = {"biases of attention": config.attention_bias}
    keys.refuse(config, biases | {scaled: config.rope.kind != "default"})
    own: dict[str, Any] = {
        "rope.dimension_count": Typed(U32, config.rotary_dim),
        "rope.dimension_sections": mrope_sections(config),
        "attention.recurrent_layers": Typed(BOOL, list(config.recurrent)),
        "ssm.conv_kernel": Typed(U32, config.conv_kernel),
        "ssm.state_size": Typed(U32, config.key_width),
        "ssm.group_count": Typed(U32, config.key_heads),
        "ssm.time_step_rank": Typed(U32, config.value_heads),
        "ssm.inner_size": Typed(U32, config.value_heads * config.value_width),
    }
    if config.num_experts:
        shared = Typed(U32, config.shared_expert_size)
        own |= keys.experts(config) | {"expert_shared_feed_forward_length": shared}
        own["feed_forward_length"] = None  # every layer has experts
    return own


def mrope_sections(config: "HybridConfig") -> Typed:
    """Return how rotated pairs are shared among three position rows, which text fills alike.

    Interleaved: pair i belongs to row i mod 3. The fourth row must have no pair.
    """
    pairs = config.rotary_dim // 2
    return Typed(I32, [-(-(pairs - i) // 3) for i in range(3)] + [0])


def gguf_stored(name: str, config: "HybridConfig") -> dict[str, Origin]:
    """Return a canonical tensor in its stored form; the inverse of `gguf_origin`."""
    if config.num_experts and (of_experts := tensors.expert_stored(name, config)) is not None:
        return of_experts
    match = _IN_LAYER.fullmatch(name)
    layer, stem = match.groups() if match else ("", name)
    stored = f"blk.{layer}.{LAYER[stem]}" if stem in LAYER else stored_name(name)
    if name.endswith("norm.weight") and not stem.startswith("linear_attn."):
        return {stored: Origin(name, values=_plus_one)}
    if stem.startswith("linear_attn."):
        return {stored: _tiled(stem.removeprefix("linear_attn."), name, config)}
    if stem == "mlp.shared_expert_gate.weight":
        return {stored: Origin(name, reshaped=(config.hidden_size,))}
    return {stored: Origin(name)}


def _tiled(stem: str, name: str, config: "HybridConfig") -> Origin:
    """Return a tensor of a recurrent layer with its value heads tiled."""
    order = np.argsort(grouped(config, config.value_width))
    kept = 2 * config.key_heads * config.key_width  # queries and keys, which stay
    through = np.concatenate([np.arange(kept), kept + order])
    if stem == "out_proj.weight":
        return Origin(name, columns=order)
    if stem == "conv1d.weight":
        return Origin(name, through, reshaped=(config.conv_channels, config.conv_kernel))
    rows = {"in_proj_qkv.weight": through, "in_proj_z.weight": order}
    by_head = ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")
    rows |= dict.fromkeys(by_head, np.argsort(grouped(config, 1)))
    return Origin(name, rows.get(stem), values=negated_exp if stem == "A_log" else None)


def _plus_one(values: np.ndarray) -> np.ndarray:
    return values + np.float32(1)


def negated_exp(values: np.ndarray) -> np.ndarray:
    """Return -exp(values), the inverse of `log_negated`."""
    with np.errstate(over="ignore"):  # reported as not finite
        return -np.exp(values.astype(np.float64)).astype(np.float32)


GGUF = TargetGguf(
    architectures=("qwen35", "qwen35moe"),
    from_gguf=from_gguf,
    to_gguf=to_gguf,
    written=GGUF_ARCHITECTURES,
    origin=gguf_origin,
    stored=gguf_stored,
    ignored=gguf_ignored,
    mrope_sections=mrope_sections,
)
