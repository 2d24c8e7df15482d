"""Compile users' grammars in separate processes first, where crashes and delays do no harm.

A process starts with the first grammar and serves one grammar at a time. It is killed when a
grammar exceeds its time, and the next grammar starts another one.
"""

import collections
import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax.engine.structured import trial_process
from dflash_jax.errors import RequestError

SECONDS = 30.0  # a grammar may take, by default
SHORT = 1.0  # seconds of a short trial; only hostile grammars take longer
ALREADY_DEAD = 1.0  # seconds within which a process that something else ended is noticed
START_SECONDS = 120.0  # the process may take to read the tokenizer
Part = tuple[str, str]  # a name for errors, and a grammar
KEPT = 2048  # grammars whose verdict is remembered


class GrammarTrials:
    """Decides which grammars of users may be compiled, for one tokenizer, and remembers it.

    A trial takes place in one of two processes, each started by the first grammar that needs it:
    short trials in one, so that they never wait for a long one in the other.

    Args:
      tokenizer: text of a tokenizer.json; it has `vocab` ids, `eos` among them.
      memory: bytes that a trial may take.
    """

    def __init__(
        self, tokenizer: str, vocab: int, eos: Sequence[int], memory: int = trial_process.MEMORY
    ):
        self._short = GrammarProcess(tokenizer, vocab, eos, memory)
        self._long = GrammarProcess(tokenizer, vocab, eos, memory)
        self._lock = threading.Lock()
        self._verdicts: collections.OrderedDict[bytes, str | None] = collections.OrderedDict()

    def decide(self, grammar: str, seconds: float, parts: Sequence[Part] = ()) -> bool:
        """Try a grammar for `SHORT` seconds at most; return whether `check` will take no longer.

        The grammar is in llguidance's own form, and may take `seconds` in all. Arguments are those
        of `check`.
        """
        try:
            self._verdict(self._short, grammar, min(SHORT, seconds), parts)
        except TimeoutError:
            if seconds > SHORT:
                return False
            self._remember(_key(grammar), _too_slow(seconds))
        return True

    def check(self, grammar: str, seconds: float, parts: Sequence[Part] = ()) -> None:
        """Try a grammar unless that was done before.

        Args:
          parts: names and grammars of parts to try by themselves, as they are reached only later.

        Raises:
          RequestError: it is not understood, takes longer than `seconds`, or ends the process.
        """
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
        """Return why a grammar is refused after a trial; None if it is not, or unknown.

        Args:
          long: try it in the process of long trials, so that no short one waits.
        """
        try:
            return self._verdict(self._long if long else self._short, grammar, seconds)
        except TimeoutError:
            return None

    def refuses(self, grammar: str) -> bool:
        """Return whether a grammar was tried before, and refused."""
        with self._lock:
            return self._verdicts.get(_key(grammar)) is not None

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
        """Return why a grammar is refused, or None; try it in a process unless it is known.

        Raises:
          TimeoutError: it takes longer.
        """
        key = _key(grammar)
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
        self._remember(key, verdict := process.attempt(grammar, seconds, parts))
        return verdict

    def _remember(self, key: bytes, verdict: str | None) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            if len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)


class GrammarProcess:
    """A process that compiles grammars for one tokenizer; arguments as for `GrammarTrials`."""

    def __init__(self, tokenizer: str, vocab: int, eos: Sequence[int], memory: int):
        import llguidance

        path = str(Path(llguidance.__file__).parents[1])
        self._setup = {"path": path, "tokenizer": tokenizer, "vocab": vocab, "eos": list(eos)}
        self._setup["memory"] = self._memory = memory
        self._lock = threading.Lock()  # one grammar at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._closed = 0  # times

    def attempt(self, grammar: str, seconds: float, parts: Sequence[Part] = ()) -> str | None:
        """Compile a grammar and its parts in the process; return why it is refused, or None.

        Raises:
          TimeoutError: it takes longer.
          RequestError: the process cannot start, or was closed meanwhile.
        """
        with self._lock:
            closed = self._closed
            while True:
                reused = self._runs()
                if not reused:
                    self._start()
                begun = time.monotonic()
                try:
                    return self._exchange([grammar, *parts], seconds)
                except EOFError as error:
                    if closed != self._closed:
                        raise RequestError(
                            "the engine was closed while the structure was compiled; send it again"
                        ) from error
                    if reused and time.monotonic() - begun < ALREADY_DEAD:
                        continue  # it may have been ended from outside: try again in a new one
                    return (
                        "the structure cannot be compiled: the process that tried to ended"
                        f" ({error}), by its depth or by more than {self._memory >> 20} MiB of"
                        " memory; nest fewer rules, references and repetitions in each other"
                    )

    def start(self) -> None:
        """Start the process unless it runs; raises as `attempt` does."""
        with self._lock:
            if not self._runs():
                self._start()

    def close(self) -> None:
        """End the process, in the middle of a grammar too; another `attempt` starts it again."""
        self._closed += 1
        if (process := self._process) is not None:
            process.kill()  # without the lock, which is held while a grammar is compiled
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        """Start the process, in place of one that ended, and give it the tokenizer."""
        self._end()
        command = [sys.executable, "-P", trial_process.__file__]  # -P: imports none of our modules
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:  # in a session of its own, as Ctrl-C in a terminal must not reach it
            process = subprocess.Popen(command, start_new_session=True, **pipes)
            self._process, self._finalizer = process, weakref.finalize(self, _kill, process)
            self._exchange(self._setup, START_SECONDS)
        except (OSError, EOFError, TimeoutError) as error:
            self._end()
            raise RequestError(
                f"the process that compiles structures cannot start ({error}); structured output"
                f" needs {sys.executable!r} to be a Python that can import llguidance"
            ) from error

    def _exchange(self, message: Any, seconds: float) -> Any:
        """Return the answer to a message.

        Raises:
          TimeoutError: none came in time; the process is killed.
          EOFError: the process ended; the message names its exit status or signal.
        """
        process, expired = self._process, threading.Event()
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        answer = b""
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                process.wait(1)  # for its exit status
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        finally:
            timer.cancel()
            if not answer.endswith(b"\n") or expired.is_set():
                self._end()  # also after an interrupt: its answer would be taken for the next one
        if answer.endswith(b"\n"):
            return json.loads(answer)
        if expired.is_set():
            raise TimeoutError(f"no answer within {seconds:g} s")
        raise EOFError(_status(process.returncode))

    def _end(self) -> None:
        """End the process and wait for it."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()


def _too_slow(seconds: float) -> str:
    return (
        f"the structure took longer than {seconds:g} s to compile; simplify it, such as by fewer"
        " nested rules, repetitions or alternatives"
    )


def _status(code: int) -> str:
    """Name an exit status as `subprocess` reports it."""
    names = {-number: number.name for number in signal.Signals}
    return names.get(code, f"exit status {code}")


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # a message was not written
                pipe.close()
