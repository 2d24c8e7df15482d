"""Compile grammars of calls that are decoded again, in a thread while the row waits."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from dflash_jax.compiler.build import CompiledPrograms
from dflash_jax.compiler.keys import Variant
from dflash_jax.engine.request import Request
from dflash_jax.engine.structured.grammars import Grammar, Grammars
from dflash_jax.engine.vocabulary import calls_grammar
from dflash_jax.tokenizer import Tokenizer


class HasPrograms(Protocol):
    """The owner of an engine's compiled programs, which may be replaced."""

    compiled: CompiledPrograms


class CallGrammars:
    """Compiles grammars of declared tools, and the programs of constrained decoding if missing."""

    def __init__(self, grammars: Grammars, runner: HasPrograms, tokenizer: Tokenizer | None):
        self.grammars, self._runner, self._tokenizer = grammars, runner, tokenizer
        self._thread = ThreadPoolExecutor(1, "call-grammars")  # started when first used

    def begin(self, request: Request) -> "Future[Grammar]":
        """Begin to compile the grammar of a request's calls."""
        return self._thread.submit(self._make, request)

    def _make(self, request: Request) -> Grammar:
        assert self._tokenizer is not None
        grammar = self.grammars.make({"grammar": calls_grammar(request.words, self._tokenizer)})
        needed = (Variant.CONSTRAINED, Variant.FORCED_TOKENS)
        self._runner.compiled.compile(needed, workers=1)
        return grammar
