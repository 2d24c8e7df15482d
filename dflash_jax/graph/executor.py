"""Where an engine's programs run: their parameters, states and executables.

The host side of an engine holds device values without looking into them. It passes them from call
to call, and reads outputs by `np.asarray`. An executor makes the values, so that they may be JAX
arrays of this process or handles of values on several hosts (`dflash_jax.hosts`).
"""

import concurrent.futures
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.build import compile_programs
from dflash_jax.graph.keys import ProgramKey
from dflash_jax.graph.memory import tree_bytes
from dflash_jax.graph.placement import (
    mesh_of,
    place,
    place_empty_state,
    place_params,
    shardings,
    updated_params,
)
from dflash_jax.graph.programs import Program, declare
from dflash_jax.graph.steps.logits_processing import neutral_logits_state
from dflash_jax.graph.steps.pair import Params


class Executor(Protocol):
    """Holds the parameters of a plan's programs, and compiles and calls them.

    Attributes:
      programs: the plan's programs; their arguments tell the shapes of all values.
      compile: compiles programs, with the arguments of `compile_programs`.
      put: returns a tree of NumPy arrays as values that later calls take without a transfer.
      params: of both models; the first argument of programs that run a model.
      platform: of the devices: "cpu", "gpu" or "tpu".
      copies: whether outputs have to be copied to the host (`copy_to_host_async`).
      hosts: number of processes that run the programs.
      state_bytes: bytes of a state, once `empty_state` was called.
      lost: completes with the error if the values are lost, and is cancelled by `close`; None if
        that cannot happen.
    """

    programs: Mapping[ProgramKey, Program]
    compile: Callable[..., dict[ProgramKey, Any]]
    put: Callable[[Any], Any]
    params: Any
    platform: str
    copies: bool
    hosts: int
    state_bytes: int
    lost: "concurrent.futures.Future[None] | None"

    def empty_state(self) -> Any:
        """Return a `DecodeState` with every row at position 0."""

    def empty_logits_state(self) -> Any:
        """Return a `LogitsState` that changes no logits."""

    def replacement(self, params: Any) -> Any:
        """Return parameters with others of some roles; errors as for `Engine.update_params`."""

    @property
    def params_deleted(self) -> bool:
        """Whether parameters were donated to another program."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""

    @property
    def digest(self) -> bytes:
        """A digest that differs between models."""

    def close(self) -> None:
        """End the processes that belong to the executor."""


class LocalExecutor:
    """Runs programs in this process, on a device, on two devices, or on a mesh."""

    def __init__(self, planned: PlannedPair, params: Params):
        self._planned = planned
        self.programs: Mapping[ProgramKey, Program] = declare(planned)
        self.compile: Callable[..., dict[ProgramKey, Any]] = compile_programs
        self.put: Callable[[Any], Any] = jax.device_put
        self.params: Any = place_params(planned, params)
        self.platform = jax.default_backend()
        self.copies = self.platform != "cpu"  # on a CPU, outputs are on the host already
        self.hosts, self.state_bytes = 1, 0
        self.lost: concurrent.futures.Future[None] | None = None

    def empty_state(self) -> Any:
        """Return an empty `DecodeState`, or `TwoDeviceState`, in the plan's places."""
        state = place_empty_state(self._planned)
        self.state_bytes = tree_bytes(state)
        return state

    def empty_logits_state(self) -> Any:
        """Return a `LogitsState` that changes no logits."""
        plan, vocab = self._planned.plan, self._planned.config.vocab_size
        empty, mesh = neutral_logits_state(plan.rows, vocab), mesh_of(self._planned)
        return place(empty, None if mesh is None else shardings(mesh, empty, {}))

    def replacement(self, params: Any) -> Any:
        """Return the parameters with others of some roles; see `updated_params`."""
        return updated_params(self._planned, params, self.params)

    @property
    def params_deleted(self) -> bool:
        """Whether parameters were donated to another program."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.params))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return tree_bytes(self.params)

    @property
    def digest(self) -> bytes:
        """A digest of norms and biases."""
        return vectors_digest(self.params)

    def close(self) -> None:
        """Do nothing: there are no other processes."""


def vectors_digest(params: Params) -> bytes:
    """Return a digest of all vectors of a tree: norms and biases, which differ between models."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        if leaf.ndim == 1:
            digest.update(np.asarray(leaf).tobytes())
    return digest.digest()
