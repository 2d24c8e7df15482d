"""Entries of the log that every worker executes, the workers' replies, and their encoding.

Values on the devices have handles: positive numbers that the front gives out. Messages hold NumPy
arrays, numbers and texts only.
"""

from typing import Any

import ml_dtypes  # noqa: F401  # registers bfloat16 with NumPy
import msgspec
import numpy as np


class HostArray(msgspec.Struct, array_like=True, frozen=True):
    """A NumPy array in a message."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Leaf = int | HostArray  # an input of a call: a handle, or a value


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A message between the front and a worker."""


class Join(Message, frozen=True):
    """Join the other workers: the coordinator's address, and the number of workers.

    `devices` is the number of virtual devices of a worker on a CPU; 0 leaves it to `XLA_FLAGS`.
    """

    coordinator: str
    hosts: int
    devices: int


class Load(Message, frozen=True):
    """Load the models by the arguments of `open_pair`, for a completed plan as JSON."""

    sources: dict[str, str | None]
    plan: str


class Compile(Message, frozen=True):
    """Compile programs; the reply has the same number."""

    number: int
    keys: list[str]
    parallel: bool


class CallProgram(Message, frozen=True):
    """Call a program. Handle 0 stands for an argument that the program does not take.

    The results get consecutive handles from `results` on: the state, the logits state, and the
    arrays of the output.
    """

    key: str
    params: bool
    state: int
    logits_state: int
    inputs: list[Leaf]
    results: int


class Create(Message, frozen=True):
    """Make an empty state, or logits state."""

    handle: int
    logits: bool


class Put(Message, frozen=True):
    """Keep an array for later calls."""

    handle: int
    value: HostArray


class Fetch(Message, frozen=True):
    """Wait for an array; worker 0 sends it."""

    handle: int


class Free(Message, frozen=True):
    """Forget values; unknown handles, of donated states, are ignored."""

    handles: list[int]


class Ping(Message, frozen=True):
    """Answer at once, whatever else runs."""


Entry = Join | Load | Compile | CallProgram | Create | Put | Fetch | Free | Ping


class HostDevices(Message, frozen=True):
    """The worker's devices; `memory` is the free memory of one in bytes, of the host on a CPU."""

    platform: str
    devices: int
    memory: int


class Loaded(Message, frozen=True):
    """The models are loaded: the platform, a digest of configs and vectors, and sizes in bytes."""

    platform: str
    digest: bytes
    weight_bytes: int
    state_bytes: int


class Compiled(Message, frozen=True):
    """Programs were compiled; `error` says why not, or is empty."""

    number: int
    error: str


class Value(Message, frozen=True):
    """An array that was fetched."""

    handle: int
    value: HostArray


class Pong(Message, frozen=True):
    """The answer to a ping."""


class Failed(Message, frozen=True):
    """The worker cannot go on."""

    reason: str


Reply = HostDevices | Loaded | Compiled | Value | Pong | Failed

encode = msgspec.msgpack.Encoder().encode
decode_entry = msgspec.msgpack.Decoder(Entry).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def pack(array: Any) -> HostArray:
    """Return an array, or a number, for a message."""
    array = np.asarray(array)
    return HostArray(array.dtype.name, array.shape, array.tobytes())


def unpack(packed: HostArray) -> np.ndarray:
    """Return the array of a message, which cannot be written to.

    Raises:
      ValueError: the bytes do not fit the shape, or the dtype holds objects.
    """
    return np.frombuffer(packed.data, np.dtype(packed.dtype)).reshape(packed.shape)
