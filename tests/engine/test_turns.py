"""What enters a turn: posted requests, their ends, deadlines and cancellations."""

import threading

import pytest

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import CancelCell, Request
from dflash_jax.engine.running_request import RunningRequest
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.scheduler import Inbox
from dflash_jax.engine.state_machine import Recovery
from dflash_jax.engine.turns.turn_events import CallRetry, End, TurnEvents
from dflash_jax.graph.keys import Step


def request(deadline: float | None = None, cell: CancelCell | None = None) -> RunningRequest:
    recovery = Recovery(deadline_s=deadline)
    made = Request(prompt=(1,), params=SamplingParams(max_tokens=9), recovery=recovery)
    return RunningRequest(made, None, cancel=cell)


def test_a_turn_takes_what_was_posted_and_the_next_one_only_what_came_after() -> None:
    inbox = Inbox(most=4)
    first, second = request(), request()
    retry = CallRetry(first.number, None, error="too large")
    assert inbox.empty
    assert inbox.admit([first, second], waiting=[])
    inbox.retry(retry)
    inbox.end(second.number, "closed")
    events = inbox.take()
    assert events.admit == (first, second)
    assert events.end == (End(second.number, "closed"),)
    assert events.retry == (retry,)
    assert inbox.take() == events  # as the turn was interrupted
    inbox.applied(events)
    assert inbox.empty
    assert inbox.take() == TurnEvents()


def test_the_queue_has_room_for_all_of_some_requests_or_for_none() -> None:
    inbox = Inbox(most=3)
    assert not inbox.admit([request(), request()], waiting=[request()] * 2)
    assert inbox.empty
    assert inbox.admit([request(), request()], waiting=[request()])
    assert not inbox.admit([request()], waiting=[request()])  # though no turn took them
    inbox.applied(inbox.take())
    assert inbox.admit([request()], waiting=[])


def test_threads_do_not_take_the_same_place() -> None:
    inbox = Inbox(most=10)
    admitted: list[bool] = []

    def post() -> None:
        admitted.extend(inbox.admit([request()], waiting=[]) for _ in range(5))

    threads = [threading.Thread(target=post) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (admitted.count(True), inbox.unread) == (10, 10)


def test_the_inbox_reads_deadlines_of_requests_that_have_not_ended() -> None:
    inbox = Inbox(most=4)
    now = [0.0]
    inbox.clock = lambda: now[0]
    late, ended, patient = request(5), request(5), request()
    for each in (late, ended):
        each.deadline = 5.0
    inbox.admit([late, ended, patient], waiting=[])
    events = inbox.take()
    assert not events.end
    inbox.applied(events)
    inbox.ended(ended)
    now[0] = 5.5
    assert inbox.take().end == (End(late.number, "overdue"),)


@pytest.mark.parametrize("before", [True, False])
def test_a_cell_ends_each_of_its_requests_before_or_after_they_are_posted(*, before: bool) -> None:
    cell = CancelCell()
    first, second = request(cell=cell), request(cell=cell)
    inbox = Inbox(most=2)
    if before:
        cell.cancel("disconnect")
    inbox.admit([first, second], waiting=[])
    cell.cancel("shutdown")  # the first reason counts
    expected = {End(x.number, "disconnect" if before else "shutdown") for x in (first, second)}
    assert set(inbox.take().end) == expected
    inbox.ended(first)
    inbox.ended(second)
    assert not cell._ends  # of a cell that outlives its requests


def test_a_request_that_is_closed_within_a_turn_ends_in_the_next(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a handler of log lines may do, in the thread that runs the turn."""
    handle = tiny.submit([1, 2, 3], max_tokens=60)
    schedule = tiny.core.scheduler.schedule

    def closing(*arguments: object) -> object:
        handle.close()
        assert not handle.done
        return schedule(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tiny.core.scheduler, "schedule", closing)
    tiny.advance()
    monkeypatch.undo()
    assert not handle.done
    tiny.advance()
    assert handle.result().finish_reason == "cancelled"


def test_what_a_request_expects_of_drafting_is_known_when_it_gets_a_row(tiny: Engine) -> None:
    """Not when it was prepared: requests that end meanwhile count."""
    acceptance = tiny.core.acceptance
    first, second = (tiny.submit([i], max_tokens=20) for i in (1, 2))
    first.result()
    while second.sequence.row is None:
        tiny.advance()
    assert tiny.core.acceptance.requests == acceptance.requests + 1
    expected = tiny.core.acceptance.first_state(second.number, 0.0)
    assert second.sequence.state.drafting.acceptance == expected.acceptance
    second.close()


def test_answers_to_one_prompt_are_a_group(tiny3: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a group share chunks of the prompt; equal prompts of others do not."""
    fed: list[int] = []
    step = tiny3.core.runner.step

    def noted(name: Step, *rest: object, **options: object) -> object:
        fed.append(name is Step.PREFILL)
        return step(name, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tiny3.core.runner, "step", noted)
    prompt = [7] * 40  # three chunks
    tiny3.generate_many([prompt], n=2, max_tokens=1)
    assert fed.count(True) == 2 + 2
    fed.clear()
    tiny3.generate_many([prompt, prompt], max_tokens=1)
    assert fed.count(True) == 3 + 3
