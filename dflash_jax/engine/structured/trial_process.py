"""Compiles grammars, also in the process that tries a user's grammar before the engine does.

A `LimitedProcess` loads this file alone, without the package.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def prepare(setup: Mapping[str, Any]) -> Callable[[Any], str | None]:
    """Return a function that tries a grammar, given alone or in a list with its parts."""
    import llguidance

    tokenizer = llguidance.LLTokenizer(
        setup["tokenizer"], n_vocab=setup["vocab"], eos_token=setup["eos"]
    )

    def answer(given: Any) -> str | None:
        grammar, *parts = given if isinstance(given, list) else [given]
        try:
            return tried(tokenizer, grammar, parts)
        except Exception as failure:  # such as text that is not valid Unicode
            return f"the structure is not understood: {failure}"

    return answer
