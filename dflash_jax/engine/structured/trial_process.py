"""Compiles grammars; as a script, the process that tries a user's grammar before the engine does.

The process reads one JSON object a line: first the tokenizer, then grammars, each alone or
in a list with its parts. It answers each with a line. It imports no other module of the package,
and so no jax. It ends when its input ends, also in the middle of a grammar, so that it never
survives the process that started it.
"""

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEMORY = 512 * 2**20  # bytes a grammar may take, by default
STACK = 2**20  # bytes; smaller than any thread's of the engine, so that no grammar overflows there
REFUSED = "the structure is not understood: "
EMPTY = "NoExtensionBias"  # llguidance's error where no text may follow
LEXER_FUEL = 250_000  # bounds a mask to about 0.2 s; llguidance's default of 10**6 lets it take 2 s


def compiled(tokenizer: Any, grammar: str) -> tuple[Any, str | None]:
    """Return a matcher at the start of a grammar, and why it cannot be used, if it cannot.

    The tokenizer is an `llguidance.LLTokenizer`, and the grammar in llguidance's own form.
    """
    import llguidance

    limits = llguidance.LLParserLimits(initial_lexer_fuel=LEXER_FUEL)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return matcher, f"{REFUSED}{reason(matcher)}"
    matcher.compute_bitmask()  # some errors are found only then
    if matcher.is_error():
        if reason(matcher) == EMPTY:
            return matcher, "no text matches the structure; write one that some text matches"
        return matcher, f"{REFUSED}{reason(matcher)}"
    return matcher, None


def tried(tokenizer: Any, grammar: str, parts: Sequence[Sequence[str]]) -> str | None:
    """Return why a grammar cannot be used, if it cannot.

    Args:
      parts: names and grammars of parts that are reached only later. Each has to match some text.
    """
    for name, part in parts:
        _, error = compiled(tokenizer, part)
        if error is not None:
            return error.replace("the structure", name, 1)
    return compiled(tokenizer, grammar)[1]


def reason(matcher: Any) -> str:
    """Return a matcher's error, without the dump of its state and of the grammar."""
    return matcher.get_error().partition("\n<state>")[0]


def main() -> None:
    """Serve until the input ends."""
    requests = sys.stdin.buffer
    given = json.loads(requests.readline())
    sys.path.append(given["path"])
    import llguidance

    tokenizer = llguidance.LLTokenizer(
        given["tokenizer"], n_vocab=given["vocab"], eos_token=given["eos"]
    )
    _limit_memory(given["memory"])
    if hasattr(os, "nice"):
        os.nice(5)  # running requests come first
    threading.stack_size(STACK)
    _reply(None)
    for line in requests:  # a thread compiles, so that this one sees the end of the input
        given = json.loads(line)
        grammars = given if isinstance(given, list) else [given]
        threading.Thread(target=_try, args=(tokenizer, *grammars), daemon=True).start()
    os._exit(0)


def _try(tokenizer: Any, grammar: str, *parts: Sequence[str]) -> None:
    try:
        error = tried(tokenizer, grammar, parts)
    except Exception as failure:  # such as text that is not valid Unicode
        error = f"the structure is not understood: {failure}"
    _reply(error)


def _reply(error: str | None) -> None:
    sys.stdout.write(json.dumps(error) + "\n")
    sys.stdout.flush()


def _limit_memory(most_added: int) -> None:
    """Limit the growth of the address space, where the system supports that."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        size = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + most_added, most))
    except (ImportError, OSError, ValueError):
        return


if __name__ == "__main__":
    main()
