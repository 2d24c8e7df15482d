"""DSpark drafters: as version 1, with a Markov head and a confidence head."""

from dflash_jax.config.dspark import DSparkConfig
from dflash_jax.converters.names import dflash
from dflash_jax.converters.names.slots import Slot, linear, same


def slots(config: DSparkConfig) -> list[Slot]:
    """Every parameter of the drafter."""
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
