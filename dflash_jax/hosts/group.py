"""The workers of one model: started, connected, watched and killed together."""

import collections
import concurrent.futures
import contextlib
import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dflash_jax.errors import ComputeError, HostError
from dflash_jax.hosts import messages
from dflash_jax.hosts.channel import Channel, Hello, JoiningPort
from dflash_jax.hosts.launch import Launcher, WorkerProcess


class WorkerLink:
    """The front's connection to one worker, with a thread that sends and one that receives.

    Args:
      received: called with every reply but pongs, in the receiving thread.
      lost: called with the reason when the connection breaks.
    """

    def __init__(
        self,
        index: int,
        channel: Channel,
        received: Callable[[int, messages.Reply], None],
        lost: Callable[[int, str], None],
    ):
        self.index, self.missed = index, 0
        self._channel, self._received, self._lost = channel, received, lost
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for target in (self._send_all, self._receive_all):
            threading.Thread(target=target, name=f"host {index}", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Send a message; returns at once."""
        self._outbox.put(data)

    def close(self) -> None:
        """Close the connection."""
        self._outbox.put(None)
        self._channel.close()

    def _send_all(self) -> None:
        try:
            while (data := self._outbox.get()) is not None:
                self._channel.send(data)
        except OSError as error:
            self._lost(self.index, f"the connection ended: {error}")

    def _receive_all(self) -> None:
        try:
            while True:
                reply = messages.decode_reply(self._channel.receive())
                if isinstance(reply, messages.Pong):
                    self.missed = 0
                else:
                    self._received(self.index, reply)
        except (OSError, EOFError, ValueError) as error:  # of which msgspec's are ValueErrors
            self._lost(self.index, f"the connection ended: {error}")


log = logging.getLogger("dflash_jax.hosts")
PING_S = 1.0  # seconds between two pings
MISSED = 5  # pings without an answer after which a worker counts as dead
MISSED_BUSY = 60  # the same while workers start, load or compile
ACCEPT_S = 0.2  # seconds between two looks at processes that start
START_S = 180.0  # seconds in which workers have to start and to join each other
LOAD_S = 1800.0  # seconds in which they have to load the models
GRACE_S = 2.0  # seconds after an error in which the process that caused it is seen to have ended
RESULT_S = 120.0  # seconds in which an output has to arrive
Future = concurrent.futures.Future


class HostGroup:
    """Workers that execute one log. Any thread may write to it.

    Args:
      launcher: starts the workers.
      hosts: number of workers.

    Attributes:
      error: why the group is not usable, or None.
      lost: completes with `error`; cancelled by `close`.

    Raises:
      HostError: a worker does not start.
    """

    def __init__(self, launcher: Launcher, hosts: int):
        self.hosts = hosts
        self.error: HostError | None = None
        self.lost: Future[None] = Future()
        self._launcher, self._token = launcher, secrets.token_hex(32)
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._next_handle = 1
        self._freed: collections.deque[int] = collections.deque()
        self._values: dict[int, Future[np.ndarray]] = {}  # that were fetched, by handle
        self._compiling: dict[int, tuple[Future[None], list[str]]] = {}
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._arrived = 0  # arrays
        self._busy = 0  # operations during which a worker may answer late
        self._closed = threading.Event()
        self._processes: list[WorkerProcess] = []
        self._links: list[WorkerLink] = []
        self._channels: list[Channel] = []  # of the workers
        try:
            with self._patience():
                self.coordinator = self._start()
        except BaseException:
            self.close()
            raise

    # -- start --------------------------------------------------------------------------------

    def _start(self) -> str:
        """Start and connect all workers; return the address at which worker 0 coordinates."""
        deadline = time.monotonic() + START_S
        found: dict[int, Hello] = {}
        connected: dict[int, Channel] = {}
        with JoiningPort(self._launcher.address, self._token) as port:
            for index in range(self.hosts):
                self._processes.append(self._launcher.start(index, port.address, self._token))
            while len(found) < self.hosts:
                self._check_start(deadline, found)
                port.accept(ACCEPT_S)
                for channel, hello in port.take():
                    self._channels.append(channel)
                    if hello.index in range(self.hosts):
                        found.setdefault(hello.index, hello)
                        connected.setdefault(hello.index, channel)
        for hello in found.values():
            if problem := found[0].difference(hello):
                raise HostError(
                    f"hosts have different versions ({problem}); install the same on each"
                )
        for index, channel in sorted(connected.items()):
            self._links.append(WorkerLink(index, channel, self._received, self._lost))
        threading.Thread(target=self._watch, name="hosts", daemon=True).start()
        return found[0].coordinator

    def _check_start(self, deadline: float, found: dict[int, Any]) -> None:
        for index, process in enumerate(self._processes):
            if (ended := process.status()) is not None:
                raise HostError(
                    f"host {index} ({process.name}) {ended} before it connected; see its log"
                )
        if time.monotonic() > deadline:
            missing = [index for index in range(self.hosts) if index not in found]
            raise HostError(
                f"hosts {missing} did not connect within {START_S:g} s; see their logs, and let"
                f" them reach {self._launcher.address}"
            )

    def ask(self, entry: messages.Entry, seconds: float) -> list[Any]:
        """Send an entry to all workers; return the reply of each."""
        replies: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        with self._patience():
            self.write(entry)
            while len(replies) < self.hosts:
                try:
                    index, reply = self._answers.get(timeout=max(deadline - time.monotonic(), 0))
                except queue.Empty:
                    name = type(entry).__name__
                    self.fail(f"not all hosts answered {name} within {seconds:g} s")
                    raise self._failure() from None
                self._check()
                replies[index] = reply
        return [replies[index] for index in range(self.hosts)]

    # -- the log ------------------------------------------------------------------------------

    def write(self, entry: messages.Entry) -> None:
        """Append an entry to the log."""
        with self._lock:
            self._check()
            freed = [self._freed.popleft() for _ in range(len(self._freed))]
            for each in (messages.Free(freed), entry) if freed else (entry,):
                data = messages.encode(each)
                for link in self._links:
                    link.send(data)

    def new_handles(self, count: int) -> int:
        """Return the first of consecutive handles that were never used."""
        with self._lock:
            first = self._next_handle
            self._next_handle += count
        return first

    def free(self, handle: int) -> None:
        """Forget a value, with the next entry; called by finalizers in any thread."""
        self._freed.append(handle)

    def fetch(self, handle: int) -> "Future[np.ndarray]":
        """Ask for an array, which completes the future."""
        with self._lock:
            future = self._values[handle] = Future()
            self.write(messages.Fetch(handle))
        return future

    def wait(self, future: "Future[Any]", seconds: float = RESULT_S) -> Any:
        """Return the result of a future.

        Raises:
          HostError: the group failed, or no array arrived for so long, so that it fails now. The
            chunks of a long prompt arrive before its first token.
        """
        silent, arrived = 0.0, self._arrived  # counted as in `_watch`
        while silent < seconds:
            try:
                return future.result(PING_S)
            except concurrent.futures.TimeoutError:
                silent = silent + PING_S if arrived == self._arrived else 0.0
                arrived = self._arrived
        self.fail(f"a result did not arrive within {seconds:g} s")
        raise self._failure()

    def compile(self, keys: Sequence[str], *, parallel: bool) -> "Future[None]":
        """Compile programs in all workers, some at the same time if `parallel`."""
        number = next(self._numbers)
        with self._lock:
            future: Future[None] = Future()
            self._compiling[number] = future, []
            self._busy += 1
            self.write(messages.Compile(number, list(keys), parallel))
        return future

    def _received(self, index: int, reply: messages.Reply) -> None:
        """Handle a worker's reply, in the thread of its connection."""
        match reply:
            case messages.Value(handle=handle, value=value):
                self._arrived += 1
                with self._lock:
                    future = self._values.pop(handle, None)
                if future is not None:
                    future.set_result(messages.unpack(value))
            case messages.Compiled(number=number, error=error):
                self._compiled(index, number, error)
            case messages.Failed(reason=reason):
                self.fail(f"host {index} failed: {reason}")
            case _:
                self._answers.put((index, reply))

    def _compiled(self, index: int, number: int, error: str) -> None:
        with self._lock:
            if number not in self._compiling:
                return
            future, errors = self._compiling[number]
            errors.append(error and f"host {index}: {error}")
            if len(errors) < self.hosts:
                return
            del self._compiling[number]
            self._busy -= 1
        if found := next(filter(None, errors), None):
            future.set_exception(ComputeError(found))
        else:
            future.set_result(None)

    # -- failure ------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.error is not None or self._closed.is_set():
            raise self._failure()

    def _failure(self) -> HostError:
        return HostError(str(self.error or "the hosts were stopped"))

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """Let workers answer pings late while the block runs."""
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1

    def _watch(self) -> None:
        """Ping all workers, and look at their processes. Counts pings, not seconds.

        A front that was stopped for a while does not take that for the workers' silence.
        """
        ping = messages.encode(messages.Ping())
        while not self._closed.wait(PING_S):
            most = MISSED_BUSY if self._busy else MISSED
            for link, process in zip(self._links, self._processes, strict=True):
                if (ended := process.status()) is not None:
                    return self.fail(f"host {link.index} ({process.name}) {ended}")
                if link.missed >= most:
                    silent = f"did not answer for {link.missed * PING_S:g} s"
                    return self.fail(f"host {link.index} ({process.name}) {silent}")
                link.missed += 1
                link.send(ping)

    def _lost(self, index: int, reason: str) -> None:
        self.fail(f"host {index} ({self._processes[index].name}): {reason}")

    def fail(self, reason: str) -> None:
        """End the group: waits end with the error, and all workers are killed."""
        # A process that was killed is seen later: its memory is freed first.
        until = time.monotonic() + GRACE_S
        while not (ended := self._ended()) and time.monotonic() < until:
            if self._closed.wait(GRACE_S / 40):
                return
        advice = "all hosts are started again; send the request again"
        error = HostError(f"{ended or reason}; {advice}")
        with self._lock:
            if self.error is not None or self._closed.is_set():
                return
            self.error = error
        log.error("the hosts failed: %s", ended or reason)
        self._end(error)
        self.lost.set_exception(error)

    def _ended(self) -> str:
        """Name a process that ended, to which other workers' errors are due."""
        states = [(x, process, process.status()) for x, process in enumerate(self._processes)]
        found = [f"host {x} ({p.name}) {ended}" for x, p, ended in states if ended is not None]
        return "; ".join(found)

    def _end(self, error: HostError) -> None:
        self._closed.set()
        with self._lock:
            waits: list[Future[Any]] = [*self._values.values()]
            waits += [future for future, _ in self._compiling.values()]
            self._values.clear()
            self._compiling.clear()
        for future in waits:
            future.set_exception(error)
        self._answers.put((0, None))
        for link in self._links:
            link.close()
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.kill()
        self._launcher.close()

    def close(self) -> None:
        """Kill the workers; does nothing if the group failed before."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._end(self._failure())
        self.lost.cancel()
