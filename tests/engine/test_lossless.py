"""C1: speculative output equals plain output for any drafter, block size, prompt and row."""

import functools

import jax
import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.engine.engine import Engine
from dflash_jax.graph.keys import Step
from dflash_jax.graph.state import output_columns
from dflash_jax.plan import Kernels
from dflash_jax.testing import (
    force_acceptance,
    random_engine,
    scripted_engine,
    set_script,
    tiny_drafter,
    tiny_target,
)

CHUNK = 16
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 50)
NEW = 40


@functools.cache
def make(
    dtype: str, block: int, rows: int = 1, kernels: Kernels = "auto", **changes: object
) -> Engine:
    target = tiny_target(**{"num_layers": 2} | changes)
    plan = Plan(rows=rows, max_length=256, chunk=CHUNK, block=block, dtype=dtype, kernels=kernels)
    return random_engine(target, tiny_drafter(target), plan)


scripted_like = functools.cache(scripted_engine)


def prompts(engine: Engine, lengths=LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, engine.graph.config.vocab_size, n).tolist() for n in lengths]


@pytest.mark.sample("float32-8-1-auto0")
@pytest.mark.parametrize(
    ("dtype", "block", "rows", "kernels"),
    [
        ("float32", 8, 1, "auto"),  # engines that other tests share
        ("bfloat16", 4, 3, "auto"),  # native kernels, where there are some
        pytest.param("bfloat16", 4, 3, "xla", marks=pytest.mark.optimised),
        pytest.param("float32", 3, 1, "xla", marks=pytest.mark.soak),
        *(
            pytest.param(dtype, block, 1, kernels, marks=pytest.mark.soak)
            for dtype in ("float32", "bfloat16")
            for block in (2, 4, 8)
            for kernels in ("auto", "xla")
        ),
    ],
)
def test_every_drafter_and_prompt_length_gives_plain_tokens(
    dtype: str, block: int, rows: int, kernels: Kernels
) -> None:
    real = make(dtype, block, rows, kernels)
    scripted = scripted_like(real)
    rng = np.random.default_rng(block)
    for prompt in prompts(real):
        plain = real.generate(prompt, max_tokens=NEW, speculative=False)
        assert real.generate(prompt, max_tokens=NEW).token_ids == plain.token_ids
        truth = [*prompt, *plain.token_ids]
        vocab = real.graph.config.vocab_size
        noisy = [t if rng.random() < 0.7 else int(rng.integers(vocab)) for t in truth]
        scripts = {
            "oracle": truth,
            "adversarial": [(t + 1) % vocab for t in truth],
            "noisy": noisy,
            "random": rng.integers(0, vocab, len(truth)).tolist(),
        }
        for name, script in scripts.items():
            set_script(scripted, script)
            result = scripted.generate(prompt, max_tokens=NEW)
            assert result.token_ids == plain.token_ids, (name, len(prompt))
            if name == "oracle":
                assert result.stats.rounds == -(-(NEW - 1) // block)
            if name == "adversarial":
                assert set(result.stats.acceptance_lengths) == {1}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("weights", "kernels"),
    [
        ("int8", "auto"),  # native kernels, where there are some
        ("int4", "auto"),
        pytest.param("int8", "xla", marks=pytest.mark.soak),
        pytest.param("int4", "xla", marks=pytest.mark.soak),
    ],
)
def test_quantised_weights_give_plain_tokens(weights: str, kernels: str) -> None:
    target = tiny_target(num_layers=2, hidden_size=64, intermediate_size=128)
    plan = Plan(max_length=128, chunk=CHUNK, block=4, weights=weights, kernels=kernels)
    real = random_engine(target, tiny_drafter(target), plan)
    scripted = scripted_engine(real)
    for prompt in prompts(real, lengths=(1, CHUNK, 50)):
        plain = real.generate(prompt, max_tokens=NEW, speculative=False)
        assert real.generate(prompt, max_tokens=NEW).token_ids == plain.token_ids
        truth = np.array([*prompt, *plain.token_ids])
        wrong = np.random.default_rng(len(prompt)).random(len(truth)) < 0.3
        set_script(scripted, ((truth + wrong) % target.vocab_size).tolist())
        result = scripted.generate(prompt, max_tokens=NEW)
        assert result.token_ids == plain.token_ids
        assert result.stats.acceptance_length > 1.5


def test_forced_patterns_are_accepted_as_written() -> None:
    engine = make("float32", 8)
    scripted = scripted_like(engine)
    prompt = prompts(engine, [20])[0]
    truth = [*prompt, *engine.generate(prompt, max_tokens=100, speculative=False).token_ids]
    pattern = [3, 1, 5, 2, 7, 0, 4, 4]
    set_script(
        scripted, force_acceptance(truth, len(prompt), pattern, engine.graph.config.vocab_size)
    )
    stats = scripted.generate(prompt, max_tokens=100).stats
    assert stats.acceptance_lengths[:16] == [n + 1 for n in pattern] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_sliding_layers_in_rings_and_long_contexts(dtype: str) -> None:
    """R4: windows below the chunk, ring caches wrapped several times, short last chunks."""
    changes = {"num_layers": 3, "windows": (10, None, 24)}
    ringed = make(dtype, 4, **changes)
    assert [c.ring for c in ringed.core.runner.state.target] == [True, False, True]
    target = tiny_target(**changes)
    plan = Plan(max_length=256, chunk=CHUNK, block=4, dtype=dtype, rings=False)
    whole = random_engine(target, tiny_drafter(target), plan)
    for prompt in prompts(ringed, (1, 9, 17, 130)):
        plain = ringed.generate(prompt, max_tokens=100, speculative=False).token_ids
        assert ringed.generate(prompt, max_tokens=100).token_ids == plain
        if dtype == "float32":  # another capacity is another plan, equal in float32 only (R10)
            assert whole.generate(prompt, max_tokens=100).token_ids == plain


@pytest.mark.exhaustive
@pytest.mark.optimised
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.soak)])
def test_a_row_does_not_depend_on_its_neighbours_or_its_past(dtype: str) -> None:
    """R8, R9, R10: same plan, other rows idle or busy, row fresh or used."""
    engine = make(dtype, 4, 3)
    given = prompts(engine, (1, 15, 16, 33, 50, 7, 20))
    alone = [engine.generate(p, max_tokens=NEW).token_ids for p in given]
    plain = [engine.generate(p, max_tokens=NEW, speculative=False).token_ids for p in given]
    together = [r.token_ids for r in engine.generate_many(given, max_tokens=NEW)]
    assert alone == plain == together


def test_one_token_plain_steps_agree_in_float32() -> None:
    """exact=False: plain steps one token wide."""
    target = tiny_target(num_layers=2)
    drafter = tiny_drafter(target)
    exact, single = (
        random_engine(target, drafter, Plan(max_length=256, chunk=CHUNK, block=8, exact=exact))
        for exact in (True, False)
    )
    program = single.core.runner.compiled.programs[single.graph.key(Step.PLAIN)]
    _, _, out = jax.eval_shape(program.function, *program.arguments)
    assert out.packed.shape[-1] == 1 + output_columns(single.core.scheduler.rules())
    for prompt in prompts(exact, (1, 16, 33)):
        tokens = exact.generate(prompt, max_tokens=NEW).token_ids
        assert single.generate(prompt, max_tokens=NEW, speculative=False).token_ids == tokens
        assert single.generate(prompt, max_tokens=NEW).token_ids == tokens


@pytest.mark.exhaustive
@pytest.mark.optimised
def test_switching_decode_modes_midway_changes_no_token() -> None:
    """C2: plain steps keep the drafter's context, so that drafting can resume at any step."""
    engine = make("bfloat16", 4, 3)
    scripted = scripted_like(engine)
    prompt = prompts(engine, [21])[0]
    plain = engine.generate(prompt, max_tokens=60, speculative=False).token_ids
    set_script(scripted, [*prompt, *plain])
    handle = scripted.submit(prompt, max_tokens=60)
    turn = 0
    while not handle.done:
        handle.sequence.policy = type(handle.sequence.policy)(
            max_tokens=60, stop_ids=handle.sequence.policy.stop_ids, speculative=turn // 3 % 2 == 0
        )
        scripted.advance()
        turn += 1
    assert handle.result().token_ids == plain
    assert handle.stats.plain_steps > 3
    assert max(handle.stats.acceptance_lengths) == 4


def test_a_real_drafter_reads_the_same_context_after_plain_steps() -> None:
    """The drafter's context is the same after plain and after fused steps."""
    engine = make("float32", 8)
    prompt = prompts(engine, [30])[0]
    drafts = []
    for speculative in (True, False):
        handle = engine.submit(prompt, max_tokens=30, speculative=speculative)
        while not handle.done:
            engine.advance()
        context = engine.core.runner.state.drafter[1]
        drafts.append(np.asarray(context.k)[0, :, : len(prompt) + 20])
    np.testing.assert_allclose(drafts[0], drafts[1], atol=1e-4)
