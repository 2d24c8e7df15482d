"""SmolLM3: the tensors of Llama; some layers do not rotate."""

from typing import Any

from dflash_jax.config.smollm3 import SmolLM3Config
from dflash_jax.converters.families.llama import UNAPPLIED, gguf_origin, gguf_stored, slots
from dflash_jax.converters.gguf import keys, tensors
from dflash_jax.converters.gguf.file import GgufFile
from dflash_jax.converters.gguf.keys import GgufFields, geometry
from dflash_jax.converters.names import published

__all__ = ["from_gguf", "gguf_origin", "gguf_stored", "slots", "to_gguf", "to_hf"]

EVERY = 4  # layers of which the last does not rotate, in GGUF files


def to_hf(config: SmolLM3Config, dtype: str) -> dict[str, Any]:
    """Return the config.json of a target whose weights are of `dtype`."""
    rotate = [int(i not in config.unrotated) for i in range(config.num_layers)]
    found = published.decoder_fields(config, dtype, "SmolLM3ForCausalLM")
    return found | {"no_rope_layers": rotate}


# GGUF
def from_gguf(fields: GgufFields, source: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that are specific to SmolLM3."""
    fields.refuse_unless(UNAPPLIED)
    return geometry(fields) | {
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
