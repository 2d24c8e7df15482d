"""Profiles: the time of a step by named parts."""

import jax
import numpy as np
import pytest

from dflash_jax.bench.profile import part_of, profile
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import ComputeError, RequestError


def test_a_path_of_scopes_names_stage_and_part() -> None:
    assert part_of("jit(speculative)/target/Decoder/layers_3/attention/dot") == "target/attention"
    assert part_of("jit(speculative)/draft/DFlash.propose/head/dot_general") == "draft/head"
    assert part_of("jit(plain)/Decoder.logits/head/dot_general") == "head"
    assert part_of("jit(plain)/verify/argmax") == "verify"
    assert part_of("") == "rest"


def test_most_operations_of_a_step_belong_to_named_parts(tiny: Engine) -> None:
    report = profile(tiny, [1, 2, 3], steps=4)
    assert (report.program, report.steps) == ("speculative", 4)
    wanted = {"target/mlp", "target/attention", "draft/mlp", "draft/attention", "context", "head"}
    assert wanted <= report.parts.keys()
    named = sum(kernel.part != "rest" for kernel in report.kernels)
    assert named > 0.5 * len(report.kernels)  # times mean little at this size
    assert sum(k.seconds for k in report.kernels) == pytest.approx(report.busy_s)
    assert "target/mlp" in str(report)
    assert profile(tiny, [1, 2, 3], steps=1, speculative=False).program == "plain"
    assert len(tiny.generate([5, 6], max_tokens=3).token_ids) == 3  # the engine still works
    with pytest.raises(RequestError, match="max_length is 128"):
        profile(tiny, [1] * 100, steps=8)


def test_a_profile_that_fails_leaves_the_engine_as_it_was(tiny: Engine) -> None:
    params, pacer = tiny.params, tiny.core.pacer
    tiny.update_params(jax.tree.map(lambda x: np.full_like(x, np.nan), params))
    try:
        with pytest.raises(ComputeError, match="not finite"):
            profile(tiny, [1, 2, 3], steps=2)
    finally:
        tiny.update_params(params)
    assert tiny.core.pacer is pacer
    assert not tiny.core.busy
