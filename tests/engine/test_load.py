"""Mixed traffic; `benchmarks.audit load` runs more of it on the shipped pair."""

import dataclasses

import numpy as np
import pytest

from benchmarks.audit.fixed import KINDS, drive
from dflash_jax.engine.engine import Engine
from dflash_jax.testing import random_engine


@pytest.mark.exhaustive
def test_mixed_traffic_gives_the_outputs_of_single_requests_and_leaves_none(
    tiny3: Engine,
) -> None:
    plan = dataclasses.replace(tiny3.plan, prefix_cache=1 << 20)
    engine = random_engine(tiny3.graph.config, tiny3.graph.drafter_config, plan)
    engine.core.runner.compiled.executables = (
        tiny3.core.runner.executables
    )  # the prefix programs are added
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 251, 40).tolist()
    prompts = [[*shared[: 16 * i], *rng.integers(0, 251, 3 + 7 * i).tolist()] for i in range(3)]
    traffic = drive(engine, prompts, requests=60, most=20)
    assert traffic.good, traffic
    assert traffic.requests == 60
    assert traffic.cancelled > 3
    assert traffic.hit_tokens > 0
    assert len(KINDS) == 8
