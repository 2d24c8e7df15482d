"""Jobs: outputs in progress, shared by the event loop and the engine thread."""

import dataclasses
from collections.abc import Callable

from dflash_jax.engine.handle import RequestHandle
from dflash_jax.engine.request import CancelCell
from dflash_jax.engine.result import Piece, Result
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.errors import DFlashError
from dflash_jax.graph.keys import Variant

Listener = Callable[[int, list[Piece], "Result | Exception | None"], None]


@dataclasses.dataclass(eq=False)
class Job:
    """One output in progress.

    `listener(index, pieces, end)` is called in the event loop with new pieces, and at the end with
    the result or the error. The first call, without pieces, means that the engine accepted the
    request.

    Attributes:
      given: number of pieces passed to the listener.
      cancelled: `Worker.cancel` was called.
      finished: the listener received the end.
      waits_for: variants whose programs are still being compiled.
    """

    prompt: list[int]
    params: SamplingParams
    index: int
    listener: Listener
    handle: RequestHandle | None = None
    given: int = 0
    cancelled: bool = False
    finished: bool = False
    waits_for: tuple[Variant, ...] = ()
    cell: CancelCell = dataclasses.field(default_factory=CancelCell)

    @property
    def pending(self) -> bool:
        """Return whether the output grammar may still be compiling."""
        return self.handle is None and not self.finished and self.params.structured is not None

    def take_update(self) -> "tuple[Job, list[Piece], Result | Exception | None] | None":
        """Return what the listener has not received yet, or None, and mark it as delivered."""
        assert self.handle is not None
        pieces = self.handle.pieces[self.given :]
        self.given += len(pieces)
        if not self.handle.done:
            return (self, pieces, None) if pieces else None
        try:
            return self, pieces, self.handle.result()
        except DFlashError as error:
            return self, pieces, error


JobUpdate = tuple[Job, list[Piece], Result | Exception | None]
