"""How hosts of a training run meet, exchange values and notice that one is gone."""

import contextlib
import functools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_jax.cli import main
from dflash_jax.errors import ConfigError, HostError
from dflash_jax.hosts.channel import Channel
from dflash_jax.trainer import exchange, training_hosts
from dflash_jax.trainer.exchange import HostLink, TrainingHosts
from dflash_jax.trainer.training import Placement
from dflash_jax.trainer.training_hosts import HostOptions

Outcome = tuple[Any, BaseException | None]


class RecordingHosts(TrainingHosts):
    """Hosts whose process outlives the loss of another one."""

    def _lost(self, text: str, code: int, named: bool) -> None:
        self.losses = [*getattr(self, "losses", []), text]


def together(*works: Callable[[], Any]) -> list[Outcome]:
    """Call functions in threads; return the value or the error of each."""
    found: list[Outcome] = [(None, None)] * len(works)

    def call(i: int) -> None:
        try:
            found[i] = works[i](), None
        except BaseException as error:
            found[i] = None, error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.fixture
def three() -> Iterator[list[TrainingHosts]]:
    """Hosts 0 to 2, which are connected."""
    groups: list[TrainingHosts] = [RecordingHosts(i, 3) for i in range(3)]
    for i in (2, 1):
        ends = socket.socketpair()
        groups[0].add(i, Channel(ends[0]))
        groups[i].add(0, Channel(ends[1]))
    yield groups
    together(*(lambda group=group: group.exchange(exchange.LAST) for group in groups))
    for group in groups:
        group.close()


def values(found: list[Outcome]) -> list[Any]:
    assert [error for _, error in found] == [None] * len(found)
    return [value for value, _ in found]


def test_every_host_gets_the_values_of_all(three: list[TrainingHosts]) -> None:
    calls = [lambda group=group: group.exchange("n", [group.host]) for group in three]
    assert values(together(*calls)) == [[[0], [1], [2]]] * 3
    assert TrainingHosts().exchange("n", 7) == [7]


def test_a_flag_of_any_host_is_seen_by_all(three: list[TrainingHosts]) -> None:
    for who in (None, 0, 2):
        calls = [
            lambda group=group, who=who: group.any("stop", group.host == who) for group in three
        ]
        assert values(together(*calls)) == [who is not None] * 3


def test_another_value_is_named_with_its_host(three: list[TrainingHosts]) -> None:
    calls = [lambda group=group: group.agree("the step", group.host // 2) for group in three]
    for _, error in together(*calls):
        assert isinstance(error, HostError)
        assert str(error).startswith("the step is 1 on host 2 and 0 on host 0; give all hosts")


def test_another_call_is_refused() -> None:
    groups = [RecordingHosts(i, 2) for i in range(2)]
    for group, end in zip(groups, socket.socketpair(), strict=True):
        group.add(1 - group.host, Channel(end))
    other = functools.partial(groups[1]._links[0].send, name="b", value=0)
    first = together(functools.partial(groups[0].exchange, "a"), other)[0][1]
    assert isinstance(first, HostError)
    assert "host 1 is at 'b', this one at 'a'" in str(first)
    for group in groups:
        group.close()


def test_rows_of_a_batch_are_divided_in_order() -> None:
    rows = np.arange(12)
    parts = [TrainingHosts(i, 3).share_of(rows) for i in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), rows)
    assert {len(part) for part in parts} == {4}


@pytest.fixture
def link() -> Iterator[tuple[HostLink, Channel, "queue.SimpleQueue[tuple[str, int, bool]]"]]:
    """A connection to host 4, its other end, and the losses it reports."""
    end, other = map(Channel, socket.socketpair())
    lost: queue.SimpleQueue[tuple[str, int, bool]] = queue.SimpleQueue()
    found = HostLink(4, end, lambda *told: lost.put(told))
    yield found, other, lost
    found.close()
    other.close()


def test_a_host_that_ends_is_reported(link: Any) -> None:
    _, other, lost = link
    other.close()
    assert lost.get(timeout=10) == ("host 4 is gone: it ended without a message", 1, False)


def test_the_last_words_of_a_host_are_passed_on(link: Any) -> None:
    _, other, lost = link
    other.send(b"{}")
    other.send(b'{"ended": "ConfigError: no rows", "code": 1}')
    assert lost.get(timeout=10) == ("host 4 is gone: ConfigError: no rows", 1, True)


def test_a_broken_message_is_reported(link: Any) -> None:
    _, other, lost = link
    other.detach().sendall(b"GET / HTTP/1.1\n")
    text, code, _ = lost.get(timeout=10)
    assert code == 1
    assert text.startswith("host 4 is gone: its connection broke (")


def test_a_silent_host_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SILENCE", 0.2)
    end, other = socket.socketpair()
    lost: queue.SimpleQueue[tuple[str, int, bool]] = queue.SimpleQueue()
    with contextlib.closing(HostLink(4, Channel(end), lambda *told: lost.put(told))), other:
        assert lost.get(timeout=10)[0] == "host 4 is gone: it was silent for 0.2 seconds"


def test_a_pinging_host_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SILENCE", 0.5)
    monkeypatch.setattr(exchange, "PING", 0.05)
    lost: queue.SimpleQueue[tuple[str, int, bool]] = queue.SimpleQueue()
    ends = [
        HostLink(i, Channel(end), lambda *told: lost.put(told))
        for i, end in enumerate(socket.socketpair())
    ]
    with pytest.raises(queue.Empty):
        lost.get(timeout=1.5)
    for end in ends:
        end.close()


def test_a_host_may_leave_after_the_last_exchange(link: Any) -> None:
    found, other, lost = link
    other.send(b'{"name": "end", "value": null}')
    assert found.receive()["name"] == exchange.LAST
    other.close()
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.3)


def options(host: int, address: tuple[str, int], wait: float = 20.0, **more: Any) -> HostOptions:
    given = {"count": 3, "devices": 1, "settings": {"seed": 0}, "token": "secret"} | more
    return HostOptions(host=host, address=address, wait=wait, **given)


def meet(chosen: HostOptions) -> TrainingHosts:
    group = RecordingHosts(chosen.host, chosen.count)
    with contextlib.ExitStack() as entered:
        meeting = training_hosts._listen if group.first else training_hosts._connect
        meeting(group, chosen, entered, ())
    return group


def test_hosts_meet_in_any_order_past_a_stranger() -> None:
    address = training_hosts.free_ports()

    def stranger() -> None:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as end:
                end.sendall(b"GET / HTTP/1.1\n\n")
                return

    works = [lambda i=i: meet(options(i, address)) for i in (2, 1, 0)]
    groups = values(together(stranger, *works))[1:]
    exchanged = together(*(lambda group=group: group.exchange("n", group.host) for group in groups))
    assert values(exchanged) == [[0, 1, 2]] * 3
    together(*(lambda group=group: group.exchange(exchange.LAST) for group in groups))
    for group in groups:
        group.close()


def test_hosts_meet_through_a_flood_of_silent_and_of_lying_connections() -> None:
    address, ended = training_hosts.free_ports(), threading.Event()

    def flood() -> None:
        with contextlib.ExitStack() as kept:
            while not ended.wait(0.01):
                with contextlib.suppress(OSError):
                    kept.enter_context(socket.create_connection(address, timeout=5))

    def lie() -> None:
        while not ended.wait(0.05):
            with contextlib.suppress(OSError, HostError):
                meet(options(1, address, wait=0.1, token="guessed", settings={"seed": 5}))

    def late(host: int) -> TrainingHosts:
        time.sleep(0.5)
        return meet(options(host, address))

    strangers = [threading.Thread(target=work) for work in (flood, lie)]
    for thread in strangers:
        thread.start()
    try:
        works = [lambda i=i: late(i) for i in (1, 2)]
        groups = values(together(lambda: meet(options(0, address)), *works))
    finally:
        ended.set()
        for thread in strangers:
            thread.join()
    assert [len(group._links) for group in groups] == [2, 1, 1]
    together(*(lambda group=group: group.exchange(exchange.LAST) for group in groups))
    for group in groups:
        group.close()


def test_a_host_with_another_token_is_refused_and_missed() -> None:
    address = training_hosts.free_ports()
    (_, missed), (_, refused) = together(
        lambda: meet(options(0, address, wait=1.0, count=2)),
        lambda: meet(options(1, address, count=2, token="")),
    )
    assert isinstance(missed, HostError)
    assert isinstance(refused, HostError)
    assert "host 1 did not join" in str(missed)
    assert "host 0 has another token; give all hosts the same DFLASH_HOSTS_TOKEN" in str(refused)


def test_missing_hosts_are_named() -> None:
    address = training_hosts.free_ports()
    (_, error), _ = together(
        lambda: meet(options(0, address, wait=2.0)), lambda: meet(options(2, address, count=3))
    )
    assert isinstance(error, HostError)
    assert f"host 1 did not join at 127.0.0.1, port {address[1]}, within 2 s" in str(error)


def test_a_host_that_nobody_answers_says_where() -> None:
    address = training_hosts.free_ports()
    with pytest.raises(
        HostError, match=rf"does not answer at 127.0.0.1, port {address[1]}, within"
    ):
        meet(options(1, address, wait=0.3))


def test_an_occupied_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with pytest.raises(HostError, match=f"cannot listen at .*, port {address[1]} "):
            meet(options(0, address))


@pytest.mark.parametrize(
    ("host", "more", "problem"),
    [
        (1, {"settings": {"seed": 5}}, "seed is 5 on host 1 and 0 on host 0"),
        (1, {"count": 4}, "hosts is 4 on host 1 and 3 on host 0"),
        (7, {}, "there are two processes with --host 7"),
    ],
)
def test_another_command_is_refused_at_both_ends(host: int, more: Any, problem: str) -> None:
    address = training_hosts.free_ports()
    both = together(lambda: meet(options(0, address)), lambda: meet(options(host, address, **more)))
    for _, error in both:
        assert isinstance(error, HostError)
        assert str(error).startswith(problem)


@pytest.mark.parametrize("text", ["", "node", "node:", ":80", "node:x", "node:0", "node:65535"])
def test_addresses_without_two_ports_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        training_hosts.parse_address(text)


def test_addresses_are_read() -> None:
    assert training_hosts.parse_address("node:80") == ("node", 80)
    assert training_hosts.parse_address("[::1]:8000") == ("::1", 8000)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--hosts 0", "--hosts is 0; expected at least 1"),
        ("--hosts 2", "devices is 1 for 2 hosts; expected a multiple"),
        ("--hosts 2 --set devices=3", "buckets have [4] rows"),
        ("--hosts 2 --host 0 --set devices=2", "--host and --coordinator go together"),
        ("--hosts 2 --coordinator a:1 --set devices=2", "--host and --coordinator go together"),
        ("--host 2 --hosts 2 --coordinator a:1", "--host is 2 of --hosts 2; expected 0 to 1"),
        ("--host 0 --hosts 2 --coordinator a --set devices=2", "--coordinator is 'a'; expected"),
        ("--hosts 2 --host-wait 0 --set devices=2", "--host-wait is 0.0; expected a positive"),
    ],
)
def test_wrong_options_are_named(
    words: str, problem: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert main(["train", "--preset", "smoke", "--out", out, *words.split()]) == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_devices_that_hosts_cannot_share_are_refused() -> None:
    with exchange.using(TrainingHosts(0, 2)):
        with pytest.raises(ConfigError, match="devices is 3 for 2 hosts"):
            Placement(3)
        with pytest.raises(ConfigError, match="devices were asked for on host 0, but there are"):
            Placement(128)


@pytest.mark.exhaustive
def test_two_processes_train_a_drafter_like_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "It is 12."}]
    line = json.dumps({"messages": turns})
    (tmp_path / "data.jsonl").write_text(f"{line}\n" * 8)
    words = ["train", "--preset", "smoke", "--data", str(tmp_path / "data.jsonl"), "--json"]
    for setting in ("answers=given", "held_out=0", "steps=2", "buckets=32x4", "save_every=2"):
        words += ["--set", setting]
    alone, both = tmp_path / "alone", tmp_path / "both"
    assert main([*words, "--out", str(alone)]) == 0
    more = ["--hosts", "2", "--set", "devices=2", "--out", str(both)]
    ran = subprocess.run(
        [sys.executable, "-m", "dflash_jax", *words, *more],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["drafter"] == str(both / "drafter")
    assert (both / "drafter" / "model.safetensors").is_file()
    logged = [
        [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        for out in (alone, both)
    ]
    assert [[step["step"] for step in steps] for steps in logged] == [[1, 2]] * 2
    for one, two in zip(*logged, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["gradient"] == pytest.approx(one["gradient"], rel=1e-3)


def test_hosts_that_were_not_heard_of_are_named(
    three: list[TrainingHosts],
) -> None:
    assert three[0].silent() == []
    three[0]._links[1].heard -= 3 * exchange.PING
    assert three[0].silent() == [2]
    error = training_hosts._failed_collective(RuntimeError("UNKNOWN: timed out\nmore"), three[0])
    assert str(error).startswith(
        "a program of all hosts failed, and host 2 is silent (UNKNOWN: timed out); run the same"
    )
