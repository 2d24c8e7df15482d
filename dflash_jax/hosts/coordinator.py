"""JAX's coordinator, within reach of processes that have the token only.

JAX's service trusts every connection, and a stranger's can end all processes. So it listens on a
Unix socket in a folder of the user. Processes of other hosts reach it by a tunnel, whose two ends
prove the token to each other. Once all processes have joined, nothing listens any more.

    JAX -- Unix socket -- `tunnel` ---- TCP, with proof ---- `relay` -- Unix socket -- coordinator
"""

import contextlib
import functools
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator

from dflash_jax.errors import HostError
from dflash_jax.hosts.channel import Hello, JoiningPort, connect

UNIX = "unix:"  # begins addresses of Unix sockets, as in gRPC
LONGEST = 80  # bytes of a folder's path with which the path of a socket in it is short enough
ACCEPT_S = 0.2  # seconds between two looks at whether a relay was closed
CONNECT_S = 60.0  # seconds in which one end of a tunnel has to reach the other
CHUNK = 1 << 16  # bytes


@contextlib.contextmanager
def private_address() -> Iterator[str]:
    """Yield the address of a Unix socket that only the user can reach, removed at the end."""
    parent = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="dflash-",
        dir="/tmp" if len(os.fsencode(parent)) > LONGEST else parent,
        ignore_cleanup_errors=True,
    ) as folder:
        yield f"{UNIX}{folder}/jax"


@contextlib.contextmanager
def relay(inner: str, address: str, token: str, *, port: int = 0) -> Iterator[str]:
    """Connect tunnels that prove the token with a Unix socket; yield HOST:PORT.

    Tunnels that were connected stay at the end of the block.

    Args:
      inner: the address of the Unix socket.
      address: to listen on.
      port: 0 for a free one.

    Raises:
      OSError: the address is not of this machine, or its port is not free.
    """
    closed = threading.Event()

    def run() -> None:
        while not closed.is_set():
            listening.accept(ACCEPT_S)
            for channel, _ in listening.take():
                _start(functools.partial(_to_unix, channel.detach(), inner))

    with JoiningPort(address, token, port=port) as listening:
        thread = _start(run)
        try:
            yield listening.address
        finally:
            closed.set()
            thread.join()


def _to_unix(end: socket.socket, inner: str) -> None:
    other = socket.socket(socket.AF_UNIX)
    try:
        other.connect(inner.removeprefix(UNIX))
    except OSError:  # the coordinator does not listen yet: gRPC tries again
        end.close()
        other.close()
        return
    _join(end, other)


@contextlib.contextmanager
def tunnel(address: str, token: str) -> Iterator[str]:
    """Yield the address of a Unix socket that is connected with a `relay`.

    Connections stay at the end of the block.

    Args:
      address: HOST:PORT of the relay.
    """

    def to_relay(end: socket.socket) -> None:
        try:
            channel = connect(address, token, CONNECT_S)
            channel.send(Hello(0, {}).encode())
        except (HostError, OSError):
            end.close()
            return
        _join(end, channel.detach())

    def run() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                end, _ = server.accept()
                _start(functools.partial(to_relay, end))

    with private_address() as inner, socket.socket(socket.AF_UNIX) as server:
        server.bind(inner.removeprefix(UNIX))
        server.listen()
        _start(run)
        try:
            yield inner
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts


def _join(one: socket.socket, other: socket.socket) -> None:
    """Pass on the bytes between two sockets until either end closes."""
    opposite = _start(functools.partial(_pass_on, other, one))
    _pass_on(one, other)
    opposite.join()
    one.close()
    other.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    for end in (source, target):  # the other direction ends, too
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="tunnel", daemon=True)
    thread.start()
    return thread
