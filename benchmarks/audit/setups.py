"""Setups: engines of every model family, drafter kind and plan, drawn from a seed."""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from benchmarks.audit.scenario import VARIANTS
from dflash_jax.config import TargetConfig
from dflash_jax.testing import tiny_gemma, tiny_gpt_oss, tiny_hybrid, tiny_moe, tiny_target

SHIPPED, GIVEN = "shipped", "given"
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_size": 16,
    "shared_expert_size": 20,
}
DENSE: dict[str, Any] = {"num_experts": 0, "per_layer_size": 0, "shared_layers": 0}
FAMILIES: dict[str, TargetConfig] = {
    "llama": tiny_target(model_type="llama"),
    "qwen3, two windows": tiny_target(windows=(10, None, 24)),
    "qwen3_moe": tiny_moe(),
    "qwen3_5": tiny_hybrid(),
    "qwen3_5_moe": tiny_hybrid(**EXPERTS),
    "gemma4": tiny_gemma(**DENSE),
    "gemma4, experts, shared keys, per-layer inputs": tiny_gemma(),
    "gpt_oss": tiny_gpt_oss(),
}
FULL: dict[str, Any] = {"windows": (None, None), "causal": (False, False)}
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {  # kind and fields
    "dflash": ("dflash", {}),
    "dflash2": ("dflash2", {}),
    "dspark": ("dspark", {"markov_head": "gated", "draft_vocab_size": 60, "own_head": True}),
    "dflash, full": ("dflash", FULL),
    "dspark, cut by confidence": ("dspark", {"markov_head": "rnn"} | FULL),
    "dflash, causal": ("dflash", {"windows": (9, 20), "causal": (True, True)}),
}
WEIGHTS = ("float", "int8", "int4", "packed")
DTYPES = ("float32", "bfloat16", "float16")
ORDERS = ("auto", "row_major", "column_major", "tiled")
CHUNKS = (4, 8, 16, 24)
BLOCKS = (2, 3, 4, 5, 8, 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Models and a plan.

    Attributes:
      family: family of the target in `FAMILIES`; "shipped" is the shipped pair, "given" is from
        files.
      drafter: one of `DRAFTERS`; empty if the family has its own.
      plan: fields of the plan.
      shape: fields of both configs that differ from the small models.
      syntax: a text that selects the tool-call syntax of the target.
      variants: program variants that requests may use.
      prompt_logprobs: requests may have prompt log-probabilities.
    """

    family: str
    drafter: str = ""
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shape: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drafter_shape: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    syntax: str = "<tool_call>"
    variants: tuple[str, ...] = VARIANTS
    prompt_logprobs: bool = True
    weights_seed: int = 0

    def __str__(self) -> str:
        plan = ", ".join(f"{name} {value}" for name, value in self.plan.items())
        return f"{' + '.join(filter(None, (self.family, self.drafter)))}: {plan}"


def draw_setup(seed: int, number: int, *, family: str = "") -> Setup:
    """Draw a setup; successive numbers cover all families, drafters and kinds of weights.

    Args:
      family: the only family to draw; all by default.
    """
    rng = random.Random(f"{seed}/setup/{number}")
    families = [family] if family else [*FAMILIES, SHIPPED]
    turn, at = divmod(number, len(families))
    chosen, kinds = families[at], list(DRAFTERS)
    weights = WEIGHTS[(at + turn) % len(WEIGHTS)]
    plan: dict[str, Any] = {
        "rows": rng.randint(1, 4),
        "chunk": rng.choice(CHUNKS),
        "block": rng.choice(BLOCKS),
        "dtype": DTYPES[(at + 2 * turn) % 2] if rng.random() < 0.85 else DTYPES[2],
        "kv_dtype": rng.choice(["auto", "auto", "int8"]),
        "lookahead": rng.randrange(2),
        "steps_per_call": rng.choice([1, 2, 4]),
        "rings": rng.random() < 0.7,
        "weight_layout": rng.choice(["auto", "row_major", "column_major", "tiled"])
        if weights == "float"
        else "auto",
        "weights": weights,
        "kernels": rng.choice(["auto", "auto", "xla"]),
        "activations": rng.choice(["auto", "auto", "float"]),
    }
    plan["max_length"] = 5 * plan["chunk"] + 120
    if chosen in (SHIPPED, GIVEN):
        plan["weights"] = "float" if weights == "packed" else weights
        return Setup(family=chosen, plan=plan, prompt_logprobs=rng.random() < 0.5)
    drafter = kinds[(at + turn) % len(kinds)]
    if drafter == "dspark, cut by confidence":
        plan["min_survival"] = rng.choice([0.2, 0.5])
    width = {"int4": 64, "packed": 256}.get(weights)
    shape = {"hidden_size": width, "intermediate_size": width} if width else {}
    return Setup(
        family=chosen,
        drafter=drafter,
        plan=plan,
        shape=shape,
        drafter_shape=shape,
        syntax=rng.choice(["<tool_call>", "<function=", "<|channel|>", "<|tool_call>", ""]),
        prompt_logprobs=rng.random() < 0.5,
        weights_seed=rng.randrange(100),
    )


# Few programs but all events, for `make test`. Every variant is compiled once.
SHORT = (
    Setup(
        family="qwen3, two windows",
        drafter="dflash",
        plan={"rows": 3, "chunk": 16, "block": 4, "max_length": 200, "steps_per_call": 2},
        shape={"num_layers": 1, "windows": (24,)},
        drafter_shape={"num_layers": 1, "windows": (12,), "causal": (False,)},
        prompt_logprobs=False,
    ),
    Setup(
        family="qwen3_5",
        drafter="dflash2",
        plan={"rows": 2, "chunk": 8, "block": 5, "max_length": 160, "steps_per_call": 2},
        shape={"num_layers": 2, "recurrent": (True, False)},
        drafter_shape={"num_layers": 1, "windows": (12,), "causal": (True,)},
        syntax="<function=",
        variants=(),
        prompt_logprobs=False,
    ),
    Setup(
        family="llama",
        drafter="dspark",
        plan={"rows": 2, "chunk": 8, "block": 3, "max_length": 160}
        | {"weights": "int8", "kv_dtype": "int8", "steps_per_call": 1},
        shape={"num_layers": 1, "windows": (None,)},
        drafter_shape={"num_layers": 1, "windows": (None,), "causal": (False,)},
        variants=(),
        prompt_logprobs=False,
    ),
)
