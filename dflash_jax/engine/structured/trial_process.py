"""Compiles grammars, also in the process that tries a user's grammar before the engine does.

A `LimitedProcess` loads this file alone, without the package.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Bytes of the stack of a trial, which is smaller than that of any thread of the engine: a grammar
# that passed its trial overflows no stack there.
STACK = 2**20
REFUSED = "the structure is not understood: "
EMPTY = "NoExtensionBias"  # llguidance's error where no text may follow
# Bounds the time of a mask to about 0.2 s. Under llguidance's default of 10**6, one may take 2 s.
LEXER_FUEL = 250_000


def compiled(tokenizer: Any, grammar: str) -> tuple[Any, str | None]:
    """Return a matcher at the start of a grammar, and why it cannot be used, or None.

    Args:
      tokenizer: an `llguidance.LLTokenizer`.
      grammar: the grammar in llguidance's own form.
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
    """Return why a grammar cannot be used, or None.

    Args:
      parts: names and grammars of parts that an output may reach only later. Each has to match some
        text.
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
    """Return a function that tries a grammar, or a list of a grammar and its parts.

    Args:
      setup: text of a tokenizer.json, "tokenizer", its number of ids, "vocab", and its end tokens,
        "eos".
    """
    import llguidance

    tokenizer = llguidance.LLTokenizer(
        setup["tokenizer"], n_vocab=setup["vocab"], eos_token=setup["eos"]
    )

    def answer(question: Any) -> str | None:
        grammar, *parts = question if isinstance(question, list) else [question]
        try:
            return tried(tokenizer, grammar, parts)
        except Exception as failure:  # such as text that is not valid Unicode
            return f"the structure is not understood: {failure}"

    return answer
