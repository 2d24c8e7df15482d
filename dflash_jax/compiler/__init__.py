"""Declare, plan, lower, compile: the only place that turns functions into executables."""

from dflash_jax.compiler.build import Executable, compile_programs, jit
from dflash_jax.compiler.cache import enable_compilation_cache
from dflash_jax.compiler.plan import Plan
from dflash_jax.compiler.programs import Program, declare
from dflash_jax.compiler.resolve import resolve

__all__ = [
    "Executable",
    "Plan",
    "Program",
    "compile_programs",
    "declare",
    "enable_compilation_cache",
    "jit",
    "resolve",
]
