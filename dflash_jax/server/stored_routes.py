"""Routes of stored responses and of /v1/conversations. Every API key has stores of its own."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_jax.server.background import in_thread
from dflash_jax.server.conversation_store import StoredItem
from dflash_jax.server.http_responses import JsonPieces, json_response
from dflash_jax.server.message_formats import messages_from_responses
from dflash_jax.server.middleware import Handler, Middleware
from dflash_jax.server.protocol import Problem, decode
from dflash_jax.server.response_store import ResponseStore, ResponseStores
from dflash_jax.server.writer import encode

# Beginning and end of a list object; the end has the ids of its first and last item.
HEAD = b'{"object":"list","data":['
TAIL = b'],"has_more":false,"first_id":%b,"last_id":%b}'


class ConversationBody(msgspec.Struct):
    """Body of POST /v1/conversations and of POST to its items."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None


class StoredRoutes:
    """Handlers of stored responses and conversations.

    Whatever a client can make large is handled in threads.
    """

    def __init__(self, stores: ResponseStores, middleware: Middleware):
        self._stores = stores
        self._middleware = middleware

    @property
    def handlers(self) -> dict[str, tuple[Handler, list[str]]]:
        """Return the handlers by path, each with its methods."""
        return {
            "/v1/responses/{response_id}": (self._response, ["GET", "DELETE"]),
            "/v1/conversations": (self._create, ["POST"]),
            "/v1/conversations/{conversation_id}": (self._conversation, ["GET", "DELETE"]),
            "/v1/conversations/{conversation_id}/items": (self._items, ["GET", "POST"]),
        }

    def _store(self, raw_request: Request) -> ResponseStore:
        return self._stores.of(raw_request.state.key.owner)

    async def _response(self, raw_request: Request) -> Response:
        response_id = raw_request.path_params["response_id"]
        store = self._store(raw_request)
        if raw_request.method == "DELETE":
            store.delete(response_id)
            return json_response({"id": response_id, "object": "response", "deleted": True})
        if raw_request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise Problem("a kept response is not streamed; leave it out", param="stream")
        return JsonPieces([store.get(response_id)])

    async def _create(self, raw_request: Request) -> Response:
        body = await self._middleware.body(raw_request)
        store = self._store(raw_request)

        def create() -> list[bytes]:
            parsed = _parse(body)
            return [encode(store.conversations.create(parsed.items or [], parsed.metadata))]

        return JsonPieces(await in_thread(create, long=True))

    async def _conversation(self, raw_request: Request) -> Response:
        conversation_id = raw_request.path_params["conversation_id"]
        conversations = self._store(raw_request).conversations
        if raw_request.method == "DELETE":
            conversations.delete(conversation_id)
            return json_response(
                {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
            )
        return JsonPieces([conversations.get(conversation_id)])

    async def _items(self, raw_request: Request) -> Response:
        conversation_id = raw_request.path_params["conversation_id"]
        conversations = self._store(raw_request).conversations
        if raw_request.method == "POST":
            conversations.get(conversation_id)  # before the body is read
            body = await self._middleware.body(raw_request)

            def extend() -> list[bytes]:
                return _list(conversations.extend(conversation_id, _parse(body).items or []))

            return JsonPieces(await in_thread(extend, long=True))
        newest_first = raw_request.query_params.get("order", "desc") == "desc"

        def show() -> list[bytes]:
            items = conversations.items(conversation_id)
            if newest_first:
                items.reverse()
            return _list(items)

        return JsonPieces(await in_thread(show))


def _parse(body: bytes) -> ConversationBody:
    """Return the body of a request; its items are those that a response can have as input."""
    parsed, _ = decode(body, ConversationBody)
    try:
        messages_from_responses(None, parsed.items or [])
    except Problem as problem:
        problem.param = (problem.param or "items").replace("input", "items", 1)
        raise
    return parsed


def _list(items: list[StoredItem]) -> list[bytes]:
    """Return the pieces of the list object of items, without decoding them."""
    pieces = [HEAD]
    for _, item in items:
        pieces += (item, b",")
    if items:
        pieces.pop()  # the last comma
    ids = [item_id for item_id, _ in items]
    first = encode(ids[0] if ids else None)
    last = encode(ids[-1] if ids else None)
    return [*pieces, TAIL % (first, last)]
