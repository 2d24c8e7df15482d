"""One output being made, as event loop and engine thread see it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from dflash_jax.compiler.variants import CompiledPrograms, Variant
from dflash_jax.engine.recovery import CancelCell
from dflash_jax.engine.result import Piece, Result
from dflash_jax.engine.sequence import Live
from dflash_jax.errors import DFlashError
from dflash_jax.server.protocol import Problem

Listener = Callable[[int, list[Piece], "Result | Exception | None"], None]
LONGEST_RETRY = 60  # seconds; clients ignore a Retry-After beyond it


@dataclasses.dataclass(eq=False)
class Job:
    """One output being made.

    `listener(index, pieces, end)` is called in the event loop: new pieces, and at the end the
    result or what went wrong. The first call, without pieces, says that the request was accepted.
    """

    prompt: list[int]
    options: dict[str, Any]
    index: int
    listener: Listener
    live: Live | None = None
    given: int = 0  # pieces handed over
    cancelled: bool = False  # somebody wants its end
    finished: bool = False  # its listener was given its end
    waits_for: tuple[Variant, ...] = ()  # variants whose programs are still being compiled
    cell: CancelCell = dataclasses.field(default_factory=CancelCell)

    @property
    def pending(self) -> bool:
        """Whether its structure is still being compiled, as far as is known."""
        return self.live is None and not self.finished and "structured" in self.options

    def take_update(self) -> "tuple[Job, list[Piece], Result | Exception | None] | None":
        """What the listener has not heard yet."""
        assert self.live is not None
        pieces = self.live.pieces[self.given :]
        self.given += len(pieces)
        if not self.live.done:
            return (self, pieces, None) if pieces else None
        try:
            return self, pieces, self.live.result()
        except DFlashError as error:
            return self, pieces, error


JobUpdate = tuple[Job, list[Piece], Result | Exception | None]


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
