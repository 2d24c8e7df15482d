"""Stored responses and conversations, which later requests retrieve, refer to or extend."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from dflash_jax.server.conversation import check_messages
from dflash_jax.server.protocol import Problem, new_id

# Conversations in memory, which responses of a conversation extend.

Item = dict[str, Any]
StoredItem = tuple[str, bytes]  # the id and the JSON of an item


def new_items(items: Sequence[Item]) -> list[StoredItem]:
    """Return items as a conversation stores them: their ids, new ones if needed, and JSON."""
    whole = [{"id": new_id("item_"), "type": "message"} | item for item in items]
    for item in whole:
        if not isinstance(item["id"], str):
            item["id"] = new_id("item_")
    return [(item["id"], msgspec.json.encode(item)) for item in whole]


@dataclasses.dataclass
class StoredConversation:
    """A conversation; its items are JSON, as Python objects take up to 20 times the memory."""

    fields: bytes
    items: list[StoredItem] = dataclasses.field(default_factory=list)
    size: int = 0  # bytes of JSON


class ConversationStore:
    """Conversations in memory; the least recently extended ones are dropped first. Thread-safe.

    Args:
      max_bytes: limit for all items and metadata, as JSON.

    Attributes:
      size: bytes of all items and metadata, as JSON.
    """

    def __init__(self, max_bytes: int = 2**25):
        self._max_bytes, self.size = max_bytes, 0
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
        fields = {"id": conversation_id, "object": "conversation"}
        fields |= {"created_at": int(time.time()), "metadata": metadata or {}}
        made = StoredConversation(data := msgspec.json.encode(fields), size=len(data))
        new = new_items(items)
        self._check_size(made.size, new)
        with self._lock:
            self._stored[conversation_id] = made
            self.size += made.size
            self.append(conversation_id, new)
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
        new = new_items(items)
        with self._lock:
            self.check_room(conversation_id, new)
            self.append(conversation_id, new)
        return new

    def append(self, conversation_id: str, new: Sequence[StoredItem]) -> None:
        """Add items of `new_items`; does nothing if the conversation is gone or would be full."""
        added = sum(len(data) for _, data in new)
        with self._lock:
            stored = self._stored.get(conversation_id)
            if stored is None or stored.size + added > self._max_bytes:
                return
            self._stored[conversation_id] = self._stored.pop(conversation_id)
            stored.items += new
            stored.size += added
            self.size += added
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

    def check_room(self, conversation_id: str, new: Sequence[StoredItem]) -> None:
        """Refuse items for which a conversation has no room; raises as `extend` does."""
        self._check_size(self._find(conversation_id).size, new)

    def _check_size(self, size: int, new: Sequence[StoredItem]) -> None:
        whole = size + sum(len(data) for _, data in new)
        if whole > self._max_bytes:
            raise Problem(
                f"the conversation would have {whole} bytes; at most {self._max_bytes} are kept:"
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


MOST_BYTES = 2**25  # of the responses of one owner, and of its conversations
MOST_TOTAL = 2**28  # of the responses of all owners, and of their conversations
encode, decode = msgspec.json.encode, msgspec.json.decode


class StoredResponse(NamedTuple):
    """A response and its conversation, as JSON: Python objects take up to 20 times the memory."""

    items: list[bytes]  # input and output items; shared with the responses before it
    response: bytes
    item_ids: list[str]  # of the output items

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        return sum(map(len, self.items)) + len(self.response)


def _is_reference(item: Item) -> bool:
    """Return whether an input item names a stored one: its type may be left out."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and {"id"} == item.keys() - {"type"})


class ResponseStore:
    """The responses and conversations of one owner, in memory. Thread-safe.

    The oldest responses are dropped first. Items are decoded one by one, when a request refers to
    them, so methods that take or return many of them should be called in a thread.

    Args:
      max_bytes: limit for all stored responses with their input, as JSON, and for conversations.
      max_input: returns the limit in bytes for what one request refers to.

    Attributes:
      conversations: what `conversation` of a request refers to.
    """

    def __init__(
        self, max_bytes: int = MOST_BYTES, max_input: Callable[[], int] = lambda: MOST_BYTES
    ):
        self._max_bytes, self._max_input, self._size = max_bytes, max_input, 0
        self._lock = threading.RLock()
        self._stored: dict[str, StoredResponse] = {}  # by response id
        self._items: dict[str, bytes] = {}  # output items, by their ids
        self.conversations = ConversationStore(max_bytes)

    def limit(self, max_bytes: int) -> None:
        """Set another limit, from the next response or item on."""
        self._max_bytes = max_bytes
        self.conversations.limit(max_bytes)

    @property
    def size(self) -> int:
        """Bytes of JSON of all responses and conversations."""
        return self._size + self.conversations.size

    def put(self, response: dict[str, Any], given: Iterable[bytes]) -> None:
        """Store a response and its input items; one that is larger than the store is not kept."""
        output = {item["id"]: encode(item) for item in response["output"]}
        stored = StoredResponse([*given, *output.values()], encode(response), list(output))
        if stored.size > self._max_bytes:
            return
        with self._lock:
            self._stored[response["id"]] = stored
            self._size += stored.size
            self._items |= output
            while self._size > self._max_bytes:
                self.delete(next(iter(self._stored)))

    def get(self, response_id: str) -> bytes:
        """Return a response as it was sent, as JSON.

        Raises:
          Problem: 404, it is not stored.
        """
        return self._find(response_id).response

    def delete(self, response_id: str) -> None:
        """Remove a response.

        Raises:
          Problem: 404, it is not stored.
        """
        with self._lock:
            stored = self._find(response_id)
            del self._stored[response_id]
            self._size -= stored.size
            for item in stored.item_ids:
                del self._items[item]

    def _find(self, response_id: str) -> StoredResponse:
        stored = self._stored.get(response_id)
        if stored is None:
            raise Problem(
                f"the response {response_id!r} is not kept here", status=404, param="response_id"
            )
        return stored

    def begin_turn(
        self,
        items: Sequence[Item],
        *,
        previous: str | None = None,
        conversation: str | None = None,
        keep: bool = True,
    ) -> "RequestTurn":
        """Return a request's input with everything that it refers to.

        Args:
          items: the input items of the request.
          previous: id of the response that the items follow.
          conversation: id of the conversation that they follow.
          keep: store the response.

        Raises:
          Problem: a response or item is not stored, or the request refers to too much.
        """
        with self._lock:
            before = self._before(previous, conversation)
            referenced = {
                at: self._referenced(str(item.get("id")), f"input[{at}]")
                for at, item in enumerate(items)
                if _is_reference(item)
            }
        pulled = [*before, *referenced.values()]
        self._check_input(pulled, len(before) + len(items))
        decoded = {data: decode(data) for data in set(pulled)}  # each once
        given = [decoded[referenced[at]] if at in referenced else x for at, x in enumerate(items)]
        turn = RequestTurn(self, [*(decoded[data] for data in before), *given], conversation, keep)
        if keep or conversation:
            new = [referenced[at] if at in referenced else encode(x) for at, x in enumerate(items)]
            turn.stored = [*before, *new]
            turn.new = new_items(given) if conversation else []
        if conversation:
            self.conversations.check_room(conversation, turn.new)
        return turn

    def _before(self, previous: str | None, conversation: str | None) -> list[bytes]:
        if previous and previous not in self._stored:
            raise Problem(
                f"the response {previous!r} is not kept here; send the whole input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if conversation is not None:
            return [data for _, data in self.conversations.items(conversation)]
        return self._stored[previous].items if previous else []

    def _referenced(self, item_id: str, where: str) -> bytes:
        if item_id not in self._items:
            raise Problem(
                f"the item {item_id[:100]!r} is not kept here; send it whole",
                status=404,
                param=where,
            )
        return self._items[item_id]

    def _check_input(self, pulled: Sequence[bytes], count: int) -> None:
        """Refuse a request that refers to more than a body may have.

        Args:
          pulled: the items that it refers to, repeated ones as often as they are.
          count: number of all input items.
        """
        size, most = sum(map(len, pulled)), self._max_input()
        if size > most:
            raise Problem(
                f"the request refers to stored items of {size} bytes; at most {most} are read, as"
                " in a body: start a new conversation, or the server with a larger --max-body",
                param="input",
                code="stored_input_too_large",
            )
        check_messages(range(count), "input")


class RequestTurn:
    """The input of a request, and where its response is recorded.

    Attributes:
      items: the input items with everything before them, and references resolved.
      stored: the same as JSON, if the response is recorded.
      new: the items to add to the conversation, by id.
    """

    def __init__(
        self, store: ResponseStore, items: list[Item], conversation: str | None, keep: bool
    ):
        self.items = items
        self.stored: list[bytes] = []
        self.new: list[StoredItem] = []
        self._store, self._conversation, self._keep = store, conversation, keep

    def record(self, response: dict[str, Any]) -> None:
        """Store the finished response, and extend its conversation."""
        if self._conversation is not None:
            added = [*self.new, *new_items(response["output"])]
            self._store.conversations.append(self._conversation, added)
        if self._keep:
            self._store.put(response, self.stored)


class ResponseStores:
    """A store for each owner of API keys: nobody sees, continues or evicts what others keep.

    Args:
      max_input: as in `ResponseStore`.
    """

    def __init__(self, max_input: Callable[[], int]):
        self._max_input = max_input
        self._stores: dict[str, ResponseStore] = {}
        self._most = MOST_BYTES

    def of(self, owner: str) -> ResponseStore:
        """Return the store of an owner; "" is the one of a server without keys."""
        if owner not in self._stores:
            self._stores[owner] = ResponseStore(self._most, self._max_input)
        return self._stores[owner]

    def share(self, owners: Sequence[str]) -> None:
        """Give each owner an equal share, and forget what others have stored."""
        self._most = min(MOST_BYTES, MOST_TOTAL // max(len(owners), 1))
        self._stores = {owner: self.of(owner) for owner in owners}
        for store in self._stores.values():
            store.limit(self._most)
