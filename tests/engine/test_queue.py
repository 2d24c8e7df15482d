"""The queue: its limit, its order, and threads that submit and cancel."""

import dataclasses
import threading
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import QueueFullError
from dflash_jax.graph import Graph

PROMPT = [5, 4, 3, 2, 1]


@pytest.fixture
def short(tiny3: Engine) -> Engine:
    """`tiny3` with a queue of four requests."""
    plan = dataclasses.replace(tiny3.plan, queue=4)
    engine = Engine(Graph(tiny3.graph.pair, plan), tiny3.params)
    engine.core.runner.compiled.executables = tiny3.core.runner.executables
    return engine


def test_a_full_queue_refuses_requests_and_continues(short: Engine) -> None:
    handles = [short.submit([i], max_tokens=5) for i in range(4)]
    with pytest.raises(QueueFullError, match="4 requests wait already and 1 more were given, but"):
        short.submit([9], max_tokens=5)
    assert short.core.queued == 4
    short.advance()
    assert (short.core.active, short.core.queued) == (3, 1)
    with pytest.raises(QueueFullError, match="1 requests wait already and 4 more"):
        short.enqueue(short.prepare([9], n=4, max_tokens=5))
    assert short.core.queued == 1  # all or none
    handles.append(short.submit([9], max_tokens=5))
    while short.core.busy:
        short.advance()
    assert all(handle.finish_reason is not None for handle in handles)


def test_a_request_like_the_last_one_sends_no_rules_to_the_device(short: Engine) -> None:
    scheduler = short.core.scheduler
    put, sent = scheduler._put, []

    def counted(column: Any) -> Any:
        sent.append(column)
        return put(column)

    scheduler._put = counted
    for prompt in ([1, 2, 3], [4, 5]):
        sent.clear()
        short.generate(prompt, max_tokens=1, seed=3)
    assert sent == []


def test_a_list_of_prompts_may_be_longer_than_the_queue(short: Engine, tiny: Engine) -> None:
    prompts = [[i, i + 1] for i in range(12)]
    got = [r.token_ids for r in short.generate_many(prompts, max_tokens=6)]
    assert got == [tiny.generate(p, max_tokens=6).token_ids for p in prompts]


def test_rows_are_assigned_in_queue_order(tiny3: Engine) -> None:
    handles = [tiny3.submit([i] * (1 + 7 * (i % 3)), max_tokens=3 + i % 5) for i in range(20)]
    started: list[int] = []
    while tiny3.core.busy:
        tiny3.advance()
        fresh = [
            i
            for i, handle in enumerate(handles)
            if handle.sequence in tiny3.core.scheduler.rows and i not in started
        ]
        started += fresh
        gone = [i for i, handle in enumerate(handles) if handle.done and i not in started]
        started += gone
        assert started == sorted(started)


def test_a_long_prompt_does_not_delay_rows_that_decode(tiny3: Engine) -> None:
    """Chunks of a prompt alternate with decode steps of other rows."""
    quick = tiny3.submit(PROMPT, max_tokens=60)
    while not quick.token_ids:
        tiny3.advance()
    slow = tiny3.submit([1] * 100, max_tokens=2)
    before, waits, wait = len(quick.token_ids), [], 0
    while not slow.token_ids and not quick.done:
        tiny3.advance()
        wait = 0 if len(quick.token_ids) > before else wait + 1
        before = len(quick.token_ids)
        waits.append(wait)
    assert slow.num_computed == 100
    assert max(waits) <= 2  # one chunk, and one step in flight
    while tiny3.core.busy:
        tiny3.advance()


def test_threads_may_submit_stream_and_cancel(tiny3: Engine, tiny: Engine) -> None:
    """Streams of six threads drive the engine together; some are closed early."""
    wanted = {i: tiny.generate([i, 7], max_tokens=20).token_ids for i in range(6)}
    outputs: dict[int, list[int]] = {}
    errors: list[BaseException] = []

    def stream_prompt(i: int) -> None:
        try:
            for turn in range(3):
                stream = tiny3.submit([i, 7], max_tokens=20)
                got: list[int] = []
                for piece in stream:
                    got += piece.token_ids
                    if turn == 1 and len(got) > i:
                        stream.close()
                        break
                assert got == wanted[i][: len(got)]
                outputs[i] = got
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=stream_prompt, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors
    assert outputs == wanted
    assert not tiny3.core.busy or not tiny3.core.active


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("end", ["dropped", "iterator dropped", "closed", "cancelled", "in queue"])
def test_an_engine_is_idle_once_its_requests_are_dropped_or_cancelled(
    tiny3: Engine, end: str, closes: bool
) -> None:
    cell = dj.CancelCell()
    for _ in range(1 + 3 * (end == "in queue")):
        stream = tiny3.submit([3, 1], max_tokens=100, cancel=cell)
    pieces = iter(stream)
    next(pieces)
    assert tiny3.core.busy
    assert tiny3.core.in_flight  # calls whose results were not read yet
    if end == "cancelled":
        cell.cancel("client_abort")
    elif end == "closed":
        stream.close()
    elif end == "iterator dropped":
        del pieces
    else:
        del pieces, stream
    if closes:
        tiny3.close()
    assert not tiny3.core.busy
    assert (tiny3.core.active, tiny3.core.queued, len(tiny3.core.in_flight)) == (0, 0, 0)
    assert len(tiny3.generate([3, 1], max_tokens=5, ignore_eos=True).token_ids) == 5


def test_a_referenced_request_keeps_an_engine_busy(tiny3: Engine) -> None:
    first, second = (tiny3.submit([i, 1], max_tokens=40, ignore_eos=True) for i in (3, 4))
    pieces = iter(first)
    next(pieces)
    del pieces, first
    tiny3.close()
    assert tiny3.core.busy
    assert tiny3.core.active == 1
    assert sum(len(piece.token_ids) for piece in second) == 40
    assert not tiny3.core.busy


def test_one_thread_may_run_the_engine_for_others(short: Engine, tiny: Engine) -> None:
    """As in a server: one thread runs the engine, and callers only read results."""
    halt = threading.Event()

    def serve() -> None:
        while not halt.is_set():
            if short.core.busy:
                short.advance()
            else:
                halt.wait(0.001)

    worker = threading.Thread(target=serve)
    worker.start()
    try:
        handle, other = short.submit(PROMPT, max_tokens=30), short.submit([3], max_tokens=60)
        other.close()
        assert other.done
        deadline = threading.Event()
        for _ in range(20000):
            if handle.done:
                break
            deadline.wait(0.005)
        assert handle.token_ids == tiny.generate(PROMPT, max_tokens=30).token_ids
    finally:
        halt.set()
        worker.join()
