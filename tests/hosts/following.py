"""Run by test_following as each process of a group: prints what process 0 answered.

    python -m tests.hosts.following INDEX COORDINATOR CASE

Without a coordinator the process is alone, with two virtual devices.
"""

import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import dflash_jax as dj
from dflash_jax import distributed
from dflash_jax.bench.replay import prompt_of, read_turns
from dflash_jax.cli.replay import SHIPPED
from dflash_jax.distributed import Group, HostPlace
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.scheduler import Scheduler
from dflash_jax.engine.turns.group_turns import follow_turns, publish_turns
from dflash_jax.loading import open_pair
from dflash_jax.server.serving_hosts import load, take_part
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target

LONG = [5, 6, 7] * 120
ENDLESS: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True}


def shipped(group: Group | None) -> Engine:
    """Return an engine with the shipped pair, on two devices."""
    plan = dj.Plan(
        rows=2, max_length=1024, prefix_cache=2**22, dtype="float32", kernels="xla", mesh=(1, 2)
    )
    pair = open_pair("tiny")
    return pair.engine(plan) if group is None else load(pair, plan, group)


def random(group: Group | None) -> Engine:
    """Return a small engine that compiles soon."""
    target = tiny_target(num_layers=1, vocab_size=96)
    drafter = tiny_drafter(target, target_layer_ids=(0,))
    plan = dj.Plan(rows=2, max_length=640, chunk=32, block=4, mesh=(1, 2), dtype="float32")
    return random_engine(target, drafter, plan)


def every_event(engine: Engine) -> list[Any]:
    """Cancel, drop, close, retry and recover requests in threads; return the whole answers."""
    engine.warm_up("greedy", "sampled", "penalized", "constrained", "recovery")
    [turn] = [turn for turn in read_turns(SHIPPED) if turn.id == "agent-7.2"]
    prompt = prompt_of(turn, engine)
    assert engine.tokenizer is not None
    [end] = engine.tokenizer.encode("<|im_end|>", specials=False)
    calls: dict[str, Any] = {"tools": turn.tools, "logit_bias": {end: 12}, "max_tokens": 150}
    answers: dict[str, Any] = {}

    def recovered() -> None:
        found = engine.generate(prompt, recovery=dj.Recovery(), **calls)
        answers["call"] = found.token_ids, found.stats.recovery
        engine.warm_up("chunks")  # while the others decode
        answers["long"] = engine.generate(LONG, max_tokens=8).token_ids

    def given_up() -> None:
        handle = engine.submit([1, 3], **ENDLESS)
        next(iter(handle))
        del handle  # drops the request
        handle = engine.submit(LONG, **ENDLESS)
        next(iter(handle))
        handle.close()
        overdue = engine.generate([4], recovery=dj.Recovery(deadline_s=0.05), **ENDLESS)
        answers["overdue"] = overdue.finish_reason

    def cancelled() -> None:
        cell = dj.CancelCell()
        handle = engine.submit([8, 8], temperature=1.0, max_tokens=400, cancel=cell)
        next(iter(handle))
        cell.cancel("disconnect")
        both = engine.generate_many([[1, 2], [3]], n=2, temperature=0.8, max_tokens=20, seed=3)
        answers["sampled"] = [each.token_ids for each in both]
        structure = {"regex": "[a-f]{12}"}
        answers["structured"] = engine.generate([3], structured=structure, max_tokens=20).text
        scored = engine.generate([3, 4], logprobs=2, frequency_penalty=0.5, max_tokens=8)
        answers["logprobs"] = [each.logprob for each in scored.logprobs or ()]

    run_together(recovered, given_up, cancelled)
    answers["cached"] = engine.generate(LONG, max_tokens=2).stats.cached_tokens > 0
    return [answers[name] for name in sorted(answers)]


def run_together(*works: Callable[[], object]) -> None:
    """Run functions in threads of their own; raise the first error."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def plain(engine: Engine) -> list[Any]:
    """Answer requests for ever, unless the case ends the process."""
    results = engine.generate_many([[1, 2, 3], list(range(40))], max_tokens=24)
    answers = [each.token_ids for each in results]
    print(json.dumps(answers), flush=True)
    while "--once" not in sys.argv:
        engine.generate([1, 2], **ENDLESS)
    return answers


def spoil(case: str) -> None:
    """Make a follower fail as a case wants."""
    schedule = Scheduler.schedule
    turns = 0

    def spoiled(self: Scheduler, *arguments: Any) -> Any:
        nonlocal turns
        work = schedule(self, *arguments)
        turns += work is not None and not work.prefill
        if turns == 40 and case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if turns == 40 and case == "diverges" and work is not None:
            return dataclasses.replace(work, num_steps=7)
        return work

    Scheduler.schedule = spoiled  # type: ignore[method-assign]


def main() -> None:
    index, coordinator, case = sys.argv[1:4]
    make, work = (shipped, every_event) if case == "events" else (random, plain)
    if not coordinator:
        print(json.dumps(work(make(None))))
        return
    if case != "killed":
        distributed.SILENT = 600  # looks: a busy machine is no lost process
    place = HostPlace(int(index), 2, coordinator, devices=1)
    group = distributed.join(place, {"case": case}, advice="start again")

    def lead() -> int:
        engine = make(group)
        publish_turns(engine, group)
        answers = work(engine)
        engine.close()
        print(json.dumps(answers), flush=True)
        return 0

    def follow() -> int:
        spoil(case)
        assert follow_turns(make(group), group) == "the engine was closed"
        return 0

    take_part(group, lead if group.first else follow)


if __name__ == "__main__":
    main()
