"""Who may end a request from outside, and what outranks it."""

import enum
from collections.abc import Callable
from typing import Literal

Reason = Literal["client_abort", "disconnect", "deadline", "shutdown"]


class CancelCell:
    """A sticky flag with a reason, shared by all copies of a handle; any thread may set it."""

    __slots__ = ("reason",)

    def __init__(self) -> None:
        self.reason: Reason | None = None

    def cancel(self, reason: Reason = "client_abort") -> None:
        """Asks for the end; the first reason stays."""
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return self.reason is not None


class Handle:
    """Where a request's tokens go: callbacks in turn, until one refuses or the cell is set.

    Args:
      cell: shared by all copies of the handle.
      asked: called when tokens are about to go out; True cancels, for good.
      callbacks: called with each token, in order; False stops the chain and cancels.
    """

    def __init__(
        self,
        cell: CancelCell | None = None,
        asked: Callable[[], bool] | None = None,
        callbacks: tuple[Callable[[int], object], ...] = (),
    ):
        self.cell = CancelCell() if cell is None else cell
        self.asked, self.callbacks = asked, callbacks

    def adding(self, callback: Callable[[int], object]) -> "Handle":
        """A copy that calls one more, after the others; the cancel cell stays shared."""
        return Handle(self.cell, self.asked, (*self.callbacks, callback))

    def should_cancel(self) -> bool:
        """Whether somebody wants the end."""
        if not self.cell and self.asked is not None and self.asked():
            self.cell.cancel()
        return bool(self.cell)

    def emit(self, token: int) -> bool:
        """Gives a token out; False, and nobody called, once cancelled."""
        if self.should_cancel():
            return False
        for callback in self.callbacks:
            if callback(token) is False:
                self.cell.cancel()
                return False
        return True


class Compute(enum.Enum):
    """How a finished computation counts."""

    FAILED = "failed"
    CANCELLED = "cancelled"
    OK = "ok"


def classify(ok: bool, handle: Handle) -> Compute:
    """A failure is a failure even for a caller who left, who is not even asked then."""
    if not ok:
        return Compute.FAILED
    return Compute.CANCELLED if handle.should_cancel() else Compute.OK
