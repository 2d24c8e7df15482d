"""How the hosts of a training run meet: connections, JAX's processes, processes of this machine.

Host 0 listens at the coordinator's address, and for tunnels to JAX's own service at the next port,
until all have met. `dflash_jax.hosts` has both, for servers too.
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
from dflash_jax.hosts.channel import (
    Channel,
    Hello,
    JoiningPort,
    WrongTokenError,
    connect,
    joined_address,
    private_address,
    relay,
    tunnel,
)
from dflash_jax.hosts.launch import LOOPBACK, TOKEN, start_module
from dflash_jax.trainer import exchange
from dflash_jax.trainer.exchange import AGAIN, STOPPED, TrainingHosts
from dflash_jax.trainer.loop import TrainingStopped
from dflash_jax.utils.command import INTERRUPTED, TERMINATED, Terminated
from dflash_jax.version import __version__

RETRY = 0.2  # seconds between two looks at the hosts that start
END = 30  # seconds for all hosts to end
WAIT = 300.0  # seconds for all hosts to meet
ANSWER_BYTES = 1 << 20
VIRTUAL = "xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """Place of a process among the hosts of a run.

    Attributes:
      address: name and port of host 0.
      devices: number of devices of each host.
      settings: what all hosts must have in common.
      token: by which hosts know each other; strangers have another.
      wait: seconds for all hosts to meet.
      local: whether the hosts are processes of one machine, which divide its devices.
    """

    count: int
    host: int
    address: tuple[str, int]
    devices: int
    settings: dict[str, Any]
    token: str = ""
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
            with exchange.using(group):
                yield group
                group.exchange("done")  # until then a host that is gone ends all
                group.exchange(exchange.LAST)
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
            return f"interrupted; the state that was saved last is kept{AGAIN}", INTERRUPTED
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
    own = range(options.host * options.devices, (options.host + 1) * options.devices)
    try:
        with _coordinator(options) as address:
            jax.distributed.initialize(
                address,
                num_processes=options.count,
                process_id=options.host,
                local_device_ids=list(own) if options.local else None,
                cluster_detection_method="deactivate",
                initialization_timeout=math.ceil(options.wait),
                shutdown_timeout_seconds=END,
                coordinator_bind_address=address if options.host == 0 else None,
            )
            jax.devices()  # all processes exchange theirs
    except (RuntimeError, OSError) as error:
        name, port = options.address
        raise HostError(
            f"JAX cannot join {options.count} processes at {name}, port {port + 1}"
            f" ({str(error).partition(chr(10))[0]}); give a coordinator whose port and next port"
            " are free and reachable from all hosts"
        ) from error


@contextlib.contextmanager
def _coordinator(options: HostOptions) -> Iterator[str]:
    """Yield the address of JAX's service, which no connection without the token reaches."""
    name, port = options.address
    if options.host:
        with tunnel(joined_address(name, port + 1), options.token) as address:
            yield address
        return
    with (
        private_address() as address,
        relay(address, name, options.token, port=port + 1),
    ):
        yield address


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


def _hello(options: HostOptions) -> Hello:
    versions = {"dflash-jax": __version__, "jax": jax.__version__}
    return Hello(options.host, {"hosts": options.count} | versions | options.settings)


def _listen(
    group: TrainingHosts,
    options: HostOptions,
    entered: contextlib.ExitStack,
    command: Sequence[str],
) -> None:
    """Wait for the other hosts, starting those of this machine."""
    name, port = options.address
    try:
        listening = JoiningPort(name, options.token, port=port)
    except OSError as error:
        raise HostError(
            f"host 0 cannot listen at {name}, port {port} ({error.strerror or error}); give an"
            " address of this machine with a free port as --coordinator"
        ) from error
    until, missing = time.monotonic() + options.wait, set(range(1, options.count))
    with listening:
        started = [entered.enter_context(_process(command, options, i)) for i in missing if command]
        while missing:
            if any(process.poll() is not None for process in started) or time.monotonic() > until:
                listed = ", ".join(map(str, sorted(missing)))
                raise HostError(
                    f"host {listed} did not join at {name}, port {port}, within {options.wait:g} s,"
                    f" or ended; start all {options.count} hosts with the same command, each with"
                    f" its own --host, and with the same {TOKEN} if any has one"
                )
            listening.accept(RETRY)
            for channel, hello in listening.take():
                _welcome(group, options, channel, hello, missing)


def _welcome(
    group: TrainingHosts, options: HostOptions, channel: Channel, hello: Hello, missing: set[int]
) -> None:
    """Add a host that has joined; refuse one that runs another command."""
    problem = _hello(options).difference(hello)
    if not problem and hello.index not in missing:
        problem = f"there are two processes with --host {hello.index}"
    with contextlib.suppress(OSError):  # a host that is gone already is missed later
        channel.send(json.dumps({"problem": problem}).encode())
    if problem:
        channel.close()
        raise HostError(f"{problem}; give all hosts the same command, each with its own --host")
    missing.remove(hello.index)
    group.add(hello.index, channel)


def _connect(group: TrainingHosts, options: HostOptions, *unused: Any) -> None:
    """Connect to host 0, which may start later."""
    name, port = options.address
    try:
        channel = connect(joined_address(name, port), options.token, options.wait)
    except WrongTokenError as error:
        raise HostError(
            f"host 0 has another token; give all hosts the same {TOKEN}, or none"
        ) from error
    except (OSError, HostError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HostError(
            f"host 0 does not answer at {name}, port {port}, within {options.wait:g} s ({reason});"
            " start it, or correct --coordinator"
        ) from error
    channel.set_timeout(options.wait)
    try:
        channel.send(_hello(options).encode())
        problem = json.loads(channel.receive(ANSWER_BYTES))["problem"]
    except (OSError, EOFError, ValueError) as error:
        problem = f"host 0 ended before all hosts had joined ({error})"
    if problem:
        channel.close()
        raise HostError(f"{problem}; give all hosts the same command, each with its own --host")
    group.add(0, channel)


@contextlib.contextmanager
def _process(
    command: Sequence[str], options: HostOptions, host: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a host of this machine, which ends with host 0.

    It is in a session of its own, so that Ctrl-C reaches host 0 only, which stops all hosts.
    """
    name, port = options.address
    words = [*command, "--host", str(host), "--coordinator", joined_address(name, port)]
    with start_module(
        ("dflash_jax", *words), {TOKEN: options.token}, stdout=subprocess.DEVNULL
    ) as process:
        try:
            yield process
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END)
        finally:
            process.kill()
