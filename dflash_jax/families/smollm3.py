"""SmolLM3: Llama with layers that do not rotate queries and keys (NoPE), usually every fourth."""

import dataclasses
from typing import Any

from dflash_jax.config.base import TargetConfig, dense_config, extended, switched_window
from dflash_jax.config.fields import Fields
from dflash_jax.converters.formats import config_json
from dflash_jax.converters.formats.gguf import keys, tensors
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields
from dflash_jax.errors import ConfigError
from dflash_jax.families import llama
from dflash_jax.families.entry import Family, TargetGguf


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(TargetConfig):
    """A SmolLM3 target."""

    unrotated: tuple[int, ...]  # layers without rotary embedding

    @property
    def conventions(self) -> tuple[str, ...]:
        """Descriptions of what is special in the family."""
        plain = f"{len(self.unrotated)} layers without rotary embedding"
        return (*super().conventions, plain)

    def rotates(self, layer: int) -> bool:
        """Return whether a layer has a rotary embedding."""
        return layer not in self.unrotated


def from_hf(f: Fields) -> SmolLM3Config:
    """Return the config of a SmolLM3; a window is, unless listed, that of layers without rotation.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    config = dense_config(f, tied=True)
    count = config.num_layers
    every = f.integer("no_rope_layer_interval", 4)
    if every < 1:
        raise ConfigError(f"{f.where}: no_rope_layer_interval is {every}; expected 1 or more")
    listed = f.get("no_rope_layers", [int((i + 1) % every != 0) for i in range(count)])
    known = isinstance(listed, list) and all(rotates in (0, 1) for rotates in listed)
    if not known or len(listed) != count:
        raise ConfigError(
            f"{f.where}: no_rope_layers is {listed}; expected {count} entries, 1 for each layer"
            " that rotates and 0 for the others"
        )
    unrotated = tuple(i for i, rotates in enumerate(listed) if not rotates)
    windows = config.windows
    if f.get("layer_types") is None:
        window = switched_window(f)
        windows = tuple(window if i in unrotated else None for i in range(count))
    return extended(
        config,
        SmolLM3Config,
        mlp_bias=f.flag("mlp_bias", False),
        windows=windows,
        unrotated=unrotated,
    )


EVERY = 4  # layers of which the last does not rotate, in GGUF files


def to_hf(config: SmolLM3Config, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    rotate = [int(i not in config.unrotated) for i in range(config.num_layers)]
    fields = config_json.decoder_fields(config, dtype, "SmolLM3ForCausalLM")
    return fields | {"no_rope_layers": rotate}


# GGUF
def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to SmolLM3."""
    fields.refuse_unless(llama.UNAPPLIED)
    return keys.geometry(fields) | {
        "model_type": "smollm3",
        "attention_bias": tensors.biased(source),
        "mlp_bias": "blk.0.ffn_gate.bias" in source.names(),
        "no_rope_layer_interval": EVERY,
    }


def to_gguf(config: SmolLM3Config) -> keys.Metadata:
    """Return the metadata that is specific to SmolLM3.

    Raises:
      ConfigError: files of this architecture cannot hold the model.
    """
    usual = tuple(range(EVERY - 1, config.num_layers, EVERY))
    keys.refuse(
        config,
        {
            "a sliding window": any(config.windows),
            f"rotation in other layers than all but every {EVERY}th": config.unrotated != usual,
        },
    )
    return keys.rope(config.rope)


FAMILY = Family(
    config=SmolLM3Config,
    from_hf=from_hf,
    model_types=("smollm3",),
    defaults={"smollm3": {"max_position_embeddings": 32768, "num_key_value_heads": 4}},
    optional_window=True,
    slots=llama.slots,
    to_hf=to_hf,
    gguf=TargetGguf(
        architectures=("smollm3",),
        from_gguf=from_gguf,
        to_gguf=to_gguf,
        origin=llama.gguf_origin,
        stored=llama.gguf_stored,
    ),
)
