"""Global JAX settings that the engine must not depend on."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

Returned = TypeVar("Returned")

# Programs are typed in 32 bits, update their state in place, and are compiled ahead of time;
# non-finite numbers are handled by the engine.
OFF = {
    "jax_enable_x64": jax.enable_x64,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_disable_jit": jax.disable_jit,
}
TRACELESS = "jax_no_tracing"
# Inputs come from the host, and outputs are read there.
GUARDS = ("jax_transfer_guard_host_to_device", "jax_transfer_guard_device_to_host")


@contextlib.contextmanager
def isolated_jax_config() -> Iterator[None]:
    """Apply the settings that engines are traced, compiled and run under, in this thread.

    Only settings that differ are entered, because every step calls this. A mesh that is set for
    other arrays is left.
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
    """Call a function with tracing forbidden, and allow it again even after a Ctrl-C."""
    before = getattr(jax.config, TRACELESS)
    try:
        with isolated_jax_config(), jax.no_tracing():
            return work()
    finally:
        if getattr(jax.config, TRACELESS) != before:  # interrupted while entering or leaving
            jax.no_tracing(before).__enter__()
