"""Responses that later requests ask for, or refer to by their ids or by those of their items."""

import json
from typing import Any, NamedTuple

from dflash_jax.server.protocol import Problem

Item = dict[str, Any]


class StoredResponse(NamedTuple):
    """A conversation that ended in a response, as JSON: objects take six times the memory."""

    items: bytes  # all of them, a list
    answer: bytes
    made: list[str]  # ids of the items that the response consists of

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.items) + len(self.answer)


class ResponseStore:
    """Conversations that ended in a response, the oldest forgotten first.

    Args:
      most_bytes: of all conversations, as JSON.
    """

    def __init__(self, most_bytes: int = 2**25):
        self._most, self._size = most_bytes, 0
        self._talks: dict[str, StoredResponse] = {}  # by the response's id
        self._responses: dict[str, str] = {}  # ids of responses, by ids of items they consist of

    def keep(self, answer: dict[str, Any], given: list[Item]) -> None:
        """Keeps a response, and the items it was given."""
        made = answer["output"]
        talk = StoredResponse(_json([*given, *made]), _json(answer), [item["id"] for item in made])
        self._talks[answer["id"]] = talk
        self._size += talk.size
        self._responses |= dict.fromkeys(talk.made, answer["id"])
        while self._size > self._most:
            self.forget(next(iter(self._talks)))

    def answer(self, response: str) -> dict[str, Any]:
        """A response as it was answered; raises Problem 404 where it is not kept."""
        return _value(self._talk(response).answer)

    def forget(self, response: str) -> None:
        """Keeps a response no longer; raises Problem 404 where it is not kept."""
        talk = self._talk(response)
        del self._talks[response]
        self._size -= talk.size
        for item in talk.made:
            del self._responses[item]

    def _talk(self, response: str) -> StoredResponse:
        found = self._talks.get(response)
        if found is None:
            raise Problem(404, f"the response {response!r} is not kept here", param="response_id")
        return found

    def whole(self, previous: str | None, items: list[Item]) -> list[Item]:
        """The items of a request, those it refers to in their places.

        Args:
          previous: the response that they follow.

        Raises:
          Problem: one is not kept, or not any more.
        """
        if previous and previous not in self._talks:
            raise Problem(
                400, f"the response {previous!r} is not kept here; send the whole input",
                param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        before = _value(self._talks[previous].items) if previous else []
        return before + [self._item(item, f"input[{at}]") for at, item in enumerate(items)]

    def _item(self, item: Item, where: str) -> Item:
        if item.get("type") != "item_reference":
            return item
        response = self._responses.get(number := str(item.get("id")))
        if response is None:
            raise Problem(404, f"the item {number!r} is not kept here; send it whole", param=where)
        return next(made for made in self.answer(response)["output"] if made["id"] == number)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _value(text: bytes) -> Any:
    return json.loads(text.decode("utf-8", "surrogatepass"))
