"""Requests in event loops: several on one engine, cancelled, closed and failed."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator

import pytest

from dflash_jax import CancelCell
from dflash_jax.engine.engine import Engine, RequestHandle
from dflash_jax.graph import Graph

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def engine(tiny3: Engine) -> Engine:
    """An engine of three rows with a short queue."""
    plan = dataclasses.replace(tiny3.plan, queue=4)
    made = Engine(Graph(tiny3.graph.pair, plan), tiny3.params)
    made.share_programs(tiny3)
    return made


@pytest.fixture(autouse=True)
def ends_idle(engine: Engine) -> Iterator[None]:
    """Every request of a test has ended soon after it."""
    yield
    end = time.monotonic() + 10
    while engine.core.active or engine.core.queued or engine._driver._attached:
        assert time.monotonic() < end
        time.sleep(0.01)


async def ids_of(handle: RequestHandle) -> list[int]:
    return [i async for piece in handle for i in piece.token_ids]


def test_streams_that_run_together_give_what_each_gives_alone(engine: Engine) -> None:
    async def together() -> list[list[int]]:
        streams = [engine.submit(prompt, max_tokens=40) for prompt in PROMPTS]
        found = await asyncio.gather(*map(ids_of, streams))
        assert [(await stream).token_ids for stream in streams] == found
        assert list(map(len, found)) == [40] * 3
        more = await asyncio.gather(*[engine.submit(x, max_tokens=9) for x in PROMPTS])
        assert [result.token_ids for result in more] == [x[:9] for x in found]
        return found

    expected = [r.token_ids for r in engine.generate_many(PROMPTS, max_tokens=40)]
    assert asyncio.run(together()) == expected
    assert asyncio.run(together()) == expected  # in another event loop


def test_the_event_loop_goes_on_while_an_engine_works(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = engine.core.step
    monkeypatch.setattr(engine.core, "step", lambda: (time.sleep(0.02), turn()))
    longest = 0.0

    async def ticking() -> None:
        nonlocal longest
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - before)

    async def main() -> None:
        ticks = asyncio.ensure_future(ticking())
        await ids_of(engine.submit([1], max_tokens=20, speculative=False))
        ticks.cancel()

    before = time.perf_counter()
    asyncio.run(main())
    assert longest < (time.perf_counter() - before) / 2


@pytest.mark.parametrize("way", ["task", "break", "cell"])
def test_a_stream_that_is_given_up_ends_its_request(engine: Engine, way: str) -> None:
    cell = CancelCell()
    stream = engine.submit([1, 2], max_tokens=110, ignore_eos=True, cancel=cell)

    async def read() -> None:
        async for _ in stream:
            if way == "break":
                break
            if way == "cell":
                cell.cancel()

    async def main() -> None:
        task = asyncio.ensure_future(read())
        while not stream.token_ids:
            await asyncio.sleep(0)
        if way == "task":
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        while not stream.done:
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert stream.result().finish_reason == "cancelled"
    assert len(stream.result().token_ids) < 110


def test_a_task_that_is_cancelled_while_it_is_queued_leaves_no_request(
    engine: Engine,
) -> None:
    def slow() -> RequestHandle:  # as while a program is compiled
        time.sleep(0.1)
        return engine.submit([1], max_tokens=110, ignore_eos=True)

    async def read() -> None:
        await ids_of(await asyncio.to_thread(slow))

    async def main() -> None:
        task = asyncio.ensure_future(read())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert engine.generate([1], max_tokens=2).token_ids


def test_a_turn_that_fails_ends_every_stream(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, turns = engine.core.step, iter(range(100))

    def breaking() -> None:
        if next(turns) == 3:
            raise OSError("the disk is gone")
        turn()

    monkeypatch.setattr(engine.core, "step", breaking)

    async def main() -> list:
        streams = [engine.submit([1], max_tokens=110, ignore_eos=True) for _ in range(2)]
        return await asyncio.gather(*map(ids_of, streams), return_exceptions=True)

    found = asyncio.run(main())
    assert any(isinstance(each, OSError) for each in found)
    monkeypatch.undo()
    assert engine.generate([1], max_tokens=2).token_ids
