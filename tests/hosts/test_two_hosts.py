"""An engine over two worker processes here. `soak/test_hosts.py` does the same through HTTP."""

import os
import signal
import time

import pytest

from dflash_jax import Plan
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import HostError, RequestError
from dflash_jax.hosts.launch import ChildLauncher, ChildProcess
from dflash_jax.hosts.pair import HostedPair
from dflash_jax.loading import open_pair
from tests.hosts.test_group import until

SOURCES: dict[str, str | None] = {
    "target": "tiny", "drafter": "own", "layer_ids": "auto", "lora": None
}  # fmt: skip
PLAN = Plan(
    rows=2, max_length=192, chunk=32, dtype="float32", prefix_cache=2**24, kernels="xla",
    steps_per_call=1,
)  # fmt: skip


def test_two_hosts_give_the_tokens_of_one_process_until_one_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes: list[ChildProcess] = []

    class Launcher(ChildLauncher):
        def start(self, index: int, front: str, token: str) -> ChildProcess:
            processes.append(ChildProcess(index, front, token, self.address))
            return processes[-1]

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    pair = open_pair("tiny")
    engine = HostedPair(pair, SOURCES, Launcher(), hosts=2, devices=1).engine(PLAN)
    try:
        assert engine.plan.mesh == (1, 2)
        alone = pair.engine(PLAN)
        prompts = [engine.chat_ids([{"role": "user", "content": f"Count to {i}."}]) for i in (3, 5)]
        prompts.append([*prompts[0], *prompts[1], *prompts[0]])
        for _ in range(2):
            answers, expected = (run(each, prompts) for each in (engine, alone))
            assert answers == expected
        assert expected[-1][1] == 32  # of the prompt, copied from the prefix cache
        with pytest.raises(RequestError, match="over several hosts cannot be replaced"):
            engine.params = alone.params
        stream = engine.stream(prompts[0], max_tokens=100, ignore_eos=True)
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
