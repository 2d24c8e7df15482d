"""Error responses of requests that the engine cannot take or finish."""

import math
from collections.abc import Sequence

from dflash_jax.errors import ComputeError, DFlashError, HostError, QueueFullError, RequestError
from dflash_jax.graph.build import CompiledPrograms
from dflash_jax.graph.keys import Variant
from dflash_jax.server.fields import SERVED
from dflash_jax.server.protocol import Problem

LONGEST_RETRY = 60  # seconds; clients ignore a longer Retry-After
LOADING_RETRY_S = 5
BODIES_RETRY_S = 2  # seconds in which bodies of others may have been handled
HOSTS_RETRY_S = 10  # seconds in which several hosts may start again
GRAMMAR_RETRY_S = 30  # seconds within which a slow grammar is compiled or refused
# Options of the engine whose request fields have the same name.
SAME_NAME = {*SERVED, "stop"}
# Request fields of the other options, by option or by API and option.
FIELD_OF_OPTION = {
    "block_size": "speculative.block_size",
    "responses.max_tokens": "max_output_tokens",
    "chat.logprobs": "top_logprobs",
    "responses.logprobs": "top_logprobs",
}


def queue_full() -> Problem:
    """Return the error of a request for which the queue has no room."""
    return Problem("the queue is full; try again", status=503, code="queue_full", retry_s=1)


def too_busy() -> Problem:
    """Return the error of a connection for which there is no room."""
    return Problem("too many connections; try again", status=503, code="too_busy", retry_s=1)


def bodies_full(most: int) -> Problem:
    """Return the error of a request whose body has no room beside those of others."""
    return Problem(
        f"the bodies of all requests together are larger than {most} bytes, the most this server"
        " holds at a time, and this was the largest that had not come to its end; try again",
        status=503,
        code="bodies_full",
        retry_s=BODIES_RETRY_S,
    )


def shutting_down() -> Problem:
    """Return the error of a request that arrives, or has to wait, while the server drains."""
    return Problem("the server is shutting down", status=503, code="draining", retry_s=5)


def not_ready(compiled: CompiledPrograms | None, variants: Sequence[Variant]) -> Problem:
    """Return the 503 for a request that comes before the server is ready.

    Args:
      compiled: the programs of the model, None while it is loaded.
      variants: those to compile before the server is ready, empty while it is loaded.
    """
    if compiled is None or not variants:
        state = "loading"
        seconds = LOADING_RETRY_S
    elif missing := len(compiled.missing(variants)):
        of = len(compiled.keys(variants))
        state = f"compiling, {of - missing} of {of} programs are ready"
        seconds = _wait(compiled, variants)
    else:
        state = "about to be ready"
        seconds = 1
    return Problem(
        f"the model is {state}; try again in about {seconds} s, or when GET /ready answers 200",
        status=503,
        code="loading",
        retry_s=seconds,
    )


def still_compiling(compiled: CompiledPrograms, variants: Sequence[Variant]) -> Problem:
    """Return the 503 for a request whose programs are not compiled yet."""
    names = " and ".join(variants)
    missing = compiled.missing(variants)
    seconds = _wait(compiled, variants)
    return Problem(
        f"the request needs programs that are still being compiled ({names}: {len(missing)} are"
        f" missing); try again in about {seconds} s",
        status=503,
        code="compiling",
        retry_s=seconds,
    )


def _wait(compiled: CompiledPrograms, variants: Sequence[Variant]) -> int:
    return min(max(math.ceil(compiled.estimate_s(variants)), 1), LONGEST_RETRY)


def unfinished() -> Problem:
    """Return the error of a request that timed out while its grammar was being compiled."""
    return Problem(
        "the request's time was up before its output structure was compiled; simplify the"
        " structure, or try again with a longer timeout",
        status=503,
        code="structure_unfinished",
        retry_s=GRAMMAR_RETRY_S,
    )


def to_problem(error: Exception, api: str) -> Problem:
    """Return an engine error as a `Problem` that uses the field names of the request's API."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, QueueFullError):
        return queue_full()
    if isinstance(error, HostError):
        return Problem(str(error), status=503, code="replica_ended", retry_s=HOSTS_RETRY_S)
    if not isinstance(error, RequestError):
        return Problem(str(error), status=500, code="compute_failed")
    text = str(error)
    option, is_, rest = text.partition(" is ")
    if not is_ or not option.isidentifier():
        word = text.partition(" ")[0]
        return Problem(text, param=word if word in SAME_NAME else None)
    param = FIELD_OF_OPTION.get(f"{api}.{option}", FIELD_OF_OPTION.get(option, option))
    return Problem(f"{param} is {rest}", param=param)


def as_exception(error: BaseException) -> Exception:
    """Return the error, or a ComputeError for a BaseException such as a panic in a Rust library."""
    if isinstance(error, Exception):
        return error
    return ComputeError(f"a library failed ({type(error).__name__}: {error}); see the server's log")


def step_failure(error: Exception) -> DFlashError:
    """Return the error of requests that run when a step fails."""
    if isinstance(error, DFlashError):
        return error
    return ComputeError(
        f"the computation failed ({type(error).__name__}: {error}); see the server's log"
    )


def not_compiled(error: BaseException) -> DFlashError:
    """Return the error of a request whose programs cannot be compiled."""
    if isinstance(error, HostError):
        return error
    return ComputeError(f"the programs it needs cannot be compiled: {error}")
