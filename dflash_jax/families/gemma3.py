"""Gemma 3, the text part: norms of 1 + w around attention and MLP, two rotary embeddings.

Multimodal files nest the text fields under `text_config`, and leave out those that have their
usual values. GGUF files hold norms with 1 added.
"""

import dataclasses
from typing import Any

import numpy as np

from dflash_jax.config.base import (
    FULL,
    SLIDING,
    RopeConfig,
    TargetConfig,
    all_end_ids,
    dtype_name,
    layer_count,
    layer_windows,
    text_part,
)
from dflash_jax.config.fields import Fields, integer, whole
from dflash_jax.config.rope import BY_LENGTH, made_for, scaled
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.canonical import Origin
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufArray, GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.tensors import stored_name
from dflash_jax.converters.formats.gguf.writer import BOOL, F32, U32, Typed
from dflash_jax.converters.formats.slots import Folder, Slot
from dflash_jax.errors import ConfigError
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf
from dflash_jax.families.qwen3 import head_norms

# Outer fields of multimodal files: configs and tokens of the vision part.
OTHER_PARTS = (
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "mm_tokens_per_image",
    "vision_config",
)
PATTERN = 6  # every sixth layer is full if the config does not say


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(TargetConfig):
    """A Gemma 3 text model. The rotary embedding of the base class is of sliding layers."""

    full_rope: RopeConfig

    @property
    def conventions(self) -> tuple[str, ...]:
        """Descriptions of what is special in the family."""
        cap = (f"softcap {self.final_softcap}",) if self.final_softcap else ()
        return (*super().conventions, "norms times 1 + w", *cap, "text only")

    def window_rope(self, window: int | None) -> RopeConfig:
        """Return the rotary embedding of the layers with this window."""
        return self.full_rope if window is None else self.rope


def from_hf(f: Fields) -> Gemma3Config:
    """Return the text model of a config, which may be nested in a multimodal one."""
    return text_part(f, OTHER_PARTS, _text)


def _text(f: Fields, outer: Fields) -> Gemma3Config:
    f.used.update(("model_type", "cache_implementation", "_sliding_window_pattern"))
    f.values = f.values | {"model_type": "gemma3_text"}
    f.must_be("hidden_activation", "gelu_pytorch_tanh")
    f.must_be("attn_logit_softcapping", None)
    f.must_be("use_bidirectional_attention", None, False)
    layers = layer_count(f)
    head_dim = integer(f, "head_dim")
    rope, full_rope = _ropes(f, head_dim)
    hidden = f.integer("hidden_size")
    cap = f.number("final_logit_softcapping", 0.0)
    if (scalar := f.number("query_pre_attn_scalar", 256.0)) <= 0:
        raise ConfigError(f"{f.where}: query_pre_attn_scalar is {scalar}; expected more than 0")
    return Gemma3Config(
        model_type="gemma3_text",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=integer(f, "num_attention_heads"),
        num_kv_heads=integer(f, "num_key_value_heads"),
        head_dim=head_dim,
        intermediate_size=f.integer("intermediate_size"),
        rms_norm_eps=f.number("rms_norm_eps", 1e-6),
        attention_bias=f.flag("attention_bias", False),
        rope=rope,
        full_rope=full_rope,
        vocab_size=integer(f, "vocab_size"),
        tie_embeddings=outer.flag("tie_word_embeddings", True),
        windows=_windows(f, layers),
        max_length=made_for(f),
        eos_token_ids=all_end_ids(outer, f),
        dtype=dtype_name(f if f.get("dtype", f.get("torch_dtype")) else outer),
        qk_norm=True,
        norm_after=True,
        embedding_scale=max(hidden, 0) ** 0.5,  # the config refuses negative sizes
        score_scale=scalar**-0.5,
        final_softcap=cap if cap > 0 else None,
    )


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer: by `layer_types`, or all but every n-th."""
    every = f.integer("sliding_window_pattern", PATTERN)
    if every < 1:
        raise ConfigError(f"{f.where}: sliding_window_pattern is {every}; expected 1 or more")
    usual = [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    read = f.over(f.values | {"layer_types": f.get("layer_types", usual)})
    windows = tuple(window for _, window in layer_windows(read, layers))
    f.used.update(read.used)
    return windows


def _ropes(f: Fields, width: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary embeddings of sliding and of full layers, in either spelling."""
    both = f.inner("rope_parameters")
    old = f.inner("rope_scaling")
    local = f.number("rope_local_base_freq", 1e4)
    base = f.number("rope_theta", 1e6)
    sliding = both.inner(SLIDING)
    full = both.inner(FULL)
    both.refuse_rest()
    ropes = (
        scaled(sliding, f, sliding.number("rope_theta", local), width),
        scaled(full if full.values else old, f, full.number("rope_theta", base), width),
    )
    if by_length := [rope.kind for rope in ropes if rope.kind in BY_LENGTH]:
        raise ConfigError(
            f"{f.where}: rope type {by_length[0]!r} is not supported in a kind of layers"
        )
    return ropes


# Published multimodal files leave these out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


NORMS = {
    "input_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


def folder(_: Gemma3Config) -> Folder:
    """Return tensors of published folders that are not part of the text model."""
    return Folder(ignored={r"^(vision_tower|multi_modal_projector)\.": "vision: only text is run"})


def slots(config: Gemma3Config) -> list[Slot]:
    """Return every parameter of the target."""
    slots = llama.layers(config, NORMS)
    for i in range(config.num_layers):
        slots += head_norms(config, (f"layers_{i}", "attention"), f"layers.{i}.self_attn.")
    return slots


def to_hf(config: Gemma3Config, dtype: str) -> dict[str, Any]:
    """Return the config.json of the text model alone, as transformers spells it."""
    fields = config_json.decoder_fields(config, dtype, "Gemma3ForCausalLM")
    for key in ("hidden_act", "rope_theta", "rope_scaling", "use_sliding_window"):
        del fields[key]
    if fields["sliding_window"] is None:  # no layer slides; the family's default is harmless
        del fields["sliding_window"]
    assert config.score_scale is not None
    return fields | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": whole(_scalar(config)),  # transformers refuses 256.0
        "final_logit_softcapping": config.final_softcap,
        "rope_parameters": {
            SLIDING: config_json.rope_parameters(config.rope),
            FULL: config_json.rope_parameters(config.full_rope),
        },
    }


def mlx_fields(config: Gemma3Config) -> dict[str, Any]:
    """Return the fields in which mlx-lm 0.32.2 looks for rotary embeddings and kinds of layers.

    Raises:
      ConfigError: they cannot express those of the model.
    """
    count = config.num_layers
    full = [window is None for window in config.windows] or [True] * count
    each = [n for n in range(1, count + 1) if full == [(i + 1) % n == 0 for i in range(count)]]
    others = {
        "full layers that are not each n-th": not each,
        f"the rotary embedding {config.rope.kind} in layers with a window": (
            config.rope.kind != "default"
        ),
        f"final_logit_softcapping {config.final_softcap}": config.final_softcap is not None,
        "biases of attention": config.attention_bias,
    }
    if wrong := [name for name, has in others.items() if has]:
        raise ConfigError(
            f"MLX's Gemma 3 cannot have {wrong[0]}; write a .gguf file or safetensors"
        )
    return {
        "sliding_window_pattern": each[0],
        "rope_local_base_freq": config.rope.theta,
        "rope_theta": config.full_rope.theta,
        "rope_scaling": config_json.scaling(config.full_rope),
    }


def _scalar(config: Gemma3Config) -> float:
    """Return what the root of which divides scores, free of rounding if it is a whole number."""
    assert config.score_scale is not None
    exact = config.score_scale**-2
    return float(round(exact)) if round(exact) ** -0.5 == config.score_scale else exact


# GGUF
GGUF_LAYER_NAMES = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
LAYERS_OF_27B = 62  # whose scores are divided by another root, for which files have no key
UNAPPLIED = {"logit_scale": 1.0, "embedding_scale": 1.0, "nextn_predict_layers": None}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to Gemma 3."""
    fields.refuse_unless(UNAPPLIED)
    hf_fields = keys.geometry(fields)
    layers = hf_fields["num_hidden_layers"]
    full = {"rope_theta": hf_fields.pop("rope_theta")}
    full |= hf_fields.pop("rope_scaling") or {"rope_type": "default"}
    sliding = {"rope_theta": fields.number("rope.freq_base_swa", 1e4), "rope_type": "default"}
    return hf_fields | {
        "model_type": "gemma3_text",
        "attention_bias": tensors.biased(source),
        "sliding_window": fields.count("attention.sliding_window", 1 << 24, 4096),
        "layer_types": _kinds(fields, layers),
        "query_pre_attn_scalar": _published_scalar(
            layers,
            hf_fields["hidden_size"],
            hf_fields["num_attention_heads"],
            hf_fields["head_dim"],
        ),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {SLIDING: sliding, FULL: full},
    }


def _kinds(fields: GgufFields, layers: int) -> list[str]:
    """Return the kind of each layer: listed, or every n-th full."""
    key = "attention.sliding_window_pattern"
    if isinstance(fields.get(key), GgufArray):
        return [SLIDING if slides else FULL for slides in fields.ints(key)]
    every = fields.count(key, 1024, PATTERN)
    return [SLIDING if (i + 1) % every else FULL for i in range(layers)]


def _published_scalar(layers: int, hidden: int, heads: int, width: int) -> float:
    return hidden / heads if layers == LAYERS_OF_27B else float(width)


def gguf_origin(name: str, config: Gemma3Config, shapes: tensors.Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one; norms are 1 less."""
    stored = stored_name(name, GGUF_LAYER_NAMES)
    if stored not in shapes:
        return tensors.fused_origin(name, config, shapes)
    if name.endswith("norm.weight"):
        return Origin(stored, change="norm: 1 subtracted", values=_less_one, offset=1.0)
    return Origin(stored)


def gguf_stored(name: str, config: Gemma3Config) -> dict[str, Origin]:
    """Return a canonical tensor in its stored form; the inverse of `gguf_origin`."""
    added = _plus_one if name.endswith("norm.weight") else None
    return {stored_name(name, GGUF_LAYER_NAMES): Origin(name, values=added)}


def _less_one(values: np.ndarray) -> np.ndarray:
    return values - np.float32(1)


def _plus_one(values: np.ndarray) -> np.ndarray:
    return values + np.float32(1)


def to_gguf(config: Gemma3Config) -> keys.Metadata:
    """Return the metadata that is specific to Gemma 3.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    usual = _published_scalar(
        config.num_layers, config.hidden_size, config.num_heads, config.head_dim
    )
    keys.refuse(
        config,
        {
            f"scores times {config.score_scale}": _scalar(config) != usual,
            f"the rotary embedding {config.rope.kind}": config.rope.kind != "default",
        },
    )
    metadata = keys.rope(config.full_rope) | {
        "rope.freq_base": Typed(F32, config.full_rope.theta),
        "rope.freq_base_swa": Typed(F32, config.rope.theta),
        "attention.sliding_window": Typed(U32, next((w for w in config.windows if w), 1)),
        "attention.sliding_window_pattern": Typed(BOOL, [w is not None for w in config.windows]),
    }
    if config.final_softcap:
        metadata["final_logit_softcapping"] = Typed(F32, config.final_softcap)
    return metadata


FAMILY = Family(
    config=Gemma3Config,
    from_hf=from_hf,
    model_types=("gemma3", "gemma3_text"),
    defaults={"gemma3_text": DEFAULTS},
    net="dflash_jax.families.gemma3_net",
    slots=slots,
    folder=folder,
    to_hf=to_hf,
    mlx_fields=mlx_fields,
    gguf=TargetGguf(
        architectures=("gemma3",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
        layer_names=GGUF_LAYER_NAMES,
        origin=gguf_origin,
        stored=gguf_stored,
    ),
)
