"""Structured output: a JSON schema, a regular expression, a grammar or a list of choices.

A grammar gives a mask of allowed tokens for each position, one bit per token. After drafting, the
host advances the grammar along the drafted tokens and passes one mask per position to the verifier,
so that speculative output equals the output of constrained decoding token by token.
"""

import importlib.util
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.engine.sampling_params import Structure
from dflash_jax.engine.structured.process import SECONDS, GrammarTrials
from dflash_jax.engine.structured.worker import compiled, reason
from dflash_jax.errors import RequestError, install_hint
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.grammar import bounded
from dflash_jax.tool_parsers.grammar_bounds import check_lark, check_schema, parsed_schema

KINDS = ("json", "regex", "choice", "grammar")


class Grammars:
    """Compiles the grammars of requests for one tokenizer.

    A grammar is compiled in a separate process first, and here only if that succeeded, because
    llguidance crashes its process if a grammar exhausts the stack.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, eos: Sequence[int]):
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, list(eos)
        self.seconds = SECONDS  # that compiling one grammar may take; may be changed
        self._lock = threading.Lock()
        self._shared: tuple[Any, GrammarTrials] | None = None  # the first is an LLTokenizer

    @property
    def available(self) -> bool:
        """Whether grammars can be compiled here."""
        known = bool(self._tokenizer and self._eos)
        return known and importlib.util.find_spec("llguidance") is not None

    def make(self, structure: Structure) -> "Grammar":
        """Return a grammar at its beginning; see `SamplingParams.structured`.

        Raises:
          RequestError: no tokenizer, no llguidance, or a structure that is not understood, is too
            large, or takes too long to compile.
        """
        source, tokenizer, trials = self._read(structure)
        trials.check(source, self.seconds)
        matcher, error = compiled(tokenizer, source)
        if error is not None:
            raise RequestError(error)
        return Grammar(matcher)

    def decide(self, structure: Structure) -> bool:
        """Try a structure for at most a second; return whether `make` will take no longer.

        A structure that `make` refuses takes no time.
        """
        try:
            source, _, trials = self._read(structure)
            return trials.decide(source, self.seconds)
        except RequestError:
            return True

    def close(self) -> None:
        """End the processes that try grammars; `make` and `decide` start them again."""
        if self._shared is not None:
            self._shared[1].close()

    def _read(self, structure: Structure) -> tuple[str, Any, GrammarTrials]:
        """Return a structure in llguidance's form, its view of the tokenizer, and the trials."""
        if self._tokenizer is None:
            raise RequestError("structured output needs a tokenizer, and this model ships none")
        if not self._eos:
            raise RequestError("structured output needs an end token, and this model names none")
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(
                f"structured output needs llguidance; {install_hint('structured')}"
            ) from error
        around = structure.get("around") if isinstance(structure, Mapping) else None
        if around is not None:
            structure = {kind: value for kind, value in structure.items() if kind != "around"}
        source = _source(structure, llguidance.LLMatcher)
        if around is not None:
            check_lark(around)
            answer = {"lark_grammar": source}
            if source.startswith("{"):
                [answer] = json.loads(source)["grammars"]
            grammars = [{"lark_grammar": around}, answer | {"name": "answer"}]
            source = json.dumps({"grammars": grammars})
        with self._lock:
            if self._shared is None:
                text = self._tokenizer.core.to_str()
                view = llguidance.LLTokenizer(text, n_vocab=self._vocab, eos_token=self._eos)
                self._shared = view, GrammarTrials(text, self._vocab, self._eos)
            return source, self._shared[0], self._shared[1]


class Grammar:
    """The state of one request's grammar."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """Whether only an end token may follow."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the grammar failed, or None; it is `finished` then."""
        return reason(self._matcher) if self._matcher.is_error() else None

    def leaves_no_choice(self) -> bool:
        """Return whether the grammar allows a single token here."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return int(np.bitwise_count(mask).sum()) == 1

    def accept(self, ids: Sequence[int]) -> None:
        """Advance by emitted tokens."""
        self._matcher.consume_tokens(list(ids))

    def fill(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        """Write a row's masks, uint32 [T, W]: position i follows the first i drafts.

        Positions after a draft the grammar forbids are not written, as they cannot be reached.
        """
        walked = 0
        for place, row in enumerate(masks):
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if place >= len(drafts) or not self._matcher.try_consume_tokens([drafts[place]]):
                break
            walked += 1
        if walked:
            self._matcher.rollback(walked)


def _source(structure: Any, matcher: Any) -> str:
    """Return a structure as a grammar of llguidance."""
    if not isinstance(structure, Mapping) or len(structure) != 1 or set(structure) - set(KINDS):
        raise RequestError(
            f"structured is {structure!r}; expected a mapping with one of {', '.join(KINDS)}"
        )
    ((kind, value),) = structure.items()
    if kind == "json" and isinstance(value, str | Mapping):
        try:
            schema = parsed_schema(value) if isinstance(value, str) else value
            check_schema(schema)
            schema = bounded(schema, strict=True) if isinstance(schema, Mapping) else schema
            return matcher.grammar_from_json_schema(json.dumps(schema))
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"the JSON schema is not understood: {error}") from error
    if kind in ("regex", "grammar") and isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the structure is not understood: {error}") from error
        if kind == "regex":
            return matcher.grammar_from_regex(value)
        check_lark(value)
        return matcher.grammar_from_lark(value)
    choices = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if kind == "choice" and choices and all(isinstance(x, str) for x in value):
        return matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
    expected = {"json": "a schema", "choice": "a list of texts"}.get(kind, "a text")
    raise RequestError(f"structured {kind} is {value!r}; expected {expected}")
