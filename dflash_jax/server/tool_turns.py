"""Token ids of past assistant turns with tool calls."""

import array
import collections
import json
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from dflash_jax.server.protocol import Message


class ToolTurnCache:
    """Token ids of assistant turns with tool calls, by the ids of their calls.

    The least recently used turns are dropped first. Thread-safe.

    Args:
      most_ids: bound on the token ids of all turns together.
      most_turns: bound on the number of turns.
    """

    def __init__(self, most_ids: int = 8_000_000, most_turns: int = 50_000):
        self._most_ids = most_ids
        self._most_turns = most_turns
        self._turns: collections.OrderedDict[tuple[str, ...], _StoredTurn] = (
            collections.OrderedDict()
        )
        self._size = 0  # token ids of all turns
        self._lock = threading.Lock()  # prompts are built in threads

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, message: Message, ids: Sequence[int]) -> None:
        """Store the output ids of a turn that clients will send back as this message."""
        turn = _StoredTurn(array.array("I", ids), json.dumps(_comparable(message)))
        with self._lock:
            self._turns[_call_ids(message)] = turn
            self._size += len(ids)
            while self._size > self._most_ids or len(self._turns) > self._most_turns:
                _, oldest = self._turns.popitem(last=False)
                self._size -= len(oldest.ids)

    def lookup(self, message: Message) -> tuple[int, ...] | None:
        """Return the output ids of the turn that an assistant message repeats.

        None if the turn is not stored, or the client changed its text, a name or an argument.
        """
        key = _call_ids(message)
        with self._lock:
            if not key or key not in self._turns:
                return None
            self._turns.move_to_end(key)
            turn = self._turns[key]
        current = json.loads(json.dumps(_comparable(message)))  # its tuples become lists
        return tuple(turn.ids) if json.loads(turn.message) == current else None


class _StoredTurn(NamedTuple):
    """A turn in compact form: tuples and dictionaries take six times the memory."""

    ids: "array.array[int]"
    message: str  # `_comparable` as JSON


def _call_ids(message: Message) -> tuple[str, ...]:
    return tuple(str(call.get("id")) for call in message.get("tool_calls") or ())


def _comparable(message: Message) -> tuple[str, list[Any]]:
    """Return the parts of a message that clients may edit; surrounding white space is ignored."""
    functions = [call["function"] for call in message["tool_calls"]]
    text = (message.get("content") or "").strip()
    return text, [(function["name"], function["arguments"]) for function in functions]
