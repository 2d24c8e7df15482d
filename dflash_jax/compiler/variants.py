"""Variants of a plan's programs, and what of them is compiled."""

import enum
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_jax.compiler.build import TIMED, WORKERS, Executable, compile_programs
from dflash_jax.compiler.programs import GREEDY, MASKED, SAMPLED, SHAPED, Program
from dflash_jax.errors import DFlashError
from dflash_jax.utils.allocator import give_back

log = logging.getLogger("dflash_jax.compiler")
LONG = 5.0  # seconds of compiling, after which free memory is given back to the system
GUESS = 5.0  # seconds that a program takes to compile, until one was


class Variant(enum.StrEnum):
    """A group of programs that one kind of request needs, the likeliest kind first."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    FORCED_TOKENS = "forced_tokens"  # recovery
    CONSTRAINED = "constrained"  # structured output
    PENALIZED = "penalized"  # penalties, biases, log-probabilities of the output
    PROMPT_LOGPROBS = "prompt_logprobs"


OF_LANE = {
    GREEDY: Variant.GREEDY,
    SAMPLED: Variant.SAMPLED,
    SHAPED: Variant.PENALIZED,
    MASKED: Variant.CONSTRAINED,
}
SINGLE = {  # variants that programs belong to by name, whatever their lanes
    "forced": Variant.FORCED_TOKENS,
    "replace": Variant.FORCED_TOKENS,
    "score": Variant.PROMPT_LOGPROBS,
}


def programs_by_variant(programs: Iterable[Program]) -> dict[Variant, tuple[str, ...]]:
    """Names of the programs each variant needs, in the order they have to be compiled in.

    A program may belong to several variants.
    """
    found: dict[Variant, list[str]] = {variant: [] for variant in Variant}
    # Programs that decide on a GPU which kernels others take come first, see `compile_programs`.
    for program in sorted(programs, key=lambda p: (p.name.split("_")[0] not in TIMED, p.name)):
        single = SINGLE.get(program.name)
        for variant in [single] if single else [OF_LANE[lane] for lane in program.lanes]:
            found[variant].append(program.name)
    return {variant: tuple(names) for variant, names in found.items()}


class CompiledPrograms:
    """The programs of a plan, and the executables made of them so far.

    Any thread may compile and read. The executables may be shared with other engines of the same
    plan and models.

    Attributes:
      programs: everything the plan may need, by name.
      executables: what was compiled so far, by name.
      seconds: spent compiling.
      label: the model's name, for log lines.
    """

    def __init__(self, programs: Mapping[str, Program]):
        self.programs = dict(programs)
        self.executables: dict[str, Executable] = {}
        self.seconds = 0.0
        self.label = ""
        self._wanted: dict[str, None] = {}  # programs that were asked for, compiled or not
        self._current: set[str] = set()  # programs that are being compiled
        self._errors: dict[str, str] = {}
        self._compiled = 0
        self._lock = threading.Lock()

    @property
    def variants(self) -> dict[Variant, tuple[str, ...]]:
        """Names of the programs of each variant."""
        return programs_by_variant(self.programs.values())

    def missing(self, variants: Iterable[Variant]) -> list[str]:
        """Names of the programs that variants lack."""
        return [name for name in self.names(variants) if name not in self.executables]

    def names(self, variants: Iterable[Variant]) -> list[str]:
        """Names of the programs of variants, each once."""
        known = self.variants
        return list(dict.fromkeys(name for variant in variants for name in known[variant]))

    def want(self, variants: Iterable[Variant]) -> None:
        """Count the variants' programs among those that are going to be compiled."""
        self._wanted |= dict.fromkeys(self.names(variants))

    def compile(self, variants: Iterable[Variant], *, workers: int = WORKERS) -> float:
        """Compile what variants lack, in this thread; return the seconds it took.

        Args:
          workers: programs to compile at the same time.

        Raises:
          PlanError: a program would copy its state.
        """
        variants = list(variants)
        if not self.missing(variants):
            return 0.0
        self.want(variants)
        with self._lock:
            return self._compile(self.missing(variants), workers)

    def compile_next(self, names: Iterable[str]) -> None:
        """Compile the first of these programs that is not compiled yet, in this thread."""
        with self._lock:
            missing = [name for name in names if name not in self.executables]
            self._compile(missing[:1], 1)

    def estimate_s(self, variants: Iterable[Variant]) -> float:
        """Seconds that compiling what variants lack may take, by what it took so far."""
        each = self.seconds / self._compiled if self._compiled else GUESS
        return each * len(self.missing(variants))

    @property
    def progress(self) -> dict[str, dict[str, Any]]:
        """For each variant its state, how many of its programs are compiled, and of how many."""
        return {variant.value: self._progress_of(variant) for variant in Variant}

    def _progress_of(self, variant: Variant) -> dict[str, Any]:
        names, missing = self.names([variant]), self.missing([variant])
        found: dict[str, Any] = {"compiled": len(names) - len(missing), "of": len(names)}
        errors = [self._errors[name] for name in missing if name in self._errors]
        if not missing:
            state = "ready"
        elif not self._current.isdisjoint(missing):
            state = "compiling"
        elif errors:
            state, found["error"] = "failed", errors[0]
        else:
            state = "waiting" if all(name in self._wanted for name in missing) else "on demand"
        return {"state": state} | found

    def _compile(self, names: list[str], workers: int) -> float:
        started = time.perf_counter()
        try:
            made = compile_programs(
                (self.programs[name] for name in names), workers=workers, begun=self._begin
            )
            self.executables |= made
            self._compiled += len(made)
        except Exception as error:
            kind = "" if isinstance(error, DFlashError) else f"{type(error).__name__}: "
            self._errors |= dict.fromkeys(names, f"{kind}{error}")
            raise
        finally:
            self._current.clear()
            seconds = time.perf_counter() - started
            self.seconds += seconds
        if seconds > LONG:
            give_back()
        return seconds

    def _begin(self, program: Program) -> None:
        """Note that a program is about to be compiled."""
        self._current.add(program.name)
        wanted = list(self._wanted)
        done = sum(name in self.executables for name in wanted)
        label = f"{self.label}: " if self.label else ""
        place = done + len(self._current)
        log.info("%scompiling program %d of %d: %s", label, place, len(wanted), program.name)
