"""LFM2: the inputs of convolutions after rejected drafts, against transformers and plain steps."""

from pathlib import Path

import numpy as np
import pytest
from test_qwen3_5 import BLOCK, CHUNK, NEW, Cached, prompt_of, read_case, recurrent, scripts

import dflash_jax as dj
from dflash_jax.config.lfm2 import Lfm2Config
from dflash_jax.engine.engine import Engine
from dflash_jax.kernels.caches import ConvCache
from dflash_jax.testing import (
    random_engine,
    scripted_engine,
    set_script,
    tiny_drafter,
    tiny_target,
)


def test_inputs_after_a_prefill_and_a_rollback(oracle: Path) -> None:
    case = read_case(oracle / "targets" / "lfm2")
    v, cached = case.vectors, Cached(case.path)
    taken = case.keep - case.prefill
    state, _, _ = cached(cached.empty, v["input_ids"][:, : case.prefill], case.prefill)
    for name in ("prefill", "rollback"):
        for i, cache in enumerate(state.target):
            if isinstance(cache, ConvCache):
                inputs = np.swapaxes(cache.inputs, 1, 2)
                wanted = v[f"incr.{name}.state.{i}.conv"]
                np.testing.assert_allclose(inputs, wanted, atol=1e-4, err_msg=name)
        state, _, _ = cached(state, v["incr.block1.input_ids"], taken)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Two rows with a scripted drafter; convolutions with biases."""
    target = Lfm2Config(
        **vars(tiny_target(model_type="lfm2", qk_norm=True)),
        recurrent=(True, False, True),
        conv_kernel=3,
        conv_bias=True,
    )
    plan = dj.Plan(rows=2, max_length=192, chunk=CHUNK, block=BLOCK, dtype=request.param)
    return scripted_engine(random_engine(target, tiny_drafter(target), plan))


@pytest.mark.optimised
@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, 2 * CHUNK + 5])
def test_every_accept_pattern_gives_plain_tokens_and_plain_inputs(
    engine: Engine, length: int
) -> None:
    prompt = prompt_of(length)
    plain = engine.generate(prompt, max_tokens=NEW, speculative=False).token_ids
    inputs = recurrent(engine)
    assert len(inputs) == 2
    assert len(set(plain)) > 5
    for name, script in scripts([*prompt, *plain], seed=length):
        set_script(engine, script)
        assert engine.generate(prompt, max_tokens=NEW).token_ids == plain, name
        for ours, theirs in zip(recurrent(engine), inputs, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
