"""OpenAI's /v1/conversations: items in memory, which responses of a conversation extend."""

import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_jax.server.background import read_body
from dflash_jax.server.connection import json_response
from dflash_jax.server.message_formats import messages_from_responses
from dflash_jax.server.middleware import Handler, Middleware
from dflash_jax.server.protocol import Problem, decode, new_id

Item = dict[str, Any]


@dataclasses.dataclass
class StoredConversation:
    """A conversation; its items are JSON, as Python objects take six times the memory."""

    fields: dict[str, Any]
    items: list[bytes] = dataclasses.field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        return len(_to_json(self.fields)) + sum(map(len, self.items))


class ConversationStore:
    """Conversations in memory; the least recently extended ones are dropped first.

    Args:
      max_bytes: limit for all items and metadata, as JSON.
    """

    def __init__(self, max_bytes: int = 2**25):
        self._max_bytes, self._size = max_bytes, 0
        self._stored: dict[str, StoredConversation] = {}  # the last extended one is last

    def create(self, items: Sequence[Item], metadata: dict[str, Any] | None) -> dict[str, Any]:
        """Store a new conversation and return its object."""
        conversation_id = new_id("conv_")
        fields = {"id": conversation_id, "object": "conversation"}
        fields |= {"created_at": int(time.time()), "metadata": metadata or {}}
        made = self._stored[conversation_id] = StoredConversation(fields)
        self._size += made.size
        self.extend(conversation_id, items)
        return fields

    def get(self, conversation_id: str) -> dict[str, Any]:
        """Return the object of a conversation.

        Raises:
          Problem: 404, it is not stored.
        """
        return self._find(conversation_id).fields

    def items(self, conversation_id: str) -> list[Item]:
        """Return the items of a conversation, the oldest first.

        Raises:
          Problem: 404, it is not stored.
        """
        return [_from_json(item) for item in self._find(conversation_id).items]

    def extend(self, conversation_id: str, items: Sequence[Item]) -> list[Item]:
        """Add items, and return them with their ids; does nothing if the conversation is gone."""
        whole = [{"id": new_id("item_"), "type": "message"} | item for item in items]
        if (stored := self._stored.pop(conversation_id, None)) is None:
            return whole
        self._stored[conversation_id] = stored
        new = list(map(_to_json, whole))
        stored.items += new
        self._size += sum(map(len, new))
        while self._size > self._max_bytes:
            self.delete(next(iter(self._stored)))
        return whole

    def delete(self, conversation_id: str) -> None:
        """Remove a conversation.

        Raises:
          Problem: 404, it is not stored.
        """
        self._size -= self._find(conversation_id).size
        del self._stored[conversation_id]

    def _find(self, conversation_id: str) -> StoredConversation:
        stored = self._stored.get(conversation_id)
        if stored is None:
            raise Problem(
                404,
                f"the conversation {conversation_id!r} is not kept here; create one by POST"
                " /v1/conversations, or send the whole input",
                param="conversation",
                code="conversation_not_found",
            )
        return stored


class ConversationBody(msgspec.Struct):
    """Body of POST /v1/conversations and of POST to its items."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None


class ConversationRoutes:
    """Handlers of the routes below /v1/conversations."""

    def __init__(self, store: ConversationStore, middleware: Middleware):
        self._store, self._middleware = store, middleware

    @property
    def handlers(self) -> dict[str, tuple[Handler, list[str]]]:
        """Return the handlers by path, each with its methods."""
        one = "/v1/conversations/{conversation_id}"
        return {
            "/v1/conversations": (self._create, ["POST"]),
            one: (self._one, ["GET", "DELETE"]),
            f"{one}/items": (self._items, ["GET", "POST"]),
        }

    async def _body(self, raw_request: Request) -> ConversationBody:
        """Return the body; its items are those that a response can have as input."""
        read = functools.partial(decode, kind=ConversationBody)
        parsed, _ = await read_body(read, await self._middleware.body(raw_request))
        try:
            messages_from_responses(None, parsed.items or [])
        except Problem as problem:
            problem.param = (problem.param or "items").replace("input", "items", 1)
            raise
        return parsed

    async def _create(self, raw_request: Request) -> Response:
        parsed = await self._body(raw_request)
        return json_response(self._store.create(parsed.items or [], parsed.metadata))

    async def _one(self, raw_request: Request) -> Response:
        conversation_id = raw_request.path_params["conversation_id"]
        if raw_request.method == "DELETE":
            self._store.delete(conversation_id)
            gone = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
            return json_response(gone)
        return json_response(self._store.get(conversation_id))

    async def _items(self, raw_request: Request) -> Response:
        conversation_id = raw_request.path_params["conversation_id"]
        items = self._store.items(conversation_id)
        if raw_request.method == "POST":
            given = (await self._body(raw_request)).items or []
            items = self._store.extend(conversation_id, given)
        elif raw_request.query_params.get("order", "desc") == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
        return json_response({"object": "list", "data": items, "has_more": False} | ends)


def _to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _from_json(text: bytes) -> Any:
    return json.loads(text.decode("utf-8", "surrogatepass"))
