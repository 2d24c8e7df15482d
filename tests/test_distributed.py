"""Groups of processes: values, turns and ends, by JAX's real store within this process."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from jax._src.lib import _jax

from dflash_jax import distributed
from dflash_jax.distributed import Group
from dflash_jax.errors import HostError
from dflash_jax.utils.addresses import free_address, joined_address, split_address

Outcome = tuple[Any, BaseException | None]


def together(*works: Callable[[], Any]) -> list[Outcome]:
    """Call functions in threads; return the value or the error of each."""
    outcomes: list[Outcome] = [(None, None)] * len(works)

    def call(i: int) -> None:
        try:
            outcomes[i] = works[i](), None
        except BaseException as error:
            outcomes[i] = None, error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    assert [error for _, error in outcomes] == [None] * len(outcomes)
    return [value for value, _ in outcomes]


class Three:
    """Groups of three processes, which are threads of the test, with clients of one store.

    Attributes:
      ends: number of the group, message and exit code where a process would have ended.
    """

    def __init__(self) -> None:
        address = free_address()
        self.service = _jax.get_distributed_runtime_service(
            address, 3, heartbeat_timeout=3600, shutdown_timeout=5
        )
        self.clients = [
            _jax.get_distributed_runtime_client(
                address, i, init_timeout=30, heartbeat_timeout=3600, shutdown_on_destruction=False
            )
            for i in range(3)
        ]
        values(together(*(client.connect for client in self.clients)))
        self.ends: queue.SimpleQueue[tuple[int, str, int]] = queue.SimpleQueue()
        self.groups = [self._group(i) for i in range(3)]

    def _group(self, index: int) -> Group:
        def ended(text: str, code: int) -> None:
            self.ends.put((index, text, code))

        client = self.clients[index]
        return Group(index, 3, client, advice="start again", quiet=index == 2, ended=ended)

    def close(self) -> None:
        for group in self.groups:
            group._closed.set()
        together(*(client.shutdown for client in self.clients))
        self.service.shutdown()


@pytest.fixture(scope="module")
def three() -> Iterator[Three]:
    made = Three()
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[Three]:
    """Three processes that notice soon who is gone."""
    monkeypatch.setattr(distributed, "TICK", 0.05)
    made = Three()
    yield made
    made.close()


def test_every_process_gets_the_values_of_all(three: Three) -> None:
    calls = [lambda group=group: group.exchange("n", [group.index]) for group in three.groups]
    assert values(together(*calls)) == [[[0], [1], [2]]] * 3
    gathered = [lambda group=group: group.all_gather("b", b"\n\0x") for group in three.groups]
    assert values(together(*gathered)) == [[b"\n\0x"] * 3] * 3
    assert Group().exchange("n", 7) == [7]
    assert Group().all_gather("n", b"x") == [b"x"]


def test_a_value_that_comes_late_is_waited_for(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "WAITS_MS", (20, 20))

    def late(group: Group) -> list[Any]:
        time.sleep(0.3 * group.index)
        return group.exchange("late", group.index)

    calls = [lambda group=group: late(group) for group in three.groups]
    assert values(together(*calls)) == [[0, 1, 2]] * 3


def test_a_flag_of_any_process_is_seen_by_all(three: Three) -> None:
    for who in (None, 0, 2):
        calls = [
            lambda group=group, who=who: group.any("stop", group.index == who)
            for group in three.groups
        ]
        assert values(together(*calls)) == [who is not None] * 3


def test_another_value_and_another_call_are_named(three: Three) -> None:
    calls = [
        lambda group=group: group.agree("the step", group.index // 2) for group in three.groups
    ]
    for _, error in together(*calls):
        assert isinstance(error, HostError)
        assert str(error).startswith("the step is 1 on host 2 and 0 on host 0; give all hosts")
    others = [lambda group=group: group.exchange("ab"[group.index // 2]) for group in three.groups]
    outcomes = together(*others)
    assert str(outcomes[0][1]).startswith("host 2 is at 'b', this one at 'a'; give all hosts")
    assert str(outcomes[2][1]).startswith("host 0 is at 'a', this one at 'b'; give all hosts")


def test_turns_come_in_order_and_are_forgotten_once_all_followed(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "KEPT", 8)
    first, *others = three.groups
    turns = 3 * 8 + 1

    def publish() -> None:
        for turn in range(turns):
            first.publish(turn, str(turn).encode())

    def follow(group: Group) -> list[bytes]:
        return [group.follow(turn) for turn in range(turns)]

    outcomes = together(publish, *(lambda group=group: follow(group) for group in others))
    assert values(outcomes)[1:] == [[str(turn).encode() for turn in range(turns)]] * 2
    first._forget()
    left = {int(key.partition("/")[0]) for key in first._under("turns")}
    assert min(left) == 3


def test_a_process_that_ends_by_an_error_is_named_with_it(quick: Three) -> None:
    quick.groups[1]._tell(1, "ConfigError: no rows", 1)
    quick.groups[1]._closed.set()
    ends = sorted(quick.ends.get(timeout=20) for _ in range(2))
    assert ends == [
        (0, "HostError: host 1 is gone: ConfigError: no rows; start again", 1),
        (2, "", 1),  # on the terminal of process 0, which prints it
    ]


def test_a_silent_process_is_named(quick: Three) -> None:
    quick.groups[2]._closed.set()
    ends = sorted(quick.ends.get(timeout=20) for _ in range(2))
    text = "HostError: host 2 is gone: it was silent for 1 seconds; start again"
    assert ends == [(0, text, 1), (1, text, 1)]


def test_processes_that_close_together_are_not_missed(quick: Three) -> None:
    values(together(*(group.close for group in quick.groups)))
    with pytest.raises(queue.Empty):
        quick.ends.get(timeout=2 * distributed.SILENT * distributed.TICK)


PROGRAM = """
import os, signal, sys, time
from dflash_jax import distributed
from dflash_jax.distributed import HostPlace
index, address, fate = int(sys.argv[1]), sys.argv[2], sys.argv[3]
place = HostPlace(index, 2, address, wait=5.0 if fate == "missing" else 100.0)
common = {"seed": index if fate == "differs" else 0}
group = distributed.join(place, common, advice="start again")
if fate == "killed" and index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if fate == "first" and index == 0:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
if fate in ("killed", "first"):
    group.exchange("never", 0)
if fate == "leaves" and index == 1:
    group.leave("ConfigError: no rows", 5)
print(group.exchange("hello", index * 7), flush=True)
group.close()
"""


def run_two(fate: str, *, count: int = 2) -> list[tuple[int, str, str]]:
    """Run two processes; return exit code, output and last line of errors of each."""
    address = free_address()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(i), address, fate],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    outcomes = []
    for process in running:
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
        outcomes.append((process.returncode, out, (err.splitlines() or [""])[-1]))
    return outcomes


def test_two_processes_meet_exchange_and_end() -> None:
    assert [(code, out) for code, out, _ in run_two("well")] == [(0, "[0, 7]\n")] * 2


def test_other_settings_end_both_processes_by_name() -> None:
    for code, _, said in run_two("differs"):
        assert code == 1
        assert "HostError: seed is 1 on host 1 and 0 on host 0; give all hosts" in said


def test_the_last_words_of_a_process_end_the_other_one() -> None:
    (code, _, said), (other, _, own) = run_two("leaves")
    assert (code, other) == (5, 5)
    assert own == "dflash-jax: ConfigError: no rows"
    assert said == "dflash-jax: HostError: host 1 is gone: ConfigError: no rows; start again"


@pytest.mark.exhaustive
def test_a_killed_process_ends_the_other_one() -> None:
    (code, _, said), (killed, _, _) = run_two("killed")
    assert (code, killed) == (1, -signal.SIGKILL)
    assert said == (
        "dflash-jax: HostError: host 1 is gone: it was silent for 10 seconds; start again"
    )
    (killed, _, _), (code, _, said) = run_two("first")
    assert (killed, code) == (-signal.SIGKILL, 1)
    assert said.startswith("dflash-jax: HostError: host 0 is gone: it")


@pytest.mark.exhaustive
def test_missing_processes_end_the_one_that_waits() -> None:
    [(code, _, said)] = run_two("missing", count=1)
    assert code == 1
    assert said.startswith("dflash-jax: HostError: not all of 2 hosts met at 127.0.0.1, port ")


def test_addresses_are_read() -> None:
    assert split_address("node:80") == ("node", 80)
    assert split_address("[::1]:8000") == ("::1", 8000)
    assert joined_address("::1", 8000) == "[::1]:8000"
    assert split_address(free_address())[0] == "127.0.0.1"
    for text in ("", "node", "node:", ":80", "node:x", "node:0", "node:65536"):
        with pytest.raises(ValueError, match="expected HOST:PORT"):
            split_address(text)
