"""The way to JAX's coordinator: open to processes that have the token, and to no others."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_jax.hosts.channel import UNIX, private_address, relay, tunnel


@contextlib.contextmanager
def echoing() -> Iterator[tuple[str, list[socket.socket]]]:
    """A coordinator that returns what it receives; yields its address, and its connections."""
    accepted: list[socket.socket] = []

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted.append(server.accept()[0])
                threading.Thread(target=echo, args=(accepted[-1],), daemon=True).start()

    def echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1000):
                connection.sendall(data)

    with private_address() as address, socket.socket(socket.AF_UNIX) as server:
        server.bind(address.removeprefix(UNIX))
        server.listen()
        thread = threading.Thread(target=run)
        thread.start()
        yield address, accepted
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def opened(address: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.settimeout(20)
    found.connect(address.removeprefix(UNIX))
    return found


def repeated(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    found = b""
    while len(found) < len(data) and (part := connection.recv(1 << 16)):
        found += part
    return found


def test_a_tunnel_passes_bytes_on_and_outlives_the_ports() -> None:
    with echoing() as (inner, _):
        with relay(inner, "127.0.0.1", "secret") as address, tunnel(address, "secret") as near:
            connection = opened(near)
            assert repeated(connection, bytes(range(256)) * 999) == bytes(range(256)) * 999
        name, _, port = address.rpartition(":")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((name, int(port)))
        assert not Path(near.removeprefix(UNIX)).exists()
        assert repeated(connection, b"more") == b"more"
        connection.close()


def test_strangers_do_not_reach_the_coordinator() -> None:
    with echoing() as (inner, accepted), relay(inner, "127.0.0.1", "secret") as address:
        name, _, port = address.rpartition(":")
        with socket.create_connection((name, int(port)), timeout=20) as stranger:
            stranger.recv(100)
            stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert stranger.recv(100) == b""  # closed
        with tunnel(address, "guessed") as near, opened(near) as connection:
            assert connection.recv(100) == b""
        assert accepted == []


def test_only_the_user_reaches_the_socket() -> None:
    with private_address() as address:
        folder = Path(address.removeprefix(UNIX)).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_a_long_temporary_folder_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with echoing() as (inner, _), opened(inner) as connection:
        assert repeated(connection, b"x") == b"x"
