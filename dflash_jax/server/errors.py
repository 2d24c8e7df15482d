"""Error responses of requests that the engine cannot take or finish."""

import math
from collections.abc import Sequence

from dflash_jax.compiler.build import CompiledPrograms
from dflash_jax.compiler.keys import Variant
from dflash_jax.errors import QueueFullError, RequestError
from dflash_jax.server.fields import ENGINE_OPTIONS
from dflash_jax.server.protocol import Problem

LONGEST_RETRY = 60  # seconds; clients ignore a longer Retry-After
GRAMMAR_RETRY_S = 30  # seconds within which a slow grammar is compiled or refused
# Options of the engine whose request fields have the same name.
SAME_NAME = {*ENGINE_OPTIONS, "logit_bias", "stop"}
# Request fields of the other options, by option or by API and option.
FIELD_OF_OPTION = {
    "block_size": "speculative.block_size",
    "responses.max_tokens": "max_output_tokens",
    "chat.logprobs": "top_logprobs",
    "responses.logprobs": "top_logprobs",
}


def queue_full() -> Problem:
    """Return the error of a request for which the queue has no room."""
    return Problem(503, "the queue is full; try again", code="queue_full", retry_s=1)


def shutting_down() -> Problem:
    """Return the error of a request that arrives, or has to wait, while the server drains."""
    return Problem(503, "the server is shutting down", code="draining", retry_s=5)


def still_compiling(compiled: CompiledPrograms, variants: Sequence[Variant]) -> Problem:
    """Return the 503 for a request whose programs are not compiled yet."""
    names, missing = " and ".join(variants), compiled.missing(variants)
    seconds = min(max(math.ceil(compiled.estimate_s(variants)), 1), LONGEST_RETRY)
    return Problem(
        503,
        f"the request needs programs that are still being compiled ({names}: {len(missing)} are"
        f" missing); try again in about {seconds} s",
        code="compiling",
        retry_s=seconds,
    )


def unfinished() -> Problem:
    """Return the error of a request that timed out while its grammar was being compiled."""
    return Problem(
        503,
        "the request's time was up before its output structure was compiled; simplify the"
        " structure, or try again with a longer timeout",
        code="structure_unfinished",
        retry_s=GRAMMAR_RETRY_S,
    )


def to_problem(error: Exception, api: str) -> Problem:
    """Return an engine error as a `Problem` that uses the field names of the request's API."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, QueueFullError):
        return queue_full()
    if not isinstance(error, RequestError):
        return Problem(500, str(error), code="compute_failed")
    text = str(error)
    option, is_, rest = text.partition(" is ")
    if not is_ or not option.isidentifier():
        word = text.partition(" ")[0]
        return Problem(400, text, param=word if word in SAME_NAME else None)
    param = FIELD_OF_OPTION.get(f"{api}.{option}", FIELD_OF_OPTION.get(option, option))
    return Problem(400, f"{param} is {rest}", param=param)
