"""Frames over a TCP connection, the proof that both ends have the same token, and the joining port.

A frame is its length in 8 bytes and that many bytes. Before the first message, each end sends 32
random bytes, and proves by an HMAC over those of both that it has the token, which is never sent.
Messages are not encrypted, as the traffic between the workers of JAX is not.

On the joining port the processes of several hosts join the first one; by a tunnel they reach its
coordinator.
"""

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from dflash_jax.errors import HostError

MOST_BYTES = 2**32  # of a frame
NONCE, PROOF = 32, 32  # bytes
HANDSHAKE_S = 10.0  # seconds in which a connection has to prove that it has the token


class WrongTokenError(HostError):
    """The other end of a connection proved another token."""


class Channel:
    """A connection that sends and receives frames; any thread may send."""

    def __init__(self, connection: socket.socket):
        if connection.family != getattr(socket, "AF_UNIX", None):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket, self._sending = connection, threading.Lock()
        self._deadline: float | None = None  # of the proof

    def send(self, data: bytes) -> None:
        """Send a frame; waits while the other end reads nothing.

        Raises:
          OSError: the connection is closed.
        """
        with self._sending:
            self._socket.sendall(len(data).to_bytes(8, "big") + data)

    def receive(self, most: int = MOST_BYTES) -> bytes:
        """Return the next frame.

        Raises:
          EOFError: the other end closed the connection.
          OSError: the connection broke, or a frame is longer than `most` bytes.
        """
        length = int.from_bytes(self._read(8), "big")
        if length > most:
            raise OSError(f"a frame of {length} bytes; expected at most {most}")
        return bytes(self._read(length))

    def set_timeout(self, seconds: float) -> None:
        """Let `receive` raise TimeoutError once nothing came for these seconds."""
        self._socket.settimeout(seconds)

    def detach(self) -> socket.socket:
        """Return the socket, which is no longer the channel's, for bytes without frames."""
        return self._socket

    def close(self) -> None:
        """Close the connection; a thread that sends or receives gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def authenticate(self, token: str, *, front: bool) -> None:
        """Prove to the other end that this one has the token, and let it prove the same.

        Raises:
          WrongTokenError: the other end has another token.
          HostError: it does not answer in time, or closes the connection.
        """
        roles = (b"front", b"worker") if front else (b"worker", b"front")
        nonce = secrets.token_bytes(NONCE)
        self._deadline = time.monotonic() + HANDSHAKE_S
        try:
            self.send(nonce)
            other = self.receive(NONCE)
            if len(other) != NONCE:
                raise OSError(f"its nonce has {len(other)} bytes; expected {NONCE}")
            self.send(_proof(token, roles[0], nonce, other))
            proof = self.receive(PROOF)
            self._socket.settimeout(None)
        except (OSError, EOFError) as error:
            raise HostError(f"a connection did not prove that it has the token ({error})") from None
        if not hmac.compare_digest(proof, _proof(token, roles[1], other, nonce)):
            raise WrongTokenError("a connection has another token")
        self._deadline = None

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view, at = memoryview(data), 0
        while at < length:
            if self._deadline is not None:  # for all bytes together: they may come one by one
                self._socket.settimeout(max(self._deadline - time.monotonic(), 0.001))
            count = self._socket.recv_into(view[at:])
            if not count:
                raise EOFError("the connection was closed")
            at += count
        return data


def _proof(token: str, role: bytes, nonce: bytes, other: bytes) -> bytes:
    return hmac.new(token.encode(), role + nonce + other, hashlib.sha256).digest()


log = logging.getLogger("dflash_jax.hosts")
MOST_UNPROVED = 16  # connections that may be proving their token at a time
PAUSE_S = 0.1  # seconds without accepting after the system refused it
QUIET_S = 10.0  # seconds between two warnings
RETRY_S = 0.1  # seconds after which a process connects again
HELLO_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first message of a process that joins.

    Attributes:
      common: what all processes must have in common, as JSON values by name.
      coordinator: where this process would coordinate the processes of JAX.
    """

    index: int
    common: dict[str, Any]
    coordinator: str = ""

    def encode(self) -> bytes:
        """Return the message."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Hello":
        """Return a message that was received.

        Raises:
          ValueError: it is none.
        """
        try:
            found = cls(**json.loads(data))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"the first message is none of a host ({error})") from None
        kinds = type(found.index), type(found.common), type(found.coordinator)
        if kinds != (int, dict, str):
            raise ValueError("the first message is none of a host")
        return found

    def difference(self, other: "Hello") -> str:
        """Return what another process has differently, or nothing."""
        for name, value in self.common.items():
            if (theirs := other.common.get(name)) != value:
                return f"{name} is {theirs} on host {other.index} and {value} on host {self.index}"
        return ""


class JoiningPort:
    """Listens for processes. A connection that does not prove its token makes room for others.

    Strangers can reach the port, so connections without proof are bounded in number and time: a new
    one beyond the bound replaces the oldest one, and a process that was replaced connects again.

    Args:
      address: to listen on.
      token: that processes have to prove.
      port: 0 for a free one.

    Attributes:
      address: HOST:PORT.

    Raises:
      OSError: the address is not of this machine, or its port is not free.
    """

    def __init__(self, address: str, token: str, *, port: int = 0):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, port), family=family, backlog=64)
        self.address = joined_address(*self._server.getsockname()[:2])
        self._token = token
        self._joined: list[tuple[Channel, Hello]] = []
        self._unproved: dict[Channel, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._quiet_until = 0.0  # time of the next warning: strangers must not fill a log

    def __enter__(self) -> "JoiningPort":
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening, and close the connections that nobody took."""
        self._server.close()
        with self._lock:
            ended = [*self._unproved, *(channel for channel, _ in self._joined)]
            self._unproved.clear()
            self._joined.clear()
        for channel in ended:
            channel.close()

    def accept(self, seconds: float) -> None:
        """Accept a connection, if one comes within these seconds, and greet it in a thread."""
        self._server.settimeout(seconds)
        try:
            connection, _ = self._server.accept()
        except TimeoutError:
            return
        except OSError as error:  # no descriptor is free, or the client left already
            self._warn("a connection could not be accepted", error)
            time.sleep(PAUSE_S)
            return
        channel = Channel(connection)
        with self._lock:
            self._unproved[channel] = None
            oldest = next(iter(self._unproved)) if len(self._unproved) > MOST_UNPROVED else None
            if oldest is not None:
                del self._unproved[oldest]
        if oldest is not None:
            oldest.close()
        with contextlib.suppress(RuntimeError):  # the system starts no more threads
            threading.Thread(target=self._greet, args=(channel,), daemon=True).start()

    def take(self) -> list[tuple[Channel, Hello]]:
        """Return the connections that proved the token since the last call; they stay open."""
        with self._lock:
            taken = list(self._joined)
            self._joined.clear()
        return taken

    def _warn(self, what: str, error: Exception) -> None:
        now = time.monotonic()
        level = logging.WARNING if now >= self._quiet_until else logging.DEBUG
        if level == logging.WARNING:
            self._quiet_until = now + QUIET_S
        log.log(level, "%s: %s", what, error)

    def _greet(self, channel: Channel) -> None:
        """Add a connection to those that joined, if it proves that it is of another host."""
        try:
            channel.authenticate(self._token, front=True)
            hello = Hello.decode(channel.receive(HELLO_BYTES))
        except (HostError, OSError, EOFError, ValueError) as error:
            self._warn("a connection was refused", error)
            hello = None
        with self._lock:
            waited = channel in self._unproved
            self._unproved.pop(channel, None)
            if waited and hello is not None:
                self._joined.append((channel, hello))
                return
        channel.close()


def joined_address(name: str, port: int) -> str:
    """Return HOST:PORT."""
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT."""
    name, _, port = address.rpartition(":")
    return name.strip("[]"), int(port)


def connect(address: str, token: str, seconds: float) -> Channel:
    """Return a connection to a `JoiningPort`, on which both ends proved the token.

    The port may open later, and strangers may fill it, so a connection that is refused or closed is
    made again for `seconds`.

    Raises:
      WrongTokenError: the other end has another token.
      HostError, OSError: it refuses, or closes, every connection.
    """
    end = time.monotonic() + seconds
    while True:
        channel: Channel | None = None
        try:
            left = max(end - time.monotonic(), 1.0)
            channel = Channel(socket.create_connection(split_address(address), timeout=left))
            channel.authenticate(token, front=False)
            return channel
        except (HostError, OSError) as error:
            if channel is not None:
                channel.close()
            if isinstance(error, WrongTokenError) or time.monotonic() > end:
                raise
            time.sleep(RETRY_S)


# JAX's coordinator, within reach of processes that have the token only.
#
# JAX's service trusts every connection, and a stranger's can end all processes. So it listens on a
# Unix socket in a folder of the user. Processes of other hosts reach it by a tunnel, whose two ends
# prove the token to each other. Once all processes have joined, nothing listens any more.
#
#     JAX -- Unix socket -- `tunnel` ---- TCP, with proof ---- `relay` -- Unix socket -- coordinator

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
