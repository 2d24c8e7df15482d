"""Stored responses, which later requests retrieve or refer to, and the store of each owner."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from dflash_jax.server.conversation import check_messages
from dflash_jax.server.conversation_store import ConversationStore, Item, StoredItem, new_items
from dflash_jax.server.protocol import Problem

# Bounds in bytes that responses and conversations have, each of their own.
MOST_BYTES = 2**25  # of one owner
MOST_TOTAL = 2**28  # of all owners together
encode = msgspec.json.encode
decode = msgspec.json.decode


class StoredResponse(NamedTuple):
    """A response and its conversation, as JSON: Python objects take up to 20 times the memory.

    Attributes:
      items: input and output items, which are shared with the responses before it.
      response: the response as it was sent.
      item_ids: ids of the output items.
    """

    items: list[bytes]
    response: bytes
    item_ids: list[str]

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        return sum(map(len, self.items)) + len(self.response)


def _is_reference(item: Item) -> bool:
    """Return whether an input item names a stored one: its type may be left out."""
    kind = item.get("type")
    if kind is None:
        return item.keys() - {"type"} == {"id"}
    return kind == "item_reference"


class ResponseStore:
    """The responses and conversations of one owner, in memory. Thread-safe.

    The oldest responses are dropped first. Items are decoded one by one, when a request refers to
    them, so methods that take or return many of them should be called in a thread.

    Args:
      max_bytes: limit for all stored responses with their input, as JSON, and for conversations.
      max_input: returns the limit in bytes for what one request refers to.

    Attributes:
      conversations: conversations that requests continue by their field `conversation`.
    """

    def __init__(
        self, max_bytes: int = MOST_BYTES, max_input: Callable[[], int] = lambda: MOST_BYTES
    ):
        self._max_bytes = max_bytes
        self._max_input = max_input
        self._size = 0
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

    def put(self, response: dict[str, Any], input_items: Iterable[bytes]) -> None:
        """Store a response and its input items, unless it is larger than the store."""
        output = {item["id"]: encode(item) for item in response["output"]}
        items = [*input_items, *output.values()]
        stored = StoredResponse(items, encode(response), list(output))
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
            earlier = self._earlier_items(previous, conversation)
            referenced: dict[int, bytes] = {}  # JSON of items that others refer to, by place
            for at, item in enumerate(items):
                if _is_reference(item):
                    referenced[at] = self._referenced(str(item.get("id")), f"input[{at}]")
        stored = [*earlier, *referenced.values()]
        self._check_input(stored, len(earlier) + len(items))
        decoded = {data: decode(data) for data in set(stored)}  # each once
        new = list(items)
        for at, data in referenced.items():
            new[at] = decoded[data]
        turn = RequestTurn(self, [*(decoded[data] for data in earlier), *new], conversation, keep)
        if keep or conversation:
            turn.stored = list(earlier)
            for at, item in enumerate(items):
                turn.stored.append(referenced[at] if at in referenced else encode(item))
        if conversation:
            turn.new = new_items(new)
            self.conversations.check_room(conversation, turn.new)
        return turn

    def _earlier_items(self, previous: str | None, conversation: str | None) -> list[bytes]:
        """Return the items that a request follows."""
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

    def _check_input(self, stored: Sequence[bytes], count: int) -> None:
        """Refuse a request that refers to more than a body may have.

        Args:
          stored: the items that the request refers to, each as often as it does.
          count: number of all input items.
        """
        size = sum(map(len, stored))
        max_input = self._max_input()
        if size > max_input:
            raise Problem(
                f"the request refers to stored items of {size} bytes; at most {max_input} are read,"
                " as in a body: start a new conversation, or the server with a larger --max-body",
                param="input",
                code="stored_input_too_large",
            )
        check_messages(range(count), "input")


class RequestTurn:
    """The input of a request, and where its response is recorded.

    Attributes:
      items: the input items after everything before them, with the items that they refer to.
      stored: the same as JSON, if the response is recorded.
      new: the items to add to the conversation, with their ids.
    """

    def __init__(
        self, store: ResponseStore, items: list[Item], conversation: str | None, keep: bool
    ):
        self.items = items
        self.stored: list[bytes] = []
        self.new: list[StoredItem] = []
        self._store = store
        self._conversation = conversation
        self._keep = keep

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
      max_input: returns the limit in bytes for what one request refers to.
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
