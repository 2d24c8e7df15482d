"""Compile grammars of calls that are decoded again, in a thread while the row waits."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dflash_jax.engine.request import Request
from dflash_jax.engine.structured.grammars import Grammar, Grammars
from dflash_jax.engine.vocabulary import calls_grammar
from dflash_jax.graph.keys import Variant
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.tool_schema import Tool

Build = Callable[[tuple[Variant, ...]], object]  # compiles missing programs


class CallGrammars:
    """Compiles grammars of declared tools, and the programs of constrained decoding if missing."""

    def __init__(self, grammars: Grammars, build: Build, tokenizer: Tokenizer | None):
        self.grammars, self._build, self._tokenizer = grammars, build, tokenizer
        self._thread = ThreadPoolExecutor(1, "call-grammars")  # started when first used

    def begin(self, request: Request, before: str = "") -> "Future[Grammar]":
        """Begin to compile the grammar of a request's calls.

        Args:
          before: the beginning of a call, which is not decoded again.
        """
        return self._thread.submit(self._make, request, before)

    def _make(self, request: Request, before: str = "") -> Grammar:
        assert self._tokenizer is not None
        end = self.grammars.deadline()
        tools = tuple(self._usable(tool, end) for tool in request.words.tools)
        words = dataclasses.replace(request.words, tools=tools)
        grammar = self.grammars.make(
            {"grammar": calls_grammar(words, self._tokenizer), "prefix": before}
        )
        self._build((Variant.CONSTRAINED, Variant.RECOVERY))
        return grammar

    def _usable(self, tool: Tool, end: float) -> Tool:
        """Return a tool without values in its schema that grammars do not support."""
        schema, _, _ = self.grammars.usable_schema(tool.parameters, end)
        return dataclasses.replace(tool, parameters=schema)
