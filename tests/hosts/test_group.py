"""Groups of scripted workers: the log, handles, and every way in which a group can fail."""

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.errors import ComputeError, HostError, PlanError
from dflash_jax.graph.keys import ProgramKey, Step
from dflash_jax.hosts import group as group_module
from dflash_jax.hosts import messages
from dflash_jax.hosts.group import HostGroup
from dflash_jax.hosts.messages import HostDevices, pack
from dflash_jax.hosts.remote import RemoteArray, RemoteExecutable, RemoteTree, completed
from dflash_jax.plan import ResolvedPlan
from dflash_jax.testing import AMPLE, tiny_target
from tests.hosts.conftest import ScriptedWorker


def values(worker: ScriptedWorker, entry: messages.Entry) -> None:
    """Answer fetches by the handle itself, from worker 0 only."""
    if isinstance(entry, messages.Fetch) and worker.index == 0:
        worker.send(messages.Value(entry.handle, pack(np.array([entry.handle], np.int32))))


def array(group: HostGroup) -> RemoteArray:
    return RemoteArray(group, group.new_handles(1), (1,), np.int32)


def until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_all_workers_get_one_log_and_values_come_from_the_first(start: Any) -> None:
    group, workers = start(values)
    arrays = [array(group) for _ in range(3)]
    for each in arrays:
        each.copy_to_host_async()
    assert [int(np.asarray(each)[0]) for each in reversed(arrays)] == [3, 2, 1]
    assert np.asarray(arrays[0], dtype=np.float32).dtype == np.float32
    until(lambda: len(workers[1].entries) == 3)  # asked for once
    assert workers[0].entries == workers[1].entries
    assert [x.handle for x in workers[0].entries] == [1, 2, 3]


def test_handles_are_freed_after_their_last_use(start: Any) -> None:
    group, workers = start()
    state, given = RemoteTree(group, group.new_handles(1)), array(group)
    key = ProgramKey(Step.COPY_ROW)
    shape = np.zeros((2, 3), np.float32)
    run = RemoteExecutable(key, group, (shape, None, {"a": shape, "b": shape}))
    state, none, output = run(None, state, None, [given, np.int32(4)])
    assert none is None
    assert (output["b"].shape, output["b"].dtype) == ((2, 3), np.float32)
    del given
    output.pop("a")
    gc.collect()
    run(None, state, None, [output["b"]])
    until(lambda: len(workers[0].entries) == 3)
    first, freed, second = workers[0].entries
    assert (first.state, first.results) == (1, 3)
    assert first.inputs == [2, pack(np.int32(4))]
    assert set(freed.handles) == {1, 2, 5}  # the first state, the input, output "a"
    assert (second.state, second.inputs) == (3, [6])


def test_programs_are_compiled_when_all_workers_say_so(start: Any) -> None:
    def compiled(worker: ScriptedWorker, entry: messages.Entry) -> None:
        assert isinstance(entry, messages.Compile)
        error = "no memory" if worker.index and entry.number == 2 else ""
        worker.send(messages.Compiled(entry.number, error))

    group, _ = start(compiled)
    group.wait(group.compile(["plain[greedy]"], parallel=False), 10)
    with pytest.raises(ComputeError, match="host 1: no memory"):
        group.wait(group.compile(["plain[greedy]"], parallel=False), 10)
    assert group.error is None


def ends_with(group: HostGroup, workers: list[ScriptedWorker], reason: str) -> None:
    """Expect every use of a group to end with a named error, and its workers killed."""
    with pytest.raises(HostError, match=reason):
        group.lost.result(10)
    with pytest.raises(HostError, match=reason):
        np.asarray(array(group))
    assert all(worker.killed.is_set() for worker in workers)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda w: w.disconnect(), r"host 1 \(a thread\): the connection ended"),
        (lambda w: w.send(messages.Failed("ValueError: x")), "host 1 failed: ValueError: x"),
        (lambda w: setattr(w, "ended", "ended by SIGKILL"), r"host 1 \(a thread\) ended by SIGK"),
        (lambda w: setattr(w, "silent", True), r"host 1 \(a thread\) did not answer for 0.1 s"),
        (lambda w: w._channel.send(b"\xc1"), r"host 1 \(a thread\): the connection ended"),
    ],
)
def test_a_lost_worker_ends_all_waits_by_name(start: Any, harm: Any, reason: str) -> None:
    group, workers = start()
    waiting, compiling = array(group), group.compile(["plain[greedy]"], parallel=True)
    compiled = group.compile(["plain"], parallel=True)
    waiting.copy_to_host_async()
    if "answer" in reason:  # not while programs are compiled
        for worker in workers:
            for number in (1, 2):
                worker.send(messages.Compiled(number, ""))
        group.wait(compiled, 10)
    harm(workers[1])
    with pytest.raises(HostError, match=reason):
        np.asarray(waiting)
    if "answer" not in reason:
        with pytest.raises(HostError, match=reason):
            group.wait(compiling, 10)
    ends_with(group, workers, reason)


def test_another_process_that_ended_is_named_before_the_errors_it_caused(start: Any) -> None:
    group, workers = start()
    workers[0].ended = "ended by SIGKILL"
    workers[1].send(messages.Failed("connection reset by peer"))
    ends_with(group, workers, r"host 0 \(a thread\) ended by SIGKILL")


def test_workers_that_compile_may_answer_late(start: Any) -> None:
    group, workers = start()
    compiled = group.compile(["plain[greedy]"], parallel=True)
    workers[0].silent = True
    until(lambda: group._links[0].missed > 2 * group_module.MISSED)
    assert group.error is None
    for worker in workers:
        worker.send(messages.Compiled(1, ""))
    group.wait(compiled, 10)
    ends_with(group, workers, "did not answer for")


def test_a_result_that_does_not_arrive_fails_the_group(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, workers = start()
    with pytest.raises(HostError, match=r"a result did not arrive within 0.05 s; all hosts are st"):
        group.wait(group.fetch(1), 0.05)
    ends_with(group, workers, "did not arrive")


def test_a_result_is_waited_for_while_others_arrive(start: Any) -> None:
    group, workers = start()
    last, sent = group.fetch(99), threading.Event()

    def send() -> None:
        for handle in range(1, 6):
            assert not sent.wait(0.06)
            workers[0].send(messages.Value(handle, pack(np.int32(handle))))
        workers[0].send(messages.Value(99, pack(np.int32(7))))

    thread = threading.Thread(target=send)
    thread.start()
    assert group.wait(last, 0.1) == 7
    thread.join()


def test_workers_with_other_tokens_or_versions_are_refused(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        HostError, match=r"different versions \(jax is 2 on host 1 and 1 on host 0\); install"
    ):
        start(versions={1: "2"})
    monkeypatch.setattr(group_module, "START_S", 0.5)
    with pytest.raises(HostError, match=r"hosts \[1\] did not connect within 0.5 s"):
        start(tokens={1: "guessed"})


def test_a_closed_group_is_no_failure(start: Any) -> None:
    group, workers = start()
    group.close()
    assert group.lost.cancelled()
    assert group.error is None
    assert all(worker.killed.is_set() for worker in workers)
    with pytest.raises(HostError, match="the hosts were stopped"):
        group.write(messages.Fetch(1))
    array(group)  # handles are dropped without an error


def test_the_mesh_is_over_all_devices_of_the_hosts() -> None:
    target = tiny_target(num_heads=8, num_kv_heads=4)
    joined = [HostDevices("cpu", 2, AMPLE)] * 2
    plan = Plan(rows=2)
    assert completed(plan, joined, target, None).mesh == (1, 4)
    eight = [HostDevices("cpu", 4, AMPLE)] * 2
    assert completed(plan, eight, target, None).mesh == (2, 4)
    assert completed(Plan(rows=3), eight, target, None).mesh == (1, 8)
    made = completed(Plan(rows=2, mesh=(2, 2)), joined, target, None)
    assert isinstance(made, ResolvedPlan)
    with pytest.raises(PlanError, match=r"mesh is 1 x 2, but 2 hosts have 4 devices, 2 each"):
        completed(Plan(rows=2, mesh=(1, 2)), joined, target, None)
    with pytest.raises(PlanError, match=r"but only 2\.0 B are allowed"):
        completed(plan, [HostDevices("cpu", 2, 1)] * 2, target, None)
    others = [joined[0], HostDevices("gpu", 8, AMPLE)]
    with pytest.raises(HostError, match=r"host 0 has 2 of cpu; host 1 has 8 of gpu"):
        completed(plan, others, target, None)
