"""A worker's process: executes the front's log on the global mesh, in order.

`python -m dflash_jax.hosts.worker HOST:PORT INDEX ADDRESS`, with the token in the environment.
The connection's thread answers pings at once, and ends the process when the connection closes.
Programs are compiled in a thread, in the front's order, while calls run; the front calls a program
only after all workers compiled it. A third thread waits for outputs.
"""

import contextlib
import hashlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dflash_jax.device import default_device, free_memory
from dflash_jax.errors import HostError
from dflash_jax.graph.build import WORKERS
from dflash_jax.graph.cache import use_compilation_cache
from dflash_jax.graph.executor import LocalExecutor, vectors_digest
from dflash_jax.graph.keys import ProgramKey
from dflash_jax.graph.settings import isolated_jax_config, untraced
from dflash_jax.hosts import messages
from dflash_jax.hosts.channel import UNIX, Channel, Hello, connect, private_address, relay, tunnel
from dflash_jax.hosts.launch import LOOPBACK, TOKEN
from dflash_jax.hosts.messages import pack, unpack
from dflash_jax.loading import open_pair
from dflash_jax.models import build_graph
from dflash_jax.plan import ResolvedPlan
from dflash_jax.version import __version__

CONNECT_S = 30.0  # seconds in which a worker has to connect
JOIN_S = 120  # seconds in which all workers have to join


class HostWorker:
    """Executes the entries of the log.

    Args:
      channel: the connection to the front, on which each end proved its token.
      index: of this worker; 0 coordinates the others and sends outputs.
      address: where other workers reach this one.
      token: that other workers have, too.
    """

    def __init__(self, channel: Channel, index: int, address: str, token: str):
        self._channel, self._index, self._address = channel, index, address
        self._token = token
        self._meeting = contextlib.ExitStack()  # closed once all workers have joined
        self._own_coordinator = self._meeting.enter_context(private_address())
        self._log: queue.SimpleQueue[messages.Entry] = queue.SimpleQueue()
        self._to_compile: queue.SimpleQueue[messages.Compile] = queue.SimpleQueue()
        self._to_send: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._executor: Any = None
        self._executables: dict[str, Any] = {}
        self._values: dict[int, Any] = {}  # by handle
        self._actions: dict[type, Callable[[Any], None]] = {
            messages.Join: self._join,
            messages.Load: self._load,
            messages.Compile: self._to_compile.put,
            messages.Create: self._create,
            messages.Put: self._put,
            messages.CallProgram: self._call,
            messages.Fetch: self._fetch,
            messages.Free: self._free,
        }

    def run(self) -> None:
        """Execute the log until the connection closes, which ends the process."""
        coordinator = self._own_coordinator
        if self._index == 0 and self._address != LOOPBACK:  # other hosts cannot reach the socket
            listening = relay(coordinator, self._address, self._token)
            coordinator = self._meeting.enter_context(listening)
        versions = {"dflash_jax": __version__, "jax": jax.__version__, "NumPy": np.__version__}
        self._channel.send(Hello(self._index, versions, coordinator).encode())
        for target in (self._receive, self._compile_all, self._send_all):
            threading.Thread(target=self._guarded, args=(target,), daemon=True).start()
        self._guarded(self._execute_all)
        threading.Event().wait()  # the front ends the process, by closing the connection

    def _guarded(self, work: Callable[[], None]) -> None:
        """Report an error to the front, which then ends all workers."""
        try:
            work()
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
            sys.stderr.write(f"dflash-jax: host {self._index} failed: {reason}\n")
            self._send(messages.Failed(reason))

    def _send(self, reply: messages.Reply) -> None:
        with contextlib.suppress(OSError):  # closed: the connection's thread ends the process
            self._channel.send(messages.encode(reply))

    def _receive(self) -> None:
        while True:
            try:
                entry = messages.decode_entry(self._channel.receive())
            except (EOFError, OSError):
                os._exit(0)  # no shutdown: it would wait for other workers
            if isinstance(entry, messages.Ping):
                self._send(messages.Pong())
            else:
                self._log.put(entry)

    def _execute_all(self) -> None:
        while True:
            entry = self._log.get()
            self._actions[type(entry)](entry)

    # -- start --------------------------------------------------------------------------------

    def _join(self, entry: messages.Join) -> None:
        if entry.devices:
            jax.config.update("jax_num_cpu_devices", entry.devices)
        jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM
        own = self._own_coordinator if self._index == 0 else None
        address = own or entry.coordinator
        with self._meeting as meeting:
            if not address.startswith(UNIX):
                address = meeting.enter_context(tunnel(address, self._token))
            jax.distributed.initialize(
                address,
                entry.hosts,
                self._index,
                initialization_timeout=JOIN_S,
                coordinator_bind_address=own,
                cluster_detection_method="deactivate",
            )
        device = default_device()
        count = jax.local_device_count()
        self._send(messages.HostDevices(device.platform, count, free_memory(device)))

    def _load(self, entry: messages.Load) -> None:
        use_compilation_cache()
        plan = ResolvedPlan.from_json(entry.plan)
        sources = entry.sources
        pair = open_pair(
            sources["target"] or "",
            sources["drafter"],
            layer_ids=sources["layer_ids"] or "",
            taps_at=plan.taps_at,
            lora=sources["lora"],
        )
        with isolated_jax_config():
            weights = pair.weights(plan)
            digest = configs_digest(pair.configs) + vectors_digest(weights)
            self._executor = LocalExecutor(build_graph(*pair.configs, plan), weights)
            del weights
            self._executor.empty_state()  # for its size; freed at once
        made = self._executor
        loaded = messages.Loaded(made.platform, digest, made.weight_bytes, made.state_bytes)
        self._send(loaded)

    def _compile_all(self) -> None:
        while True:
            entry = self._to_compile.get()
            programs = [self._executor.programs[ProgramKey.parse(key)] for key in entry.keys]
            workers, error = WORKERS if entry.parallel else 1, ""
            try:
                made = self._executor.compile(programs, workers=workers)
                self._executables |= {str(key): made[key] for key in made}
            except Exception as failure:  # of one program, such as one without memory
                error = " ".join(f"{type(failure).__name__}: {failure}".split())[:1000]
            self._send(messages.Compiled(entry.number, error))

    # -- calls --------------------------------------------------------------------------------

    def _create(self, entry: messages.Create) -> None:
        executor = self._executor
        make = executor.empty_logits_state if entry.logits else executor.empty_state
        self._values[entry.handle] = make()

    def _put(self, entry: messages.Put) -> None:
        self._values[entry.handle] = unpack(entry.value)

    def _call(self, entry: messages.CallProgram) -> None:
        program = self._executor.programs[ProgramKey.parse(entry.key)]
        leaves = [self._values[x] if isinstance(x, int) else unpack(x) for x in entry.inputs]
        take = self._values.pop if program.donated else self._values.__getitem__
        arguments = (
            self._executor.params if entry.params else None,
            take(entry.state) if entry.state else None,
            take(entry.logits_state) if entry.logits_state else None,
            jax.tree.unflatten(jax.tree.structure(program.arguments[3]), leaves),
        )
        call = self._executables[entry.key]
        state, logits_state, output = untraced(lambda: call(*arguments))
        results = [state, logits_state, *jax.tree.leaves(output)]
        self._values |= {
            entry.results + i: value for i, value in enumerate(results) if value is not None
        }

    def _fetch(self, entry: messages.Fetch) -> None:
        self._to_send.put((entry.handle, self._values[entry.handle]))

    def _free(self, entry: messages.Free) -> None:
        for handle in entry.handles:
            self._values.pop(handle, None)

    def _send_all(self) -> None:
        """Wait for outputs, in all workers, so that each of them reports its own errors."""
        while True:
            handle, array = self._to_send.get()
            host = np.asarray(array)
            if self._index == 0:
                self._send(messages.Value(handle, pack(host)))
            del array


def configs_digest(configs: Any) -> bytes:
    """Return a digest of the configs of a target and a drafter."""
    return hashlib.sha256(repr(configs).encode()).digest()


def main() -> None:
    """Connect to the front, and execute its log."""
    front, index, address = sys.argv[1:]
    token = os.environ.pop(TOKEN, "")
    try:
        channel = connect(front, token, CONNECT_S)
    except (OSError, HostError) as error:
        sys.exit(f"dflash-jax: host {index} cannot reach its server at {front}: {error}")
    HostWorker(channel, int(index), address, token).run()


if __name__ == "__main__":
    main()
