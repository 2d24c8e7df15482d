"""Structured output: a JSON schema, a regular expression, a grammar or a list of choices.

A grammar gives a mask of allowed tokens for each position, one bit per token. After drafting, the
host advances the grammar along the drafted tokens and passes one mask per position to the verifier,
so that speculative output equals the output of constrained decoding token by token.
"""

import dataclasses
import hashlib
import importlib.util
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from dflash_jax.engine.request import Request
from dflash_jax.engine.sampling_params import Structure
from dflash_jax.engine.structured.process import KEPT, SECONDS, SHORT, GrammarTrials
from dflash_jax.engine.structured.refusals import (
    OF_WHOLE,
    UsableSchema,
    schema_refusal,
    text_refusal,
    usable,
)
from dflash_jax.engine.structured.sources import Source, schema_source, source_of
from dflash_jax.engine.structured.trial_process import REFUSED, compiled, reason
from dflash_jax.engine.vocabulary import calls_grammar
from dflash_jax.errors import RequestError, StructureError, install_hint
from dflash_jax.graph.keys import Variant
from dflash_jax.tokenizer import Tokenizer

MASK_SECONDS = 5.0  # that the masks of one row may take; they take milliseconds
Build = Callable[[tuple[Variant, ...]], object]  # compiles missing programs


class Grammars:
    """Compiles the grammars of requests for one tokenizer.

    A grammar is compiled in a separate process first, and here only if that succeeded, because
    llguidance crashes its process if a grammar exhausts the stack.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, eos: Sequence[int]):
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._eos = list(eos)
        self.seconds = SECONDS  # that compiling one grammar may take; may be changed
        self.trusted = False  # whether grammars come from a process that has tried them
        self._lock = threading.Lock()
        self._shared: tuple[Any, GrammarTrials] | None = None  # the first is an LLTokenizer
        self._verdicts: dict[bytes, str | None] = {}  # why structures are refused, the oldest first

    @property
    def available(self) -> bool:
        """Whether grammars can be compiled here."""
        known = bool(self._tokenizer and self._eos)
        return known and importlib.util.find_spec("llguidance") is not None

    def make(self, structure: Structure) -> "Grammar":
        """Return a grammar at its beginning; see `SamplingParams.structured`.

        Raises:
          RequestError: no tokenizer or no llguidance.
          StructureError: the structure is not understood, matches no text, is too large, takes too
            long to compile, or does not begin with the text that the output continues.
        """
        tokenizer, trials = self._compilers()
        key = _key(structure)
        if (reason := self._verdicts.get(key)) is not None:
            raise StructureError(reason)
        try:
            source = source_of(structure)
            self._check_choices(structure)
        except RequestError as error:
            raise StructureError(str(error)) from error
        try:
            if not self.trusted:
                trials.check(source.grammar, self.seconds, source.parts)
        except RequestError as error:
            reason = self._explained(source, str(error))
            if trials.knows(source.grammar):  # otherwise the process failed
                self._remember(key, reason)
            raise StructureError(reason) from error
        matcher, error = compiled(tokenizer, source.grammar)
        if error is not None:
            raise StructureError(error)
        self._remember(key, None)
        if source.prefix:
            self._continue(matcher, tokenizer, source)
        return Grammar(matcher)

    def knows(self, structure: Structure) -> bool:
        """Return whether `make` saw the structure before, so that it needs no trial."""
        return _key(structure) in self._verdicts

    def decide(self, structure: Structure) -> bool:
        """Try a structure for at most a second; return whether `make` will take no longer.

        It takes longer to explain why a schema is refused, unless that was explained before.
        """
        if self.knows(structure):
            return True
        try:
            _, trials = self._compilers()
            source = source_of(structure)
            quick = trials.decide(source.grammar, self.seconds, source.parts)
        except RequestError:
            return True
        return quick and (source.schema is None or trials.refusal(source.grammar) is None)

    def brief_refusal(self, structure: Structure) -> StructureError | None:
        """Return the error of a structure that `decide` saw refused; None if it did not.

        Unlike that of `make`, it takes no time, and does not say which part is the cause.
        """
        try:
            _, trials = self._compilers()
            source = source_of(structure)
        except RequestError as error:
            return StructureError(str(error))
        error = trials.refusal(source.grammar)
        return None if error is None else StructureError(self._explained(source, error, brief=True))

    def _remember(self, key: bytes, reason: str | None) -> None:
        with self._lock:
            self._verdicts[key] = reason
            while len(self._verdicts) > KEPT:
                del self._verdicts[next(iter(self._verdicts))]

    def deadline(self) -> float:
        """Return when short trials that begin now have to end, by `time.monotonic`.

        Raises:
          RequestError: grammars cannot be compiled here.
        """
        _, trials = self._compilers()
        trials.start()
        return time.monotonic() + SHORT

    def usable_schema(self, schema: Mapping[str, Any], end: float) -> UsableSchema:
        """Return a tool's schema without values that grammars do not support; see `usable`.

        Args:
          end: from `deadline`; what is not tried until then is taken as supported.

        Raises:
          RequestError: grammars cannot be compiled here.
        """
        return usable(schema, self._attempt(end, strict=False))

    def _attempt(self, end: float, *, strict: bool) -> Callable[..., str | None]:
        """Return a function that returns why a schema is refused; None if it is not, or unknown.

        Args:
          strict: as for `bounded`: the schema is of an answer, and was refused as a whole.
        """
        _, trials = self._compilers()

        def attempt(schema: Mapping[str, Any]) -> str | None:
            if (left := end - time.monotonic()) <= 0:
                return None
            try:
                source = schema_source(schema, strict=strict)
            except RequestError as error:
                return str(error)
            return trials.verdict(source, left, long=strict)

        return attempt

    def _check_choices(self, structure: Structure) -> None:
        """Check that no choice contains a special token, which would be markup in the output.

        Raises:
          RequestError: one does.
        """
        assert self._tokenizer is not None
        choices = structure.get("choice", ())
        together = "\n".join(choices)  # there may be thousands
        specials = [text for text in self._tokenizer.special_texts if text and text in together]
        for choice in choices if specials else ():
            contained = [text for text in specials if text in choice]
            if contained:
                raise RequestError(
                    f"the choice {choice[:80]!r} contains {contained[0]!r}, a special token of this"
                    " model, which is no text; leave it out"
                )

    def _explained(self, source: Source, error: str, *, brief: bool = False) -> str:
        """Return why a structure is refused, in words of the request.

        Args:
          brief: do not look for the part of a schema that is the cause.
        """
        if not error.startswith(REFUSED):
            return error
        whole = source.schema is None or any(text in error for text in OF_WHOLE)
        if source.kind == "json" and (brief or whole):
            return schema_refusal({}, error, lambda _: None)
        if source.schema is None:
            return text_refusal(source.kind, error)
        attempt = self._attempt(time.monotonic() + SHORT, strict=True)
        return schema_refusal(source.schema, error, attempt)

    def _continue(self, matcher: Any, tokenizer: Any, source: Source) -> None:
        """Advance a new grammar by the text that the output continues.

        Raises:
          StructureError: the text is not the beginning of any that the grammar matches.
        """
        text = source.prefix.lstrip() if source.kind == "json" else source.prefix
        ids = tokenizer.tokenize_str(text)
        if matcher.try_consume_tokens(ids) < len(ids) or matcher.is_error():
            raise StructureError(
                f"the last message, {source.prefix[:80]!r}, is not the beginning of an output that"
                " follows the structure; leave it out, or begin as the structure does",
                of_prompt=True,
            )

    def close(self) -> None:
        """End the processes that try grammars; `make` and `decide` start them again."""
        if self._shared is not None:
            self._shared[1].close()

    def _compilers(self) -> tuple[Any, GrammarTrials]:
        """Return llguidance's view of the tokenizer, and the trials; raises as `make` does."""
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
        with self._lock:
            if self._shared is None:
                text = self._tokenizer.core.to_str()
                view = llguidance.LLTokenizer(text, n_vocab=self._vocab, eos_token=self._eos)
                self._shared = view, GrammarTrials(text, self._vocab, self._eos)
            return self._shared


class Grammar:
    """The state of one request's grammar."""

    def __init__(self, matcher: Any):
        self._matcher = matcher
        self._gave_up: str | None = None  # why; the matcher is in use for ever then

    @property
    def finished(self) -> bool:
        """Whether only an end token may follow."""
        return self._gave_up is not None or self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the grammar failed, or None; it is `finished` then."""
        if self._gave_up is not None:
            return self._gave_up
        return reason(self._matcher) if self._matcher.is_error() else None

    def give_up(self, reason: str) -> None:
        """Fail, as a mask does not come."""
        self._gave_up = reason

    def leaves_no_choice(self) -> bool:
        """Return whether the grammar allows a single token here."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return int(np.bitwise_count(mask).sum()) == 1

    def accept(self, ids: Sequence[int]) -> None:
        """Advance by emitted tokens."""
        if self._gave_up is None:
            self._matcher.consume_tokens(list(ids))

    def fill(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        """Write a row's masks, uint32 [T, W]: position i follows the first i drafts.

        Positions after a draft the grammar forbids are not written, as they cannot be reached.
        """
        if self._gave_up is not None:
            return
        walked = 0
        for place, row in enumerate(masks):
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if place >= len(drafts) or not self._matcher.try_consume_tokens([drafts[place]]):
                break
            walked += 1
        if walked:
            self._matcher.rollback(walked)


def _key(structure: Structure) -> bytes:
    try:
        return hashlib.sha256(repr(structure).encode(errors="surrogatepass")).digest()
    except RecursionError:
        return b""


Made = Callable[[Structure | None, Grammar | None, str], object]
MaskTask = tuple[Grammar, np.ndarray, list[int]]  # a grammar, and the arguments of its `fill`


class CallGrammars:
    """Compiles grammars of calls that are decoded again, in a thread while the row waits.

    It also builds the programs of constrained decoding.
    """

    def __init__(
        self,
        grammars: Grammars,
        build: Build,
        tokenizer: Tokenizer | None,
    ):
        self.grammars = grammars
        self._build = build
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "call-grammars")  # started when first used

    def begin(self, request: Request, before: str, made: Made) -> None:
        """Begin to compile the grammar of a request's calls.

        Args:
          before: the beginning of a call, which is not decoded again.
          made: called in the thread with the structure and its grammar, or with the error.
        """
        self._thread.submit(self._run, request, before, made)

    def _run(self, request: Request, before: str, made: Made) -> None:
        try:
            structure = self.structure(request, before)
            grammar = self.make(structure)
        except BaseException as error:  # else the request would wait for ever
            made(None, None, f"{error}")
        else:
            made(structure, grammar, "")

    def structure(self, request: Request, before: str = "") -> Structure:
        """Return the structure of a request's calls, for `SamplingParams.structured`.

        Raises:
          RequestError: no grammar can follow the schema of any tool.
        """
        assert self._tokenizer is not None
        end = self.grammars.deadline()
        tools = []
        for tool in request.vocabulary.tools:
            usable = self.grammars.usable_schema(tool.parameters, end)
            if usable.refused is None:
                tools.append(dataclasses.replace(tool, parameters=usable.schema))
        if not tools:
            raise RequestError("no grammar can follow the schema of any declared tool")
        vocabulary = dataclasses.replace(request.vocabulary, tools=tuple(tools))
        return {"grammar": calls_grammar(vocabulary, self._tokenizer), "prefix": before}

    def make(self, structure: Structure) -> Grammar:
        """Return the grammar of a structure, once the programs that it needs are compiled.

        Raises:
          RequestError: it cannot be compiled.
        """
        grammar = self.grammars.make(structure)
        self._build((Variant.CONSTRAINED, Variant.RECOVERY))
        return grammar


class MaskThread:
    """A thread that fills masks. It is abandoned, and replaced, if a grammar does not return.

    The compiler's code cannot be interrupted. Work on a mask is bounded, so that only an error of
    the compiler makes it take so long.

    Args:
      gives_up: whether a grammar that does not return is given up.
    """

    def __init__(self, *, gives_up: bool = True) -> None:
        self._gives_up = gives_up
        self._batches: queue.SimpleQueue[_Batch | None] | None = None

    def fill(self, tasks: Sequence[MaskTask]) -> None:
        """Fill the masks of rows; a grammar that takes longer than `MASK_SECONDS` may give up."""
        left = list(tasks)
        while left:
            batch = _Batch(left)
            if self._batches is None:
                self._batches = queue.SimpleQueue()
                weakref.finalize(self, self._batches.put, None)
                arguments = (self._batches,)
                threading.Thread(target=_run, args=arguments, name="masks", daemon=True).start()
            self._batches.put(batch)
            if batch.wait(MASK_SECONDS if self._gives_up else None):
                return
            stuck = batch.abandon()
            left[stuck][0].give_up(f"its masks took longer than {MASK_SECONDS:g} s")
            left = left[stuck + 1 :]
            self._batches = None


class _Batch:
    """Tasks of one step, and their progress."""

    def __init__(self, tasks: Sequence[MaskTask]):
        self._tasks = tasks
        self._done = 0  # tasks
        self._abandoned = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # of the three above
        self._ended = threading.Event()

    def run(self) -> None:
        """Fill the masks, unless the batch is abandoned meanwhile; in the thread."""
        try:
            for grammar, masks, drafts in self._tasks:
                grammar.fill(masks, drafts)
                with self._lock:
                    self._done += 1
                    if self._abandoned:
                        return
        except BaseException as error:  # raised where the batch is waited for
            self._error = error
        self._ended.set()

    def wait(self, seconds: float | None) -> bool:
        """Wait for the masks; return False if a task takes longer than some seconds."""
        seen = -1
        while not self._ended.wait(seconds):
            if self._done == seen:
                return False
            seen = self._done
        if self._error is not None:
            raise self._error
        return True

    def abandon(self) -> int:
        """Start no further task; return the number of the task that does not end."""
        with self._lock:
            self._abandoned = True
            return min(self._done, len(self._tasks) - 1)


def _run(batches: "queue.SimpleQueue[_Batch | None]") -> None:
    while (batch := batches.get()) is not None:
        batch.run()
        del batch  # it holds grammars and masks
