"""What users set in JAX for work of their own: engines hang on none of it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

Returned = TypeVar("Returned")

# Programs are typed in 32 bits, give their state back in place, and are compiled ahead of time;
# numbers that are not finite are judged by the engine.
OFF = {
    "jax_enable_x64": jax.enable_x64,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_disable_jit": jax.disable_jit,
}
TRACELESS = "jax_no_tracing"
# Steps are given arguments from the host, and their answers are read there.
GUARDS = ("jax_transfer_guard_host_to_device", "jax_transfer_guard_device_to_host")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """The settings that engines are traced, compiled and run under, in this thread.

    Entered where a user's differ, as every step asks. A mesh that is set for other arrays is left.
    """
    with contextlib.ExitStack() as entered:
        for name, setting in OFF.items():
            if getattr(jax.config, name):
                entered.enter_context(setting(False))
        if any(getattr(jax.config, guard) not in (None, "allow") for guard in GUARDS):
            entered.enter_context(jax.transfer_guard("allow"))
        if not jax.sharding.get_abstract_mesh().empty:
            entered.enter_context(jax.set_mesh(None))
        yield


def untraced(work: Callable[[], Returned]) -> Returned:
    """Does work that may trace nothing. Also where a Ctrl-C comes, the thread may trace on then."""
    before = getattr(jax.config, TRACELESS)
    try:
        with undisturbed(), jax.no_tracing():
            return work()
    finally:
        if getattr(jax.config, TRACELESS) != before:  # it came as jax entered or left the setting
            jax.no_tracing(before).__enter__()
