"""Workers that are threads of the test, which connect as real ones do and answer as scripted."""

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dflash_jax.errors import HostError
from dflash_jax.hosts import group as group_module
from dflash_jax.hosts import messages
from dflash_jax.hosts.channel import Channel, Hello
from dflash_jax.hosts.group import HostGroup

Answer = Callable[["ScriptedWorker", messages.Entry], None]


class ScriptedWorker:
    """A worker that records the entries of its log, and answers pings and by a function."""

    def __init__(self, index: int, front: str, token: str, answer: Answer, version: str):
        self.index, self.entries, self.ended = index, [], None
        self.silent, self.killed = False, threading.Event()
        self._answer = answer
        host, _, port = front.rpartition(":")
        self._channel = Channel(socket.create_connection((host, int(port))))
        thread = threading.Thread(target=self._run, args=(token, version), daemon=True)
        thread.start()

    def _run(self, token: str, version: str) -> None:
        try:
            self._channel.authenticate(token, front=False)
        except HostError:
            return
        self._channel.send(Hello(self.index, {"jax": version}, "127.0.0.1:1").encode())
        while True:
            try:
                entry = messages.decode_entry(self._channel.receive())
            except (EOFError, OSError):
                return
            if isinstance(entry, messages.Ping):
                if not self.silent:
                    self.send(messages.Pong())
            else:
                self.entries.append(entry)
                self._answer(self, entry)

    def send(self, reply: messages.Reply) -> None:
        self._channel.send(messages.encode(reply))

    def disconnect(self) -> None:
        self._channel.close()

    # -- as a WorkerProcess

    name = "a thread"

    def status(self) -> str | None:
        return self.ended

    def kill(self) -> None:
        self.killed.set()
        self._channel.close()


class ScriptedLauncher:
    """Starts scripted workers."""

    address = "127.0.0.1"

    def __init__(self, answer: Answer, versions: dict[int, str], tokens: dict[int, str]):
        self._answer, self._versions, self._tokens = answer, versions, tokens
        self.workers: list[ScriptedWorker] = []

    def start(self, index: int, front: str, token: str) -> ScriptedWorker:
        token = self._tokens.get(index, token)
        version = self._versions.get(index, "1")
        self.workers.append(ScriptedWorker(index, front, token, self._answer, version))
        return self.workers[-1]

    def close(self) -> None:
        pass


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that starts a group of two scripted workers; returns both."""
    monkeypatch.setattr(group_module, "PING_S", 0.02)
    monkeypatch.setattr(group_module, "GRACE_S", 0.01)
    groups = []

    def begin(
        answer: Answer = lambda worker, entry: None,
        versions: dict[int, str] | None = None,
        tokens: dict[int, str] | None = None,
    ) -> tuple[HostGroup, list[ScriptedWorker]]:
        launcher = ScriptedLauncher(answer, versions or {}, tokens or {})
        group = HostGroup(launcher, 2)
        groups.append(group)
        return group, launcher.workers

    yield begin
    for group in groups:
        group.close()
