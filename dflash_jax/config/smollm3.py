"""SmolLM3: Llama with layers that do not rotate queries and keys (NoPE), usually every fourth."""

import dataclasses

from dflash_jax.config.base import TargetConfig, dense_fields, switched_window
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields
from dflash_jax.errors import ConfigError


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
    fields = dense_fields(f, tied=True) | {"mlp_bias": f.flag("mlp_bias", False)}
    count, every = fields["num_layers"], f.integer("no_rope_layer_interval", 4)
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
    if f.get("layer_types") is None:
        window = switched_window(f)
        fields["windows"] = tuple(window if i in unrotated else None for i in range(count))
    return SmolLM3Config(**fields, unrotated=unrotated)


FAMILY = Family(
    config=SmolLM3Config,
    from_hf=from_hf,
    module="llama",
    any_width=True,
    model_types=("smollm3",),
    gguf=("smollm3",),
    defaults={"smollm3": {"max_position_embeddings": 32768, "num_key_value_heads": 4}},
    optional_window=True,
)
