"""Processes of several hosts that run one program: they meet, exchange bytes, and end together.

They use the key-value store of JAX's distributed service, which process 0 runs. The service trusts
everybody who reaches its port, so its address should be a private one. Only this file touches JAX's
client of the store, which has no public name.

Each process leaves signs of life in the store. A process without any for `SILENT` looks is gone,
and so is process 0 once the store does not answer. Then all others end, with an error that names
it, even while they wait for a result of the device. Looks are counted, not seconds: processes that
were stopped together, and go on, do not take that for silence.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import json
import math
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
from jax._src import distributed  # the client of the store has no public name
from jax.errors import JaxRuntimeError

from dflash_jax.errors import DFlashError, HostError
from dflash_jax.utils.addresses import split_address
from dflash_jax.utils.child_processes import END_S, end_process
from dflash_jax.utils.command import INTERRUPTED, TERMINATED, Terminated
from dflash_jax.version import __version__

TICK = 0.5  # seconds between two looks at the other processes
SILENT = 20  # looks without a sign of life after which a process is gone
LOSS_S = TICK * (SILENT + 6)  # seconds in which a process that is gone is certainly noticed
HEARTBEAT_S = 300  # seconds of silence after which JAX itself ends all processes
STOPPED = 3  # exit code of a run that a signal stopped, and that the same command resumes
WAIT_S = 300.0  # seconds in which all processes have to meet
WAITS_MS = 1000, 60_000  # milliseconds of a wait in which signals are handled soon, and of others
POLL_S = 0.1  # seconds between two looks for a value that does not come for a while
TOLD_TICKS = 6  # for which the store stays, so that all read why a process ends
KEPT = 256  # turns whose messages are deleted together
VIRTUAL = "xla_force_host_platform_device_count"
SPACE = "dflash"  # begins all keys


@dataclasses.dataclass(frozen=True)
class HostPlace:
    """Place of a process in a group.

    Attributes:
      coordinator: HOST:PORT of process 0, at which the others reach it.
      devices: of each process, virtual ones on a CPU; 0 leaves them to JAX and `XLA_FLAGS`.
      wait: seconds in which all processes have to meet.
      local: whether the processes are of one machine, whose devices they divide.
    """

    index: int
    size: int
    coordinator: str
    devices: int = 0
    wait: float = WAIT_S
    local: bool = False


class Group:
    """Processes that run one program; by default this one alone.

    Args:
      client: JAX's client of the store.
      advice: what errors tell to do, after a semicolon.
      quiet: print no error that another process prints, too, on the same terminal.
      ended: called with a message and an exit code if another process is gone.
    """

    def __init__(
        self,
        index: int = 0,
        size: int = 1,
        client: Any = None,
        *,
        advice: str = "start all processes again",
        quiet: bool = False,
        ended: Callable[[str, int], object] | None = None,
    ):
        self.index = index
        self.size = size
        self._client = client
        self._advice = advice
        self._quiet = quiet
        self._ended = ended or end_process
        self._calls = 0  # of `all_gather`
        self._forgotten = 0  # parts of `KEPT` turns that were deleted
        self._outbox: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        self._closed = threading.Event()
        self._ending = threading.Lock()
        if size > 1:
            self.put(f"signs/alive/{index}", b"0")
            threading.Thread(target=self._watch, name="group", daemon=True).start()

    @property
    def first(self) -> bool:
        """Whether this is process 0, which writes files and reports progress."""
        return self.index == 0

    # -- values -------------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        """Set a value, which any process can wait for.

        Raises:
          HostError: the store is gone.
        """
        with self._store():
            self._client.key_value_set_bytes(f"{SPACE}/{key}", data, allow_overwrite=True)

    def wait_for(self, key: str) -> bytes:
        """Return a value once a process has set it; signals are handled meanwhile.

        Raises:
          HostError: the store is gone.
        """
        data = self._get(key, WAITS_MS[0])
        while data is None:
            time.sleep(POLL_S)
            with self._store(unless="NOT_FOUND"):
                data = self._client.key_value_try_get_bytes(f"{SPACE}/{key}")
        return data

    def delete(self, key: str) -> None:
        """Delete a value that nobody waits for any more, and those whose keys continue its key."""
        with self._store():
            self._client.key_value_delete(f"{SPACE}/{key}")

    def all_gather(self, name: str, data: bytes) -> list[bytes]:
        """Return what each process gave, in their order, once all made this call.

        Args:
          name: of the call, the same in all processes.

        Raises:
          HostError: another process made another call.
        """
        if self.size == 1:
            return [data]
        self._calls += 1
        key = f"gather/{self._calls}"
        self.put(f"{key}/{self.index}", name.encode() + b"\n" + data)
        values: list[bytes] = []
        for other in range(self.size):
            theirs, _, value = self.wait_for(f"{key}/{other}").partition(b"\n")
            if theirs != name.encode():
                raise HostError(
                    f"host {other} is at {theirs.decode()!r}, this one at {name!r}; give all hosts"
                    " the same command"
                )
            values.append(value)
        # All have begun this call, so none of them reads values of the last one any more.
        self.delete(f"gather/{self._calls - 1}/{self.index}")
        return values

    def exchange(self, name: str, value: Any = None) -> list[Any]:
        """Return JSON values as `all_gather` returns bytes; arguments and errors as for it."""
        if self.size == 1:
            return [value]
        return [json.loads(data) for data in self.all_gather(name, json.dumps(value).encode())]

    def agree(self, name: str, value: Any) -> None:
        """Return once every process made this call with the same value.

        Raises:
          HostError: a process has another value.
        """
        values = self.exchange(name, value)
        for host, other in enumerate(values):
            if other != values[0]:
                raise HostError(
                    f"{name} is {other} on host {host} and {values[0]} on host 0; give all hosts"
                    " the same command, versions and files"
                )

    def any(self, name: str, flag: bool) -> bool:
        """Return whether the flag of any process is set."""
        return any(self.exchange(name, flag))

    # -- turns --------------------------------------------------------------------------------

    def publish(self, turn: int, data: bytes) -> None:
        """Send the message of a turn to all others, in a thread; turns are numbered from 0."""
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_all, name="turns", daemon=True)
            self._sender.start()
        self._outbox.put((turn, data))

    def follow(self, turn: int) -> bytes:
        """Return the message of a turn, once process 0 has published it.

        Raises:
          HostError: the group has ended.
        """
        if turn % KEPT == 0:
            self.put(f"followed/{self.index}", str(turn).encode())
        while True:
            data = self._get(_turn(turn), WAITS_MS[1])
            if data is not None:
                return data

    def _send_all(self) -> None:
        with contextlib.suppress(HostError):  # the watching thread names who is gone
            while not self._closed.is_set():
                turn, data = self._outbox.get()
                self.put(_turn(turn), data)
                if turn % KEPT == 0:
                    self._forget()

    def _forget(self) -> None:
        """Delete the messages of turns that all have followed."""
        followed = self._under("followed")
        if len(followed) == self.size - 1:
            while self._forgotten < min(map(int, followed.values())) // KEPT:
                self.delete(f"turns/{self._forgotten}")
                self._forgotten += 1

    def _get(self, key: str, milliseconds: int) -> bytes | None:
        """Return a value if it is set within some time."""
        with self._store(unless="DEADLINE_EXCEEDED"):
            return self._client.blocking_key_value_get_bytes(f"{SPACE}/{key}", milliseconds)
        return None

    def _under(self, folder: str) -> dict[str, bytes]:
        """Return the values of all keys in a folder, by the rest of the key."""
        start = f"{SPACE}/{folder}/"
        with self._store():
            pairs = self._client.key_value_dir_get_bytes(start)
        return {key.removeprefix(start): value for key, value in pairs}

    @contextlib.contextmanager
    def _store(self, *, unless: str | None = None) -> Iterator[None]:
        """Raise HostError if the store does not answer in the block; pass over an error by name."""
        try:
            yield
        except JaxRuntimeError as error:
            if unless is not None and unless in str(error):
                return
            reason = str(error).partition("\n")[0][:200]
            raise HostError(
                f"host 0 is gone: its store does not answer ({reason}); {self._advice}"
            ) from error

    # -- ends ---------------------------------------------------------------------------------

    def leave(self, text: str, code: int = 1) -> NoReturn:
        """Print an error, tell it to the other processes, which end by it, and end this process.

        It ends at once: JAX's own end waits for processes that are ending too.
        """
        with self._ending:
            with contextlib.suppress(HostError):
                self._tell(self.index, text, code)
            end_process(text if self.first or code != STOPPED else "", code)

    def close(self) -> None:
        """Leave the group at its end, together with all others."""
        if self.size > 1:
            self.all_gather("end", b"")
            self._closed.set()
            with contextlib.suppress(RuntimeError):
                jax.distributed.shutdown()  # waits for all

    def leave_by(self, error: BaseException) -> NoReturn:
        """Leave by an error, as `leave` does by a text."""
        cause = error.__cause__ if isinstance(error, HostError) else error
        if isinstance(cause, JaxRuntimeError):
            error = self._failed(cause)
        match error:
            case DFlashError() | OSError():
                self.leave(f"{type(error).__name__}: {error}", 1)
            case KeyboardInterrupt():
                self.leave(f"interrupted; {self._advice}", INTERRUPTED)
            case Terminated():
                self.leave("terminated", TERMINATED)
        traceback.print_exception(error)
        self.leave(f"{type(error).__name__}: {error}", 1)

    def _failed(self, error: JaxRuntimeError) -> HostError:
        """Return the error of a program of all processes that failed in this one.

        A process that is gone fails the programs of the others first; then it is noticed, which
        ends this process. So this waits for a while.
        """
        self._closed.wait(LOSS_S)
        reason = str(error).partition("\n")[0][:200]
        return HostError(f"a program of all hosts failed ({reason}); {self._advice}")

    def _tell(self, host: int, text: str, code: int) -> None:
        """Tell all others why a process ends. The store of process 0 stays until they know."""
        message = json.dumps({"text": text, "code": code}).encode()
        self.put(f"signs/ended/{host}", message)
        if self.first:
            time.sleep(TOLD_TICKS * TICK)

    def _watch(self) -> None:
        """Look for signs of life of all others, and leave some, until one is gone."""
        last: dict[int, bytes | None] = {}
        looks = dict.fromkeys(range(self.size), 0)  # since the last sign of each
        for look in itertools.count(1):
            if self._closed.wait(TICK):
                return
            try:
                self.put(f"signs/alive/{self.index}", str(look).encode())
                signs = self._under("signs")
            except HostError:
                return self._lose(0, "it ended without a message")
            for host in range(self.size):
                sign = signs.get(f"alive/{host}")
                looks[host] = looks[host] + 1 if sign == last.get(host) else 0
                last[host] = sign
                if host == self.index:
                    continue
                message = signs.get(f"ended/{host}")
                if message is not None:
                    told = json.loads(message)
                    if told["code"] == 0 and host:  # it was done before this process
                        continue
                    return self._lose(host, told["text"], told["code"], told=True)
                if looks[host] >= SILENT:
                    return self._lose(host, f"it was silent for {SILENT * TICK:g} seconds")

    def _lose(self, host: int, text: str, code: int = 1, *, told: bool = False) -> None:
        """End this process, as another one is gone.

        Args:
          told: a process has told why, so that it has printed that.
        """
        with self._ending:
            if self._closed.is_set():
                return
            if self.first:
                with contextlib.suppress(HostError):
                    self._tell(host, text, code)
            advice = "" if text.endswith(self._advice) else f"; {self._advice}"
            shown = f"HostError: host {host} is gone: {text}{advice}"
            silent = told and (self._quiet or code in (0, STOPPED))
            self._ended("" if silent else shown, code)


def _turn(turn: int) -> str:
    return f"turns/{turn // KEPT}/{turn}"


_current = [Group()]


def current() -> Group:
    """Return the group of this process. It is global, as JAX's process index is."""
    return _current[-1]


@contextlib.contextmanager
def using(group: Group) -> Iterator[None]:
    """Make this the current group while the block runs."""
    _current.append(group)
    try:
        yield
    finally:
        _current.pop()


def join(place: HostPlace, common: Mapping[str, Any], *, advice: str) -> Group:
    """Start JAX as one of several processes, and return their group, the current one from now on.

    JAX must not have started. An error after all have met ends this process, and all others.

    Args:
      common: JSON values that all processes must have in common, by name.
      advice: as for `Group`.

    Raises:
      HostError: this process cannot listen at the coordinator's address.
    """
    name, port = split_address(place.coordinator)
    missing = (
        f"HostError: not all of {place.size} hosts met at {name}, port {port}, within"
        f" {place.wait:g} s; start all with the same command, each with its own number, and give"
        " an address of host 0 that all reach"
    )
    aborts = _NamedAborts(missing)
    # Its handling of signals would end a process that has something to save.
    jax.config.update("jax_enable_preemption_service", False)
    if place.devices and VIRTUAL not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", place.devices)
    own = range(place.index * place.devices, (place.index + 1) * place.devices)
    try:
        jax.distributed.initialize(
            place.coordinator,
            num_processes=place.size,
            process_id=place.index,
            local_device_ids=list(own) if place.local and own else None,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(place.wait),
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=round(END_S),
            coordinator_bind_address=place.coordinator if place.index == 0 else None,
        )
    except RuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            end_process(missing, 1)
        raise HostError(
            f"this process cannot join {place.size} hosts at {name}, port {port}"
            f" ({str(error).partition(chr(10))[0]}); give host 0 an address of its machine with a"
            " free port"
        ) from error
    gone = "host 0 is gone: it ended without a message" if place.index else "JAX has aborted"
    aborts.text = f"HostError: {gone}; {advice}"
    quiet = place.local and place.index > 0
    client = distributed.global_state.client
    group = Group(place.index, place.size, client, advice=advice, quiet=quiet)
    versions = {"hosts": place.size, "dflash-jax": __version__, "jax": jax.__version__}
    try:
        for key, value in {**versions, **common}.items():
            group.agree(key, value)
        jax.devices()  # all processes exchange theirs
    except (DFlashError, RuntimeError) as error:
        group.leave(f"{type(error).__name__}: {error}")
    _current.append(group)
    return group


class _NamedAborts:
    """Ends this process by an error with a name where JAX would abort it.

    JAX aborts a process that cannot meet the others, and one whose process 0 is gone.

    Attributes:
      text: the error.
    """

    def __init__(self, text: str):
        self.text = text
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
        self._handle = handler(self._abort)
        _handlers.append(self)  # C knows the address of the function alone
        with contextlib.suppress(OSError, AttributeError, TypeError):
            library = ctypes.CDLL(None)
            library.signal.argtypes = ctypes.c_int, handler
            library.signal.restype = ctypes.c_void_p
            library.signal(signal.SIGABRT, self._handle)

    def _abort(self, number: int) -> None:
        end_process(self.text, 1)


_handlers: list[_NamedAborts] = []
