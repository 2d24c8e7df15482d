"""Which kernels layers use: those of `Plan.kernels`, while a program is traced."""

import contextlib
import contextvars
from collections.abc import Iterator

_chosen = contextvars.ContextVar("kernels", default="xla")


def kernels() -> str:
    """Return the kernels of the program that is traced: "xla", "pallas" or "native"."""
    return _chosen.get()


@contextlib.contextmanager
def using_kernels(name: str) -> Iterator[None]:
    """Choose the kernels of layers that are traced inside the context."""
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)
