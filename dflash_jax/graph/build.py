"""Lowering and compiling programs ahead of time, and their contracts."""

import concurrent.futures
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from dflash_jax.errors import DFlashError, PlanError
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.graph.programs import Program
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.graph.stored import StoredPrograms, reads, stored_programs
from dflash_jax.utils.allocator import fewer_collections, trim_memory
from dflash_jax.utils.progress import ShownCount

log = logging.getLogger("dflash_jax.graph")
# On a GPU XLA joins products that share an input by copying their weights into one, in every call.
OPTIONS: dict[str, bool | str] = {"xla_gpu_dot_merger_threshold_mb": "0"}
TIMED = (Step.PLAIN, Step.PREFILL)  # these steps have every kernel of the target
# XLA uses threads of its own for a program; half as many programs as cores keep all busy.
WORKERS = max(1, (os.cpu_count() or 1) // 2)
LONG = 0.1  # seconds of compiling or loading, after which free memory is returned to the system
GUESS = 5.0  # seconds that the first program is assumed to take
_compiling = threading.Lock()  # the process compiles for one caller at a time
Ended = Callable[[ProgramKey, bool, float], object]  # takes whether it was read, and the seconds


@dataclasses.dataclass(frozen=True)
class Executable:
    """A compiled program; calling it only dispatches. Other shapes raise JAX's own TypeError.

    Of a program on two devices, `compiled` is the first part; sizes and text are those of all.
    """

    program: Program
    compiled: jax.stages.Compiled
    donated_bytes: int
    seconds: float  # tracing, lowering and compiling, or loading
    parts: tuple["Executable", ...] = ()
    cached: bool = False  # read from disk, by this package or by JAX

    def __call__(self, *args: Any) -> Any:
        call = self.program.call
        return self.compiled(*args) if call is None else call(self.parts, *args)

    @property
    def key(self) -> ProgramKey:
        """Identity of the program in its plan."""
        return self.program.key

    @property
    def stablehlo(self) -> str:
        """The program as given to XLA, which traces it again."""
        return "\n".join(lower(part.program).as_text() or "" for part in self._all)

    @property
    def aliased_bytes(self) -> int:
        """Bytes of donated arguments that are updated in place."""
        return self._total("alias_size_in_bytes")

    @property
    def temporary_bytes(self) -> int:
        """Scratch memory of one call."""
        return self._total("temp_size_in_bytes")

    @property
    def argument_bytes(self) -> int:
        """Bytes of all arguments, weights included."""
        return self._total("argument_size_in_bytes")

    @property
    def code_bytes(self) -> int:
        """Bytes of machine code; 0 where XLA does not report it, as on a CPU."""
        loaded = (part.compiled.runtime_executable() for part in self._all)
        return sum(x.size_of_generated_code_in_bytes() for x in loaded if x)

    @property
    def _all(self) -> tuple["Executable", ...]:
        return self.parts or (self,)

    def _total(self, name: str) -> int:
        return sum(getattr(part.compiled.memory_analysis(), name) for part in self._all)


def jit(function: Callable[..., Any], *, donate: tuple[int, ...] = (), **options: Any) -> Any:
    """Apply `jax.jit`, for code outside this package: compilation happens in one place."""
    return jax.jit(function, donate_argnums=donate, **options)


@fewer_collections()
def compile_programs(
    programs: Iterable[Program],
    *,
    workers: int = WORKERS,
    begun: Callable[[Program], object] = lambda program: None,
    ended: Ended = lambda key, cached, seconds: None,
) -> dict[ProgramKey, Executable]:
    """Compile programs.

    On a GPU, XLA times the kernels it could use for a product and remembers the fastest. Two
    programs compiled at once could choose different ones, so that variants would round
    differently. Programs that run the target at some width therefore come before those that share
    it, one by one.

    Args:
      workers: number of programs to compile at the same time; one is compiled in the caller's
        thread.
      begun: called with each program before it is compiled or read.
      ended: called after that.

    Raises:
      PlanError: a program would copy its donated state.
    """

    stored = stored_programs(OPTIONS)

    def build(program: Program) -> Executable:
        begun(program)
        executable = _compile(program, stored)
        ended(program.key, executable.cached, executable.seconds)
        return executable

    rest = list(programs)
    alone = []
    if jax.default_backend() != "cpu":
        alone = [program for program in rest if program.key.step in TIMED]
        rest = [program for program in rest if program not in alone]
    if workers == 1:
        alone = [*alone, *rest]
        rest = []
    with _compiling, concurrent.futures.ThreadPoolExecutor(workers) as pool:
        built = [*map(build, alone), *pool.map(build, rest)]
    return {executable.key: executable for executable in built}


def can_be_compiled_elsewhere(program: Program) -> bool:
    """Return whether this process could load a program that another one compiles."""
    stored = stored_programs(OPTIONS)
    return stored is not None and stored.lacks(program)


def lower(program: Program) -> jax.stages.Lowered:
    """Trace and lower a program that runs on one device or mesh."""

    def run(*arguments: Any) -> Any:  # JAX keeps a trace for as long as the function lives
        return program.function(*arguments)

    run.__name__ = program.key.identifier  # seen in compilation cache and profiles
    if program.placement is None:
        jitted = jax.jit(run, donate_argnums=program.donated)
    else:
        jitted = jax.jit(run, donate_argnums=program.donated, out_shardings=program.placement)
    return jitted.lower(*program.arguments)


@isolated_jax_config()
def _compile(program: Program, stored: StoredPrograms | None) -> Executable:
    if program.call is not None:
        parts = tuple(_compile(part, stored) for part in program.parts)
        donated = sum(part.donated_bytes for part in parts)
        seconds = sum(part.seconds for part in parts)
        cached = all(part.cached for part in parts)
        return Executable(program, parts[0].compiled, donated, seconds, parts, cached)
    started = time.perf_counter()
    read = reads()
    compiled = stored.load(program) if stored else None
    if compiled is None:
        lowered = lower(program)
        if stored:
            compiled = stored.compile(program, lowered)
        else:
            compiled = lowered.compile(compiler_options=OPTIONS)
    donated = 0
    for x in jax.tree.leaves([program.arguments[i] for i in program.donated]):
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        donated += math.prod(shape) * x.dtype.itemsize  # on one device
    seconds = time.perf_counter() - started
    built = Executable(program, compiled, donated, seconds, cached=reads() > read)
    if built.aliased_bytes < donated:
        raise PlanError(
            f"program {program.key} would copy {donated - built.aliased_bytes} of {donated}"
            " bytes of its state in every call; this is a defect, please report it with the plan"
        )
    return built


class CompiledPrograms:
    """The programs of a plan, and those of them that are compiled.

    Any thread may compile and read. The executables may be shared with other engines of the same
    plan and models.

    Attributes:
      variants: the programs that each variant needs, in the order to compile them in. A program
        may belong to more than one variant.
      seconds: time spent compiling and reading.
      compile_seconds: time spent on programs that no cache had, together; several take their time
        at once.
      compiled: number of those.
      label: the model's name, for log lines.

    Args:
      build: compiles programs, as `compile_programs` does; may be replaced later.
      kernels: the plan's.
    """

    def __init__(
        self,
        programs: Mapping[ProgramKey, Program],
        build: Callable[..., dict[ProgramKey, Executable]] = compile_programs,
        kernels: str = "xla",
    ):
        self.programs = dict(programs)
        self.build = build
        # Programs that decide on a GPU which kernels others use come first: `compile_programs`.
        ordered = sorted(self.programs, key=lambda key: (key.step not in TIMED, str(key)))
        self.variants = {v: tuple(x for x in ordered if v in x.needed_by(kernels)) for v in Variant}
        self.executables: dict[ProgramKey, Executable] = {}
        self.seconds = 0.0
        self.compile_seconds = 0.0
        self.compiled = 0
        self.label = ""
        self._wanted: dict[ProgramKey, None] = {}  # requested programs, compiled or not
        self._current: set[ProgramKey] = set()  # programs that are being compiled
        self._errors: dict[ProgramKey, str] = {}
        self._made = 0
        self._ended: set[ProgramKey] = set()  # ready ones of the current call
        self._count = ShownCount(0)
        self._lock = threading.Lock()

    def missing(self, variants: Iterable[Variant]) -> list[ProgramKey]:
        """Return the programs of the variants that are not compiled."""
        return [key for key in self.keys(variants) if key not in self.executables]

    def keys(self, variants: Iterable[Variant]) -> list[ProgramKey]:
        """Return the programs of the variants, each once."""
        needed: dict[ProgramKey, None] = {}
        for variant in variants:
            needed |= dict.fromkeys(self.variants[variant])
        return [key for key in needed if key in self.programs]

    def want(self, variants: Iterable[Variant]) -> None:
        """Count the variants' programs among those that will be compiled."""
        for variant in variants:
            self._wanted |= dict.fromkeys(self.keys([variant]))

    @property
    def pending(self) -> int:
        """How many programs will be compiled, and are not yet."""
        return sum(key not in self.executables for key in list(self._wanted))

    def wanted(self, variant: Variant) -> bool:
        """Return whether all programs of a variant are among those that will be compiled."""
        return all(key in self._wanted for key in self.keys([variant]))

    def compile(self, variants: Iterable[Variant], *, workers: int = WORKERS) -> float:
        """Compile the variants' missing programs, `workers` at a time; return the seconds it took.

        Raises:
          PlanError: a program would copy its donated state.
        """
        variants = list(variants)
        if not self.missing(variants):
            return 0.0
        self.want(variants)
        with self._lock:
            return self._compile(self.missing(variants), workers)

    def compile_keys(self, keys: Iterable[ProgramKey], *, workers: int = WORKERS) -> None:
        """Compile programs that are missing, `workers` at a time; errors as for `compile`."""
        keys = list(keys)
        self._wanted |= dict.fromkeys(keys)
        with self._lock:
            self._compile([key for key in keys if key not in self.executables], workers)

    def compile_next(self, variants: Iterable[Variant]) -> None:
        """Compile the first missing program of the variants, in this thread."""
        with self._lock:
            self._compile(self.missing(variants)[:1], 1)

    def next_program(self, variants: Iterable[Variant]) -> Program | None:
        """Return the first missing program of the variants."""
        return next((self.programs[key] for key in self.missing(variants)), None)

    def estimate_s(self, variants: Iterable[Variant]) -> float:
        """Return the seconds that compiling the variants may take, from the average so far."""
        each = self.seconds / self._made if self._made else GUESS
        return each * len(self.missing(variants))

    @property
    def progress(self) -> dict[str, dict[str, Any]]:
        """For each variant with programs, its state and how many of them are compiled."""
        return {
            variant.value: self._progress_of(variant) for variant in Variant if self.keys([variant])
        }

    def _progress_of(self, variant: Variant) -> dict[str, Any]:
        keys = self.keys([variant])
        missing = self.missing([variant])
        counts: dict[str, Any] = {"compiled": len(keys) - len(missing), "of": len(keys)}
        errors = [self._errors[key] for key in missing if key in self._errors]
        if not missing:
            state = "ready"
        elif not self._current.isdisjoint(missing):
            state = "compiling"
        elif errors:
            state = "failed"
            counts["error"] = errors[0]
        else:
            state = "waiting" if all(key in self._wanted for key in missing) else "on demand"
        return {"state": state} | counts

    def _compile(self, keys: list[ProgramKey], workers: int) -> float:
        started = time.perf_counter()
        self._count = ShownCount(len(keys), "programs")
        try:
            programs = [self.programs[key] for key in keys]
            made = self.build(programs, workers=workers, begun=self._begin, ended=self._end)
            self.executables |= made
            self._made += len(made)
        except Exception as error:
            kind = "" if isinstance(error, DFlashError) else f"{type(error).__name__}: "
            self._errors |= dict.fromkeys(keys, f"{kind}{error}")
            raise
        finally:
            self._current.clear()
            self._ended.clear()
            seconds = time.perf_counter() - started
            self.seconds += seconds
        if seconds > LONG:
            trim_memory()
        return seconds

    def _begin(self, program: Program) -> None:
        """Note that a program is about to be compiled or read."""
        self._count(1 if self._current else 0)
        self._current.add(program.key)

    def _end(self, key: ProgramKey, cached: bool, seconds: float) -> None:
        """Count and log a program that is ready."""
        self._ended.add(key)
        if not cached:
            self.compiled += 1
            self.compile_seconds += seconds
        wanted = list(self._wanted)
        label = f"{self.label}: " if self.label else ""
        place = sum(x in self.executables for x in wanted) + len(self._ended)
        how = "read from the cache" if cached else f"compiled in {seconds:.1f} s"
        log.info("%sprogram %d of %d %s: %s", label, place, len(wanted), how, key)
