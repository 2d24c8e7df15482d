"""Configurations as config.json files for other engines, in published and speculators layouts."""

from typing import Any

from dflash_jax.config import (
    FULL,
    SLIDING,
    AttentionConfig,
    DrafterConfig,
    RopeConfig,
    TargetConfig,
)
from dflash_jax.config.dspark import TRAINING
from dflash_jax.config.family import drafter_kinds, family_of
from dflash_jax.config.fields import Fields
from dflash_jax.converters import families
from dflash_jax.converters.taps import AUTO, PLUS_ONE, Taps, read_taps
from dflash_jax.errors import ConfigError


def fields(config: AttentionConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target or of a z-lab drafter whose weights are of `dtype`.

    Raises:
      ConfigError: others have no form for this model.
    """
    kinds = drafter_kinds()
    if isinstance(config, DrafterConfig):
        if config.kind not in kinds or config.draft_vocab_size:
            raise ConfigError(
                f"a {config.kind} drafter with a vocabulary of {config.choices} has no published"
                f" form; {', '.join(kinds)} over the whole vocabulary have"
            )
        return drafter_fields(config, dtype)
    if not isinstance(config, TargetConfig):
        raise ConfigError(f"{type(config).__name__} has no published form; targets and drafters do")
    to_hf = families.provided(family_of(config.model_type), "to_hf")
    if to_hf is None:
        raise ConfigError(
            f"a {config.model_type} target cannot be exported;"
            f" {', '.join(families.providing('to_hf'))} can."
            " Its published folder is the form others read; `convert --to orbax` keeps it for"
            " dflash_jax"
        )
    return to_hf(config, dtype)


def decoder_fields(config: TargetConfig, dtype: str, architecture: str) -> dict[str, Any]:
    """Return the fields that decoders without recurrent layers share."""
    found = shared_fields(config, dtype, architecture) | _geometry(config)
    if config.mlp_bias:
        found["mlp_bias"] = True
    windows = config.windows or (None,) * config.num_layers
    return found | _windows(windows, [w is not None for w in windows])


def shared_fields(config: TargetConfig, dtype: str, architecture: str) -> dict[str, Any]:
    """Return the fields that all exported targets share."""
    return _sizes(config) | {
        "architectures": [architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_length,
        "eos_token_id": list(config.eos_token_ids) or None,  # no list may be empty
        # Null, not absent: the default of a family may lie outside a small vocabulary.
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "dtype": dtype,
    }


def drafter_fields(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a z-lab drafter, without its reduced vocabulary."""
    optional = {
        "input_embedding_scale": (config.input_embedding_scale, None),
        "output_multiplier": (config.output_multiplier, 1.0),
        "final_logit_softcapping": (config.final_logit_softcapping, None),
    }
    own: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    own |= {key: value for key, (value, default) in optional.items() if value != default}
    if config.sample_from_anchor != type(config).sample_from_anchor:  # the kind's default
        own["sample_from_anchor"] = config.sample_from_anchor
    if config.speculative_tokens:
        own["speculative_tokens"] = config.speculative_tokens
    own |= families.provided(config.kind, "to_hf")(config)
    found = _geometry(config) | {
        "architectures": [drafter_kinds()[config.kind].architectures[0]],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": own,
        "dtype": dtype,
    }
    if config.rope.original_length:
        found["max_position_embeddings"] = config.rope.original_length
    return found | _causality(config)


def _causality(config: DrafterConfig) -> dict[str, Any]:
    """Return layer kinds, and `is_causal` if it differs from what the kinds imply."""
    sliding = [window is not None for window in config.windows]
    if not any(sliding) and len(set(config.causal)) > 1:
        sliding = list(config.causal)  # a sliding layer is causal even without a window
    found = _windows(config.windows, sliding)
    if list(config.causal) == sliding:
        return found
    if len(set(config.causal)) > 1:
        raise ConfigError(
            f"the layers' causality {list(config.causal)} cannot be written: published files"
            " know one value for all, or sliding layers causal and the others not"
        )
    return found | {"is_causal": config.causal[0]}


def _windows(windows: tuple[int | None, ...], sliding: list[bool]) -> dict[str, Any]:
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ConfigError(
            f"windows {sorted(sizes)} differ; published files know one for all layers"
        )
    return {
        "layer_types": [SLIDING if s else FULL for s in sliding],
        "use_sliding_window": bool(sizes),
        "sliding_window": next(iter(sizes), None),
    }


def _geometry(config: AttentionConfig) -> dict[str, Any]:
    return _sizes(config) | {
        "intermediate_size": config.intermediate_size,
        "rope_theta": config.rope.theta,
        "rope_scaling": _scaling(config.rope),
    }


def _sizes(config: AttentionConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
    }


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """Return a rotary embedding in the spelling that holds its base as well."""
    return {"rope_theta": rope.theta} | (_scaling(rope) or {"rope_type": "default"})


def _scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    if rope.kind == "proportional":
        share = {"partial_rotary_factor": rope.partial_rotary_factor}
        return (
            {"rope_type": rope.kind} | share | ({} if rope.factor == 1 else {"factor": rope.factor})
        )
    found: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.original_length:
        found["original_max_position_embeddings"] = rope.original_length
    if rope.kind == "llama3":
        keys = ("low_freq_factor", "high_freq_factor")
    elif rope.kind == "yarn":
        keys = ("beta_fast", "beta_slow", "truncate", "attention_factor")
    elif rope.kind == "longrope":
        keys = ("attention_factor",)
        found |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
    else:
        keys = ()
    return found | {key: getattr(rope, key) for key in keys}


# The speculators layout of drafters, converted from and to the published config.json.
#
# The nested layer config is written as the difference from its class's defaults, so those are
# filled in here. Facts from the speculators and transformers sources.


# Values of absent fields, as in Qwen3Config of transformers 5.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "hidden_act": "silu",
}
PACKAGING = (  # fields that do not affect the forward pass, in addition to those of all configs
    "base_model_ep_plan",
    "base_model_pp_plan",
    "base_model_tp_plan",
    "max_anchors",
    "num_anchors",
    "speculators_version",
)
CARRIED = (*DEFAULTS, "layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


READ = (
    "aux_hidden_state_layer_ids",
    "block_size",
    "draft_vocab_size",
    "dtype",
    "mask_token_id",
    "model_type",
    "projector_type",
    "sample_from_anchor",
    "shift_label",
    "sliding_window_non_causal",
    "speculators_config",
    "speculators_model_type",
    "target_hidden_size",
    "transformer_layer_config",
)
READ_OF_LAYERS = ("dtype", "model_type", "rope_parameters", "rope_scaling")


def is_speculators(config: dict[str, Any]) -> bool:
    """Return whether a config.json has this layout."""
    return "speculators_model_type" in config


def published_fields(
    config: dict[str, Any], *, where: str, choice: str = AUTO
) -> tuple[dict[str, Any], Taps]:
    """Return the fields for `dflash_jax.config.drafter_config`, and how the taps were read.

    Raises:
      ConfigError: the drafter is not supported, or a field is unknown.
      CheckpointError: the numbering of the taps is ambiguous.
    """
    kind = config["speculators_model_type"]
    if not isinstance(kind, str) or kind not in (classes := _classes()):
        raise ConfigError(f"{where}: speculator type {kind!r} is none of {[*classes]}")
    own = families.provided(kind, "FIELDS", ())
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise ConfigError(f"{where}: transformer_layer_config is missing; fetch the file again")
    layers = DEFAULTS | layers
    _refuse_unlike(config, layers, where)
    written = config.get("aux_hidden_state_layer_ids")
    if not isinstance(written, list) or not all(type(i) is int for i in written):
        raise ConfigError(
            f"{where}: aux_hidden_state_layer_ids is {written!r}; expected the list of layers"
        )
    taps = read_taps(
        written,
        source="aux_hidden_state_layer_ids",
        convention=PLUS_ONE,
        choice=choice,
        where=where,
    )
    spelt = families.provided(kind, "SPECULATOR_FIELDS", {})
    named = {spelt.get(name, name): name for name in own}
    _check_unread(config, (*READ, *named), where)
    _check_unread(layers, (*CARRIED, *READ_OF_LAYERS), f"{where}: transformer_layer_config")
    shifted = config.get("sample_from_anchor")
    fields = {key: layers[key] for key in CARRIED if key in layers}
    fields |= _rope(layers) | {
        "architectures": [drafter_kinds()[kind].architectures[0]],
        "model_type": "qwen3",
        "block_size": config.get("block_size", 8),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "sample_from_anchor": config.get("shift_label") if shifted is None else shifted,
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "is_causal": False if config.get("sliding_window_non_causal") else None,
        "dflash_config": {
            "mask_token_id": config.get("mask_token_id"),
            "target_layer_ids": list(taps.ids),
            "projector_type": config.get("projector_type"),
            "speculative_tokens": _advised(config.get("speculators_config"), where),
            **{name: config[key] for key, name in named.items() if key in config},
        },
    }
    return fields, taps


def _advised(settings: Any, where: str) -> int:
    """Return the drafts of a step that the first proposal method asks for; 0 if it does not."""
    methods = settings.get("proposal_methods") if isinstance(settings, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    if count is None:
        return 0
    if type(count) is not int or count < 1:
        raise ConfigError(
            f"{where}: speculative_tokens is {count!r}; expected a positive integer, or no such"
            " field"
        )
    return count


def _proposals(kind: str, count: int) -> dict[str, Any]:
    """Return the settings that advise `count` drafts of a step, as `_advised` reads them."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": count}
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
    }


def _classes() -> dict[str, str]:
    """Return the class name of each kind of drafter that this layout has."""
    found = {kind: families.provided(kind, "SPECULATOR") for kind in drafter_kinds()}
    return {kind: name for kind, name in found.items() if name}


def _check_unread(values: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    reader = Fields(values, where)
    reader.used.update(known, PACKAGING, TRAINING)
    reader.check_rest()


def _refuse_unlike(config: dict[str, Any], layers: dict[str, Any], where: str) -> None:
    width = config.get("target_hidden_size")
    if width not in (None, layers["hidden_size"]):
        raise ConfigError(
            f"{where}: a target of width {width} for a drafter of width {layers['hidden_size']}"
            " is not supported; they must be equal"
        )


def _rope(layers: dict[str, Any]) -> dict[str, Any]:
    """Reduce rotary settings by layer kind to those of sliding layers, as speculators does."""
    found = layers.get("rope_parameters")
    if isinstance(found, dict) and "sliding_attention" in found:
        found = found["sliding_attention"]
    return {"rope_parameters": found, "rope_scaling": layers.get("rope_scaling")}


def speculators_fields(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a drafter in this layout, with every field of the layers.

    Raises:
      ConfigError: the drafter has no form in this layout.
    """
    if (kind := config.kind) not in (classes := _classes()):
        raise ConfigError(f"a {kind} drafter has no form in the speculators layout")
    fields = drafter_fields(config, dtype)
    if fields.get("is_causal"):
        raise ConfigError("a drafter causal in every layer has no form in the speculators layout")
    own = fields["dflash_config"]
    spelt = families.provided(kind, "SPECULATOR_FIELDS", {})
    names = [name for name in families.provided(kind, "FIELDS", ()) if name in own]
    carried = {spelt.get(name, name): own.pop(name) for name in names}
    for name in ("sample_from_anchor", "shift_label", "projector_type"):
        own.pop(name, None)
    advised = own.pop("speculative_tokens", 0)
    if extra := sorted(set(own) - {"mask_token_id", "target_layer_ids"}):
        raise ConfigError(f"{', '.join(extra)} has no place in the speculators layout")
    layers = DEFAULTS | {key: fields[key] for key in CARRIED if key in fields}
    layers |= {"model_type": "qwen3", "rope_parameters": _rope_parameters(fields)}
    return {
        "architectures": [classes[kind]],
        "speculators_model_type": kind,
        "transformer_layer_config": layers,
        "draft_vocab_size": config.choices,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": fields.get("is_causal") is False,
        "sample_from_anchor": config.sample_from_anchor,
        "dtype": dtype,
        **({"speculators_config": _proposals(kind, advised)} if advised else {}),
        **carried,
    }


def _rope_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    scaling = fields["rope_scaling"] or {"rope_type": "default"}
    return {"rope_theta": fields["rope_theta"], **scaling}
