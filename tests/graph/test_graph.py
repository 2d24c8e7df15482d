"""Graphs of modules that are not the package's: lossless, checked, and with errors in words."""

import dataclasses
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import dflash_jax as dj
from dflash_jax.errors import PlanError, RequestError
from dflash_jax.graph import Graph, GraphPrograms, TargetOutput
from dflash_jax.graph.state import PromptPart, prompt_arrays
from dflash_jax.kernels.caches import zero_rows
from tests.graph.own_modules import (
    LONGEST,
    PLAN,
    PROMPTS,
    VOCAB,
    WIDTH,
    Bigram,
    Heads,
    Own,
    decoded,
    trained,
)


class OwnCaches(Own):
    """Has a cache type of its own."""

    def empty_caches(self, make: Any) -> tuple[Any, ...]:
        [cache] = super().empty_caches(make)
        return ({"k": cache.k, "v": cache.v},)


@struct.dataclass
class Last:
    """The last input of each row, and as an update that of every place."""

    inputs: jax.Array

    def commit(self, num_committed: jax.Array) -> "Last":
        return Last(jnp.take_along_axis(self.inputs, num_committed[:, None, None], axis=1)[:, 0])

    def restart(self, rows: jax.Array) -> "Last":
        return zero_rows(self, rows)


class Mixing(Own):
    """A recurrent layer that mixes each input with the one before it."""

    def setup(self) -> None:
        normal = nn.initializers.normal(0.3)
        self.table = self.param("table", normal, (VOCAB, WIDTH))
        self.mix = self.param("mix", normal, (WIDTH,))
        self.mlp = [self.param(n, normal, (WIDTH, WIDTH)) for n in ("up", "down")]

    def empty_caches(self, make: Any) -> tuple[Last, ...]:
        return (Last(jnp.zeros((make.rows, WIDTH), make.dtype)),)

    def __call__(self, tokens: Any, caches: Any, start: Any, *, taps: Any = (), **_: Any) -> Any:
        states = self.embed(tokens)
        whole = jnp.concatenate([caches[0].inputs[:, None], states], axis=1)
        whole = jax.lax.optimization_barrier(whole)
        mix = self.mix[None, None]
        x = whole[:, 1:] * mix + whole[:, :-1] * (1 - mix)
        place = jnp.arange(tokens.shape[1])[None, :, None]
        if self.fault:  # place 0 is computed by other means, or differs
            error = {"place": 2.0**-22, "begin": 2.0**-4}[self.fault]
            x = jnp.where(place == 0, x * (1 + error), x)
        x = x + jnp.tanh(x @ self.mlp[0]) @ self.mlp[1]
        return TargetOutput(x, tuple((states, x)[i] for i in taps), (Last(whole),))


class Careless(Bigram):
    """Makes the drafts of `Bigram`, then breaks a field of them."""

    def __init__(self, fault: str):
        self.fault = fault

    def propose(
        self, params: Any, state: Any, anchor: Any, start: Any, shared: Any, sampler: Any
    ) -> Any:
        draft, state = super().propose(params, state, anchor, start, shared, sampler)
        block, even = draft.block, start % 2 == 0
        broken = {
            "anchor": {"block": block.at[:, 0].add(1)},
            "unknown tokens": {"block": block.at[:, 2].set(jnp.where(even, 2 * VOCAB, -5))},
            "too many": {"num_drafts": start * 0 + 99},
            "fewer than none": {"num_drafts": start * 0 - 7},
            "not finite": {"finite": even, "num_drafts": start * 0 + 3},
            "nothing told": {"finite": None, "num_drafts": None},
            "width": {"block": block[:, :-1]},
        }
        return dataclasses.replace(draft, **broken[self.fault]), state


# -- lossless --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bigram() -> tuple[GraphPrograms, Any]:
    graph = Graph(dj.Pair(Own(), Bigram()), PLAN)
    names = ["prefill", "plain", "speculative", "prefill[sampled]", "speculative[sampled]"]
    return graph.compile(names), graph.init_params(jax.random.key(1))


@pytest.fixture(scope="module")
def expected(bigram: tuple[GraphPrograms, Any]) -> list[list[int]]:
    """The texts of plain decoding."""
    return decoded(*bigram, "plain", stop=())[0]


@pytest.mark.exhaustive
def test_drafts_from_the_text_are_lossless(
    bigram: tuple[GraphPrograms, Any], expected: list[list[int]]
) -> None:
    texts, calls = decoded(*bigram, "speculative", stop=())
    assert texts == expected
    lengths = [len(text) for text in texts]
    assert lengths == [LONGEST - len(prompt) for prompt in PROMPTS]
    assert calls < max(lengths) - 1  # some drafts were accepted


@pytest.mark.sample("unknown tokens", "fewer than none", "not finite")
@pytest.mark.parametrize(
    "fault",
    ["anchor", "unknown tokens", "too many", "fewer than none", "not finite", "nothing told"],
)
def test_no_field_of_a_draft_changes_a_token(
    fault: str, bigram: tuple[GraphPrograms, Any], expected: list[list[int]]
) -> None:
    graph = Graph(dj.Pair(Own(), Careless(fault)), PLAN)
    programs = graph.compile(["prefill", "speculative"])
    texts, calls = decoded(programs, bigram[1], "speculative", stop=())
    assert texts == expected
    slower, longest = fault == "fewer than none", max(map(len, expected)) - 1
    assert (calls == longest) if slower else (calls < longest)
    few, _ = decoded(programs, bigram[1], "speculative", stop=(), drafts=0)
    assert few == expected


def test_an_engine_decodes_as_the_programs_do(
    bigram: tuple[GraphPrograms, Any], expected: list[list[int]]
) -> None:
    programs, params = bigram
    engine = dj.Engine(programs.graph, params)
    assert engine.graph == programs.graph
    found = engine.generate_many(PROMPTS, max_tokens=24, ignore_eos=True)
    assert [result.token_ids for result in found] == [text[:24] for text in expected]
    assert "Bigram" in str(engine.graph.explain())


@pytest.mark.exhaustive
def test_trained_heads_are_lossless_and_accepted(
    bigram: tuple[GraphPrograms, Any], expected: list[list[int]]
) -> None:
    graph = Graph(dj.Pair(Own(), Heads(WIDTH, depth=1, places=3)), PLAN)
    programs = graph.compile(["prefill", "speculative"])
    fresh = graph.init_params(jax.random.key(2)) | {"target": bigram[1]["target"]}
    params = trained(graph, fresh, expected)
    untrained, slow = decoded(programs, fresh, "speculative", stop=())
    texts, calls = decoded(programs, params, "speculative", stop=())
    assert texts == untrained == expected
    assert "Heads" in str(graph)  # whose state is one array, not caches
    assert calls < slow


def test_stop_tokens_end_drafted_rows_where_they_end_plain_ones(
    bigram: tuple[GraphPrograms, Any], expected: list[list[int]]
) -> None:
    stop = expected[0][10]
    ends = [text.index(stop) + 1 if stop in text else len(text) for text in expected]
    texts, _ = decoded(*bigram, "speculative", stop=[stop])
    assert texts == [text[:end] for text, end in zip(expected, ends, strict=True)]


def test_sampled_programs_draw_the_same_tokens_from_the_same_seed(
    bigram: tuple[GraphPrograms, Any],
) -> None:
    rules = {"temperature": 1.0, "stop": (), "max_length": 40}
    first, again, other = (
        decoded(*bigram, "speculative", seed=seed, **rules)[0] for seed in (3, 3, 4)
    )
    assert first == again != other


def test_rows_without_a_prompt_are_done_and_stay_empty(bigram: tuple[GraphPrograms, Any]) -> None:
    programs, params = bigram
    state, out = programs.prefill(params, programs.graph.init_state(), [1, 2], row=1)
    assert out.done.tolist() == [True, False]
    assert out.num_tokens.tolist() == [0, 1]
    state, out = programs.plain(params, state)
    assert out.num_tokens.tolist() == [0, 1]
    assert np.asarray(state.position).tolist() == [0, 3]


def test_a_report_and_text_of_programs_need_no_compilation() -> None:
    graph = Graph(dj.Pair(Own()), PLAN)
    assert str(graph.key(dj.graph.Step.PLAIN)) in str(graph)
    assert "stablehlo" in graph.lower("plain").as_text()
    assert "drafter" not in graph.params


# -- obligations -----------------------------------------------------------------------------------


def test_a_pair_that_keeps_its_obligations_passes_the_check() -> None:
    assert dj.graph.check(dj.Pair(Own(), Bigram())) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("rows", [r"other rows: the output of layer 0 differs first at token 0 of row 0, at most"]),
        ("slots", ["later tokens of its block: ", "where the block begins: .*more than rounding"]),
        ("later tokens", [r"later tokens of its block: the output of layer 0 .* than rounding; m"]),
    ],
)
def test_the_check_finds_a_broken_obligation(fault: str, words: list[str]) -> None:
    found = " ".join(dj.graph.check(dj.Pair(Own(fault=fault))))
    assert all(re.search(each, found) for each in words), found
    assert "by rounding only" not in found


def test_the_check_tells_rounding_from_a_leak_and_passes_a_cell_that_computes_places_alike() -> (
    None
):
    [sentence] = dj.graph.check(dj.Pair(Mixing(fault="place")))
    assert re.search(r"where the block begins: the output of layer 0 .*by rounding only", sentence)
    [sentence] = dj.graph.check(dj.Pair(Mixing(fault="begin")))
    assert re.search("where the block begins: .*by more than rounding", sentence)
    assert dj.graph.check(dj.Pair(Mixing())) == []


# -- errors ----------------------------------------------------------------------------------------


def test_graphs_say_what_they_cannot_do(bigram: tuple[GraphPrograms, Any]) -> None:
    programs, params = bigram
    graph = programs.graph
    with pytest.raises(PlanError, match=r"expected a dj\.Pair and a dj\.Plan"):
        Graph(Own())  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(PlanError, match="device is 'abacus'; expected one of"):
        Graph(graph.pair, device="abacus")
    cut = {**params["target"], "table": params["target"]["table"][:-1]}
    shapes = rf"target/table is \({VOCAB - 1}, {WIDTH}\); expected \({VOCAB}, {WIDTH}\)"
    with pytest.raises(PlanError, match=shapes):
        graph.place_params({"target": cut})
    with pytest.raises(PlanError, match="target/down is missing"):
        graph.place_params({"target": {}})
    with pytest.raises(PlanError, match=r"'verify' is no program of this graph; known are .*plain"):
        graph.lower("verify")
    with pytest.raises(PlanError, match=r"names is 'plain'; expected a list of names.*\['plain'\]"):
        graph.compile("plain")
    with pytest.raises(PlanError, match=r"'plane' is no program .*; did you mean 'plain'"):
        graph.compile(["plane"])
    with pytest.raises(PlanError, match="'speculative' is no program of this graph"):
        Graph(dj.Pair(Own()), PLAN).compile()
    slots = graph.plan.stop_slots
    with pytest.raises(RequestError, match=f"{slots + 1} stop tokens; give at most {slots}"):
        graph.rules(stop=range(slots + 1))


def test_drafts_of_another_width_are_refused() -> None:
    words = r"Careless\.propose returned a block of shape \(2, 3\); expected \(2, 4\)"
    with pytest.raises(PlanError, match=words):
        Graph(dj.Pair(Own(), Careless("width")), PLAN).lower("speculative")


def test_prefixes_of_caches_of_ones_own_are_refused() -> None:
    plan = dataclasses.replace(PLAN, prefix_cache=1 << 20)
    Graph(dj.Pair(Own()), plan)
    with pytest.raises(PlanError, match=r"OwnCaches has caches of its own.*prefix_cache=0"):
        Graph(dj.Pair(OwnCaches()), plan)


def test_programs_say_what_they_cannot_do(bigram: tuple[GraphPrograms, Any]) -> None:
    programs, params = bigram
    state = programs.graph.init_state()
    for prompt, row in (([], 0), ([1] * LONGEST, 0), ([VOCAB], 0), ([-1], 0), ([1], 2)):
        with pytest.raises(RequestError, match=rf"got {len(prompt)} tokens .*expected 1 to"):
            programs.prefill(params, state, prompt, row=row)
    with pytest.raises(PlanError, match=r"params has no 'target'; make it by .graph\.place_params"):
        programs.plain({}, state)
    with pytest.raises(RequestError, match="steps is 2; expected 1 to 1"):
        programs.plain(params, state, steps=2)
    sampled = programs.graph.rules(temperature=1.0)
    with pytest.raises(PlanError, match=r"plain\[sampled\] is not compiled"):
        GraphPrograms(programs.graph, {}).plain(params, state, rules=sampled)


def test_parts_of_prompts_are_padded_to_the_width_of_a_call() -> None:
    parts = [PromptPart(1, 0, [5, 6]), PromptPart(2, 8, (7,))]
    tokens, lengths, fresh = prompt_arrays(parts, rows=3, width=4)
    assert tokens.tolist() == [[0, 0, 0, 0], [5, 6, 0, 0], [7, 0, 0, 0]]
    assert lengths.tolist() == [0, 2, 1]
    assert fresh.tolist() == [False, True, False]
