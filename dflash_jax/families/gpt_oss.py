"""gpt-oss: biases everywhere, attention sinks, every second layer sliding, experts in all.

Experts are stacked, and their gates and ups alternate. In GGUF files, gates and ups are separate
tensors, outputs first.
"""

import dataclasses
import re
from typing import Any

import numpy as np

from dflash_jax.config.base import (
    FULL,
    SLIDING,
    TargetConfig,
    dense_config,
    expert_sizes,
    extended,
)
from dflash_jax.config.fields import Fields, integer
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.canonical import Alternating, Origin, Separated
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufArray, GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.converters.formats.gguf.tensors import stored_name
from dflash_jax.converters.formats.gguf.writer import BOOL, U32, Typed
from dflash_jax.converters.formats.slots import Keys, Slot, TensorPart, linear, same
from dflash_jax.errors import ConfigError
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf

# Values of absent fields in transformers that differ from those of other families.
DEFAULTS = {"attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64}
SWIGLU_ALPHA = 1.702  # value of the published models
PUBLISHED_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(TargetConfig):
    """A gpt-oss target.

    Attributes:
      swiglu_limit: clamps the experts' gate and up projections.
      swiglu_alpha: factor inside the sigmoid of the gate.
    """

    swiglu_limit: float = 7.0
    swiglu_alpha: float = SWIGLU_ALPHA

    @property
    def conventions(self) -> tuple[str, ...]:
        """Descriptions of what is special in the family."""
        return ("biases", "attention sinks", f"experts clamped at {self.swiglu_limit:g}")


def from_hf(f: Fields) -> GptOssConfig:
    """Return the config of a gpt-oss; without `layer_types`, even layers are sliding.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    f.must_be("use_sliding_window", True)
    absent: dict[str, Any] = {
        key: value for key, value in DEFAULTS.items() if f.values.get(key) is None
    }
    if not f.values.get("rope_scaling") and f.values.get("rope_parameters") is None:
        absent["rope_parameters"] = PUBLISHED_ROPE
    read = f.over(f.values | absent)
    config = dense_config(read)
    window = integer(read, "sliding_window")
    f.used.update(read.used)
    windows = config.windows
    if f.get("layer_types") is None:
        windows = tuple((window, None)[i % 2] for i in range(config.num_layers))
    if config.rope.kind == "yarn":
        f.must_be("initial_context_length", config.rope.original_length)
    f.used.add("initial_context_length")
    experts = expert_sizes(f, config.intermediate_size)
    f.must_be("experts_per_token", experts.chosen)
    limit = f.number("swiglu_limit", 7.0)
    if limit <= 0:
        raise ConfigError(f"{f.where}: swiglu_limit is {limit}; expected a positive number")
    alpha = f.number("swiglu_alpha", SWIGLU_ALPHA)
    return extended(
        config,
        GptOssConfig,
        windows=windows,
        num_experts=experts.total,
        experts_per_token=experts.chosen,
        expert_size=experts.size,
        swiglu_limit=limit,
        swiglu_alpha=alpha,
    )


def slots(config: GptOssConfig) -> list[Slot]:
    """Return every parameter of the target."""
    width = config.hidden_size
    slots = [
        *llama.tables(config),
        same(("norm",), "norm.weight", width),
    ]
    for i in range(config.num_layers):
        at = (f"layers_{i}",)
        source = f"layers.{i}."
        slots += [
            same((*at, "input_norm"), f"{source}input_layernorm.weight", width),
            same((*at, "post_attention_norm"), f"{source}post_attention_layernorm.weight", width),
            *llama.attention(config, (*at, "attention"), f"{source}self_attn."),
            _sinks(config, (*at, "attention"), f"{source}self_attn."),
            *_experts(config, (*at, "mlp"), f"{source}mlp."),
        ]
    return slots


def _sinks(config: GptOssConfig, at: Keys, source: str) -> Slot:
    shape = (config.num_kv_heads, config.num_heads // config.num_kv_heads)
    part = TensorPart(f"{source}sinks", (config.num_heads,), (0, 1))
    return Slot((*at, "sinks"), shape, (part,))


def _experts(config: GptOssConfig, at: Keys, source: str) -> list[Slot]:
    """Return router and experts, stored inputs first: [E, D, 2F] and [E, F, D]."""
    count = config.num_experts
    width = config.hidden_size
    size = config.expert_size
    weight = TensorPart(f"{source}experts.gate_up_proj", (count, width, 2 * size), (0, 1, 3, 2))
    bias = TensorPart(f"{source}experts.gate_up_proj_bias", (count, 2 * size), (0, 2, 1))
    down = TensorPart(f"{source}experts.down_proj", (count, size, width), (0, 1, 2))
    return [
        linear((*at, "router"), f"{source}router.weight", count, width),
        same((*at, "router_bias"), f"{source}router.bias", count),
        Slot((*at, "experts_gate_up"), (count, width, 2, size), (weight,), stack=True),
        Slot((*at, "experts_gate_up_bias"), (count, 2, size), (bias,)),
        Slot((*at, "experts_down"), (count, size, width), (down,), stack=True),
        same((*at, "experts_down_bias"), f"{source}experts.down_proj_bias", count, width),
    ]


def to_hf(config: GptOssConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    fields = config_json.decoder_fields(config, dtype, "GptOssForCausalLM") | {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "swiglu_limit": config.swiglu_limit,
        "swiglu_alpha": config.swiglu_alpha,
    }
    if config.rope.kind == "default":  # null would mean the family's usual scaling
        fields["rope_scaling"] = {"rope_type": "default"}
    return fields


# GGUF
CHOSEN_SOFTMAX = 3  # expert_gating_func: over the chosen experts only
UNAPPLIED = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "nextn_predict_layers": None,
}
GGUF_LAYER_NAMES = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}
# Canonical stem: the stacks whose outputs alternate in it.
STACKS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
}


def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to gpt-oss.

    Files have no key for `truncate`, which is false in the published models.
    """
    fields.refuse_unless(UNAPPLIED)
    size = fields.count("expert_feed_forward_length", 524288, fields.get("feed_forward_length"))
    hf_fields = keys.geometry(fields, inner=size)
    if (scaling := hf_fields["rope_scaling"]) is None or scaling["rope_type"] != "yarn":
        raise ConfigError(f"{fields.where} has no yarn rotary scaling, which every gpt-oss has")
    chosen = tensors.expert_counts(fields, gating=CHOSEN_SOFTMAX)
    return hf_fields | {
        "model_type": "gpt_oss",
        "intermediate_size": size,
        "attention_bias": True,
        "rope_scaling": scaling | {"truncate": False},
        "sliding_window": fields.count("attention.sliding_window", 1 << 24),
        "layer_types": _kinds(fields, hf_fields["num_hidden_layers"]),
        "num_local_experts": chosen["num_experts"],
        "num_experts_per_tok": chosen["num_experts_per_tok"],
    }


def _kinds(fields: GgufFields, layers: int) -> list[str]:
    """Return the kind of each layer: listed, or the even ones sliding."""
    key = "attention.sliding_window_pattern"
    if not isinstance(fields.get(key), GgufArray):
        fields.refuse_unless({key: 2.0})
        return [(SLIDING, FULL)[i % 2] for i in range(layers)]
    listed = fields.ints(key)
    if len(listed) != layers:
        raise ConfigError(
            f"{fields.where}: {fields.architecture}.{key} has {len(listed)} entries for {layers}"
            " layers"
        )
    return [SLIDING if slides else FULL for slides in listed]


def gguf_origin(name: str, config: GptOssConfig, shapes: tensors.Shapes) -> Origin | None:
    """Return the stored tensor of a canonical one, and its conversion to Hugging Face's form."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    layer, stem = match.groups() if match else ("", name)
    if stem in STACKS:
        stored = [f"blk.{layer}.{part}" for part in STACKS[stem]]
        fused = stored[0].replace("ffn_gate_exps", "ffn_gate_up_exps")
        stacked = 1
        if fused in shapes and stored[0] not in shapes:
            stored = [fused]
            stacked = 2
        axes = {len(shapes.get(part, ())) for part in stored}
        if axes != {2 if stem.endswith("_bias") else 3}:
            return None
        one = len(STACKS[stem]) == 1
        words = "inputs first" if one else "gates and ups alternate, inputs first"
        words = "gates and ups alternate" if stem.endswith("_bias") else words
        said = f"stacked experts: {words}"
        return Alternating(stored[0], change=said, others=tuple(stored[1:]), stacked=stacked)
    return tensors.origin(name, config, shapes, GGUF_LAYER_NAMES)


def to_gguf(config: GptOssConfig) -> keys.Metadata:
    """Return the metadata that is specific to gpt-oss.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    windows = {window for window in config.windows if window is not None}
    keys.refuse(
        config,
        {
            "attention without biases": not config.attention_bias,
            "a rotary embedding without yarn": config.rope.kind != "yarn",
            f"experts clamped at {config.swiglu_limit:g}": config.swiglu_limit != 7.0,
            f"experts with swiglu_alpha {config.swiglu_alpha:g}": config.swiglu_alpha
            != SWIGLU_ALPHA,
            f"windows {sorted(windows)}": len(windows) != 1,
        },
    )
    own = keys.rope(config.rope, truncate=False) | keys.experts(config)
    return own | {
        "attention.sliding_window": Typed(U32, windows.pop()),
        "attention.sliding_window_pattern": Typed(BOOL, [w is not None for w in config.windows]),
    }


def gguf_stored(name: str, config: GptOssConfig) -> dict[str, Origin]:
    """Return a canonical tensor in its stored forms; the inverse of `gguf_origin`."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    layer, stem = match.groups() if match else ("", name)
    if stem in STACKS:
        parts = len(STACKS[stem])
        return {
            f"blk.{layer}.{stored}": Origin(name, columns=np.arange(i, 2 * config.expert_size, 2))
            if stem.endswith("_bias")
            else Separated(name, part=i, parts=parts)
            for i, stored in enumerate(STACKS[stem])
        }
    return {stored_name(name, GGUF_LAYER_NAMES): Origin(name)}


FAMILY = Family(
    config=GptOssConfig,
    from_hf=from_hf,
    model_types=("gpt_oss",),
    defaults={
        "gpt_oss": {
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        }
    },
    net="dflash_jax.families.gpt_oss_net",
    slots=slots,
    to_hf=to_hf,
    gguf=TargetGguf(
        architectures=("gpt-oss",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
        layer_names=GGUF_LAYER_NAMES,
        origin=gguf_origin,
        stored=gguf_stored,
    ),
)
