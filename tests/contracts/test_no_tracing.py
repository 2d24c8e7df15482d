"""C5: after warm-up nothing is traced and nothing is compiled."""

import jax
import pytest

from dflash_jax.engine.engine import Engine
from dflash_jax.graph.keys import Variant


@pytest.fixture(scope="module")
def warm(tiny3: Engine) -> Engine:
    tiny3.warm_up("greedy", "sampled")
    return tiny3


def test_warm_up_compiles_both_variants_once(warm: Engine) -> None:
    missing = set(warm.core.runner.compiled.programs) - set(warm.core.runner.executables)
    assert not [
        key
        for key in missing
        if {Variant.GREEDY, Variant.SAMPLED} & {*key.needed_by(warm.plan.kernels)}
    ]
    before = dict(warm.core.runner.executables)
    assert warm.warm_up("greedy", "sampled") < 0.05
    assert warm.core.runner.executables == before


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculative", [True, False], ids=["speculative", "plain"])
def test_a_whole_generation_traces_nothing(
    warm: Engine, temperature: float, speculative: bool
) -> None:
    prompts = [[1] * n for n in (1, 5, 15, 16, 17, 33, 64)]
    before = dict(warm.core.runner.executables)
    with jax.no_tracing():
        results = warm.generate_many(
            prompts,
            max_tokens=20,
            temperature=temperature,
            top_k=9,
            top_p=0.9,
            seed=1,
            stop_token_ids=[3, 4],
            speculative=speculative,
        )
        stream = warm.submit([1, 2, 3], max_tokens=30, temperature=temperature, seed=1)
        next(iter(stream))
        stream.close()
    assert all(r.stats.compile_s == 0.0 for r in results)
    assert warm.core.runner.executables == before


def test_a_broken_number_traces_nothing_either(warm: Engine) -> None:
    """Clearing a row is a program of its own, compiled with the rest."""
    with jax.no_tracing():
        warm.core.runner.clear_rows([1])
    assert warm.generate([5], max_tokens=5).stats.compile_s == 0.0


def test_tracing_would_be_noticed() -> None:
    with jax.no_tracing(), pytest.raises(RuntimeError, match="re-tracing"):
        jax.jit(lambda x: x + 1)(3)
