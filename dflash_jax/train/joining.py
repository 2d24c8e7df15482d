"""How the hosts of a training run meet: connections, JAX's processes, processes of this machine.

Host 0 listens at the coordinator's address, and JAX's own service at the next port.
"""

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from dflash_jax.errors import ConfigError, DFlashError, HostError
from dflash_jax.train import hosts
from dflash_jax.train.hosts import AGAIN, STOPPED, TrainingHosts
from dflash_jax.train.loop import TrainingStopped
from dflash_jax.utils.command import INTERRUPTED, TERMINATED, Terminated
from dflash_jax.version import __version__

RETRY = 0.2  # seconds between two attempts to connect
HELLO = 10.0  # seconds for a connected process to say which host it is
END = 30  # seconds for all hosts to end
WAIT = 300.0  # seconds for all hosts to meet
LOOPBACK = "127.0.0.1"
VIRTUAL = "xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """Place of a process among the hosts of a run.

    Attributes:
      address: name and port of host 0.
      devices: number of devices of each host.
      settings: what all hosts must have in common.
      wait: seconds for all hosts to meet.
      local: whether the hosts are processes of one machine, which divide its devices.
    """

    count: int
    host: int
    address: tuple[str, int]
    devices: int
    settings: dict[str, Any]
    wait: float = WAIT
    local: bool = False


def parse_address(text: str) -> tuple[str, int]:
    """Return name and port of an address.

    Raises:
      ConfigError: it is no HOST:PORT whose next port exists.
    """
    name, _, port = text.rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) < 2**16 - 1:
        raise ConfigError(
            f"--coordinator is {text!r}; expected HOST:PORT, the address of host 0, with a port"
            " from 1 to 65534: that port and the next one are used"
        )
    return name.strip("[]"), int(port)


def free_ports(name: str = LOOPBACK) -> tuple[str, int]:
    """Return an address of this machine with a port that is free, as is the next one."""
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    while True:
        with contextlib.suppress(OSError), socket.create_server((name, 0), family=family) as one:
            port = one.getsockname()[1]
            with socket.create_server((name, port + 1), family=family):
                return name, port


@contextlib.contextmanager
def joined(options: HostOptions, command: Sequence[str] = ()) -> Iterator[TrainingHosts]:
    """Join the other hosts while the block runs. JAX must not have started.

    An error in the block ends this process and all other hosts.

    Args:
      command: starts another host of this machine, given `--host` and `--coordinator`.

    Raises:
      HostError: hosts are missing after `wait` seconds, or run another command.
    """
    with contextlib.ExitStack() as entered:
        quiet = options.local and options.host > 0
        group = TrainingHosts(options.host, options.count, quiet=quiet)
        entered.enter_context(_without_output())
        meet = _listen if group.first else _connect
        try:
            meet(group, options, entered, command)
        except BaseException as error:
            group.abandon(*_ended_by(error))
            raise
        try:
            _start_jax(options)
            with hosts.using(group):
                yield group
                group.exchange("done")  # until then a host that is gone ends all
                group.exchange(hosts.LAST)
        except BaseException as error:
            if isinstance(error, jax.errors.JaxRuntimeError):
                time.sleep(2 * RETRY)  # a lost host fails collectives; its thread names it
                error = _failed_collective(error, group)
            group.leave(*_ended_by(error))
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.distributed.shutdown()  # waits for all
        group.close()


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Discard standard output, on which the CPU's collectives log their connections."""
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)


def _failed_collective(error: BaseException, group: TrainingHosts) -> HostError:
    silent = ", ".join(map(str, group.silent()))
    named = f"host {silent} is silent" if silent else "another host may be gone"
    reason = str(error).partition("\n")[0][:200]
    return HostError(f"a program of all hosts failed, and {named} ({reason}){AGAIN}")


def _ended_by(error: BaseException) -> tuple[str, int]:
    """Return the message and the exit code of a command that an error ends."""
    match error:
        case TrainingStopped():
            return f"{error}{AGAIN}", STOPPED
        case DFlashError() | OSError():
            return f"{type(error).__name__}: {error}", 1
        case KeyboardInterrupt():
            return "interrupted", INTERRUPTED
        case Terminated():
            return "terminated", TERMINATED
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}", 1


def _start_jax(options: HostOptions) -> None:
    """Start JAX as one of several processes, each with its own devices.

    JAX's own handling of signals would end a process without saving its state.
    """
    delay_aborts()
    jax.config.update("jax_enable_preemption_service", False)
    if VIRTUAL not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", options.devices)
    name, port = options.address
    own = range(options.host * options.devices, (options.host + 1) * options.devices)
    try:
        jax.distributed.initialize(
            f"[{name}]:{port + 1}" if ":" in name else f"{name}:{port + 1}",
            num_processes=options.count,
            process_id=options.host,
            local_device_ids=list(own) if options.local else None,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(options.wait),
            shutdown_timeout_seconds=END,
            coordinator_bind_address=f"{name}:{port + 1}" if name == LOOPBACK else None,
        )
        jax.devices()  # all processes exchange theirs
    except RuntimeError as error:
        raise HostError(
            f"JAX cannot join {options.count} processes at {name}, port {port + 1}"
            f" ({str(error).partition(chr(10))[0]}); give a coordinator whose port and next port"
            " are free and reachable from all hosts"
        ) from error


def delay_aborts() -> None:
    """Let a process that aborts live for six seconds more, in its other threads.

    JAX aborts a process whose host 0 is gone. Meanwhile the thread of the connection ends it with
    an error that names the host. The handler is the C library's `sleep`, called with the number of
    the signal, since Python's own handlers would run after the abort.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.signal.argtypes = ctypes.c_int, ctypes.c_void_p
        library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def _hello(options: HostOptions) -> dict[str, Any]:
    """Return what all hosts must have in common."""
    versions = {"dflash-jax": __version__, "jax": jax.__version__}
    return {"hosts": options.count} | versions | options.settings


def _listen(
    group: TrainingHosts,
    options: HostOptions,
    entered: contextlib.ExitStack,
    command: Sequence[str],
) -> None:
    """Wait for the other hosts, starting those of this machine."""
    name, port = options.address
    try:
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        server = entered.enter_context(socket.create_server((name, port), family=family))
    except OSError as error:
        raise HostError(
            f"host 0 cannot listen at {name}, port {port} ({error.strerror or error}); give an"
            " address of this machine with a free port as --coordinator"
        ) from error
    until, missing = time.monotonic() + options.wait, set(range(1, options.count))
    started = [entered.enter_context(_process(command, options, i)) for i in missing if command]
    server.settimeout(RETRY)
    while missing:
        if any(process.poll() is not None for process in started) or time.monotonic() > until:
            listed = ", ".join(map(str, sorted(missing)))
            raise HostError(
                f"host {listed} did not join at {name}, port {port}, within {options.wait:g} s,"
                f" or ended; start all {options.count} hosts with the same command, each with its"
                " own --host"
            )
        with contextlib.suppress(TimeoutError):
            connection, _ = server.accept()
            _welcome(group, options, connection, missing)


def _welcome(
    group: TrainingHosts, options: HostOptions, connection: socket.socket, missing: set[int]
) -> None:
    """Add a host that has connected, unless it is none; refuse one that runs another command."""
    connection.settimeout(HELLO)
    try:
        hello = json.loads(connection.makefile("rb").readline(1 << 16))
        host, settings = hello["host"], hello["settings"]
    except (OSError, ValueError, LookupError, TypeError):
        connection.close()  # something else that looks for open ports
        return
    wanted, problem = _hello(options), ""
    if changed := [key for key in wanted if settings.get(key) != wanted[key]]:
        key = changed[0]
        problem = f"{key} is {settings.get(key)} on host {host} and {wanted[key]} on host 0"
    elif host not in missing:
        problem = f"there are two processes with --host {host}"
    connection.sendall(json.dumps({"problem": problem}).encode() + b"\n")
    if problem:
        connection.close()
        raise HostError(f"{problem}; give all hosts the same command, each with its own --host")
    missing.remove(host)
    group.add(host, connection)


def _connect(group: TrainingHosts, options: HostOptions, *unused: Any) -> None:
    """Connect to host 0, which may start later."""
    until = time.monotonic() + options.wait
    while True:
        try:
            connection = socket.create_connection(options.address, timeout=HELLO)
            break
        except OSError as error:
            if time.monotonic() > until:
                name, port = options.address
                raise HostError(
                    f"host 0 does not answer at {name}, port {port}, within {options.wait:g} s"
                    f" ({error.strerror or error}); start it, or correct --coordinator"
                ) from error
            time.sleep(RETRY)
    connection.settimeout(options.wait)
    hello = {"host": options.host, "settings": _hello(options)}
    try:
        connection.sendall(json.dumps(hello).encode() + b"\n")
        problem = json.loads(_line(connection))["problem"]
    except (OSError, ValueError) as error:
        problem = f"host 0 ended before all hosts had joined ({error})"
    if problem:
        connection.close()
        raise HostError(f"{problem}; give all hosts the same command, each with its own --host")
    group.add(0, connection)


def _line(connection: socket.socket) -> bytes:
    """Return one line, and leave what follows for the connection's own thread."""
    found = b""
    while not found.endswith(b"\n"):
        if not (part := connection.recv(1)):
            raise OSError("the connection was closed")
        found += part
    return found


@contextlib.contextmanager
def _process(
    command: Sequence[str], options: HostOptions, host: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a host of this machine, which ends with host 0.

    It is in a session of its own, so that Ctrl-C reaches host 0 only, which stops all hosts.
    """
    name, port = options.address
    words = [*command, "--host", str(host), "--coordinator", f"{name}:{port}"]
    with subprocess.Popen(
        [sys.executable, "-m", "dflash_jax", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            yield process
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END)
        finally:
            process.kill()
