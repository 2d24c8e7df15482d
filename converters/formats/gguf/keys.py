"""Read GGUF metadata with types and limits, and what the metadata of decoders share."""

import math
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

from dflash_jax.config import AttentionConfig, RopeConfig, TargetConfig
from dflash_jax.converters.formats.gguf.file import STRING, GgufArray, GgufFile
from dflash_jax.converters.formats.gguf.writer import F32, U32, Typed
from dflash_jax.errors import CheckpointError, ConfigError

# Read GGUF metadata with types and limits: the numbers of a model's configuration.


MAX_ARRAY = 1 << 16
UNAPPLIED = {  # keys of other decoders, and their neutral values
    "attention.value_scale": 1.0,
    "attention.clamp_kqv": None,
    "attn_logit_softcapping": None,
    "residual_scale": 1.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}


class GgufFields:
    """Metadata below one architecture's prefix; every error names the key."""

    def __init__(self, source: GgufFile):
        self.where = str(source.path)
        self.metadata = source.metadata
        kind = self.metadata.get("general.type", "model")
        if kind != "model":
            raise CheckpointError(f"{self.where} is of type {kind!r} (general.type), not a model")
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise CheckpointError(
                f"{self.where} has no general.architecture; fetch or convert it again"
            )
        self.architecture = architecture

    def get(self, key: str) -> Any:
        """Return a value of this architecture, such as `block_count`, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, limit: int, default: int | None = None) -> int:
        """Return an integer from 1 to `limit`; a per-layer array must hold one value.

        Raises:
          ConfigError: the value is missing, or another one.
        """
        value = self.get(key)
        if isinstance(value, GgufArray):
            values = set(self.ints(key))
            value = values.pop() if len(values) == 1 else value.tolist()[:8]
        if value is None:
            value = default
        if type(value) is not int or not 1 <= value <= limit:
            raise ConfigError(
                f"{self.where}: {self.architecture}.{key} is {value!r};"
                f" expected an integer from 1 to {limit}"
            )
        return value

    def whole(self, key: str, limit: int) -> int:
        """Return an integer from 0, the default, to `limit`.

        Raises:
          ConfigError: the value is another one.
        """
        return self.count(key, limit) if self.get(key) else 0

    def number(self, key: str, default: float) -> float:
        """Return a finite float.

        Raises:
          ConfigError: the value is another one.
        """
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ConfigError(
                f"{self.where}: {self.architecture}.{key} is {value!r}; expected a number"
            )
        return shortest(float(value))

    def refuse_unless(self, neutral: Mapping[str, float | None]) -> None:
        """Check that keys have neutral values.

        Args:
          neutral: the neutral value of each key; None if the key must be absent or 0.

        Raises:
          ConfigError: another value, which would change the output.
        """
        for key, harmless in neutral.items():
            value = self.get(key)
            if value in (None, 0, harmless):
                continue
            if isinstance(value, float) and harmless and abs(value / harmless - 1) < 1e-6:
                continue
            raise ConfigError(
                f"{self.where}: {self.architecture}.{key} is {value!r}, which this version does"
                " not apply; the output would be wrong"
            )

    def ints(self, key: str) -> list[int]:
        """Return an array of integers or booleans, as integers.

        Raises:
          ConfigError: the value is no such array.
        """
        value = self.get(key)
        if not isinstance(value, GgufArray) or len(value) > MAX_ARRAY:
            raise ConfigError(
                f"{self.where}: {self.architecture}.{key} is {value!r}; expected a short array"
            )
        values = value.tolist()
        if not all(isinstance(v, int) for v in values):
            raise ConfigError(
                f"{self.where}: {self.architecture}.{key} holds {values[:4]}; expected integers"
            )
        return [int(v) for v in values]


def shortest(value: float) -> float:
    """Return the shortest decimal with the same float32 bits, to undo the rounding."""
    narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value


def geometry(
    fields: GgufFields,
    *,
    inner: int | None = None,
    kv_heads: int | None = None,
    partial: bool = False,
    scale: float | None = None,
    applied: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the Hugging Face fields for size and attention that all decoders share.

    Args:
      inner: the width of dense MLPs, if no key has one number for it.
      kv_heads: the number of key/value heads, if no key has one number for it.
      partial: whether only a part of each head may be rotated.
      scale: scale of attention scores; None is 1 over the root of a key's width.
      applied: keys of `UNAPPLIED` that the family applies.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    hidden = fields.count("embedding_length", 131072)
    heads = fields.count("attention.head_count", 1024)
    width = fields.count("attention.key_length", 1024, hidden // heads)
    values = fields.count("attention.value_length", 1024, width)
    rotated = fields.count("rope.dimension_count", 1024, width)
    if values != width or (rotated != width and not partial):
        raise ConfigError(
            f"{fields.where}: keys are {width} wide, values {values}, {rotated} of it rotated;"
            " this version needs all three equal"
        )
    neutral = {key: value for key, value in UNAPPLIED.items() if key not in applied}
    fields.refuse_unless(neutral | {"attention.scale": width**-0.5 if scale is None else scale})
    return {
        "hidden_size": hidden,
        "num_hidden_layers": fields.count("block_count", 1024),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or fields.count("attention.head_count_kv", 1024, heads),
        "head_dim": width,
        "intermediate_size": inner or fields.count("feed_forward_length", 524288),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": fields.count("context_length", 1 << 24, 4096),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(fields),
    }


def _scaling(fields: GgufFields) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type")
    if kind in (None, "none"):
        fields.refuse_unless({"rope.scaling.factor": 1.0} if kind is None else {})
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields.number("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": fields.number("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": fields.count(
                "rope.scaling.original_context_length", 1 << 24
            ),
            "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise ConfigError(
        f"{fields.where}: rope scaling {kind!r} is not supported; none, linear and yarn are"
    )


def weight_dtype(source: GgufFile) -> str:
    """Return the dtype of the largest tensor, as the dtype of the published weights."""
    largest = max(source.names(), key=source.nbytes, default=None)
    kind = source.kind(largest) if largest else "F32"
    return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


# GGUF metadata that decoders share, and the refusal of settings that it cannot express.


Metadata = dict[str, Typed]


def shared(config: AttentionConfig) -> Metadata:
    """Return the keys for size and attention, below the architecture's prefix."""
    width = config.head_dim
    return {
        "block_count": Typed(U32, config.num_layers),
        "embedding_length": Typed(U32, config.hidden_size),
        "feed_forward_length": Typed(U32, config.intermediate_size),
        "attention.head_count": Typed(U32, config.num_heads),
        "attention.head_count_kv": Typed(U32, config.num_kv_heads),
        "attention.key_length": Typed(U32, width),
        "attention.value_length": Typed(U32, width),
        "attention.layer_norm_rms_epsilon": Typed(F32, config.rms_norm_eps),
        "rope.freq_base": Typed(F32, config.rope.theta),
        "rope.dimension_count": Typed(U32, width),
    }


def experts(config: TargetConfig) -> Metadata:
    """Return the keys for number, choice and width of experts."""
    return {
        "expert_count": Typed(U32, config.num_experts),
        "expert_used_count": Typed(U32, config.experts_per_token),
        "expert_feed_forward_length": Typed(U32, config.expert_size),
    }


def rope(rope: RopeConfig, *, truncate: bool = True) -> Metadata:
    """Return the keys for a rescaled rotary embedding; none if it is not rescaled.

    Args:
      truncate: the value that readers assume for yarn, which has no key for it.

    Raises:
      ConfigError: no key can express the scaling.
    """
    if rope.kind == "default":
        return {}
    keys = {
        "rope.scaling.type": Typed(STRING, rope.kind),
        "rope.scaling.factor": Typed(F32, rope.factor),
    }
    if rope.kind == "linear":
        return keys
    usual = math.isclose(rope.attention_factor, 0.1 * math.log(max(rope.factor, 1.0)) + 1.0)
    if rope.kind == "yarn" and rope.truncate == truncate and usual:
        return keys | {
            "rope.scaling.original_context_length": Typed(U32, rope.original_length),
            "rope.scaling.yarn_beta_fast": Typed(F32, rope.beta_fast),
            "rope.scaling.yarn_beta_slow": Typed(F32, rope.beta_slow),
        }
    raise ConfigError(
        f"rotary scaling {rope.kind} (truncate {rope.truncate}, attention factor"
        f" {rope.attention_factor}) has no place in this GGUF file; write the Hugging Face layout"
        " instead"
    )


def refuse(config: TargetConfig, settings: Mapping[str, bool]) -> None:
    """Check that no setting applies that the architecture's files cannot hold.

    Args:
      settings: whether each setting, in words, applies.

    Raises:
      ConfigError: at least one does.
    """
    if unsupported := [words for words, applies in settings.items() if applies]:
        raise ConfigError(
            f"{', '.join(unsupported)} of this {config.model_type} target: no place in a GGUF file"
            " of its architecture; write the Hugging Face layout instead"
        )
