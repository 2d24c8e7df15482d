"""Compile users' grammars in separate processes first, where crashes and delays do no harm.

A process starts with the first grammar and serves one grammar at a time. It is killed when a
grammar exceeds its time, and the next grammar starts another one.
"""

import collections
import hashlib
import threading
from collections.abc import Sequence

from dflash_jax.engine.structured import trial_process
from dflash_jax.errors import RequestError
from dflash_jax.utils.limited_process import MEMORY, ClosedError, LimitedProcess

SECONDS = 30.0  # most seconds that a grammar may take, by default
SHORT = 1.0  # most seconds of a short trial; only hostile grammars take longer
Part = tuple[str, str]  # a name for errors, and a grammar
KEPT = 2048  # most grammars whose verdict is remembered


class GrammarTrials:
    """Decides which grammars of users may be compiled, for one tokenizer, and remembers it.

    There are two processes, each started by the first grammar that needs it. A trial takes at most
    `SHORT` seconds in the first, so that no grammar waits long for others there. A grammar that
    needs more time is tried in the second.

    Args:
      tokenizer: text of a tokenizer.json.
      vocab: number of its ids.
      eos: its end tokens.
      memory: most bytes that a trial may take.
    """

    def __init__(self, tokenizer: str, vocab: int, eos: Sequence[int], memory: int = MEMORY):
        self._short = GrammarProcess(tokenizer, vocab, eos, memory)
        self._long = GrammarProcess(tokenizer, vocab, eos, memory)
        self._lock = threading.Lock()
        self._verdicts: collections.OrderedDict[bytes, str | None] = collections.OrderedDict()
        # Grammars for which a short trial was too short, and that have no verdict yet.
        self._slow: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def decide(self, grammar: str, seconds: float, parts: Sequence[Part] = ()) -> bool:
        """Try a grammar for at most `SHORT` seconds; return whether `check` will take no longer.

        Args:
          grammar: the grammar in llguidance's own form.
          seconds: most seconds that it may take in all.
          parts: names and grammars of parts to try by themselves, as they are reached only later.
        """
        key = _key(grammar)
        with self._lock:
            if key in self._slow:
                return False
        try:
            self._verdict(self._short, grammar, min(SHORT, seconds), parts)
        except TimeoutError:
            if seconds > SHORT:
                self._note_slow(key)
                return False
            self._remember(key, _too_slow(seconds))
        return True

    def check(self, grammar: str, seconds: float, parts: Sequence[Part] = ()) -> None:
        """Try a grammar unless that was done before; arguments as for `decide`.

        Raises:
          RequestError: it is not understood, takes longer than `seconds`, or ends the process.
        """
        self.decide(grammar, seconds, parts)  # most grammars need no long trial
        try:
            verdict = self._verdict(self._long, grammar, seconds, parts)
        except TimeoutError:
            verdict = _too_slow(seconds)
            self._remember(_key(grammar), verdict)
        if verdict is not None:
            raise RequestError(verdict)

    def start(self) -> None:
        """Start the process of short trials, which reads the tokenizer, unless it runs.

        Raises:
          RequestError: the process cannot start.
        """
        self._short.start()

    def verdict(self, grammar: str, seconds: float, *, long: bool = False) -> str | None:
        """Return why a grammar is refused after a trial; None if it is not, or takes too long.

        Args:
          seconds: most seconds of the trial.
          long: whether to try it in the process of long trials, so that no short one waits.
        """
        try:
            return self._verdict(self._long if long else self._short, grammar, seconds)
        except TimeoutError:
            return None

    def refusal(self, grammar: str) -> str | None:
        """Return why a grammar was refused before; None if it was not, or not tried."""
        with self._lock:
            return self._verdicts.get(_key(grammar))

    def knows(self, grammar: str) -> bool:
        """Return whether a grammar was tried before."""
        with self._lock:
            return _key(grammar) in self._verdicts

    def close(self) -> None:
        """End the processes, in the middle of a trial too; the next trial starts them again."""
        self._short.close()
        self._long.close()

    def _verdict(
        self, process: "GrammarProcess", grammar: str, seconds: float, parts: Sequence[Part] = ()
    ) -> str | None:
        """Return why a grammar is refused, or None; try it in a process unless that is known.

        Raises:
          TimeoutError: it takes longer.
        """
        key = _key(grammar)
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
        verdict = process.attempt(grammar, seconds, parts)
        self._remember(key, verdict)
        return verdict

    def _remember(self, key: bytes, verdict: str | None) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            self._slow.pop(key, None)
            if len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)

    def _note_slow(self, key: bytes) -> None:
        """Remember that a grammar needs a long trial."""
        with self._lock:
            self._slow[key] = None
            if len(self._slow) > KEPT:
                self._slow.popitem(last=False)


class GrammarProcess(LimitedProcess):
    """A process that compiles grammars for one tokenizer; arguments as for `GrammarTrials`."""

    def __init__(self, tokenizer: str, vocab: int, eos: Sequence[int], memory: int):
        import llguidance

        super().__init__(
            trial_process.__file__,
            {"tokenizer": tokenizer, "vocab": vocab, "eos": list(eos)},
            [llguidance.__file__],
            memory=memory,
            stack=trial_process.STACK,
            niceness=5,  # running requests come first
        )
        self._memory = memory

    def attempt(self, grammar: str, seconds: float, parts: Sequence[Part] = ()) -> str | None:
        """Compile a grammar and its parts in the process; return why it is refused, or None.

        Raises:
          TimeoutError: it takes longer.
          RequestError: the process cannot start, or was closed meanwhile.
        """
        try:
            return self.ask([grammar, *parts], seconds)
        except ClosedError as error:
            raise RequestError(
                "the engine was closed while the structure was compiled; send it again"
            ) from error
        except EOFError as error:
            return (
                "the structure cannot be compiled: the process that tried to ended"
                f" ({error}), by its depth or by more than {self._memory >> 20} MiB of"
                " memory; nest fewer rules, references and repetitions in each other"
            )

    def _start(self) -> None:
        try:
            super()._start()
        except OSError as error:
            raise RequestError(
                f"the process that compiles structures cannot start ({error}); structured output"
                " needs a Python that can import llguidance"
            ) from error


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()


def _too_slow(seconds: float) -> str:
    return (
        f"the structure took longer than {seconds:g} s to compile; simplify it, such as by fewer"
        " nested rules, repetitions or alternatives"
    )
