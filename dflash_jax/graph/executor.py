"""Where an engine's programs run: their parameters, states and executables.

The host side of an engine holds device values without looking into them. It passes them from call
to call, and reads outputs by `np.asarray`.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dflash_jax.graph.abstract import PlannedPair
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


class Executor:
    """Holds the values of a plan's programs, on a device, on two devices, or on a mesh.

    Attributes:
      programs: the plan's programs; their arguments tell the shapes of all values.
      put: returns a tree of NumPy arrays as values that later calls take without a transfer.
      params: parameters of both models; the first argument of programs that run a model.
      platform: kind of the devices: "cpu", "gpu" or "tpu".
      copies: whether outputs have to be copied to the host (`copy_to_host_async`).
      hosts: number of processes whose devices the mesh has.
      state_bytes: bytes of a state, once `empty_state` was called.
    """

    def __init__(self, planned: PlannedPair, params: Params):
        self._planned = planned
        self.programs: Mapping[ProgramKey, Program] = declare(planned)
        self.put: Callable[[Any], Any] = jax.device_put
        self.params: Any = place_params(planned, params)
        self.platform = jax.default_backend()
        self.copies = self.platform != "cpu"  # on a CPU, outputs are on the host already
        mesh = mesh_of(planned)
        devices = [] if mesh is None else mesh.devices.flat
        self.hosts = max(len({device.process_index for device in devices}), 1)
        self.state_bytes = 0

    def empty_state(self) -> Any:
        """Return an empty `DecodeState`, or `TwoDeviceState`, in the plan's places."""
        state = place_empty_state(self._planned)
        self.state_bytes = tree_bytes(state)
        return state

    def empty_logits_state(self) -> Any:
        """Return a `LogitsState` that changes no logits."""
        plan = self._planned.plan
        vocab = self._planned.config.vocab_size
        empty = neutral_logits_state(plan.rows, vocab)
        mesh = mesh_of(self._planned)
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
        """A digest of all vectors, norms and biases, which differ between models.

        Vectors that are split between processes are left out.
        """
        vectors = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            if leaf.ndim == 1 and (leaf.is_fully_addressable or leaf.is_fully_replicated):
                vectors.update(np.asarray(leaf).tobytes())
        return vectors.digest()
