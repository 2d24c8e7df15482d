"""Frames over a TCP connection, and the proof that both ends know the same token.

A frame is its length in 8 bytes and that many bytes. Before the first message, each end sends 32
random bytes, and proves by an HMAC over those of both that it has the token, which is never sent.
Messages are not encrypted, as the traffic between the workers of JAX is not.
"""

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
import time

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
