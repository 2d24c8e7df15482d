"""The port on which workers join the front while they start."""

import contextlib
import logging
import socket
import threading
import time

from dflash_jax.errors import HostError
from dflash_jax.hosts import messages
from dflash_jax.hosts.channel import Channel

log = logging.getLogger("dflash_jax.hosts")
MOST_UNPROVED = 16  # connections that may be proving their token at a time
PAUSE_S = 0.1  # seconds without accepting after the system refused it


class JoiningPort:
    """Listens for workers. A connection that does not prove its token makes room for others.

    Strangers can reach the port, so connections without proof are bounded in number and time: a new
    one beyond the bound replaces the oldest one, and a worker that was replaced connects again.

    Args:
      address: to listen on, at a free port.
      token: that workers have to prove.
      hosts: number of workers.

    Attributes:
      address: HOST:PORT.
      joined: the connections of workers that proved the token, by index.
    """

    def __init__(self, address: str, token: str, hosts: int):
        self._server = socket.create_server((address, 0), backlog=64)
        self.address = "{}:{}".format(*self._server.getsockname()[:2])
        self.joined: dict[int, tuple[Channel, messages.Hello]] = {}
        self._token, self._hosts = token, hosts
        self._unproved: dict[Channel, None] = {}  # the oldest first
        self._lock = threading.Lock()

    def __enter__(self) -> "JoiningPort":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop listening, and close connections that proved nothing; after an error, all."""
        self._server.close()
        with self._lock:
            ended = list(self._unproved)
            self._unproved.clear()
            ended += [channel for channel, _ in self.joined.values()] if kind else []
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
            log.warning("a connection could not be accepted: %s", error)
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

    def _greet(self, channel: Channel) -> None:
        """Add a connection to those that joined, if it proves that it is a worker's."""
        try:
            channel.authenticate(self._token, front=True)
            with self._lock:
                if channel not in self._unproved:
                    return
            hello = messages.decode_reply(channel.receive())
        except (HostError, OSError, EOFError, ValueError) as error:
            log.warning("a connection was refused: %s", error)
            hello = None
        with self._lock:
            waited = channel in self._unproved
            self._unproved.pop(channel, None)
            if waited and isinstance(hello, messages.Hello) and 0 <= hello.index < self._hosts:
                self.joined.setdefault(hello.index, (channel, hello))
                return
        channel.close()
