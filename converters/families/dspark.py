"""DSpark drafters: version 1 with a Markov head and a confidence head."""

from typing import Any

from dflash_jax.config.dspark import DSparkConfig
from dflash_jax.converters.families import dflash
from dflash_jax.converters.gguf.keys import GgufFields
from dflash_jax.converters.gguf.tensors import Shapes
from dflash_jax.converters.gguf.writer import BOOL, Typed
from dflash_jax.converters.names.slots import Slot, linear, same
from dflash_jax.errors import ConfigError

SPECULATOR = "DSparkSpeculator"
FIELDS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
CONFIDENCE = "confidence_head.proj.weight"
GGUF_NAMES = {
    "markov_head.markov_w1.weight": ("markov_w1.weight",),
    "markov_head.markov_w2.weight": ("markov_w2.weight",),
    CONFIDENCE: ("conf_proj.weight", "confidence_proj.weight"),
    "confidence_head.proj.bias": ("conf_proj.bias", "confidence_proj.bias"),
}
GGUF_MARKS = ("markov_w1.weight", *GGUF_NAMES[CONFIDENCE])
GGUF_FLAT = (CONFIDENCE,)


def slots(config: DSparkConfig) -> list[Slot]:
    """Return every parameter of the drafter."""
    width, rank, head = config.hidden_size, config.markov_rank, "markov_head."
    found = dflash.slots(config)
    if rank:
        found += [
            same(("markov_w1",), f"{head}markov_w1.weight", config.vocab_size, rank),
            linear(("markov_w2",), f"{head}markov_w2.weight", config.choices, rank),
        ]
    if rank and config.markov_head == "gated":
        found += [
            linear(("markov_gate",), f"{head}gate_proj.weight", rank, width + rank),
            same(("markov_gate_bias",), f"{head}gate_proj.bias", rank),
        ]
    if rank and config.markov_head == "rnn":
        found += [
            linear(("markov_joint",), f"{head}joint_proj.weight", 3 * rank, 2 * rank + width),
            same(("markov_joint_bias",), f"{head}joint_proj.bias", 3 * rank),
        ]
    if config.confidence_head:
        read = width + rank * config.confidence_with_markov
        found += [
            linear(("confidence",), "confidence_head.proj.weight", 1, read),
            same(("confidence_bias",), "confidence_head.proj.bias", 1),
        ]
    return found


def to_hf(config: DSparkConfig) -> dict[str, Any]:
    """Return the kind's own fields of `dflash_config`."""
    own = config.markov_rank, config.markov_head, config.confidence_head
    return dict(zip(FIELDS, (*own, config.confidence_with_markov), strict=True))


def from_gguf(fields: GgufFields, shapes: Shapes) -> dict[str, Any]:
    """Return the kind's own fields of `dflash_config` that a GGUF file holds."""
    found = dflash.from_gguf(fields, shapes)
    confidence = next((shapes[n] for n in GGUF_NAMES[CONFIDENCE] if n in shapes), None)
    rank = shapes.get("markov_w1.weight", (0, 0))[-1]
    alone = fields.count("embedding_length", 131072)
    if confidence is not None:
        found["confidence_head_with_markov"] = confidence[-1] != alone
    return found | {"markov_rank": rank, "enable_confidence_head": confidence is not None}


def to_gguf(config: DSparkConfig) -> dict[str, Typed]:
    """Return the kind's own metadata of a GGUF file.

    Raises:
      ConfigError: llama.cpp does not have this Markov head.
    """
    if config.markov_rank and config.markov_head != "vanilla":
        raise ConfigError(
            f"a {config.markov_head} Markov head has no place in a drafter GGUF; export to the"
            " Hugging Face layout instead"
        )
    return {
        "has_confidence_head": Typed(BOOL, config.confidence_head),
        "sample_from_anchor": Typed(BOOL, config.sample_from_anchor),
    }
