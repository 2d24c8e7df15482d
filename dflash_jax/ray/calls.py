"""Requests on their way to a replica, their conversations, and the order of replicas; no Ray."""

import dataclasses
import hashlib
import json
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

OPENING = 1024  # characters of a text, or ids of a prompt, by which it is recognised
MOST_RESPONSES = 100_000  # whose conversations are remembered
RESPONSE_ID = re.compile(rb'"id": ?"(resp_[^"]+)"')
RESPONSES = "/v1/responses"
# Parts of an ASGI scope that can be sent to another process.
PLAIN = (
    "type", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string",
    "headers", "client", "server",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """An HTTP request, on its way to a replica.

    Attributes:
      scope: the plain parts of the ASGI scope.
      conversation: the same for every turn of a conversation; "" if it belongs to none.
      pinned: only the conversation's replica can answer it, as it stores the past responses.
    """

    scope: dict[str, Any]
    body: bytes
    conversation: str = ""
    pinned: bool = False


class Conversations:
    """Recognises conversations by their first user message or by the response they continue."""

    def __init__(self) -> None:
        self._of_response: OrderedDict[str, str] = OrderedDict()

    def call(self, scope: dict[str, Any], body: bytes) -> Call:
        """Return the call of a request."""
        plain = {name: scope[name] for name in PLAIN if name in scope}
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith(RESPONSES + "/"):
            key = self._of_response.get(path.removeprefix(RESPONSES + "/"), "")
            return Call(plain, body, key, pinned=bool(key))
        if scope["method"] != "POST" or not path.startswith("/v1/"):
            return Call(plain, body)
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            fields = None  # the replica explains the error
        if not isinstance(fields, dict):
            return Call(plain, body)
        key = self._of_response.get(str(fields.get("previous_response_id")), "")
        return Call(plain, body, key or conversation_key(fields), pinned=path == RESPONSES)

    def remember(self, call: Call, body: bytes) -> None:
        """Remember the id of a stored response, given the beginning of the body that has it."""
        if call.pinned and (match := RESPONSE_ID.search(body)):
            self._of_response[match[1].decode()] = call.conversation
            if len(self._of_response) > MOST_RESPONSES:
                self._of_response.popitem(last=False)


def conversation_key(fields: dict[str, Any]) -> str:
    """Return a hash of the model and the first user message of a request's body, or "" without."""
    messages = fields.get("messages", fields.get("input", fields.get("prompt")))
    if isinstance(messages, list) and messages:
        users = (m for m in messages if isinstance(m, dict) and m.get("role") == "user")
        opening = _text(next(users, {}).get("content")) or str(messages[:OPENING])
    else:
        opening = messages if isinstance(messages, str) else ""
    if not opening:
        return ""
    text = f"{fields.get('model')} {opening[:OPENING]}"
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _text(content: Any) -> str:
    """Return the text of a message; markers that clients move from turn to turn do not count."""
    if isinstance(content, list):
        return " ".join(_text(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def ranked(
    replicas: Sequence[Any],
    conversation: str,
    *,
    name: Callable[[Any], str],
    queue: Callable[[Any], int],
    longer: int | None,
) -> list[list[Any]]:
    """Return groups of replicas in the order in which to try them.

    Args:
      conversation: key of the conversation; "" for a request that belongs to none.
      name: returns the unique name of a replica.
      queue: returns the number of requests that a replica has.
      longer: by how many requests the queue of the conversation's replica may be longer than the
        shortest one before others are tried first; None tries no other.
    """
    if not conversation:
        return [random.sample(replicas, len(replicas))]

    def weight(replica: Any) -> bytes:
        return hashlib.blake2b(f"{conversation} {name(replica)}".encode()).digest()

    home, *others = sorted(replicas, key=weight)
    if longer is None:
        return [[home]]
    if others and queue(home) - min(map(queue, others)) >= longer:
        return [others, [home]]
    return [[home], others]
