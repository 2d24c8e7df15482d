"""Phi-3 and Phi-4-mini: Llama with partly rotated heads and long-context rotary factors."""

from typing import Any

from dflash_jax.config.base import TargetConfig, dense_fields, switched_window
from dflash_jax.config.family import Family
from dflash_jax.config.fields import Fields, integer
from dflash_jax.config.rope import rotated_share


def from_hf(f: Fields) -> TargetConfig:
    """Return the config of a Phi-3; its window, if shorter than the longest text, is of all layers.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    f.used.update(("embd_pdrop", "resid_pdrop"))  # training only
    for name, only in (("full_attn_mod", 1), ("interpolate_factor", 1)):
        f.must_be(name, only)
    f.must_be("lm_head_bias", False)
    f.must_be("mlp_bias", False)
    heads = f.integer("num_attention_heads")
    width = integer(f, "head_dim", f.integer("hidden_size") // max(heads, 1))
    rotated = int(width * rotated_share(f, 1.0))
    read = Fields(_without_share(f), f.where)
    fields = dense_fields(read, rotated=rotated)
    window = switched_window(read)
    f.used.update(read.used)
    if window is not None and window >= fields["max_length"]:
        window = None
    own: dict[str, Any] = {
        "windows": (window,) * fields["num_layers"],
        "rms_norm_eps": f.number("rms_norm_eps", 1e-5),
        "rotated": 0 if rotated == width else rotated,
    }
    return TargetConfig(**fields | own)


def _without_share(f: Fields) -> dict[str, Any]:
    """Return all fields without the share of each head that rotates, which `rotated` replaces."""
    values = {key: value for key, value in f.values.items() if key != "partial_rotary_factor"}
    for name in ("rope_scaling", "rope_parameters"):
        inner = f.inner(name).values
        values[name] = {k: v for k, v in inner.items() if k != "partial_rotary_factor"}
    f.used.add("partial_rotary_factor")
    return values


FAMILY = Family(
    config=TargetConfig,
    from_hf=from_hf,
    any_width=True,
    module="llama",
    model_types=("phi3",),
    gguf=("phi3",),
    defaults={"phi3": {"max_position_embeddings": 4096}},
)
