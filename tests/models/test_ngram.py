"""Drafts copied from the text: lossless for every family, accepted where text repeats."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.config import TargetConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.graph.state import RowRules
from dflash_jax.graph.steps.drafting import RowDraftSampler
from dflash_jax.models import build_pair
from dflash_jax.models.ngram import NGram
from dflash_jax.testing import random_params, tiny_gemma, tiny_hybrid, tiny_target

REPEATED = [7, 8, 9, 10, 11, 12] * 3 + [7, 8, 9]


def drafts(text: list[int], places: int, **options: int) -> list[int]:
    """Return the drafts after a text, in a row whose slots hold other tokens after it."""
    ngram, slots = NGram(**options), 64
    state = (
        jnp.full((1, slots), 99, jnp.int32)
        .at[0, : len(text) - 1]
        .set(jnp.array(text[:-1], jnp.int32))
    )
    anchor, start = jnp.array([text[-1]]), jnp.array([len(text) - 1])
    one = jnp.zeros(1, jnp.int32)
    rules = RowRules(*[one] * 2, one + places, *[one] * 5)
    sampler = RowDraftSampler(rules, anchor, start, places, sampled=False, vocab_size=100)
    draft, _ = ngram.propose({}, state, anchor, start, None, sampler)  # pyrefly: ignore
    count = min(int(draft.num_drafts[0]), places)
    return np.asarray(draft.block)[0, 1 : 1 + count].tolist()


def test_the_continuation_of_the_longest_and_latest_match_is_drafted() -> None:
    assert drafts(REPEATED, 4) == [10, 11, 12, 7]
    assert drafts([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], 3) == [5, 6, 1]  # latest of equally long ones
    assert drafts([9, 1, 2, 3, 5, 1, 2, 4, 9, 1, 2], 2) == [3, 5]  # longer beats later
    assert drafts([1, 2, 3, 1], 4) == []  # one token is no match
    assert drafts([1, 2, 3, 1], 4, least=1) == [2, 3, 1, 2]  # and again after the anchor
    assert drafts([3, 3, 3, 3], 4) == [3, 3, 3, 3]
    assert drafts([5], 4) == []


@pytest.mark.parametrize("target", [tiny_target(), tiny_gemma(), tiny_hybrid()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output_is_that_of_plain_decoding(target: TargetConfig, dtype: str) -> None:
    pair = dataclasses.replace(build_pair(target), drafter=NGram(block=4, least=1))
    plan = dj.Plan(rows=2, block=4, max_length=96, dtype=dtype, prefix_cache=1 << 20, chunk=8)
    graph = dj.Graph(pair, plan)
    params = jax.device_put({"target": random_params(build_pair(target), dtype=dtype)["target"]})
    engine = Engine(graph, params)
    drafted, accepted = [], 0
    for options in ({}, {"temperature": 0.8, "seed": 3, "top_k": 4}):
        for prompt in (REPEATED, REPEATED[:17], [1, 2, 3]):
            more = {"max_tokens": 40, "ignore_eos": True} | options
            result = engine.generate(prompt, **more)
            plain = engine.generate(prompt, speculative=False, **more)
            assert result.token_ids == plain.token_ids
            accepted += len(plain.token_ids) - result.stats.rounds
            drafted.append(result.token_ids)
    assert accepted > 0
    assert engine.generate(REPEATED, max_tokens=40, ignore_eos=True).token_ids == drafted[0]
