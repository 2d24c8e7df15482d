"""Filters against the official vectors, keys, and the law of sampled speculative output."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import PROMPT, ROWS, SAID, VOCAB, all_logits, chisquare, filtered, law, likelihood, said
from safetensors.numpy import load_file

from dflash_jax import Plan
from dflash_jax.config import TargetConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import Request
from dflash_jax.engine.running_request import RowSettings
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.scheduler import RowOfRules, make_rules
from dflash_jax.graph.state import RowRules
from dflash_jax.graph.steps import sampling
from dflash_jax.graph.steps.sampling import (
    REPLACEMENT_TOKEN,
    TOKEN,
    choose_tokens,
    replacement_token,
    row_keys,
)
from dflash_jax.kernels.vocabulary import CHUNK
from dflash_jax.testing import (
    random_engine,
    tiny_drafter,
    tiny_gemma,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_moe,
    tiny_target,
)


@jax.jit
def probabilities(logits: jax.Array, rules: RowRules) -> jax.Array:
    """Return the distribution [B, T, V] of each place, one-hot in greedy rows."""

    def one(row: jax.Array) -> jax.Array:
        sure = jax.nn.one_hot(jnp.argmax(row, axis=-1), row.shape[-1])
        p = jax.nn.softmax(sampling.scaled(row, rules), axis=-1)
        return jnp.where(rules.temperature[:, None] > 0, p, sure)

    return jax.lax.map(one, logits.swapaxes(0, 1)).swapaxes(0, 1)


def rules(rows: int = 1, **columns: Any) -> RowRules:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values |= {"limit": 99, "max_drafts": 99} | columns
    seeds = np.broadcast_to(np.asarray(values.pop("seed", 0), np.uint64), (rows,))
    words = np.stack([seeds >> np.uint64(32), seeds], axis=1).astype(np.uint32)
    kinds = {"temperature": np.float32, "top_p": np.float32, "min_p": np.float32}
    arrays = {
        k: jnp.asarray(np.broadcast_to(np.asarray(v, kinds.get(k, np.int32)), (rows,)))
        for k, v in values.items()
    }
    stop_ids = jnp.full((rows, 2), -1, jnp.int32)
    return RowRules(stop_ids=stop_ids, seed=jnp.asarray(words), **arrays)


def test_filters_follow_the_official_vectors_row_by_row(oracle: Path) -> None:
    """All settings as the rows of one call, so that rows keep their own settings."""
    path = oracle / "drafters" / "sampling"
    cases = json.loads((path / "meta.json").read_text())["probs"]
    v = load_file(path / "vectors.safetensors")
    columns = {name: [c[name] for c in cases] for name in ("temperature", "top_k", "top_p")}
    logits = jnp.repeat(v["logits"], len(cases), axis=0)
    p = probabilities(logits, rules(len(cases), **columns))
    wanted = np.concatenate([v[c["tensor"]] for c in cases])
    np.testing.assert_allclose(p, wanted, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    st.integers(0, 12),
    st.sampled_from([0.01, 0.3, 0.5, 0.8, 0.95, 1.0]),
    st.sampled_from([0.0, 0.02, 0.31, 1.0]),
    st.booleans(),
)
def test_filters_are_their_definition(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, ties: bool
) -> None:
    logits = np.random.default_rng(seed).standard_normal((1, 2, 9)).astype(np.float32) * 3
    if ties:
        logits = np.round(logits)
    settings_ = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    p = np.asarray(probabilities(jnp.asarray(logits), rules(**settings_)))[0]
    for got, row in zip(p, logits[0], strict=True):
        sorted_mass = np.cumsum(np.sort(filtered(row, **settings_ | {"top_p": 1.0}))[::-1])
        if np.abs(sorted_mass - top_p).min() < 1e-5:
            continue  # whether it keeps that token depends on the last bit of a sum
        np.testing.assert_allclose(got, filtered(row, **settings_), atol=1e-5)
        assert abs(got.sum() - 1) < 1e-5


def test_keys_depend_on_seed_position_and_purpose_alone() -> None:
    def data(rows: list[tuple[int, int]], purpose: int) -> list[list[int]]:
        seeds, positions = zip(*rows, strict=True)
        keys = row_keys(rules(len(rows), seed=seeds), jnp.asarray(positions, jnp.int32), purpose)
        return jax.random.key_data(keys).tolist()

    rows = list(itertools.product((0, 1, 2**32 - 1, 2**32 + 1, 2**64 - 1), (0, 1, 77)))
    keys = {
        (row, purpose): tuple(key)
        for purpose in (TOKEN, REPLACEMENT_TOKEN)
        for row, key in zip(rows, data(rows, purpose), strict=True)
    }
    assert len(set(keys.values())) == len(rows) * 2
    for row in rows:  # alone as in company
        assert tuple(data([row], TOKEN)[0]) == keys[row, TOKEN]
    with jax.default_prng_impl("rbg"):  # its numbers depend on the other rows
        assert tuple(data([rows[0]], TOKEN)[0]) == keys[rows[0], TOKEN]


def test_draws_follow_their_distribution_and_never_leave_it() -> None:
    p = np.array([0.5, 0.0, 0.3, 0.2, 0.0], np.float32)
    rows = 4000
    logits = jnp.broadcast_to(jnp.log(p), (rows, 2, 5))
    by_seed, start = rules(rows, seed=np.arange(rows)), jnp.zeros((rows,), jnp.int32)
    tokens = np.asarray(choose_tokens(logits, start, by_seed, sampled=True, kernels="xla"))
    for place in range(2):
        counts = np.bincount(tokens[:, place], minlength=5)
        assert counts[p == 0].sum() == 0
        inside = p > 0
        assert chisquare(counts[inside], p[inside] * rows) > 1e-3
    alone = choose_tokens(logits[:, 1:], start + 1, by_seed, sampled=True, kernels="xla")
    assert alone[:, 0].tolist() == tokens[:, 1].tolist()  # the same position


def test_draws_from_many_tokens_follow_their_distribution() -> None:
    """Over chunks of the vocabulary, of which some have no token that may be drawn."""
    rows, vocab = 6000, 5 * CHUNK + 7
    x = np.random.default_rng(0).standard_normal(vocab).astype(np.float32) * 2
    x[CHUNK : 2 * CHUNK] = -np.inf
    by_seed = rules(rows, seed=np.arange(rows))
    keys = row_keys(by_seed, jnp.zeros((rows,), jnp.int32), TOKEN)
    tokens = np.asarray(
        jax.jit(sampling.draw, static_argnums=3)(
            keys, jnp.broadcast_to(x, (rows, vocab)), by_seed, "xla"
        )
    )
    p = np.exp(x.astype(np.float64))
    expected, counts = p / p.sum() * rows, np.bincount(tokens, minlength=vocab)
    assert counts[p == 0].sum() == 0
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    assert len(wanted) > 100
    assert chisquare(observed, wanted) > 1e-3


def test_what_replaces_a_stop_token_has_its_law() -> None:
    p = np.array([0.4, 0.3, 0.3], np.float32)
    rows, place = 4000, jnp.ones((4000,), jnp.int32)
    by_seed = dataclasses.replace(
        rules(rows, seed=np.arange(rows)), stop_ids=jnp.zeros((rows, 1), jnp.int32)
    )
    logits = jnp.broadcast_to(jnp.log(p), (rows, 1, 3))
    said = choose_tokens(logits, place, by_seed, sampled=True, kernels="xla")[:, 0]
    instead = replacement_token(
        logits, said, jnp.zeros_like(place), place, by_seed, sampled=True, kernels="xla"
    )
    counts = np.bincount(np.asarray(instead)[np.asarray(said) == 0], minlength=3)
    assert counts[0] == 0
    assert chisquare(counts[1:], np.full(2, counts.sum() / 2)) > 1e-3


# -- the law of what the engine says -----------------------------------------------------------

SETTINGS = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 4, "top_p": 1.0},
]
LAWS = [
    pytest.param(SETTINGS[0], id="pure", marks=pytest.mark.soak),
    pytest.param(SETTINGS[1], id="top-k and top-p"),
    pytest.param(SETTINGS[2], id="top-k", marks=pytest.mark.soak),
]


@pytest.fixture(scope="module")
def many() -> Engine:
    target = tiny_target(num_layers=2, vocab_size=VOCAB)
    drafter = tiny_drafter(target, num_layers=1, windows=(None,), causal=(False,))
    plan = Plan(rows=ROWS, max_length=16, block=4, chunk=8)
    return random_engine(target, drafter, plan, seed=3)


@pytest.fixture(scope="module")
def next_logits(many: Engine) -> dict[tuple[int, ...], np.ndarray]:
    """By continuation but its last token: the target's logits of each place, by a whole pass."""
    return all_logits(many)


@pytest.mark.exhaustive
@pytest.mark.parametrize("filters", LAWS)
def test_sampled_speculative_output_has_the_distribution_of_the_target(
    many: Engine, next_logits: dict[tuple[int, ...], np.ndarray], filters: dict[str, Any]
) -> None:
    tokens, stats = said(many, range(4 * ROWS), **filters)
    p = law(next_logits, **filters)
    assert abs(p.sum() - 1) < 1e-4
    assert likelihood(tokens, p / p.sum()) > 1e-3
    sharper = p**1.5
    assert likelihood(tokens, sharper / sharper.sum()) < 1e-6, "the test could not tell"
    accepted, drafted = sum(s.accepted for s in stats), sum(s.drafted for s in stats)
    assert 0.05 < accepted / drafted < 0.95  # both branches were taken


@pytest.mark.exhaustive
def test_sampled_output_under_penalties_and_biases_has_its_law(
    many: Engine, next_logits: dict[tuple[int, ...], np.ndarray]
) -> None:
    """Penalties count what was said before each place, drafts of the same block included."""
    filters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.03}
    shapes = {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.4}

    def shape(row: np.ndarray, said: tuple[int, ...]) -> np.ndarray:
        row = row + np.array([0.0, 0.5, 0.0, -1.0, 0.0, 0.0])
        seen = np.isin(np.arange(VOCAB), [*PROMPT, *said])
        row = np.where(seen, np.where(row > 0, row / 1.5, row * 1.5), row)
        counts = np.bincount(np.array(said, int), minlength=VOCAB)
        return row - 0.7 * counts - 0.4 * (counts > 0)

    tokens, stats = said(many, range(4 * ROWS), **filters, **shapes, logit_bias={1: 0.5, 3: -1})
    p, unshaped = law(next_logits, shape, **filters), law(next_logits, **filters)
    assert likelihood(tokens, p / p.sum()) > 1e-3
    with pytest.raises(AssertionError):  # it says what the target alone would not, or otherwise
        assert likelihood(tokens, unshaped / unshaped.sum()) > 1e-6
    assert sum(s.accepted for s in stats) > 0.03 * sum(s.drafted for s in stats)


@pytest.mark.exhaustive
def test_seeds_reproduce_and_do_not_depend_on_companions(many: Engine) -> None:
    filters = SETTINGS[1]
    together, _ = said(many, range(40), **filters)
    alone = [said(many, range(s, s + 1), **filters)[0][0].tolist() for s in (0, 7, 39)]
    assert alone == together[[0, 7, 39]].tolist()
    assert len({tuple(t) for t in together}) > 20
    greedy = many.generate(PROMPT, max_tokens=SAID).token_ids
    live = many.submit(PROMPT, max_tokens=SAID)  # a greedy request among sampled ones
    again, _ = said(many, range(40), **filters)
    assert again.tolist() == together.tolist()
    assert live.result().token_ids == greedy


@pytest.mark.parametrize("speculative", [True, False])
def test_a_row_without_filters_draws_alike_beside_rows_with_them(
    many: Engine, speculative: bool
) -> None:
    free: dict[str, Any] = {"max_tokens": SAID, "temperature": 1.0, "speculative": speculative}
    alone = [many.generate(PROMPT, seed=seed, **free).token_ids for seed in range(5)]
    together = [many.submit(PROMPT, seed=seed, **free) for seed in range(5)]
    said(many, range(40), temperature=1.0, top_k=2, top_p=0.7, min_p=0.1)
    assert [x.result().token_ids for x in together] == alone
    assert len({tuple(tokens) for tokens in alone}) > 2


@pytest.mark.parametrize("filters", [{"temperature": 2e-38}, {"temperature": 2.0, "top_p": 0}])
def test_the_narrowest_filters_leave_the_likeliest_token(filters: dict[str, Any]) -> None:
    wanted = Request(prompt=(1,), params=SamplingParams(**filters))
    plan = Plan(rows=1, max_length=8, block=2, chunk=2, stop_slots=1)
    settings = RowSettings(wanted, limit=9, speculates=True, choices=(), opening=-1)
    row = RowOfRules(settings, decodes=True, drafts=0)
    p = probabilities(jnp.asarray([[[3.0, 30.0, 10.0]]]), make_rules(plan, [row], {}))
    assert p.tolist() == [[[0, 1, 0]]]  # 30 / 2e-38 is infinite


@pytest.mark.exhaustive
def test_a_position_is_drawn_by_one_key_whatever_step_decides_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[tuple[int, bytes]] = []

    def recorded(rules: RowRules, position: jax.Array, purpose: int) -> jax.Array:
        keys = row_keys(rules, position, purpose)
        if purpose == TOKEN:
            jax.debug.callback(record, position, jax.random.key_data(keys))
        return keys

    def record(position: Any, data: Any) -> None:  # runs no JAX operation: none may be traced here
        keys = map(bytes, np.asarray(data))
        used.extend(zip(np.asarray(position).tolist(), keys, strict=True))

    monkeypatch.setattr(sampling, "row_keys", recorded)
    target = tiny_target()
    engine = random_engine(target, tiny_drafter(target), Plan(max_length=64, block=4, chunk=8))
    options = {"max_tokens": 40, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    for speculative in (True, False):
        engine.generate([5, 6, 7], speculative=speculative, **options)
    jax.effects_barrier()
    positions, keys = map(set, zip(*used, strict=True))
    assert len(set(used)) == len(positions) == len(keys) > 40


@pytest.mark.exhaustive
@pytest.mark.parametrize("filters", LAWS)
def test_sampled_speculative_tokens_are_those_of_plain_decoding(
    many: Engine, filters: dict[str, Any]
) -> None:
    shapes = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {1: 0.5}}
    for options in (filters, filters | shapes):
        drafted, stats = said(many, range(ROWS), **options)
        plain, none = said(many, range(ROWS), speculative=False, **options)
        assert drafted.tolist() == plain.tolist()
        assert sum(s.accepted for s in stats) > 0 == sum(s.rounds for s in none)


# -- families and kinds --------------------------------------------------------------------------

PAIRS: dict[str, tuple[TargetConfig, str, dict[str, Any]]] = {
    "llama, dflash": (tiny_target(num_layers=2), "dflash", {}),
    "qwen3_5, dflash2": (tiny_hybrid(), "dflash2", {}),
    "gemma4, dspark": (
        tiny_gemma(),
        "dspark",
        {"markov_head": "gated", "draft_vocab_size": 60, "own_head": True},
    ),
    "gpt_oss, dspark": (tiny_gpt_oss(), "dspark", {"markov_head": "rnn"}),
    "qwen3_moe, dflash": (tiny_moe(), "dflash", {}),
}
MANNERS: list[dict[str, Any]] = [
    {"temperature": 0.3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 1.5, "top_p": 0.95, "presence_penalty": 0.4},
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name.startswith("qwen3_5") else pytest.mark.soak)
        for name in PAIRS
    ],
)
def test_every_family_and_kind_draws_the_tokens_of_plain_decoding(name: str) -> None:
    target, kind, own = PAIRS[name]
    drafter = tiny_drafter(target, kind, target_layer_ids=(0,), **own)
    engine = random_engine(target, drafter, Plan(rows=4, max_length=64, block=4, chunk=8))
    rounds = 0
    for number, manner in enumerate(MANNERS):
        prompts = [[5 + row, 6, 7 + number] for row in range(4)]
        options = {"max_tokens": 48, "seed": 7 * number, "ignore_eos": True, **manner}
        drafted = engine.generate_many(prompts, **options)
        plain = engine.generate_many(prompts, speculative=False, **options)
        assert [x.token_ids for x in drafted] == [x.token_ids for x in plain], manner
        rounds += sum(x.stats.rounds for x in drafted)
    assert rounds > 100
