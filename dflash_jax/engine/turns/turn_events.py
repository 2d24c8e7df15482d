"""The values that enter an engine at the start of a turn, and at no other time.

A turn is a function of earlier turns and of its `TurnEvents`, which hold everything that other
threads, clocks and the outside world decide. Engines that take the same events schedule the same
work, and decide the same tokens.
"""

from typing import Literal, NamedTuple

from dflash_jax.engine.request import CancelReason
from dflash_jax.engine.running_request import RunningRequest
from dflash_jax.engine.sampling_params import Structure
from dflash_jax.engine.state_machine.speculation import BreakEven
from dflash_jax.engine.structured.grammars import Grammar
from dflash_jax.graph.keys import ProgramKey

# Besides the reasons of a cell: the handle was closed, nobody has the handle any more, and the time
# of the request is up.
EndReason = CancelReason | Literal["closed", "dropped", "overdue"]
END_REASONS: tuple[EndReason, ...] = (
    "client_abort",
    "disconnect",
    "deadline",
    "shutdown",
    "closed",
    "dropped",
    "overdue",
)


class End(NamedTuple):
    """A request that ends before its output does."""

    number: int  # of the request
    reason: EndReason


class CallRetry(NamedTuple):
    """The grammar under which a request decodes a call once more, or why there is none."""

    number: int  # of the request
    structure: Structure | None  # the grammar's source; None if it could not be compiled
    grammar: Grammar | None = None
    error: str = ""  # why it could not be compiled


class TurnEvents(NamedTuple):
    """Everything that a turn depends on besides earlier turns."""

    admit: tuple[RunningRequest, ...] = ()  # requests to queue, in the order they were posted
    end: tuple[End, ...] = ()  # requests to end
    retry: tuple[CallRetry, ...] = ()  # requests that decode a call once more
    use: tuple[ProgramKey, ...] = ()  # programs that were compiled since the last turn
    steps: int = 1  # most decode steps of a call
    break_even: BreakEven | None = None  # a new one; None if none was measured since the last turn
