"""Drafted output equals plain output in few engines that meet every pair of choices.

The audit (`benchmarks/audit`) goes through products of these choices with random events. Here every
two values of any two of them meet in one of twelve engines, whose requests are decoded with wrong,
right and mixed drafts, alone and in a batch.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.audit.models import Setup, random_engine
from dflash_jax.plan import Plan
from dflash_jax.testing import scripted_engine, set_row_scripts, set_script

CHUNK = 8
LENGTHS = (1, CHUNK, 2 * CHUNK + 3)  # of prompts
NEW = 20


class Combination(NamedTuple):
    """Choices of one engine."""

    family: str
    drafter: str
    dtype: str
    weights: str
    block: int
    rows: int
    kernels: str
    kv_dtype: str
    steps_per_call: int
    lookahead: int
    sampled: bool


COMBINATIONS = [
    Combination(
        "qwen3, two windows", "dflash2", "float16", "int8", 2, 1, "auto", "int8", 1, 0, False
    ),
    Combination(
        "qwen3, two windows", "dspark", "float32", "packed", 4, 1, "xla", "auto", 4, 1, False
    ),
    Combination(
        "qwen3, two windows", "domino", "bfloat16", "float", 7, 3, "xla", "int8", 4, 0, True
    ),
    Combination("qwen3_5", "dflash2", "bfloat16", "int8", 4, 3, "auto", "auto", 4, 1, True),
    Combination("qwen3_5", "dspark", "float16", "packed", 7, 1, "auto", "int8", 1, 0, True),
    Combination("qwen3_5", "domino", "float32", "float", 2, 1, "xla", "auto", 1, 1, False),
    Combination("gpt_oss", "dflash2", "float16", "float", 4, 3, "xla", "auto", 4, 1, False),
    Combination("gpt_oss", "dspark", "float32", "int8", 7, 3, "xla", "auto", 1, 0, False),
    Combination("gpt_oss", "domino", "bfloat16", "packed", 2, 1, "auto", "int8", 4, 1, True),
    Combination("gemma3", "dflash2", "float32", "packed", 7, 3, "auto", "int8", 4, 1, True),
    Combination("gemma3", "dspark", "bfloat16", "float", 2, 3, "auto", "auto", 1, 0, False),
    Combination("gemma3", "domino", "float16", "int8", 4, 1, "xla", "int8", 1, 0, False),
]
FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3, two windows": {"num_layers": 1, "windows": (24,)},
    "qwen3_5": {"num_layers": 2, "recurrent": (True, False)},
    "gpt_oss": {"num_layers": 1, "windows": (12,)},
    "gemma3": {"num_layers": 1, "windows": (10,)},
}
ONE_LAYER = {"num_layers": 1, "windows": (12,), "causal": (False,)}


def test_every_two_choices_meet() -> None:
    values = [sorted(set(column), key=str) for column in zip(*COMBINATIONS, strict=True)]
    for a, b in itertools.combinations(range(len(values)), 2):
        met = {(row[a], row[b]) for row in COMBINATIONS}
        assert met == set(itertools.product(values[a], values[b]))


@pytest.mark.parametrize(
    ("number", "combination"), [*enumerate(COMBINATIONS)], ids=[str(i) for i in range(12)]
)
def test_drafted_and_batched_requests_give_the_tokens_of_plain_ones(
    number: int, combination: Combination
) -> None:
    width = (
        {"hidden_size": 256, "intermediate_size": 256} if combination.weights == "packed" else {}
    )
    plan = combination._asdict()
    family = plan.pop("family")
    drafter = plan.pop("drafter")
    options: dict[str, Any] = {"max_tokens": NEW, "ignore_eos": True}
    if plan.pop("sampled"):
        options |= {"temperature": 0.9, "top_k": 30, "seed": 11}
    setup = Setup(
        family=family,
        drafter=drafter,
        shape=FAMILY_SHAPES[family] | width,
        drafter_shape=ONE_LAYER | width,
        weights_seed=number,
    )
    engine = scripted_engine(random_engine(setup, Plan(**plan, chunk=CHUNK, max_length=64)))
    rng = np.random.default_rng(number)
    vocabulary = engine.graph.config.vocab_size
    prompts = [rng.integers(0, vocabulary, length).tolist() for length in LENGTHS]
    plain = []
    for prompt in prompts:
        tokens = engine.generate(prompt, speculative=False, **options).token_ids
        plain.append(tokens)
        truth = np.array([*prompt, *tokens])
        mixed = np.where(rng.random(len(truth)) < 0.7, truth, (truth + 1) % vocabulary)
        set_script(engine, mixed.tolist())
        result = engine.generate(prompt, **options)
        assert result.token_ids == tokens
        assert result.stats.acceptance_length > 1.2
    set_row_scripts(engine, {})  # the drafter's own tokens
    together = engine.generate_many(prompts, **options)
    assert [result.token_ids for result in together] == plain
