"""Responses that later requests refer to, by their ids or by those of their items."""

from typing import Any

from dflash_jax.server.protocol import Problem

Item = dict[str, Any]


class Kept:
    """Conversations that ended in a response, the oldest forgotten first."""

    def __init__(self, most_characters: int = 2**25):
        self._most, self._size = most_characters, 0
        self._talks: dict[str, tuple[list[Item], int]] = {}  # by the response's id, and its size
        self._items: dict[str, Item] = {}  # that responses consist of, by id
        self._made: dict[str, list[str]] = {}  # ids of a response's items

    def keep(self, response: str, given: list[Item], made: list[Item]) -> None:
        """Keeps a response: the items it was given, and those it consists of."""
        talk = [*given, *made]
        size = len(str(talk))
        self._talks[response], self._size = (talk, size), self._size + size
        self._made[response] = [item["id"] for item in made]
        self._items |= {item["id"]: item for item in made}
        while self._size > self._most:
            self._forget(next(iter(self._talks)))

    def _forget(self, response: str) -> None:
        self._size -= self._talks.pop(response)[1]
        for item in self._made.pop(response):
            del self._items[item]

    def whole(self, previous: str | None, items: list[Item]) -> list[Item]:
        """The items of a request, those it refers to in their places.

        Args:
          previous: the response that they follow.

        Raises:
          Problem: one is not kept, or not any more.
        """
        before = self._talks.get(previous) if previous else ([], 0)
        if before is None:
            raise Problem(
                400, f"the response {previous!r} is not kept here; send the whole input",
                param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        return before[0] + [self._item(item, f"input[{at}]") for at, item in enumerate(items)]

    def _item(self, item: Item, where: str) -> Item:
        if item.get("type") != "item_reference":
            return item
        found = self._items.get(str(item.get("id")))
        if found is None:
            raise Problem(
                404, f"the item {item.get('id')!r} is not kept here; send it whole", param=where
            )
        return found
