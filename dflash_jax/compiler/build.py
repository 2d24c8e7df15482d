"""Lowering and compiling programs ahead of time, and the contracts they must meet (C6)."""

import concurrent.futures
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from dflash_jax.compiler.programs import Program
from dflash_jax.compiler.settings import undisturbed
from dflash_jax.errors import PlanError
from dflash_jax.utils.allocator import fewer_collections

# On a GPU XLA joins products that share an input by copying their weights into one, every call.
OPTIONS: dict[str, bool | str] = {"xla_gpu_dot_merger_threshold_mb": "0"}
TIMED = ("plain", "prefill")  # programs of these kinds have every kernel of the target
# XLA compiles one program with several threads; half as many programs as cores keep all busy.
WORKERS = max(1, (os.cpu_count() or 1) // 2)
_compiling = threading.Lock()  # the process compiles for one caller at a time


@dataclasses.dataclass(frozen=True)
class Executable:
    """A compiled program; calling it only dispatches. Other shapes raise JAX's own TypeError."""

    name: str
    compiled: jax.stages.Compiled
    lowered: jax.stages.Lowered
    donated_bytes: int
    seconds: float  # tracing, lowering and compiling

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args)

    @property
    def stablehlo(self) -> str:
        """What was given to XLA."""
        return self.lowered.as_text()

    @property
    def _memory(self) -> Any:
        return self.compiled.memory_analysis()

    @property
    def aliased_bytes(self) -> int:
        """Bytes of donated arguments that are updated in place."""
        return self._memory.alias_size_in_bytes

    @property
    def temporary_bytes(self) -> int:
        """Scratch memory of one call."""
        return self._memory.temp_size_in_bytes

    @property
    def argument_bytes(self) -> int:
        """Bytes of all arguments, weights included."""
        return self._memory.argument_size_in_bytes

    @property
    def code_bytes(self) -> int:
        """Bytes of machine code; 0 where XLA does not say, as on a CPU."""
        executable = self.compiled.runtime_executable()
        return executable.size_of_generated_code_in_bytes() if executable else 0


@dataclasses.dataclass(frozen=True)
class JoinedExecutable(Executable):
    """A program that runs on two devices; `compiled` is its first part, texts and bytes of all."""

    parts: tuple[Executable, ...]
    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.call(*self.parts, *args)

    @property
    def stablehlo(self) -> str:
        return "\n".join(part.stablehlo for part in self.parts)

    @property
    def aliased_bytes(self) -> int:
        return sum(part.aliased_bytes for part in self.parts)

    @property
    def temporary_bytes(self) -> int:
        return sum(part.temporary_bytes for part in self.parts)

    @property
    def argument_bytes(self) -> int:
        return sum(part.argument_bytes for part in self.parts)

    @property
    def code_bytes(self) -> int:
        return sum(part.code_bytes for part in self.parts)


def jit(function: Callable[..., Any], *, donate: tuple[int, ...] = (), **options: Any) -> Any:
    """`jax.jit` for code outside this package, so that compilation happens in one place."""
    return jax.jit(function, donate_argnums=donate, **options)


@fewer_collections()
def compile_programs(
    programs: Iterable[Program],
    *,
    workers: int = WORKERS,
    begun: Callable[[Program], object] = lambda program: None,
) -> dict[str, Executable]:
    """Compiles programs; raises PlanError if donated state would be copied.

    On a GPU XLA times the kernels it could take for a product and remembers the fastest. Two
    programs compiled at once would each time their own and might take different ones: the lanes
    would round differently. So what runs the target at a width comes before what shares it.

    Args:
      workers: programs to compile at the same time; one is compiled in the caller's thread.
      begun: called with each program as its turn comes.
    """

    def build(program: Program) -> Executable:
        begun(program)
        return _compile(program)

    rest, first = list(programs), []
    if jax.default_backend() != "cpu":
        first = [program for program in rest if program.name.split("_")[0] in TIMED]
        rest = [program for program in rest if program not in first]
    with _compiling:
        built = list(map(build, first))
        if workers == 1:
            built += map(build, rest)
        else:
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                built += pool.map(build, rest)
    return {executable.name: executable for executable in built}


@undisturbed()
def _compile(program: Program) -> Executable:
    if program.call is not None:
        parts = tuple(map(_compile, program.parts))
        return JoinedExecutable(
            program.name,
            parts[0].compiled,
            parts[0].lowered,
            sum(part.donated_bytes for part in parts),
            sum(part.seconds for part in parts),
            parts,
            program.call,
        )
    started = time.perf_counter()
    options = {} if program.placement is None else {"out_shardings": program.placement}

    def run(*arguments: Any) -> Any:  # JAX keeps what it traced for as long as the function lives
        return program.function(*arguments)

    run.__name__ = program.name  # in the compilation cache and in profiles, too
    jitted = jax.jit(run, donate_argnums=program.donated, **options)
    lowered = jitted.lower(*program.arguments)
    compiled = lowered.compile(compiler_options=OPTIONS)
    donated = sum(
        _bytes_per_device(leaf)
        for i in program.donated
        for leaf in jax.tree.leaves(program.arguments[i])
    )
    seconds = time.perf_counter() - started
    built = Executable(program.name, compiled, lowered, donated, seconds)
    if built.aliased_bytes < donated:
        raise PlanError(
            f"program {program.name} would copy {donated - built.aliased_bytes} of {donated}"
            " bytes of its state in every call; this is a defect, please report it with the plan"
        )
    return built


def _bytes_per_device(leaf: Any) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
