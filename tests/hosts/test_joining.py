"""The port on which workers join: floods of strangers, slow proofs, and workers that come late."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dflash_jax.hosts import channel as channel_module
from dflash_jax.hosts.channel import (
    MOST_UNPROVED,
    Channel,
    Hello,
    JoiningPort,
    WrongTokenError,
    connect,
)

TOKEN = "secret"


@contextlib.contextmanager
def accepting(port: JoiningPort) -> Iterator[None]:
    """Accept connections in a thread."""
    ended = threading.Event()

    def accept() -> None:
        while not ended.is_set():
            port.accept(0.02)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def stranger(port: JoiningPort) -> socket.socket:
    host, _, number = port.address.rpartition(":")
    return socket.create_connection((host, int(number)))


def join(port: JoiningPort, index: int = 0) -> Channel:
    """Join as a worker does."""
    channel = connect(port.address, TOKEN, 20)
    channel.send(Hello(index, {"jax": "1"}).encode())
    return channel


def joined(port: JoiningPort, count: int) -> list[tuple[Channel, Hello]]:
    """Wait until connections proved the token, and take them."""
    end, found = time.monotonic() + 20, []
    while len(found) < count and time.monotonic() < end:
        found += port.take()
        time.sleep(0.01)
    assert len(found) == count
    return found


def test_workers_join_through_a_flood_of_silent_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "RETRY_S", 0.01)
    with (
        JoiningPort("127.0.0.1", TOKEN) as port,
        accepting(port),
        contextlib.ExitStack() as all_,
    ):
        for index in range(2):
            for _ in range(3 * MOST_UNPROVED):
                all_.enter_context(stranger(port))
            all_.callback(join(port, index).close)
        found = joined(port, 2)
        assert {hello.index for _, hello in found} == {0, 1}
        assert len(port._unproved) <= MOST_UNPROVED
        for channel, _ in found:
            all_.callback(channel.close)


def test_an_accept_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "PAUSE_S", 0.01)
    with JoiningPort("127.0.0.1", TOKEN) as port:
        listening, failures = port._server, [OSError(24, "Too many open files")] * 3

        class Exhausted:
            """A socket that cannot accept at first."""

            def settimeout(self, seconds: float) -> None:
                listening.settimeout(seconds)

            def accept(self) -> tuple[socket.socket, object]:
                if failures:
                    raise failures.pop()
                return listening.accept()

            def close(self) -> None:
                listening.close()

        port._server = Exhausted()  # type: ignore[assignment]
        with accepting(port):
            channel = join(port)
            [(other, _)] = joined(port, 1)
        channel.close()
        other.close()
    assert not failures


def test_a_proof_that_comes_byte_by_byte_is_refused_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "HANDSHAKE_S", 0.2)
    with JoiningPort("127.0.0.1", TOKEN) as port, accepting(port), stranger(port) as connection:
        connection.settimeout(0.02)
        came, end = [b"start"], time.monotonic() + 20
        while came[-1] and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                came.append(connection.recv(100))
            with contextlib.suppress(OSError):
                connection.send(b"\0")
        assert b"".join(came[1:]) == came[1]  # a nonce, and no proof
        assert came[-1] == b""


def test_an_empty_nonce_is_refused() -> None:
    with JoiningPort("127.0.0.1", TOKEN) as port, accepting(port), stranger(port) as connection:
        connection.settimeout(20)
        connection.recv(8 + 32)
        connection.sendall((0).to_bytes(8, "big"))
        assert connection.recv(100) == b""  # closed, without a proof
        assert not port.take()


def test_a_worker_with_another_token_does_not_try_again() -> None:
    with JoiningPort("127.0.0.1", "other") as port, accepting(port):
        with pytest.raises(WrongTokenError):
            connect(port.address, TOKEN, 20)
        assert not port.take()


@pytest.mark.parametrize(
    "message", [b"{", b"[]", b"[" * 10**5, b'{"index": true, "common": {}}', b'{"index": 0}']
)
def test_a_first_message_of_another_kind_is_refused(message: bytes) -> None:
    with JoiningPort("127.0.0.1", TOKEN) as port, accepting(port):
        channel = connect(port.address, TOKEN, 20)
        channel.send(message)
        with contextlib.closing(channel), pytest.raises((EOFError, OSError)):
            channel.receive()
        assert not port.take()


def test_what_hosts_have_differently_is_named() -> None:
    first = Hello(0, {"jax": "1", "seed": 0})
    assert first.difference(Hello(1, {"jax": "1", "seed": 0, "more": 1})) == ""
    assert first.difference(Hello(1, {"jax": "1"})) == "seed is None on host 1 and 0 on host 0"
