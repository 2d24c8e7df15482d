"""`dj.record`: hidden states of a target while it answers, as arrays."""

from typing import Any

import jax
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.errors import RequestError
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target
from tests.graph.own_modules import PLAN, Heads, Own

TARGET = tiny_target(num_layers=2, vocab_size=96)
DRAFTER = tiny_drafter(
    TARGET, target_layer_ids=(0,), num_layers=1, windows=(None,), causal=(False,)
)
PROMPTS = [[5, 6, 7], [9, 8, 4, 2, 11]]
OPTIONS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> dj.Engine:
    return random_engine(TARGET, DRAFTER, dj.Plan(max_length=64, block=4, chunk=16), seed=1)


def test_hidden_states_are_those_of_a_forward_pass_over_prompt_and_answer(
    engine: dj.Engine,
) -> None:
    drafted = engine.generate_many(PROMPTS, **OPTIONS)
    found = dj.record(engine, PROMPTS, taps=(2, 0), **OPTIONS)
    assert [x.result.token_ids for x in found] == [x.token_ids for x in drafted]
    model = dj.TargetModel(TARGET, jax.tree.map(np.asarray, engine.params["target"]), "float32")
    for one, prompt in zip(found, PROMPTS, strict=True):
        assert one.token_ids == [*prompt, *one.result.token_ids[:-1]]
        hidden = np.asarray(model.forward([one.token_ids]).hidden)[[2, 0], 0]
        np.testing.assert_allclose(one.hidden, hidden, atol=1e-4)


def test_a_target_of_a_user_is_recorded_with_all_its_taps() -> None:
    graph = dj.Graph(dj.Pair(Own(), Heads(24, depth=1, places=3)), PLAN)
    engine = dj.Engine(graph, graph.init_params(jax.random.key(1)))
    [found] = dj.record(engine, PROMPTS[:1], **OPTIONS)
    assert found.taps == (0, 1)
    assert found.hidden.shape == (2, 11, 24)
    assert found.result.token_ids == engine.generate(PROMPTS[0], **OPTIONS).token_ids


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (PROMPTS, {"taps": (3,)}, r"taps is \(3,\); expected integers from 0, .* of the last of 2"),
        (PROMPTS, {"taps": (-1,)}, r"taps is \(-1,\)"),
        (PROMPTS, {"taps": ()}, r"taps is \(\)"),
        (PROMPTS, {"taps": 1.5}, "taps is 1.5"),
        ("Hello", {}, "prompts is 'Hello'; expected a list"),
        ([[]], {}, "the prompt is empty"),
        ([[96]], {}, "out of range"),
        (PROMPTS, {"max_tokens": 99}, "the plan holds 64"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(
    engine: dj.Engine, prompts: Any, options: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        dj.record(engine, prompts, **options)


def test_rounded_caches_and_other_objects_are_refused() -> None:
    rounded = random_engine(TARGET, None, dj.Plan(max_length=64, kv_dtype="int8"))
    with pytest.raises(RequestError, match="kv_dtype is 'int8', which rounds what is kept"):
        dj.record(rounded, PROMPTS)
    with pytest.raises(RequestError, match="engine is a str; expected"):
        dj.record("tiny", PROMPTS)  # pyrefly: ignore
