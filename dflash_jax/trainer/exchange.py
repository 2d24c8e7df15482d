"""Processes that train a drafter together: they exchange values, and end together.

Host 0 has a connection to every other host. An `exchange` waits for all hosts, for hours if host 0
is decoding answers. It cannot wait for a host that is gone: a closed connection, or one that is
silent for `SILENCE` seconds, ends the process with an error that names the host, even while the
main thread waits for a collective. Saved states are complete at any time, so the same command
resumes. `training_hosts` makes the connections.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from dflash_jax.errors import HostError
from dflash_jax.hosts.channel import Channel

PING, SILENCE = 5.0, 60.0  # seconds between messages, and after which a host counts as gone
STOPPED = 3  # exit code after a signal, once the state is saved
LAST = "end"  # the name of the last exchange, after which hosts may leave
AGAIN = "; run the same command to go on"
MOST_BYTES = 1 << 28  # of a message


Lost = Callable[[str, int, bool], object]  # (message, exit code, whether a host printed it)


class HostLink:
    """A connection to another host: messages are JSON, received by a thread."""

    def __init__(self, peer: int, channel: Channel, lost: Lost):
        self.peer, self._channel, self._lost = peer, channel, lost
        self._closed = threading.Event()
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.heard = time.monotonic()  # time of the last message
        channel.set_timeout(SILENCE)
        self._receiver = threading.Thread(target=self._receive, daemon=True)
        self._receiver.start()
        threading.Thread(target=self._ping, daemon=True).start()

    def send(self, **message: Any) -> None:
        """Send a message; the receiving thread reports a broken connection."""
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        """Wait for the next message; signals are handled meanwhile."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._messages.get(timeout=1.0)

    def wait(self, seconds: float) -> None:
        """Wait until the other host closes the connection, which is no longer reported."""
        self._closed.set()
        self._receiver.join(seconds)

    def close(self) -> None:
        """Close the connection; its end is no longer reported."""
        self._closed.set()
        self._channel.close()

    def _receive(self) -> None:
        try:
            while True:
                message = json.loads(self._channel.receive(MOST_BYTES))
                self.heard = time.monotonic()
                if "ended" in message:
                    self._end(message["ended"], message["code"], named=True)
                elif "name" in message:
                    if message["name"] == LAST:
                        self._closed.set()
                    self._messages.put(message)
        except EOFError:
            self._end("it ended without a message", 1)
        except TimeoutError:
            self._end(f"it was silent for {SILENCE:g} seconds", 1)
        except (OSError, ValueError) as error:
            self._end(f"its connection broke ({error})", 1)

    def _end(self, reason: str, code: int, *, named: bool = False) -> None:
        if not self._closed.is_set():
            self._lost(f"host {self.peer} is gone: {reason}", code, named)

    def _ping(self) -> None:
        while not self._closed.wait(PING):
            self.send()


class TrainingHosts:
    """This process and the other hosts of a run; alone by default.

    Args:
      quiet: print no error that host 0 prints too, on the same terminal.
    """

    def __init__(self, host: int = 0, count: int = 1, *, quiet: bool = False):
        self.host, self.count, self._quiet = host, count, quiet
        self._links: list[HostLink] = []
        self._ending = threading.Lock()

    @property
    def first(self) -> bool:
        """Whether this is host 0, which writes files and reports progress."""
        return self.host == 0

    def add(self, peer: int, channel: Channel) -> None:
        """Add a connection: host 0 has one to each other host, which have one to host 0."""
        self._links.append(HostLink(peer, channel, self._lost))
        self._links.sort(key=lambda link: link.peer)

    def exchange(self, name: str, value: Any = None) -> list[Any]:
        """Return the values of all hosts, in order, once every host made this call.

        Args:
          name: the same on all hosts.
          value: a JSON value.

        Raises:
          HostError: another host made another call.
        """
        if self.count == 1:
            return [value]
        if self.first:
            values = [value, *(self._next(link, name)["value"] for link in self._links)]
            for link in self._links:
                link.send(name=name, value=values)
            return values
        self._links[0].send(name=name, value=value)
        return self._next(self._links[0], name)["value"]

    def agree(self, name: str, value: Any) -> None:
        """Return once every host made this call with the same value.

        Raises:
          HostError: a host has another value.
        """
        for host, other in enumerate(values := self.exchange(name, value)):
            if other != values[0]:
                raise HostError(
                    f"{name} is {other} on host {host} and {values[0]} on host 0; give all hosts"
                    " the same command, the same files and versions, and an --out that they share"
                )

    def any(self, name: str, flag: bool) -> bool:
        """Return whether the flag of any host is set."""
        return any(self.exchange(name, flag))

    def share_of(self, chosen: np.ndarray) -> np.ndarray:
        """Return this host's part of the rows of a batch."""
        return np.split(chosen, self.count)[self.host]

    def silent(self) -> list[int]:
        """Return the hosts that were not heard of recently."""
        now = time.monotonic()
        return [link.peer for link in self._links if now - link.heard > 2 * PING]

    def leave(self, text: str, code: int) -> NoReturn:
        """Print an error, send it to the other hosts, and end this process.

        It ends at once: JAX's own end waits for hosts that are ending too.
        """
        with self._ending:
            if code == STOPPED and not self.first:  # all stop at the same step, host 0 first
                self._links[0].wait(PING)
            self.abandon(text, code)
            _finish("" if self._quiet and code == STOPPED else text, code)

    def abandon(self, text: str, code: int) -> None:
        """Send an error to the other hosts, which ends them, and close the connections."""
        for link in self._links:
            link.send(ended=text, code=code)
        self.close()

    def close(self) -> None:
        """Close the connections, at the end of a run."""
        for link in self._links:
            link.close()
        self._links.clear()

    def _next(self, link: HostLink, name: str) -> dict[str, Any]:
        message = link.receive()
        if message["name"] != name:
            raise HostError(
                f"host {link.peer} is at {message['name']!r}, this one at {name!r}; give all hosts"
                " the same command, and an --out that they share"
            )
        return message

    def _lost(self, text: str, code: int, named: bool) -> None:
        """End this process, in a thread of a connection; `named` errors were printed by a host."""
        with self._ending:
            for link in self._links:  # host 0 names the host that ended to the others
                link.send(ended=text, code=code)
            prefix = "" if code == STOPPED else "HostError: "
            again = "" if text.endswith(AGAIN) else AGAIN
            _finish("" if self._quiet and named else f"{prefix}{text}{again}", code)


def _finish(text: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides it
        sys.stderr.write(cursor + (f"dflash-jax: {text}\n" if text else ""))
        sys.stderr.flush()
    os._exit(code)


_current = [TrainingHosts()]


def current() -> TrainingHosts:
    """Return the hosts of this process. They are global, as JAX's process index is."""
    return _current[-1]


@contextlib.contextmanager
def using(hosts: TrainingHosts) -> Iterator[None]:
    """Make these the current hosts while the block runs."""
    _current.append(hosts)
    try:
        yield
    finally:
        _current.pop()
