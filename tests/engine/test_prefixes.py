"""The prefix cache: cached prompts give the same bits. Names give the cases P1 to P37."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax import CancelCell, Plan
from dflash_jax.config import TargetConfig
from dflash_jax.engine import request as requests
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.prefix.cache import CacheCounters, PrefixCache
from dflash_jax.engine.state_machine import OFF, loops
from dflash_jax.engine.state_machine.controller import Cancelled, Finish
from dflash_jax.engine.state_machine.output_vocabulary import OutputVocabulary
from dflash_jax.errors import CheckpointError, ComputeError, PlanError, SnapshotError
from dflash_jax.families import drafter_kinds
from dflash_jax.graph import Graph
from dflash_jax.graph.keys import ProgramKey, Step
from dflash_jax.graph.ngram import NGram
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.networks import build_target
from dflash_jax.testing import (
    random_engine,
    scripted_engine,
    set_script,
    tiny_drafter,
    tiny_hybrid,
    tiny_target,
)

CHUNK, BUDGET = 8, 1 << 24
MIXED = tiny_hybrid(num_layers=2, recurrent=(True, False))
SLIDING = tiny_target(num_layers=2, windows=(12, None))


def make(
    target: TargetConfig, *, rows: int = 2, prefix_cache: int = BUDGET, **fields: Any
) -> Engine:
    drafter = tiny_drafter(target, target_layer_ids=(0,))  # one sliding layer, window 12
    fields |= {"max_length": 96, "chunk": CHUNK, "block": 4, "prefix_cache": prefix_cache}
    plan = Plan(rows=rows, **fields)
    return random_engine(target, drafter, plan)


RINGS_FIRST = pytest.mark.parametrize(  # where more programs are compiled
    "engine",
    [
        pytest.param(SLIDING, id="rings"),
        pytest.param(MIXED, id="recurrent", marks=pytest.mark.soak),
    ],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module", params=[SLIDING, MIXED], ids=["rings", "recurrent"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return make(request.param)


@pytest.fixture(scope="module")
def scripted(engine: Engine) -> Engine:
    """The same weights with a scripted drafter, and a separate cache."""
    return scripted_engine(engine)


@pytest.fixture
def warm(engine: Engine) -> Engine:
    """The engine with an empty cache."""
    assert engine.core.prefix_cache
    engine.core.prefix_cache.clear()
    return engine


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, n).tolist()


def fresh(engine: Engine, prompt: list[int], **options: Any) -> Any:
    """Return the result with an empty cache, and leave the cache empty."""
    assert engine.core.prefix_cache
    engine.core.prefix_cache.clear()
    result = engine.generate(prompt, **{"max_tokens": 16} | options)
    assert result.stats.cached_tokens == 0
    engine.core.prefix_cache.clear()
    return result


def visible(engine: Engine, row: int) -> list[np.ndarray]:
    """Return the state of a row that is not masked: keys and values, recurrent states."""
    position = int(engine.core.runner.state.position[row])
    seen = []
    for cache in (*engine.core.runner.state.target, *engine.core.runner.state.drafter):
        if hasattr(cache, "k"):
            last = np.arange(max(0, position - 12 if cache.ring else 0), position)
            seen += [np.asarray(x)[row][:, last % cache.slots] for x in jax.tree.leaves(cache)]
        else:
            seen += [np.asarray(cache.state)[row], np.asarray(cache.inputs)[row]]
    return [np.asarray(position), *seen]


@pytest.mark.sample("rings")
def test_p1_p3_p26_a_cached_prompt_gives_the_same_output_and_state(warm: Engine) -> None:
    for length in (CHUNK + 1, 2 * CHUNK, 5 * CHUNK - 1):
        prompt = text(length, seed=length)
        first = fresh(warm, prompt, max_tokens=1)
        state = visible(warm, 0)
        long = fresh(warm, prompt)
        warm.generate(prompt, max_tokens=1)
        again = warm.generate(prompt, max_tokens=1)
        assert again.token_ids == first.token_ids
        for got, wanted in zip(visible(warm, 0), state, strict=True):
            np.testing.assert_array_equal(got, wanted)
        hit = warm.generate(prompt, max_tokens=16)
        assert hit.stats.cached_tokens == (length - 1) // CHUNK * CHUNK
        assert hit.token_ids == long.token_ids
        assert hit.stats.acceptance_lengths == long.stats.acceptance_lengths


@pytest.mark.sample("dspark")
@pytest.mark.parametrize("kind", sorted(drafter_kinds()))
def test_every_kind_drafts_the_same_after_a_hit(kind: str) -> None:
    """Where only the target's caches come back, drafts and acceptance get worse unnoticed."""
    drafter = tiny_drafter(SLIDING, kind, target_layer_ids=(0,))
    sizes = {"max_length": 96, "chunk": CHUNK, "prefix_cache": BUDGET}
    engine = random_engine(SLIDING, drafter, Plan(rows=1, block=8, report_drafts=True, **sizes))
    prompt = text(5 * CHUNK + 3, seed=4)
    wanted = fresh(engine, prompt, trace=True)
    engine.generate(prompt, max_tokens=1)
    hit = engine.generate(prompt, max_tokens=16, trace=True)
    assert hit.stats.cached_tokens == 5 * CHUNK
    assert sum(turn.proposed for turn in wanted.trace) > 20
    assert [turn.drafts for turn in hit.trace] == [turn.drafts for turn in wanted.trace]
    assert hit.stats.acceptance_lengths == wanted.stats.acceptance_lengths


@pytest.mark.soak
def test_int8_keys_and_values_are_restored_with_their_scales() -> None:
    engine = make(SLIDING, rows=1, kv_dtype="int8")
    prompt = text(5 * CHUNK + 3, seed=2)
    wanted = fresh(engine, prompt, speculative=False)
    first = fresh(engine, prompt)
    assert first.token_ids == wanted.token_ids
    fresh(engine, prompt, max_tokens=1)
    state = visible(engine, 0)
    engine.generate(prompt, max_tokens=1)
    engine.generate(prompt, max_tokens=1)
    for got, kept in zip(visible(engine, 0), state, strict=True):
        np.testing.assert_array_equal(got, kept)
    hit = engine.generate(prompt, max_tokens=16)
    assert hit.stats.cached_tokens == 5 * CHUNK
    assert hit.token_ids == first.token_ids


@RINGS_FIRST
def test_p2_five_identical_prompts_in_a_row(scripted: Engine) -> None:
    prompt = text(3 * CHUNK + 2)
    truth = scripted.generate(prompt, max_tokens=17, speculative=False).token_ids
    set_script(scripted, [*prompt, *truth])
    assert scripted.core.prefix_cache
    scripted.core.prefix_cache.clear()
    scripted.core.prefix_cache.counters = CacheCounters()
    results = [scripted.generate(prompt, max_tokens=17) for _ in range(5)]
    assert all(r.token_ids == truth for r in results)
    assert all(r.stats.acceptance_lengths == [4, 4, 4, 4] for r in results)
    assert [r.stats.cached_tokens for r in results] == [0, *[3 * CHUNK] * 4]
    counters = scripted.core.prefix_cache.counters
    assert (counters.hits, counters.hit_tokens) == (4, 4 * 3 * CHUNK)
    assert (counters.evictions, counters.refused) == (0, 0)


@pytest.mark.exhaustive
def test_p5_a_restored_prefix_longer_than_every_window(warm: Engine) -> None:
    prompt = text(7 * CHUNK + 3, seed=3)
    wanted = fresh(warm, prompt, max_tokens=30)
    warm.generate(prompt[: 6 * CHUNK], max_tokens=1)
    got = warm.generate(prompt, max_tokens=30)
    assert got.stats.cached_tokens == 6 * CHUNK
    assert got.token_ids == wanted.token_ids


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1])
def test_p6_p7_prompts_around_chunk_boundaries(warm: Engine, length: int) -> None:
    prompt = text(length, seed=5)
    wanted = fresh(warm, prompt).token_ids
    for _ in range(2):
        assert warm.generate(prompt, max_tokens=16).token_ids == wanted


def test_p13_rejected_drafts_after_a_restore_leave_nothing(warm: Engine) -> None:
    prompt = text(2 * CHUNK + 3, seed=6)
    plain = fresh(warm, prompt, speculative=False, max_tokens=30).token_ids
    warm.generate(prompt, max_tokens=1)
    drafted = warm.generate(prompt, max_tokens=30)
    assert drafted.stats.cached_tokens == 2 * CHUNK
    assert drafted.token_ids == plain
    assert warm.generate(prompt, speculative=False, max_tokens=30).token_ids == plain


def test_p14_p15_a_row_reused_by_a_shorter_prompt_is_not_affected_by_the_last(warm: Engine) -> None:
    short, long = text(CHUNK + 2, seed=8), text(6 * CHUNK, seed=9)
    wanted = fresh(warm, short)
    warm.generate(short, max_tokens=1)
    for _ in range(2):
        warm.generate_many([long, long], max_tokens=20)
        got = warm.generate(short, max_tokens=16)
        assert got.token_ids == wanted.token_ids
        assert got.stats.acceptance_lengths == wanted.stats.acceptance_lengths


def test_p16_alternating_conversations(warm: Engine) -> None:
    """Each turn continues the last; conversations share rows and cache."""
    prompts, answers = [text(11, seed=1), text(19, seed=2)], [[], []]
    for turn in range(3):
        results = warm.generate_many(prompts, max_tokens=6)
        for i, result in enumerate(results):
            answers[i].append((list(prompts[i]), result.token_ids))
            assert (result.stats.cached_tokens > 0) == (turn > 0)
            prompts[i] = [*prompts[i], *result.token_ids, *text(5, seed=turn)]
    for prompt, tokens in answers[0] + answers[1]:
        assert fresh(warm, prompt, max_tokens=6).token_ids == tokens


def test_p20_the_prefix_cache_changes_no_bit_of_a_first_run(warm: Engine) -> None:
    prompt = text(4 * CHUNK + 1, seed=10)
    warm.generate(prompt, max_tokens=1)
    kept = visible(warm, 0)
    without = Engine(
        Graph(warm.graph.pair, dataclasses.replace(warm.plan, prefix_cache=0)),
        warm.params,
    )
    without.core.runner.compiled.executables = {
        n: p
        for n, p in warm.core.runner.executables.items()
        if n in without.core.runner.compiled.programs
    }
    assert ProgramKey(Step.PUT_SEGMENT) not in without.core.runner.executables
    without.generate(prompt, max_tokens=1)
    for got, wanted in zip(visible(without, 0), kept, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_p21_a_shared_beginning_with_other_endings(warm: Engine) -> None:
    system = text(2 * CHUNK + 3, seed=11)
    for user in range(4):
        prompt = [*system, *text(7, seed=20 + user)]
        got = warm.generate(prompt, max_tokens=12)
        assert got.stats.cached_tokens == (2 * CHUNK if user else 0)
        assert warm.core.prefix_cache
        kept = warm.core.prefix_cache.root.children
        assert len(kept) == 1
        state = {n: vars(x).copy() for n, x in kept.items()}
        wanted = fresh(warm, prompt, max_tokens=12)
        assert got.token_ids == wanted.token_ids
        assert state
        warm.generate([*system, *text(7, seed=20 + user)], max_tokens=1)


def test_refused_parameters_keep_the_prefixes_of_the_current_ones(warm: Engine) -> None:
    prompt = text(3 * CHUNK + 1)
    warm.generate(prompt, max_tokens=1)
    with pytest.raises(CheckpointError):
        warm.update_params({"target": {}})
    assert warm.generate(prompt, max_tokens=1).stats.cached_tokens == 3 * CHUNK


def test_rows_with_the_same_prompt_share_fed_chunks(warm: Engine) -> None:
    """A row restores chunks that another row has fed meanwhile."""
    prompt = text(5 * CHUNK + 1, seed=12)
    wanted = fresh(warm, prompt, max_tokens=8).token_ids
    first = warm.submit(prompt, max_tokens=8)
    warm.advance()
    warm.advance()
    second = warm.submit(prompt, max_tokens=8)
    while not (first.done and second.done):
        warm.advance()
    assert first.token_ids == second.token_ids == wanted
    assert second.stats.cached_tokens >= CHUNK


def test_p4_p29_p37_segments_of_another_layout_are_refused(warm: Engine) -> None:
    prompt = text(CHUNK + 3, seed=13)
    wanted = fresh(warm, prompt).token_ids
    warm.generate(prompt, max_tokens=1)
    snapshots = warm.core.runner.prefixes
    assert snapshots
    (node,) = snapshots.cache.root.children.values()
    segment, before = node.segment, snapshots.cache.counters.refused
    spoiled = [
        (segment.replace(drafter=()), "lacks the arrays of a layer"),  # no features
        (segment.replace(target=((), *segment.target[1:])), "lacks the arrays of a layer"),
        (jax.tree.map(lambda x: x.astype("bfloat16"), segment), "a segment holds bfloat16"),
        (jax.tree.map(lambda x: x[:1], segment), r"expected float32\["),
    ]
    for i, (bad, message) in enumerate(spoiled):
        with pytest.raises(SnapshotError, match=message):
            snapshots.check(bad, 0)
        snapshots.cache.clear()  # P32: the engine handles the error and feeds the prompt
        warm.generate(prompt, max_tokens=1)
        (node,) = snapshots.cache.root.children.values()
        node.segment = bad
        result = warm.generate(prompt, max_tokens=16)
        assert result.stats.cached_tokens == 0
        assert result.token_ids == wanted
        assert snapshots.cache.counters.refused == before + i + 1


def test_p35_a_segment_past_the_last_slot_is_refused_not_clamped(warm: Engine) -> None:
    snapshots = warm.core.runner.prefixes
    assert snapshots
    segment = snapshots._expected
    snapshots.check(segment, warm.plan.slots - CHUNK)
    for start in (-1, warm.plan.slots - CHUNK + 1):
        with pytest.raises(SnapshotError, match=f"at position {start} does not fit"):
            snapshots.check(segment, start)


def test_p25_closed_streams_leave_rows_and_prefixes_intact(warm: Engine) -> None:
    prompt = text(4 * CHUNK + 2, seed=14)
    wanted = fresh(warm, prompt).token_ids
    for _ in range(10):
        stream = warm.submit(prompt, max_tokens=16)
        next(iter(stream))
        stream.close()
        assert warm.core.active == 0
    assert warm.generate(prompt, max_tokens=16).token_ids == wanted


def test_C5_C8_prefixes_of_a_disconnected_request_are_removed(warm: Engine) -> None:
    prompt, other = text(5 * CHUNK + 2, seed=18), text(2 * CHUNK + 1, seed=19)
    wanted = fresh(warm, prompt).token_ids
    warm.generate(other, max_tokens=1)
    assert warm.core.prefix_cache
    for answering in (False, True):  # within the prompt, and within the answer
        cell = CancelCell()
        handle = warm.submit(prompt, max_tokens=30, cancel=cell)
        for _ in range(2):
            warm.advance()
        while answering and not handle.token_ids:
            warm.advance()
        assert warm.core.prefix_cache.segments > 2
        cell.cancel("disconnect")
        warm.advance()
        assert handle.result().finish_reason == "cancelled"
        assert bool(handle.token_ids) == answering
        assert warm.core.prefix_cache.segments == 2  # the other's
        got = warm.generate(prompt, max_tokens=16)
        assert (got.token_ids, got.stats.cached_tokens) == (wanted, 0)
        warm.core.prefix_cache.forget(prompt)


def test_C11_C16_prefixes_of_a_request_with_visible_output_stay(warm: Engine) -> None:
    """Closed streams and stop strings keep the prefix, once some output was visible."""
    prompt = text(2 * CHUNK + 1, seed=20)
    assert warm.core.prefix_cache
    stream = warm.submit(prompt, max_tokens=16)
    next(iter(stream))
    stream.close()
    assert warm.core.prefix_cache.segments == 2
    warm.core.prefix_cache.clear()
    handle = warm.submit(prompt, max_tokens=16)
    while not handle.token_ids:
        warm.advance()
    handle.sequence.take(Cancelled(Finish.STOP))  # as a stop string does
    warm.core.inbox.end(handle.number, "closed")
    warm.core.settle()
    assert handle.result().finish_reason == "stop"
    assert warm.core.prefix_cache.segments == 2


def test_C17_E14_E19_an_empty_answer_drops_its_prefix(
    warm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two empty outputs the restored prefix is dropped, and the whole prompt is fed."""
    prompt = text(3 * CHUNK + 1, seed=21)
    wanted = fresh(warm, prompt).token_ids
    warm.generate(prompt, max_tokens=1)
    vocabulary = OutputVocabulary(hidden=frozenset(wanted))
    monkeypatch.setattr(requests, "vocabulary_of", lambda *_: vocabulary)
    settings = dataclasses.replace(OFF, empty_retry=True)
    stream = warm.submit(prompt, max_tokens=16, recovery=settings)
    assert [i for piece in stream for i in piece.token_ids] == wanted
    stats = stream.result().stats
    assert not stats.recovery
    assert stats.fallbacks == {"empty_retry": 2, "empty_retry_confirmed_eos": 1}
    assert stats.cached_tokens == 0
    assert warm.core.prefix_cache
    assert warm.core.prefix_cache.segments == 0


def test_a_small_budget_evicts_and_stays_exact() -> None:
    big = make(SLIDING)
    assert big.core.prefix_cache
    small = Engine(
        big.graph.with_plan(prefix_cache=3 * big.core.prefix_cache.segment_bytes),
        big.params,
    )
    prompts = [[*text(10, seed=i % 3), *text(20, seed=30 + i)] for i in range(9)]
    wanted = [r.token_ids for r in big.generate_many(prompts, max_tokens=6)]
    small.core.runner.compiled.executables = big.core.runner.executables
    got = small.generate_many(prompts, max_tokens=6)
    assert [r.token_ids for r in got] == wanted
    assert small.core.prefix_cache
    assert small.core.prefix_cache.counters.evictions > 0
    assert small.core.prefix_cache.segments <= 3


def test_a_budget_below_one_segment_is_refused() -> None:
    with pytest.raises(PlanError, match="prefix_cache is 10 bytes, but one chunk of 8 tokens take"):
        make(SLIDING, prefix_cache=10)


@pytest.fixture
def broken(warm: Engine) -> Engine:
    """A target whose embedding of token 77 is not a number."""
    table = np.array(warm.params["target"]["embed"])
    table[:, 77] = np.nan
    target = warm.params["target"] | {"embed": jax.device_put(table)}
    made = Engine(Graph(warm.graph.pair, warm.plan), warm.params | {"target": target})
    made.core.runner.compiled.executables = warm.core.runner.executables
    return made


def test_C15_a_prompt_with_non_finite_logits_is_not_cached(broken: Engine) -> None:
    handle = broken.submit([*text(CHUNK, seed=15), 77, *text(CHUNK, seed=16)], max_tokens=4)
    while not handle.done:
        broken.advance()
    assert broken.core.prefix_cache is not None
    assert broken.core.prefix_cache.segments == 0


@pytest.mark.exhaustive
@RINGS_FIRST
def test_a_cached_prompt_is_forgotten_when_its_continuation_is_not_finite(broken: Engine) -> None:
    prompt = text(2 * CHUNK + 1, seed=17)
    broken.generate(prompt, max_tokens=1)
    assert broken.core.prefix_cache is not None
    assert broken.core.prefix_cache.segments == 2
    with pytest.raises(ComputeError, match="not finite"):
        broken.generate(prompt, max_tokens=8, logit_bias={77: 100.0})
    assert broken.core.prefix_cache.segments == 0


def test_P9_P10_the_context_of_a_prompt_does_not_depend_on_interleaved_rows(warm: Engine) -> None:
    """Chunks of a long prompt alternate with the prefill and the steps of another row."""
    prompt, other = text(6 * CHUNK + 3, seed=22), text(CHUNK, seed=23)
    fresh(warm, prompt, max_tokens=1)
    alone = visible(warm, 0)
    assert warm.core.prefix_cache
    warm.core.prefix_cache.clear()
    handle = warm.submit(prompt, max_tokens=1)
    warm.advance()
    assert warm.core.prefix_cache.segments == 1
    other_handle = warm.submit(other, max_tokens=20)
    turns = 0
    while not handle.done:
        warm.advance()
        turns += 1
    assert turns > 7  # chunks alone take six: the other row ran in between
    for got, wanted in zip(visible(warm, 0), alone, strict=True):
        np.testing.assert_array_equal(got, wanted)
    other_handle.close()


@RINGS_FIRST
def test_P11_the_context_does_not_depend_on_accepted_drafts(
    scripted: Engine, pytestconfig: pytest.Config
) -> None:
    """The drafter's context equals that of plain decoding; bit for bit, compiled as for users."""
    off = 1e-5 if pytestconfig.getoption("--quick-compile") else 0
    prompt = text(CHUNK + 3, seed=24)
    truth = scripted.generate(prompt, max_tokens=40, speculative=False).token_ids
    plain = visible(scripted, 0)
    for pattern in ([0], [3, 0, 1, 0, 2]):
        wrong = [(i + 1) % 97 for i in truth]
        kept = [i for n in pattern * 40 for i in [*[True] * n, False]][: len(truth)]
        script = [t if keep else w for t, w, keep in zip(truth, wrong, kept, strict=True)]
        set_script(scripted, [*prompt, *script])
        stream = scripted.submit(prompt, max_tokens=40)
        for piece in stream:
            assert piece.token_ids
            fed = len(prompt) + stream.sequence.state.num_computed
            assert int(scripted.core.runner.state.position[0]) >= fed  # one step may be in flight
        assert stream.result().token_ids == truth
        for got, wanted in zip(visible(scripted, 0), plain, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=off)


def test_P32_a_restore_that_fails_is_handled_not_ignored(warm: Engine) -> None:
    prompt = text(3 * CHUNK + 1, seed=25)
    wanted = fresh(warm, prompt).token_ids
    warm.generate(prompt, max_tokens=1)
    assert warm.core.prefix_cache
    (first,) = warm.core.prefix_cache.root.children.values()
    (second,) = first.children.values()
    second.segment = jax.tree.map(lambda x: x[..., :1], second.segment)
    found = warm.generate(prompt, max_tokens=16)
    assert found.token_ids == wanted
    assert found.stats.cached_tokens == CHUNK  # the chunk that fits is restored, the rest is fed
    assert warm.generate(prompt, max_tokens=16).stats.cached_tokens == 3 * CHUNK


def test_P34_tokens_after_a_cached_prefix_are_fed(warm: Engine) -> None:
    prompt = text(2 * CHUNK + 1, seed=26)
    assert warm.core.prefix_cache
    assert warm.core.runner.prefixes
    for kept, hit in ((CHUNK, CHUNK), (2 * CHUNK, 2 * CHUNK)):
        warm.core.prefix_cache.clear()
        warm.generate(prompt[:kept], max_tokens=1)
        stats = warm.generate(prompt, max_tokens=1).stats
        assert stats.prompt_tokens - stats.cached_tokens == len(prompt) - hit
    whole = warm.generate(prompt[: 2 * CHUNK], max_tokens=1).stats
    assert whole.cached_tokens == CHUNK  # the last chunk is always fed
    assert warm.generate(prompt[:5], max_tokens=1).stats.cached_tokens == 0
    with pytest.raises(SnapshotError, match="at position -1 does not fit"):
        warm.core.runner.prefixes.check(warm.core.runner.prefixes._expected, -1)


def test_R21_P36_outputs_are_never_cached(warm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached prefixes end on the grid within the prompt, however the output ends."""
    prompt = text(2 * CHUNK + 5, seed=27)
    truth = fresh(warm, prompt, max_tokens=20).token_ids
    looped = dataclasses.replace(OFF, loops=True)
    ended = lambda seen, *_, **__: "runaway" if len(seen) > 9 else None  # noqa: E731
    monkeypatch.setattr(loops, "too_long", ended)
    for options in ({}, {"stop_token_ids": [truth[6]]}, {"recovery": looped}):
        assert warm.core.prefix_cache
        warm.core.prefix_cache.clear()
        result = warm.generate(prompt, max_tokens=20, **options)
        assert warm.core.prefix_cache.segments == 2
        again = warm.generate([*prompt, *result.token_ids, 1], max_tokens=4)
        assert again.stats.cached_tokens == 2 * CHUNK
        assert fresh(warm, [*prompt, *result.token_ids, 1], max_tokens=4).token_ids == (
            again.token_ids
        )
    assert result.stats.recovery["runaway"] == 1


def test_E22_an_empty_turn_does_not_affect_later_ones(warm: Engine) -> None:
    retry = dataclasses.replace(OFF, empty_retry=True)
    prompt, turns, empty = text(5, seed=28), [], 6
    for turn in range(12):
        stop = []
        if turn == empty:
            stop = warm.generate(prompt, max_tokens=1).token_ids
        result = warm.generate(prompt, max_tokens=4, stop_token_ids=stop, recovery=retry)
        assert bool(result.stats.fallbacks["empty_retry"]) == (turn == empty)
        turns.append((prompt, result.token_ids))
        prompt = [*prompt, *result.token_ids, *text(3, seed=turn)]
    assert turns[empty][1] == turns[empty][1][:1]
    for prompt, tokens in turns:
        if len(tokens) > 1:
            plain = fresh(warm, prompt, max_tokens=4, speculative=False)
            assert plain.token_ids == tokens


@RINGS_FIRST
def test_p12_random_acceptance_equals_plain_decoding_after_a_hit(scripted: Engine) -> None:
    rng = np.random.default_rng(3)
    for turn in range(3):
        prompt = text(2 * CHUNK + 5, seed=40 + turn)
        truth = scripted.generate(prompt, max_tokens=30, speculative=False).token_ids
        noisy = [int(t) if rng.random() < 0.7 else int(t + 1) % 97 for t in [*prompt, *truth]]
        set_script(scripted, noisy)
        got = scripted.generate(prompt, max_tokens=30)
        assert got.stats.cached_tokens == 2 * CHUNK
        assert got.token_ids == truth


@pytest.mark.soak
def test_p8_the_chunk_size_changes_no_token() -> None:
    prompt, tokens = text(600, seed=17), []
    for chunk in (1, 7, 64, 512):
        target = SLIDING
        plan = Plan(max_length=700, chunk=chunk, block=4, prefix_cache=BUDGET)
        engine = random_engine(target, tiny_drafter(target, target_layer_ids=(0,)), plan)
        tokens.append(engine.generate(prompt, max_tokens=20).token_ids)
        assert engine.generate(prompt, max_tokens=20).token_ids == tokens[0]
    assert all(ids == tokens[0] for ids in tokens)


def test_continuations_of_a_dropped_prefix_are_not_found() -> None:
    cache = PrefixCache(chunk=2, budget=10, segment_bytes=1)
    first = cache.add(cache.root, [1, 2], "a", position=2)
    assert first
    assert cache.add(first, [3, 4], "b", position=4)
    cache.drop(first)
    assert cache.find(first, [1, 2, 3, 4, 5], 2) is None


@pytest.mark.sample("domino", "copies")
@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2", "domino", "ngram", "copies"])
def test_a_drafter_proposes_the_same_after_a_hit(kind: str) -> None:
    """Drafts, and so acceptance, are those of a prompt that was fed, whatever the drafter keeps."""
    target = tiny_target(num_layers=2)
    fields: dict[str, Any] = {"max_length": 96, "chunk": CHUNK, "block": 4, "prefix_cache": BUDGET}
    plan = Plan(rows=2, report_drafts=True, ngram=2 if kind == "copies" else 0, **fields)
    if kind == "ngram":
        weights = random_engine(target, None, plan).params
        engine = Engine(Graph(Pair(build_target(target), NGram()), plan), weights | {"drafter": {}})
    else:
        head = "dflash" if kind == "copies" else kind
        drafter = tiny_drafter(
            target, head, target_layer_ids=(0,), num_layers=1, windows=(None,), causal=(False,)
        )
        engine = random_engine(target, drafter, plan)
    prompt = [*text(12), *text(12), *text(7)]  # repeats itself, so that there is something to copy
    fed = engine.generate(prompt, max_tokens=20, trace=True)
    hit = engine.generate(prompt, max_tokens=20, trace=True)
    assert (fed.stats.cached_tokens, hit.stats.cached_tokens) == (0, 24)
    assert hit.token_ids == fed.token_ids
    assert [x.drafts for x in hit.trace] == [x.drafts for x in fed.trace]
    assert any(x.drafts for x in fed.trace)
    assert hit.stats.acceptance_lengths == fed.stats.acceptance_lengths
