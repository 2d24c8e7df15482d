"""Compiled programs on disk: one that is found by what it is made from is not even traced.

A program has a file, named by the digest of its lowered text, and a note of that digest under each
identity that it is known by. After a change of the code that changes no program, programs are
traced and lowered once to find their files again.

Programs of a mesh, and those that name a device, are not kept.

The folder lies in that of JAX's compilation cache, which is not asked for these programs: XLA
cannot write one again that it has read from a file, as it leaves out the machine code.
"""

import contextlib
import functools
import logging
import math
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable

from dflash_jax.graph.identity import Identities, digest
from dflash_jax.graph.programs import Program
from dflash_jax.utils.store import Store

log = logging.getLogger("dflash_jax.graph")
NAME = "programs"  # name of the folder
NOTE = ".note"  # ending of the names of notes
PROGRAM = ".program"  # ending of the names of programs
MOST_BYTES = 2**31  # most bytes of each kind; the files used least recently are removed
LAPACK = "custom_call @lapack_"  # in the text of a program, as of one with recurrent layers
# An option for GPUs, whose value nothing else has: JAX's cache has no programs compiled with it.
APART = {"xla_gpu_dot_merger_threshold_mb": "1"}
HIT = "/jax/compilation_cache/cache_hits"  # JAX's event in the thread that compiles
_read = threading.local()  # by this thread: `hits` in JAX's cache, `loads` from our files


class StoredPrograms:
    """The programs of a folder that were compiled with some options.

    Args:
      folder: created if it is missing; private to the user, as its contents are executed.
      options: options of XLA.

    Raises:
      OSError: the folder cannot be made, or made private.
    """

    def __init__(self, folder: Path, options: dict[str, bool | str]):
        self._options = options
        self._identities = Identities(options)
        self._notes = Store(folder, NOTE, size=MOST_BYTES)
        self._programs = Store(folder, PROGRAM, size=MOST_BYTES)

    def lacks(self, program: Program) -> bool:
        """Return whether a program is not known, but would be once it was compiled."""
        identity = self._identities.of(program) if _on_one_device(program) else None
        return identity is not None and self._notes.get(identity) is None

    def load(self, program: Program) -> jax.stages.Compiled | None:
        """Return a program without tracing it; None if it is not known."""
        identity = self._identities.of(program) if _on_one_device(program) else None
        key = self._notes.get(identity) if identity else None
        return self._loaded(key.decode()) if key else None

    def compile(self, program: Program, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Return a lowered program, from disk or compiled; it is known from now on."""
        text = lowered.as_text() or ""
        arguments = _arguments(lowered)
        if not text or not arguments or not _on_one_device(program):
            return lowered.compile(compiler_options=self._options)
        key = digest([self._identities.environment, arguments, text])
        compiled = self._loaded(key)
        kept = compiled is not None
        if compiled is None:
            before = _hits()
            with _unwritten():
                compiled = lowered.compile(compiler_options=self._options | APART)
            if _hits() == before:
                kept = self._save(key, compiled, calls_lapack=LAPACK in text)
        if kept and (identity := self._identities.of(program)):
            with contextlib.suppress(OSError):  # a full disk, say
                self._notes.put(identity, [key.encode()])
        return compiled

    def _loaded(self, key: str) -> jax.stages.Compiled | None:
        contents = self._programs.get(key)
        if contents is None:
            return None
        try:
            calls_lapack, *parts = pickle.loads(contents)
            if calls_lapack:
                _start_lapack()
            device = jax.config.values["jax_default_device"] or jax.local_devices()[0]
            load = serialize_executable.deserialize_and_load
            compiled = load(*parts, execution_devices=[device])
            _read.loads = getattr(_read, "loads", 0) + 1
            return compiled
        except Exception as error:
            log.warning("a kept program cannot be loaded, and is compiled again: %s", error)
            self._programs.remove(key)
            return None

    def _save(self, key: str, compiled: jax.stages.Compiled, *, calls_lapack: bool) -> bool:
        try:
            contents = pickle.dumps((calls_lapack, *serialize_executable.serialize(compiled)))
            self._programs.put(key, [contents])
        except Exception as error:  # the disk is full, or XLA cannot write the program
            log.info("a program is not kept: %s", error)
            return False
        return True


def stored_programs(options: dict[str, bool | str]) -> StoredPrograms | None:
    """Return the programs in the folder of JAX's compilation cache.

    None without such a folder, if it cannot be made private, and where XLA chooses kernels by
    timing them: programs compiled at different times could round differently there.

    Args:
      options: options of XLA, for programs that are compiled.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    enabled = jax.config.values["jax_enable_compilation_cache"]
    if not folder or not enabled or jax.default_backend() != "cpu":
        return None
    try:
        return StoredPrograms(Path(folder) / NAME, options)
    except OSError as error:
        log.info("compiled programs are not kept: %s", error)
        return None


@contextlib.contextmanager
def _unwritten() -> Iterator[None]:
    """Have JAX's cache not keep what this thread compiles."""
    from jax._src import config  # no public name

    least = getattr(config, "persistent_cache_min_compile_time_secs", None)
    with contextlib.nullcontext() if least is None else least(math.inf):
        yield


def _on_one_device(program: Program) -> bool:
    """Return whether a program's arguments and results have no place but the default device."""
    placed = any(x.sharding is not None for x in jax.tree.leaves(program.arguments))
    return program.placement is None and not placed


def _arguments(lowered: jax.stages.Lowered) -> str:
    """Return what a lowered program takes, which of that its text has, and what it returns."""
    try:  # there is no public name
        used = sorted(lowered._lowering.compile_args["kept_var_idx"])
    except (AttributeError, KeyError, TypeError):
        return ""
    return f"{lowered.args_info} {lowered.out_tree} {used}"


@functools.cache
def _start_lapack() -> None:
    """Give LAPACK's functions to XLA, as JAX does when it lowers a call of one."""
    solve = functools.partial(jax.lax.linalg.triangular_solve, left_side=True)
    jax.jit(solve).lower(jnp.eye(1), jnp.ones((1, 1)))


def _hits() -> int:
    """Return how many programs this thread has got from JAX's cache."""
    return getattr(_read, "hits", 0)


def reads() -> int:
    """Return how many programs this thread has read from disk instead of compiling them."""
    return _hits() + getattr(_read, "loads", 0)


def _count(event: str, **_: Any) -> None:
    if event == HIT:
        _read.hits = _hits() + 1


jax.monitoring.register_event_listener(_count)
