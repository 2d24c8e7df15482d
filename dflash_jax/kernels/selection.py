"""Which kernels layers use: those of `Plan.kernels` and `Plan.activations`, while being traced."""

import contextlib
import contextvars
from collections.abc import Iterator

_chosen = contextvars.ContextVar("kernels", default=("xla", "int8"))


def kernels() -> str:
    """Return the kernels of the program that is traced: "xla", "pallas" or "native"."""
    return _chosen.get()[0]


def activations() -> str:
    """Return what native kernels multiply int8 weights by: "int8" or "float"."""
    return _chosen.get()[1]


@contextlib.contextmanager
def using_kernels(name: str, activations: str = "int8") -> Iterator[None]:
    """Choose the kernels of layers that are traced inside the context."""
    token = _chosen.set((name, activations))
    try:
        yield
    finally:
        _chosen.reset(token)
