"""Responses that later requests ask for, or refer to by their ids or by those of their items."""

from typing import Any, NamedTuple

from dflash_jax.server.protocol import Problem

Item = dict[str, Any]


class Talk(NamedTuple):
    """A conversation that ended in a response: all of its items, and that answer."""

    items: list[Item]
    answer: dict[str, Any]
    size: int  # characters


class Kept:
    """Conversations that ended in a response, the oldest forgotten first."""

    def __init__(self, most_characters: int = 2**25):
        self._most, self._size = most_characters, 0
        self._talks: dict[str, Talk] = {}  # by the response's id
        self._items: dict[str, Item] = {}  # that responses consist of, by id

    def keep(self, answer: dict[str, Any], given: list[Item]) -> None:
        """Keeps a response, and the items it was given."""
        made = answer["output"]
        talk = Talk([*given, *made], answer, len(str(given)) + len(str(answer)))
        self._talks[answer["id"]] = talk
        self._size += talk.size
        self._items |= {item["id"]: item for item in made}
        while self._size > self._most:
            self.forget(next(iter(self._talks)))

    def answer(self, response: str) -> dict[str, Any]:
        """A response as it was answered; raises Problem 404 where it is not kept."""
        return self._talk(response).answer

    def forget(self, response: str) -> None:
        """Keeps a response no longer; raises Problem 404 where it is not kept."""
        talk = self._talk(response)
        del self._talks[response]
        self._size -= talk.size
        for item in talk.answer["output"]:
            del self._items[item["id"]]

    def _talk(self, response: str) -> Talk:
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
        before = self._talks[previous].items if previous else []
        return before + [self._item(item, f"input[{at}]") for at, item in enumerate(items)]

    def _item(self, item: Item, where: str) -> Item:
        if item.get("type") != "item_reference":
            return item
        found = self._items.get(str(item.get("id")))
        if found is None:
            raise Problem(
                404, f"the item {item.get('id')!r} is not kept here; send it whole", param=where
            )
        return found
