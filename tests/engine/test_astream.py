"""Streams for `async for`: several on one engine, cancelled, closed and failed."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator

import pytest

from dflash_jax import CancelCell
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.handle import AsyncStream
from dflash_jax.errors import QueueFullError, RequestError
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
    while engine.active or engine.queued or engine._driver._attached:
        assert time.monotonic() < end
        time.sleep(0.01)


async def ids_of(stream: AsyncStream) -> list[int]:
    return [i async for piece in stream for i in piece.token_ids]


def test_streams_that_run_together_give_what_each_gives_alone(engine: Engine) -> None:
    async def together() -> list[list[int]]:
        streams = [engine.astream(prompt, max_tokens=40) for prompt in PROMPTS]
        found = await asyncio.gather(*map(ids_of, streams))
        assert [stream.result.token_ids for stream in streams] == found
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
        await ids_of(engine.astream([1], max_tokens=20, speculative=False))
        ticks.cancel()

    before = time.perf_counter()
    asyncio.run(main())
    assert longest < (time.perf_counter() - before) / 2


@pytest.mark.parametrize("way", ["task", "break", "cell"])
def test_a_stream_that_is_given_up_ends_its_request(engine: Engine, way: str) -> None:
    cell = CancelCell()
    stream = engine.astream([1, 2], max_tokens=110, ignore_eos=True, cancel=cell)

    async def read() -> None:
        async for _ in stream:
            if way == "break":
                break
            if way == "cell":
                cell.cancel()

    async def main() -> None:
        task = asyncio.ensure_future(read())
        while not (stream._handle and stream._handle.token_ids):
            await asyncio.sleep(0)
        if way == "task":
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        while not stream._handle.done:
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert stream.result.finish_reason == "cancelled"
    assert len(stream.result.token_ids) < 110


def test_a_task_that_is_cancelled_while_it_is_queued_leaves_no_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine.submit

    def slow(*given, **more):  # as while a program is compiled
        time.sleep(0.1)
        return submit(*given, **more)

    monkeypatch.setattr(engine, "submit", slow)

    async def main() -> None:
        task = asyncio.ensure_future(ids_of(engine.astream([1], max_tokens=110, ignore_eos=True)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert engine.generate([1], max_tokens=2).token_ids


def test_what_is_wrong_is_raised_while_iterating(engine: Engine) -> None:
    async def main() -> None:
        with pytest.raises(RequestError, match="prompt"):
            await ids_of(engine.astream([]))
        stream = engine.astream([1], max_tokens=2)
        with pytest.raises(RequestError, match="still runs"):
            _ = stream.result
        await ids_of(stream)
        with pytest.raises(RequestError, match="iterated already"):
            await ids_of(stream)
        streams = [engine.astream([1], max_tokens=110, ignore_eos=True) for _ in range(12)]
        found = await asyncio.gather(*map(ids_of, streams), return_exceptions=True)
        assert any(isinstance(each, QueueFullError) for each in found)
        assert any(isinstance(each, list) and len(each) == 110 for each in found)

    asyncio.run(main())


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
        streams = [engine.astream([1], max_tokens=110, ignore_eos=True) for _ in range(2)]
        return await asyncio.gather(*map(ids_of, streams), return_exceptions=True)

    found = asyncio.run(main())
    assert any(isinstance(each, OSError) for each in found)
    monkeypatch.undo()
    assert engine.generate([1], max_tokens=2).token_ids
