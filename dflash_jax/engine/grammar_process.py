"""Tries users' grammars in a process of its own, where neither a crash nor a minute matters.

The process starts with the first grammar and serves one grammar at a time. It is killed when a
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
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax.engine import grammar_worker
from dflash_jax.errors import RequestError

SECONDS = 30.0  # a grammar may take
START_SECONDS = 120.0  # the process may take to read the tokenizer
KEPT = 256  # grammars whose verdict is remembered


class GrammarProcess:
    """A process that compiles grammars for one tokenizer.

    Args:
      tokenizer: text of a tokenizer.json.
      vocab: number of token ids.
      eos: end tokens.
      seconds: time that one grammar may take.
    """

    def __init__(self, tokenizer: str, vocab: int, eos: Sequence[int], seconds: float = SECONDS):
        import llguidance

        path = str(Path(llguidance.__file__).parents[1])
        self._setup = {"path": path, "tokenizer": tokenizer, "vocab": vocab, "eos": list(eos)}
        self.seconds = seconds
        self._lock = threading.Lock()  # one grammar at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._closed = 0  # times
        self._verdicts: collections.OrderedDict[bytes, str | None] = collections.OrderedDict()

    def check(self, grammar: str) -> None:
        """Compile a grammar, in llguidance's own form, in the process; remember the result.

        Raises:
          RequestError: it is not understood, takes too long, or ends the process.
        """
        key = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
            else:
                self._verdicts[key] = self._try(grammar)
                if len(self._verdicts) > KEPT:
                    self._verdicts.popitem(last=False)
            verdict = self._verdicts[key]
        if verdict is not None:
            raise RequestError(verdict)

    def close(self) -> None:
        """End the process, in the middle of a grammar too; another `check` starts it again."""
        self._closed += 1
        if (process := self._process) is not None:
            process.kill()  # without the lock, which is held while a grammar is compiled
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _try(self, grammar: str) -> str | None:
        """Return why a grammar is refused, or None."""
        closed = self._closed
        while True:
            reused = self._process is not None and self._process.poll() is None
            if not reused:
                self._start()
            try:
                return self._exchange(grammar, self.seconds)
            except TimeoutError:
                return (
                    f"the structure took longer than {self.seconds:g} s to compile; simplify it,"
                    " such as by fewer nested rules, repetitions or alternatives"
                )
            except EOFError as error:
                if closed != self._closed:
                    raise RequestError(
                        "the engine was closed while the structure was compiled; send it again"
                    ) from error
                if reused:  # something else may have ended it: once more in a new one
                    continue
                return (
                    f"the structure cannot be compiled: the process that tried to ended ({error}),"
                    f" by its depth or by more than {grammar_worker.MEMORY >> 20} MiB of memory;"
                    " nest fewer rules, references and repetitions in each other"
                )

    def _start(self) -> None:
        """Start the process, in place of one that ended, and give it the tokenizer."""
        self._end()
        command = [sys.executable, "-P", grammar_worker.__file__]  # -P: imports none of our modules
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is not for it
            )
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
          EOFError: the process ended; says how.
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
