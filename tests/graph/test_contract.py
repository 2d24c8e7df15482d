"""Modules that are not what a graph needs: each fault is named when the graph is made."""

import dataclasses
import types
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import pytest

import dflash_jax as dj
from dflash_jax.errors import CheckpointError, PlanError
from dflash_jax.graph import Graph, ModelConfig, TargetOutput
from dflash_jax.graph.abstract import by_path
from dflash_jax.graph.protocols import nnx_params
from tests.graph.own_modules import PLAN, VOCAB, WIDTH, Bigram, Heads, Own


class Faulty(Own):
    """`Own` with something else as the result of one of its members."""

    def logits(self, hidden: jax.Array) -> Any:
        logits = super().logits(hidden)
        match self.fault:
            case "narrow head":
                return logits[..., : VOCAB // 2]
            case "wide head":
                return jnp.pad(logits, ((0, 0), (0, 0), (0, 3)))
            case "chosen tokens":
                return logits.argmax(axis=-1)
            case "whole numbers":
                return logits.astype(jnp.int32)
            case "last place":
                return logits[:, -1]
        return logits

    def embed(self, tokens: jax.Array) -> jax.Array:
        narrow = self.fault == "narrow embedding"
        return self.table[tokens][..., : WIDTH // 2] if narrow else self.table[tokens]

    def __call__(self, tokens: Any, caches: Any, start: Any, **options: Any) -> Any:
        if self.fault == "narrow embedding":
            return TargetOutput(jnp.zeros((*tokens.shape, WIDTH)), (), tuple(caches))
        out = super().__call__(tokens, caches, start, **options)
        [cache] = out.caches
        match self.fault:
            case "pair":
                return out.hidden, out.caches
            case "no taps":
                return dataclasses.replace(out, taps=())
            case "narrow hidden":
                return dataclasses.replace(out, hidden=out.hidden[..., :-1])
            case "no row":
                return dataclasses.replace(out, hidden=out.hidden[0])
            case "bare arrays":
                return dataclasses.replace(out, caches=((cache.k, cache.v),))
            case "no caches":
                return dataclasses.replace(out, caches=())
            case "other dtype":
                return dataclasses.replace(out, caches=(cache.replace(v=cache.v > 0),))
            case "other slots":
                return dataclasses.replace(out, caches=(cache.replace(k=cache.k[:, :, :-1]),))
        return out


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("narrow head", r"Faulty\.logits returned float32\[\d, \d, 30\]; expected floats .*, 61\]"),
        ("wide head", r"logits returned float32\[\d, \d, 64\]; .*config.vocab_size"),
        ("chosen tokens", r"logits returned int32\[\d, \d\]; expected floats"),
        ("whole numbers", r"logits returned int32\[\d, \d, 61\]; expected floats"),
        ("last place", r"logits returned float32\[\d, 61\]; expected floats"),
        ("narrow embedding", r"embed returned float32\[2, 4, 12\]; expected floats \[2, 4, 24\]"),
        ("pair", r"__call__ returned \(float32\[.*; expected a dj\.graph\.TargetOutput"),
        ("no taps", r"__call__ returned 0 taps; expected 1, the hidden states \(1,\)"),
        ("narrow hidden", r"__call__ as hidden returned float32\[.*23\]; .*config.hidden_size"),
        ("no row", r"__call__ as hidden returned float32\[\d, 24\]; expected floats"),
        ("bare arrays", r"__call__ returned \(float32.* as the update of cache 0; .*LayerCache"),
        ("no caches", "__call__ returned 0 updates; expected one for each of the 1 caches"),
        ("other dtype", r"commit of layer 0 returned bool\[.* at 0/v; expected float32\["),
        ("other slots", r"commit of layer 0 returned float32\[.* at 0/k; expected float32\["),
    ],
)
def test_what_a_target_returns_is_checked_when_a_graph_is_made(fault: str, words: str) -> None:
    drafter = None if fault == "narrow embedding" else Heads(WIDTH, depth=1, places=3)
    with pytest.raises(PlanError, match=words):
        Graph(dj.Pair(Faulty(fault=fault), drafter), PLAN)


def test_own_attention_that_writes_its_own_dtype_is_refused_caches_of_another() -> None:
    plan = dataclasses.replace(PLAN, kv_dtype="float16")
    words = r"kv_dtype='float16', Own\.__call__ fails: TypeError: .*leave kv_dtype 'auto'"
    with pytest.raises(PlanError, match=words):
        Graph(dj.Pair(Own()), plan)
    with pytest.raises(PlanError, match=words):
        Graph(dj.Pair(Own()), PLAN).with_plan(kv_dtype="float16")
    with pytest.raises(PlanError, match=r"kv_dtype='int8', .*__call__ fails"):
        Graph(dj.Pair(Own()), dataclasses.replace(PLAN, kv_dtype="int8"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            types.SimpleNamespace(),
            r"config\.vocab_size of Own is None; expected a positive integer",
        ),
        (ModelConfig(0, WIDTH, 1), r"config\.vocab_size of Own is 0; expected a positive"),
        (ModelConfig(VOCAB, 24.0, 1), r"config\.hidden_size of Own is 24\.0"),
        (ModelConfig(VOCAB, WIDTH, 1, 5), r"config\.eos_token_ids of Own is 5; expected a tuple"),
        (
            None,
            "the target is of the type Own without config; expected the members config",
        ),
    ],
)
def test_the_config_of_a_target_is_checked(config: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Graph(dj.Pair(Own(config=config)), PLAN)


def drafter(**members: Any) -> Any:
    """Return a drafter of one token again and again, with other members."""
    usual = {
        "taps": (),
        "empty": lambda self, make: jnp.zeros((make.rows, 3), jnp.int32),
        "observe": lambda self, params, state, tokens, taps, start: state,
        "propose": lambda self, params, state, anchor, start, shared, sampler: (
            sampler.certain(jnp.repeat(anchor[:, None], sampler.num_drafts, 1)),
            state,
        ),
    }
    return type("Mine", (), usual | members)()


def proposes(change: Any) -> Any:
    """Return a drafter whose `propose` returns what `change` makes of draft and state."""

    def propose(
        self: Any, params: Any, state: Any, anchor: Any, start: Any, shared: Any, sampler: Any
    ) -> Any:
        return change(sampler.certain(jnp.repeat(anchor[:, None], sampler.num_drafts, 1)), state)

    return drafter(propose=propose)


def observes(change: Any) -> Any:
    """Return a drafter whose `observe` returns what `change` makes of the state."""
    return drafter(observe=lambda self, params, state, *observed: change(state))


def empties(change: Any) -> Any:
    """Return a drafter whose `empty` returns what `change` makes of the number of rows."""
    return drafter(empty=lambda self, make: change(make.rows))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (proposes(lambda draft, state: draft), r"Mine\.propose returned a Draft; expected a tuple"),
        (proposes(lambda draft, state: state), r"propose returned int32\[2, 3\]; expected a tuple"),
        (proposes(lambda draft, state: (state, draft)), "propose returned .*; expected a tuple of"),
        (proposes(lambda draft, state: None), "propose returned None; expected a tuple"),
        (proposes(lambda draft, state: (draft, None)), "propose returned None as the state"),
        (
            proposes(lambda draft, state: (draft, state.astype(float))),
            r"propose returned float32\[2, 3\]",
        ),
        (proposes(lambda draft, state: (draft, state[:1])), r"propose returned int32\[1, 3\]"),
        (proposes(lambda draft, state: (draft.replace(num_drafts=state), state)), "whose num_dr"),
        (observes(lambda state: None), "observe returned None as the state; expected int32"),
        (
            observes(lambda state: state.astype(jnp.float32)),
            r"observe returned float32\[.*; expected int32\[",
        ),
        (observes(lambda state: (state, state)), r"observe returned \(int32\[.* as the state"),
        (observes(lambda state: state["x"]), "Mine.observe fails: TypeError: .*parameters first"),
        (empties(lambda rows: jnp.zeros(3)), r"Mine\.empty returned float32\[3\] for 2 rows"),
        (empties(lambda rows: jnp.zeros(2)), r"empty returned float32\[2\] for 3 rows"),
        (empties(lambda rows: jnp.zeros((3, rows))), r"float32\[3, 2\] for 2 rows; expected arr"),
        (empties(lambda rows: {"at": jnp.int32(0)}), r"empty returned int32\[\] at at for 2 rows"),
        (empties(lambda rows: 1 / 0), "Mine.empty fails: ZeroDivisionError: division by zero"),
        (drafter(taps=(99,)), r"taps of Mine are \(99,\); expected a tuple .* to 1, the output"),
        (drafter(taps=(0, -1)), r"taps of Mine are \(0, -1\); expected a tuple of integers from 0"),
        (drafter(taps=(2,)), r"taps of Mine are \(2,\)"),
        (drafter(taps=[1]), r"taps of Mine are \[1\]; expected a tuple"),
        (drafter(taps=1), r"taps of Mine are 1; expected a tuple"),
        (
            drafter(propose=None),
            r"the drafter is of the type Mine without propose; expected the members taps",
        ),
        (Bigram, "the drafter is the class Bigram; give an object of it"),
        ("tiny", "the drafter is of the type str without taps, empty, observe, propose; expected"),
    ],
)
def test_drafters_are_checked_when_a_graph_is_made(given: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Graph(dj.Pair(Own(), given), PLAN)


def test_a_drafter_as_documented_is_taken() -> None:
    assert "Mine" in str(Graph(dj.Pair(Own(), drafter()), PLAN))


class OfNNX(nnx.Module):
    """A target in Flax NNX, without attention; `scale` is a constant, as a table of angles is."""

    def __init__(self, rngs: nnx.Rngs):
        self.config = ModelConfig(VOCAB, WIDTH, 1, eos_token_ids=(0,))
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs)])
        self.scale = nnx.Variable(jnp.full((1, 1, WIDTH), 2.0))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def empty_caches(self, make: Any) -> Any:
        return (make(2, WIDTH // 2, None),)

    def embed(self, tokens: Any) -> Any:
        return self.table(tokens)

    def logits(self, hidden: Any) -> Any:
        return self.table.attend(hidden).astype(jnp.float32)

    def __call__(
        self, tokens: Any, caches: Any, start: Any, *, taps: Any, taps_at: Any, chunked: Any
    ) -> TargetOutput:
        self.calls[...] += 1  # of a copy: a program has no side effects
        first = self.table(tokens)
        x = self.dropout(jnp.tanh(self.layers[0](first)) * self.scale[...])
        return TargetOutput(x, tuple((first, x)[i] for i in taps), tuple(caches))


class HeadsOfNNX(nnx.Module):
    """`Heads` in Flax NNX, over the embedding of the anchor alone."""

    taps = ()

    def __init__(self, places: int, rngs: nnx.Rngs):
        self.heads = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(places)])

    def empty(self, make: Any) -> Any:
        return ()

    def observe(self, state: Any, tokens: Any, taps: Any, start: Any) -> Any:
        return state

    def propose(self, state: Any, anchor: Any, start: Any, shared: Any, sampler: Any) -> Any:
        x = shared.embed(anchor[:, None])[:, 0]
        hidden = jnp.stack([head(x) for head in self.heads], axis=1)
        choice = sampler.sample_all(shared.head(hidden)[:, : sampler.num_drafts])
        return sampler.draft(choice.index, choice.finite), state


@pytest.fixture(scope="module")
def of_nnx() -> dj.Pair:
    return dj.Pair(OfNNX(nnx.Rngs(0)), HeadsOfNNX(3, nnx.Rngs(1)))


def test_modules_of_nnx_are_a_pair_whose_obligations_hold(of_nnx: dj.Pair) -> None:
    assert dj.graph.check(of_nnx) == []
    assert of_nnx.target.calls[...] == 0


def test_parameters_of_nnx_modules_are_shown_and_swapped(of_nnx: dj.Pair) -> None:
    graph = Graph(of_nnx, PLAN)
    assert graph == Graph(dj.Pair(of_nnx.target, of_nnx.drafter), PLAN)
    names = by_path(graph.params)
    assert [n for n in names if n.startswith("target")] == [
        "target/layers/0/bias", "target/layers/0/kernel", "target/table/embedding",
    ]  # fmt: skip
    assert "HeadsOfNNX" in str(graph)
    own = graph.init_params(jax.random.key(0))
    assert (own["target"]["table"]["embedding"] == of_nnx.target.table.embedding[...]).all()
    other = HeadsOfNNX(3, nnx.Rngs(7))
    engine = dj.Engine(graph, {"target": of_nnx.target, "drafter": of_nnx.drafter})
    for given in (other, nnx.state(other, nnx.Param), nnx_params(other)):
        engine.update_params({"drafter": of_nnx.drafter})
        engine.update_params({"drafter": given})
        kernel = engine.params["drafter"]["heads"][2]["kernel"]
        assert (kernel == other.heads[2].kernel[...]).all()
        placed = graph.place_params(own | {"drafter": given})
        assert (placed["drafter"]["heads"][2]["kernel"] == kernel).all()
    with pytest.raises(CheckpointError, match=r"drafter/heads/2/bias is missing"):
        engine.update_params({"drafter": HeadsOfNNX(2, nnx.Rngs(7))})
    with pytest.raises(PlanError, match=r"drafter/heads/2/bias is missing; expected \(24,\)"):
        graph.place_params({"target": of_nnx.target, "drafter": HeadsOfNNX(2, nnx.Rngs(7))})


def test_faults_of_an_nnx_module_are_named(of_nnx: dj.Pair) -> None:
    class Failing(HeadsOfNNX):
        def observe(self, state: Any, tokens: Any, taps: Any, start: Any) -> Any:
            raise ValueError("no")

    drafter = Failing(3, nnx.Rngs(1))
    with pytest.raises(PlanError, match=r"Failing.observe fails: ValueError: no; expected"):
        Graph(dj.Pair(of_nnx.target, drafter), PLAN)
    with pytest.raises(PlanError, match=r"is of the type Linear without taps, empty, observe"):
        Graph(dj.Pair(of_nnx.target, nnx.Linear(2, 2, rngs=nnx.Rngs(0))), PLAN)
