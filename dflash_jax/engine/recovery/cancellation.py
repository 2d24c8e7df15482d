"""Cancel a request from any thread."""

from typing import Literal

Reason = Literal["client_abort", "disconnect", "deadline", "shutdown"]


class CancelCell:
    """A flag that ends a request, with the reason. Any thread may set it; it is never cleared."""

    __slots__ = ("reason",)

    def __init__(self) -> None:
        self.reason: Reason | None = None

    def cancel(self, reason: Reason = "client_abort") -> None:
        """Request the end; the first reason is kept."""
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        """Whether the flag is set."""
        return self.reason is not None
