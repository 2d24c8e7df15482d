"""Conversations in memory, which responses of a conversation extend."""

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from dflash_jax.server.protocol import Problem, new_id

Item = dict[str, Any]
StoredItem = tuple[str, bytes]  # the id and the JSON of an item


def new_items(items: Sequence[Item]) -> list[StoredItem]:
    """Return items as a conversation stores them: their ids, new ones if needed, and JSON."""
    stored = []
    for item in items:
        item = {"id": new_id("item_"), "type": "message"} | item
        if not isinstance(item["id"], str):
            item["id"] = new_id("item_")
        stored.append((item["id"], msgspec.json.encode(item)))
    return stored


@dataclasses.dataclass
class StoredConversation:
    """A conversation as JSON: Python objects take up to 20 times the memory.

    Attributes:
      fields: the conversation's object.
      items: its items, the oldest first.
      size: bytes of `fields` and `items`.
    """

    fields: bytes
    items: list[StoredItem] = dataclasses.field(default_factory=list)
    size: int = 0


class ConversationStore:
    """Conversations in memory; the least recently extended ones are dropped first. Thread-safe.

    Args:
      max_bytes: limit for all items and metadata, as JSON.

    Attributes:
      size: bytes of all items and metadata, as JSON.
    """

    def __init__(self, max_bytes: int = 2**25):
        self._max_bytes = max_bytes
        self.size = 0
        self._lock = threading.RLock()
        self._stored: dict[str, StoredConversation] = {}  # the last extended one is last

    def limit(self, max_bytes: int) -> None:
        """Set another limit, from the next item on."""
        self._max_bytes = max_bytes

    def create(self, items: Sequence[Item], metadata: dict[str, Any] | None) -> dict[str, Any]:
        """Store a new conversation and return its object.

        Raises:
          Problem: 413, it is larger than the store.
        """
        conversation_id = new_id("conv_")
        fields = {
            "id": conversation_id,
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": metadata or {},
        }
        data = msgspec.json.encode(fields)
        conversation = StoredConversation(data, size=len(data))
        added = new_items(items)
        self._check_size(conversation.size, added)
        with self._lock:
            self._stored[conversation_id] = conversation
            self.size += conversation.size
            self.append(conversation_id, added)
        return fields

    def get(self, conversation_id: str) -> bytes:
        """Return the object of a conversation, as JSON.

        Raises:
          Problem: 404, it is not stored.
        """
        return self._find(conversation_id).fields

    def items(self, conversation_id: str) -> list[StoredItem]:
        """Return the items of a conversation, the oldest first.

        Raises:
          Problem: 404, it is not stored.
        """
        return list(self._find(conversation_id).items)

    def extend(self, conversation_id: str, items: Sequence[Item]) -> list[StoredItem]:
        """Add items; return their ids and JSON.

        Raises:
          Problem: 404, the conversation is not stored; 413, it would be larger than the store.
        """
        added = new_items(items)
        with self._lock:
            self.check_room(conversation_id, added)
            self.append(conversation_id, added)
        return added

    def append(self, conversation_id: str, added: Sequence[StoredItem]) -> None:
        """Add items of `new_items`; does nothing if the conversation is gone or would be full."""
        size = sum(len(data) for _, data in added)
        with self._lock:
            stored = self._stored.get(conversation_id)
            if stored is None or stored.size + size > self._max_bytes:
                return
            self._stored[conversation_id] = self._stored.pop(conversation_id)
            stored.items += added
            stored.size += size
            self.size += size
            while self.size > self._max_bytes:
                self.delete(next(iter(self._stored)))

    def delete(self, conversation_id: str) -> None:
        """Remove a conversation.

        Raises:
          Problem: 404, it is not stored.
        """
        with self._lock:
            self.size -= self._find(conversation_id).size
            del self._stored[conversation_id]

    def check_room(self, conversation_id: str, added: Sequence[StoredItem]) -> None:
        """Refuse items for which a conversation has no room; raises as `extend` does."""
        self._check_size(self._find(conversation_id).size, added)

    def _check_size(self, size: int, added: Sequence[StoredItem]) -> None:
        new_size = size + sum(len(data) for _, data in added)
        if new_size > self._max_bytes:
            raise Problem(
                f"the conversation would have {new_size} bytes; at most {self._max_bytes} are kept:"
                " start a new conversation",
                status=413,
                param="items",
                code="conversation_full",
            )

    def _find(self, conversation_id: str) -> StoredConversation:
        stored = self._stored.get(conversation_id)
        if stored is None:
            raise Problem(
                f"the conversation {conversation_id[:100]!r} is not kept here; create one by POST"
                " /v1/conversations, or send the whole input",
                status=404,
                param="conversation",
                code="conversation_not_found",
            )
        return stored
