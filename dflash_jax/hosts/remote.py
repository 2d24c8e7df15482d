"""The front's executor, and handles of values that the workers hold."""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from dflash_jax.errors import RequestError
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.build import WORKERS
from dflash_jax.graph.keys import ProgramKey
from dflash_jax.graph.programs import Program, declare
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.hosts import messages
from dflash_jax.hosts.group import HostGroup
from dflash_jax.hosts.messages import pack

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
        """Ask for the value, and return at once.

        Raises:
          HostError: the hosts failed.
        """
        if self._fetched is None:
            self._fetched = self._group.fetch(self.handle)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the value.

        Raises:
          HostError: the hosts failed, or the value does not come in time.
        """
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
        """Return handles of the results; arguments as for the program.

        Raises:
          HostError: the hosts failed.
        """
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
        self._group.wait(compiled, COMPILE_S)
        return made


@isolated_jax_config()
def _results(program: Program) -> Any:
    """Return the shapes of a program's results, by tracing it."""
    return jax.eval_shape(program.function, *program.arguments)
