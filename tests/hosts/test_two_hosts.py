"""An engine over two worker processes here. `soak/test_hosts.py` does the same through HTTP."""

import os
import signal
import time
from pathlib import Path

import pytest

from dflash_jax import Plan
from dflash_jax.checkpoint import save
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import HostError, RequestError
from dflash_jax.hosts.launch import ChildLauncher, ChildProcess
from dflash_jax.hosts.remote import HostedPair
from dflash_jax.loading import open_pair
from dflash_jax.models import build_pair
from dflash_jax.testing import random_params, tiny_drafter, tiny_target
from tests.hosts.test_group import until

PLAN = Plan(
    rows=2, max_length=192, chunk=32, dtype="float32", prefix_cache=2**24, kernels="xla",
    steps_per_call=1,
)  # fmt: skip


@pytest.mark.exhaustive
def test_two_hosts_give_the_tokens_of_one_process_until_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[ChildProcess] = []

    class Launcher(ChildLauncher):
        def start(self, index: int, front: str, token: str) -> ChildProcess:
            # Not the address of processes of one machine, so JAX's coordinator is tunnelled.
            processes.append(ChildProcess(index, front, token, "127.0.0.2"))
            return processes[-1]

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    target = tiny_target(num_layers=2, vocab_size=96)
    drafter = tiny_drafter(
        target, target_layer_ids=(0,), num_layers=1, windows=(None,), causal=(False,)
    )
    weights = random_params(build_pair(target, drafter), dtype="float32", seed=0)
    save(tmp_path / "target", target, weights["target"])
    save(tmp_path / "drafter", drafter, weights["drafter"])
    sources: dict[str, str | None] = {
        "target": str(tmp_path / "target"), "drafter": str(tmp_path / "drafter"),
        "layer_ids": "auto", "lora": None,
    }  # fmt: skip
    pair = open_pair(sources["target"] or "", sources["drafter"])
    engine = HostedPair(pair, sources, Launcher(), hosts=2, devices=1).engine(PLAN)
    try:
        assert engine.plan.mesh == (1, 2)
        alone = pair.engine(PLAN)
        prompts = [[5, 6, 7], [8, 9], list(range(3, 75))]
        for _ in range(2):
            answers, expected = (run(each, prompts) for each in (engine, alone))
            assert answers == expected
        assert expected[-1][1] == 64  # of the prompt, copied from the prefix cache
        with pytest.raises(RequestError, match="over several hosts cannot be replaced"):
            engine.update_params(alone.params)
        stream = iter(engine.submit(prompts[0], max_tokens=100, ignore_eos=True))
        next(stream)
        os.killpg(processes[1]._process.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(HostError, match=r"host 1 \(process \d+\) ended by SIGKILL; all hosts"):
            list(stream)
        assert time.monotonic() - started < 5
        until(lambda: all(process.status() for process in processes))
    finally:
        engine.close()
    assert all(process.status() for process in processes)


def run(engine: Engine, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    results = engine.generate_many(prompts, max_tokens=24)
    return [(result.token_ids, result.stats.cached_tokens) for result in results]
