"""Declare, plan, lower, compile: the only package that turns functions into executables."""

from dflash_jax.compiler.build import Executable, compile_programs, jit
from dflash_jax.compiler.cache import enable_compilation_cache
from dflash_jax.compiler.keys import ProgramKey, Step, Variant
from dflash_jax.compiler.programs import Program, declare
from dflash_jax.compiler.resolve import resolve

__all__ = [
    "Executable",
    "Program",
    "ProgramKey",
    "Step",
    "Variant",
    "compile_programs",
    "declare",
    "enable_compilation_cache",
    "jit",
    "resolve",
]
