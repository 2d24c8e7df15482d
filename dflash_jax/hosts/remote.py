"""Engines whose workers hold the models: the front's executor, and its handles of values.

After the hosts failed, everything that needs them raises `HostError`.
"""

import concurrent.futures
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import HostError, PlanError, RequestError
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.build import WORKERS, Ended
from dflash_jax.graph.keys import ProgramKey
from dflash_jax.graph.programs import Program, declare
from dflash_jax.graph.resolve import resolve
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.hosts import messages
from dflash_jax.hosts.group import LOAD_S, START_S, HostGroup
from dflash_jax.hosts.launch import Launcher
from dflash_jax.hosts.messages import pack
from dflash_jax.loading import OpenPair
from dflash_jax.models import build_graph, build_pair
from dflash_jax.plan import Plan
from dflash_jax.tokenizer import Tokenizer

COMPILE_S = 3600.0  # seconds in which programs have to be compiled


class RemoteTree:
    """A handle of a state. The workers forget the value when the handle is collected."""

    __slots__ = ("_group", "handle")

    def __init__(self, group: HostGroup, handle: int):
        self._group, self.handle = group, handle

    def __del__(self) -> None:
        self._group.free(self.handle)


class RemoteArray(RemoteTree):
    """A handle of an array, with its shape and dtype; `np.asarray` waits for its value."""

    __slots__ = ("_fetched", "dtype", "shape")

    def __init__(self, group: HostGroup, handle: int, shape: tuple[int, ...], dtype: Any):
        super().__init__(group, handle)
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._fetched: concurrent.futures.Future[np.ndarray] | None = None

    def copy_to_host_async(self) -> None:
        """Ask for the value, and return at once."""
        if self._fetched is None:
            self._fetched = self._group.fetch(self.handle)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.copy_to_host_async()
        assert self._fetched is not None
        value = self._group.wait(self._fetched)
        return value if dtype is None else value.astype(dtype)


@dataclasses.dataclass(frozen=True)
class RemoteExecutable:
    """A program that all workers compiled; calling it appends to their log."""

    key: ProgramKey
    group: HostGroup
    results: Any  # shapes of state, logits state and output
    code_bytes: int = 0  # of other processes

    def __call__(self, params: Any, state: Any, logits_state: Any, inputs: Any) -> Any:
        """Return handles of the results; arguments as for the program."""
        group = self.group
        leaves = jax.tree.leaves(inputs)
        given = [x.handle if isinstance(x, RemoteArray) else pack(x) for x in leaves]
        next_state, next_logits, output = self.results
        shapes, tree = jax.tree.flatten(output)
        first = group.new_handles(2 + len(shapes))
        called = state.handle if state else 0, logits_state.handle if logits_state else 0
        key, has_params = str(self.key), params is not None
        group.write(messages.CallProgram(key, has_params, *called, given, first))
        arrays = [RemoteArray(group, first + 2 + i, x.shape, x.dtype) for i, x in enumerate(shapes)]
        return (
            None if next_state is None else RemoteTree(group, first),
            None if next_logits is None else RemoteTree(group, first + 1),
            jax.tree.unflatten(tree, arrays),
        )


class RemoteExecutor:
    """Runs programs on the workers of a group, which have loaded the models; an `Executor`."""

    def __init__(
        self,
        group: HostGroup,
        graph: PlannedPair,
        loaded: messages.Loaded,
    ):
        self.programs: Mapping[ProgramKey, Program] = declare(graph, placed=False)
        self.compile: Callable[..., dict[ProgramKey, Any]] = self._compile
        self.put: Callable[[Any], Any] = self._put
        self.params: Any = RemoteTree(group, 0)
        self.copies, self.hosts = True, group.hosts
        self.lost: concurrent.futures.Future[None] | None = group.lost
        self.state_bytes, self.weight_bytes = loaded.state_bytes, loaded.weight_bytes
        self.platform = loaded.platform
        self.digest, self._group = loaded.digest, group

    @property
    def params_deleted(self) -> bool:
        """False: no other program can have the parameters."""
        return False

    def empty_state(self) -> Any:
        """Return a handle of an empty state."""
        return self._create(logits=False)

    def empty_logits_state(self) -> Any:
        """Return a handle of a logits state that changes no logits."""
        return self._create(logits=True)

    def replacement(self, params: Any) -> NoReturn:
        """Refuse other parameters.

        Raises:
          RequestError: always.
        """
        raise RequestError(
            "the parameters of a model over several hosts cannot be replaced; start it again with"
            " the other weights"
        )

    def close(self) -> None:
        """End the workers."""
        self._group.close()

    def _create(self, *, logits: bool) -> RemoteTree:
        created = RemoteTree(self._group, self._group.new_handles(1))
        self._group.write(messages.Create(created.handle, logits))
        return created

    def _put(self, tree: Any) -> Any:
        return jax.tree.map(self._put_array, tree)

    def _put_array(self, array: Any) -> RemoteArray:
        handle = self._group.new_handles(1)
        self._group.write(messages.Put(handle, pack(array)))
        return RemoteArray(self._group, handle, np.shape(array), array.dtype)

    def _compile(
        self,
        programs: Iterable[Program],
        *,
        workers: int = WORKERS,
        begun: Callable[[Program], object] = lambda program: None,
        ended: Ended = lambda key, cached, seconds: None,
    ) -> dict[ProgramKey, Any]:
        """Compile programs in all workers, as `compile_programs` does in this process.

        Raises:
          ComputeError: a worker cannot compile one.
          HostError: the hosts failed.
        """
        programs = list(programs)
        for program in programs:
            begun(program)
        keys = [str(program.key) for program in programs]
        compiled = self._group.compile(keys, parallel=workers > 1)
        made = {x.key: RemoteExecutable(x.key, self._group, _results(x)) for x in programs}
        started = time.perf_counter()
        self._group.wait(compiled, COMPILE_S)
        for key in made:  # hosts do not say what their caches had
            ended(key, False, (time.perf_counter() - started) / len(made))
        return made


@isolated_jax_config()
def _results(program: Program) -> Any:
    """Return the shapes of a program's results, by tracing it."""
    return jax.eval_shape(program.function, *program.arguments)


# Engines whose models are loaded by workers on several hosts.


class HostedPair:
    """A target and its drafter, opened here for their configs, and loaded by workers.

    Args:
      pair: the models, opened in this process.
      sources: arguments of `open_pair` for the workers, by name.
      launcher: starts the workers.
      hosts: number of workers.
      devices: virtual devices of a worker on a CPU; 0 leaves them to `XLA_FLAGS`.
    """

    def __init__(
        self,
        pair: OpenPair,
        sources: dict[str, str | None],
        launcher: Launcher,
        *,
        hosts: int,
        devices: int = 0,
    ):
        self._pair, self._launcher = pair, launcher
        self._sources = {name: _absolute(source) for name, source in sources.items()}
        self._hosts, self._devices = hosts, devices
        self._group: HostGroup | None = None
        self._starting = threading.Lock()

    @property
    def configs(self) -> tuple[TargetConfig, DrafterConfig | None]:
        """Configs of the two models."""
        return self._pair.configs

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer."""
        return self._pair.tokenizer

    def engine(self, plan: Plan) -> Engine:
        """Start workers that load the models, and return an engine; ends earlier workers.

        Raises:
          HostError: a worker cannot start, or fails.
          PlanError: the plan does not fit the hosts' devices, their memory or the models.
        """
        with self._starting:
            if self._group is not None:
                self._group.close()
            group = self._group = HostGroup(self._launcher, self._hosts)
            try:
                return self._engine(group, plan)
            except BaseException:
                group.close()
                raise

    def _engine(self, group: HostGroup, plan: Plan) -> Engine:
        join = messages.Join(group.coordinator, self._hosts, self._devices)
        joined: list[messages.HostDevices] = group.ask(join, START_S)
        plan = completed(plan, joined, *self.configs)
        loaded = group.ask(messages.Load(self._sources, plan.to_json()), LOAD_S)
        if len({reply.digest for reply in loaded}) > 1:
            raise HostError(
                f"hosts have different models under {self._sources['target']!r} and"
                f" {self._sources['drafter']!r}; copy the same files to each host"
            )
        graph = build_graph(*self.configs, plan)
        executor = RemoteExecutor(group, graph, loaded[0])
        return Engine(graph, executor.params, tokenizer=self.tokenizer, executor=executor)


def completed(
    plan: Plan,
    joined: Sequence[messages.HostDevices],
    target: TargetConfig,
    drafter: DrafterConfig | None,
) -> Plan:
    """Return the plan with every choice made, for a mesh over all devices of the hosts.

    Raises:
      HostError: hosts have different platforms or numbers of devices.
      PlanError: the mesh has another number of devices, or the plan does not fit.
    """
    platforms = {(reply.platform, reply.devices) for reply in joined}
    if len(platforms) > 1:
        named = "; ".join(f"host {i} has {x.devices} of {x.platform}" for i, x in enumerate(joined))
        raise HostError(f"hosts have different devices ({named}); give each host the same")
    [(platform, each)] = platforms
    total = each * len(joined)
    if plan.mesh == (1, 1):
        plan = dataclasses.replace(plan, mesh=_default_mesh(plan.rows, total, target.num_kv_heads))
    data, model = plan.mesh
    if data * model != total:
        raise PlanError(
            f"mesh is {data} x {model}, but {len(joined)} hosts have {total} devices, {each} each;"
            f" leave it out, or give one of {total}, such as 1x{total}"
        )
    memory = min(reply.memory for reply in joined)
    memory *= len(joined) if platform == "cpu" else total
    return resolve(plan, build_pair(target, drafter), platform=platform, memory=memory)


def _default_mesh(rows: int, devices: int, kv_heads: int) -> tuple[int, int]:
    """Return a mesh that splits kv heads, and rows over the other devices if it divides them.

    Where the devices do not divide the kv heads, every device would hold and exchange all caches.
    """
    model = math.gcd(devices, kv_heads)
    return (devices // model, model) if rows % (devices // model) == 0 else (1, devices)


def _absolute(source: str | None) -> str | None:
    """Return the absolute path of a source that is one; names and hub ids as they are."""
    path = Path(source or "").expanduser()
    return str(path.absolute()) if source and path.exists() else source
