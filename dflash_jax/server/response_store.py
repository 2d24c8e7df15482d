"""Stored responses, which later requests retrieve or refer to by response or item id."""

import json
from typing import Any, NamedTuple

from dflash_jax.server.conversation_store import ConversationStore
from dflash_jax.server.protocol import Problem

Item = dict[str, Any]


class StoredResponse(NamedTuple):
    """A response and its conversation, as JSON: Python objects take six times the memory."""

    conversation: bytes  # input and output items, a list
    response: bytes
    item_ids: list[str]  # of the output items

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        return len(self.conversation) + len(self.response)


class ResponseStore:
    """Responses in memory; the oldest are dropped first.

    Args:
      max_bytes: limit for all stored responses with their input, as JSON.

    Attributes:
      conversations: what `conversation` of a request refers to.
    """

    def __init__(self, max_bytes: int = 2**25):
        self._max_bytes, self._size = max_bytes, 0
        self._stored: dict[str, StoredResponse] = {}  # by response id
        self._response_of_item: dict[str, str] = {}  # response ids, by the ids of output items
        self.conversations = ConversationStore()

    def record(
        self,
        response: dict[str, Any],
        given: list[Item],
        *,
        keep: bool = True,
        conversation: str | None = None,
        added: int = 0,
    ) -> None:
        """Store a finished response, and extend its conversation.

        Args:
          given: the input items, those of the conversation included.
          keep: store the response itself.
          conversation: id of the conversation to extend.
          added: number of input items that were new in this request.
        """
        if conversation is not None:
            new = given[len(given) - added :]
            self.conversations.extend(conversation, [*new, *response["output"]])
        if keep:
            self.put(response, given)

    def put(self, response: dict[str, Any], given: list[Item]) -> None:
        """Store a response and its input items."""
        output = response["output"]
        stored = StoredResponse(
            _to_json([*given, *output]), _to_json(response), [item["id"] for item in output]
        )
        self._stored[response["id"]] = stored
        self._size += stored.size
        self._response_of_item |= dict.fromkeys(stored.item_ids, response["id"])
        while self._size > self._max_bytes:
            self.delete(next(iter(self._stored)))

    def get(self, response_id: str) -> dict[str, Any]:
        """Return a response as it was sent.

        Raises:
          Problem: 404, it is not stored.
        """
        return _from_json(self._find(response_id).response)

    def delete(self, response_id: str) -> None:
        """Remove a response.

        Raises:
          Problem: 404, it is not stored.
        """
        stored = self._find(response_id)
        del self._stored[response_id]
        self._size -= stored.size
        for item in stored.item_ids:
            del self._response_of_item[item]

    def _find(self, response_id: str) -> StoredResponse:
        stored = self._stored.get(response_id)
        if stored is None:
            raise Problem(
                404, f"the response {response_id!r} is not kept here", param="response_id"
            )
        return stored

    def resolve_input(
        self, previous: str | None, items: list[Item], conversation: str | None = None
    ) -> list[Item]:
        """Return a request's input items with everything before them, and references resolved.

        Args:
          previous: id of the response that the items follow.
          conversation: id of the conversation that they follow.

        Raises:
          Problem: a response or item is not stored.
        """
        if previous and previous not in self._stored:
            raise Problem(
                400, f"the response {previous!r} is not kept here; send the whole input",
                param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        before = _from_json(self._stored[previous].conversation) if previous else []
        if conversation is not None:
            before = self.conversations.items(conversation)
        return before + [self._resolve(item, f"input[{at}]") for at, item in enumerate(items)]

    def _resolve(self, item: Item, where: str) -> Item:
        if item.get("type") != "item_reference":
            return item
        response_id = self._response_of_item.get(item_id := str(item.get("id")))
        if response_id is None:
            raise Problem(404, f"the item {item_id!r} is not kept here; send it whole", param=where)
        return next(x for x in self.get(response_id)["output"] if x["id"] == item_id)


def _to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _from_json(text: bytes) -> Any:
    return json.loads(text.decode("utf-8", "surrogatepass"))
