"""The speculators layout of drafters, converted from and to the published config.json.

The nested layer config is written as the difference from its class's defaults, so those are
filled in here. Facts from the speculators and transformers sources.
"""

from typing import Any

from dflash_jax.config import DrafterConfig
from dflash_jax.config.fields import Fields
from dflash_jax.converters.names.published import drafter_fields
from dflash_jax.converters.taps import AUTO, PLUS_ONE, Taps, read_taps
from dflash_jax.errors import ConfigError
from dflash_jax.families import drafter_kinds
from dflash_jax.families.dspark import TRAINING
from dflash_jax.families.entry import Speculator

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
    if not isinstance(kind, str) or kind not in (known := _speculators()):
        raise ConfigError(f"{where}: speculator type {kind!r} is none of {[*known]}")
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
    named = {known[kind].fields.get(name, name): name for name in drafter_kinds()[kind].fields}
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


def _speculators() -> dict[str, Speculator]:
    """Return the form of each kind of drafter that this layout has."""
    forms = {name: kind.speculator for name, kind in drafter_kinds().items()}
    return {name: form for name, form in forms.items() if form is not None}


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
    parameters = layers.get("rope_parameters")
    if isinstance(parameters, dict) and "sliding_attention" in parameters:
        parameters = parameters["sliding_attention"]
    return {"rope_parameters": parameters, "rope_scaling": layers.get("rope_scaling")}


def speculators_fields(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a drafter in this layout, with every field of the layers.

    Raises:
      ConfigError: the drafter has no form in this layout.
    """
    if (kind := config.kind) not in (known := _speculators()):
        raise ConfigError(f"a {kind} drafter has no form in the speculators layout")
    fields = drafter_fields(config, dtype)
    if fields.get("is_causal"):
        raise ConfigError("a drafter causal in every layer has no form in the speculators layout")
    own = fields["dflash_config"]
    names = [name for name in drafter_kinds()[kind].fields if name in own]
    carried = {known[kind].fields.get(name, name): own.pop(name) for name in names}
    for name in ("sample_from_anchor", "shift_label", "projector_type"):
        own.pop(name, None)
    advised = own.pop("speculative_tokens", 0)
    if extra := sorted(set(own) - {"mask_token_id", "target_layer_ids"}):
        raise ConfigError(f"{', '.join(extra)} has no place in the speculators layout")
    layers = DEFAULTS | {key: fields[key] for key in CARRIED if key in fields}
    layers |= {"model_type": "qwen3", "rope_parameters": _rope_parameters(fields)}
    speculators_json = {
        "architectures": [known[kind].name],
        "speculators_model_type": kind,
        "transformer_layer_config": layers,
        "draft_vocab_size": config.choices,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": fields.get("is_causal") is False,
        "sample_from_anchor": config.sample_from_anchor,
        "dtype": dtype,
        **carried,
    }
    if advised:
        speculators_json["speculators_config"] = _proposals(kind, advised)
    return speculators_json


def _rope_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    scaling = fields["rope_scaling"] or {"rope_type": "default"}
    return {"rope_theta": fields["rope_theta"], **scaling}
