"""No route delays other requests: each with the largest input that it takes."""

import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dflash_jax.engine.result import Piece, Result, RoundTrace, Stats, TokenLogprob
from dflash_jax.loading import locate
from dflash_jax.server.completions import ChatWriter, CompletionWriter
from dflash_jax.server.conversation import MOST_MESSAGES
from dflash_jax.server.reply import Reply
from dflash_jax.server.responses import ResponsesWriter
from dflash_jax.tokenizer import Tokenizer
from tests.server.conftest import CONTEXT, MAX_BODY, QUEUE, LiveServer
from tests.server.test_replies import asked, generation

BEYOND_IDLE_S = 1.0
IDLE_S, PAUSE_S = 0.5, 0.005  # of measuring, and between two requests of the neighbour
MOST_HEAD = 50_000  # bytes of a path with its query
RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
USER = {"role": "user", "content": "a"}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A server with a response and a conversation that are as large as bodies may be.

    Attributes:
      ids: of the response, its output item, and the conversation.
    """

    live: LiveServer
    ids: dict[str, str]

    def send(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        host, _, port = self.live.url.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        try:
            connection.request(method, path.format(**self.ids), body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def longest_wait(self, work: Callable[..., Any], *given: Any) -> tuple[float, Any]:
        """Return the longest wait for /health while a function runs, and its result."""
        waits, ended = [0.0], threading.Event()

        def ask() -> None:
            while not ended.wait(PAUSE_S):
                begun = time.perf_counter()
                assert self.send("GET", "/health")[0] == 200
                waits.append(time.perf_counter() - begun)

        neighbour = threading.Thread(target=ask)
        neighbour.start()
        try:
            result = work(*given)
        finally:
            ended.set()
            neighbour.join()
        return max(waits), result


def filled(body: dict[str, Any], name: str, part: Any, most: int = MAX_BODY) -> bytes:
    """Return a body with a list of many equal parts as a field, as large as the server reads."""
    encoded = json.dumps(part).encode()
    count = min((MAX_BODY - len(json.dumps(body)) - 200) // (len(encoded) + 1), most)
    head = json.dumps({k: v for k, v in body.items() if k != name} | {name: None}).encode()
    return head.replace(b"null", b"[" + b",".join([encoded] * count) + b"]", 1)


def crowded(body: dict[str, Any], name: str, **more: str) -> bytes:
    """Return a body with as many messages as there may be."""
    return filled(body, name, USER | more, MOST_MESSAGES)


def long(body: dict[str, Any], name: str) -> bytes:
    return json.dumps(body | {name: "a " * (MAX_BODY // 2 - 1000)}).encode()


def entries(body: dict[str, Any], name: str = "metadata") -> list[bytes]:
    """Return a body with numbers, and one with objects."""
    return [filled(body, name, 1), filled(body, name, {"a": 1})]


def bodies() -> dict[str, list[bytes]]:
    """Return the largest bodies of each POST route, by path."""
    messages = {"messages": [USER], "max_tokens": 2}
    asking = {"input": "a", "max_output_tokens": 2}
    reference = {"type": "item_reference", "id": "{item}"}
    continued = [
        json.dumps(asking | {"conversation": "{conversation}"}).encode(),
        json.dumps(asking | {"input": [reference] * 1000}).encode(),
        crowded(asking, "input", type="message"),
        filled(asking | {"stream": True}, "metadata", {"a": 1}),
    ]
    answers = {"n": QUEUE, "max_tokens": 48, "return_token_sources": True}
    prompts = {"prompt": [[5] * (CONTEXT - 8)] * QUEUE, "max_tokens": 1, "echo": True}
    items = crowded({}, "items", type="message")
    text = json.loads(long({"role": "user"}, "content"))
    chat = [
        *entries(messages),
        crowded(messages, "messages"),
        json.dumps(messages | {"messages": [text]}).encode(),
    ]
    complete = {"prompt": "a", "max_tokens": 2}
    return {
        "/v1/chat/completions": [*chat, json.dumps(messages | answers).encode()],
        "/v1/completions": [
            *entries(complete), long({}, "prompt"), filled({}, "prompt", 5),
            json.dumps(prompts | {"return_token_ids": True}).encode(),
        ],
        RESPONSES: [*entries(asking | {"store": False}), long({}, "input"), *continued],
        f"{RESPONSES}/input_tokens": [*entries(asking), long({}, "input"), *continued],
        "/v1/messages": chat,
        "/v1/messages/count_tokens": chat,
        "/tokenize": [long({}, "content"), crowded({}, "messages")],
        "/detokenize": [filled({}, "tokens", 5), json.dumps({"tokens": [5] * CONTEXT}).encode()],
        CONVERSATIONS: [items, *entries({})],
        CONVERSATIONS + "/{conversation_id}/items": [items],
    }  # fmt: skip


# The largest paths of the other routes, by method and path; DELETE comes last.
PATHS = {
    ("GET", path): f"{path}?x={'a' * MOST_HEAD}"
    for path in ("/", "/v1/models", "/health", "/ready", "/metrics", "/props")
} | {
    ("GET", "/page/{name}"): f"/page/{'a' * MOST_HEAD}",
    ("GET", "/v1/models/{name:path}"): f"/v1/models/{'a/' * (MOST_HEAD // 2)}",
    ("GET", RESPONSES + "/{response_id}"): RESPONSES + "/{response}",
    ("GET", CONVERSATIONS + "/{conversation_id}"): CONVERSATIONS + "/{conversation}",
    ("GET", CONVERSATIONS + "/{conversation_id}/items"): CONVERSATIONS + "/{conversation}/items",
    ("DELETE", CONVERSATIONS + "/{conversation_id}"): CONVERSATIONS + "/{conversation}",
    ("DELETE", RESPONSES + "/{response_id}"): RESPONSES + "/{response}",
}


@pytest.fixture(scope="module")
def stored(live: LiveServer) -> Stored:
    made = Stored(live, {})
    text = {"input": "a", "max_output_tokens": 2, "metadata": {"x": "y" * (MAX_BODY - 1000)}}
    answer = json.loads(made.send("POST", RESPONSES, json.dumps(text).encode())[1])
    talk = json.loads(made.send("POST", CONVERSATIONS, bodies()[CONVERSATIONS][0])[1])
    ids = {"response": answer["id"], "item": answer["output"][0]["id"], "conversation": talk["id"]}
    return Stored(live, ids)


def test_every_route_has_its_largest_input_here(stored: Stored) -> None:
    routes = stored.live.running.server.routes
    served = {(method, route.path) for route in routes for method in route.methods or ()}
    known = {("POST", path) for path in bodies()} | PATHS.keys()
    assert {(method, path) for method, path in served if method != "HEAD"} == known


@pytest.mark.exhaustive
def test_no_request_delays_a_neighbour_by_a_second(stored: Stored) -> None:
    idle, _ = stored.longest_wait(time.sleep, IDLE_S)
    cases = [
        ("POST", path.replace("{conversation_id}", "{conversation}"), body)
        for path, all_of_it in bodies().items()
        for body in all_of_it
    ]
    cases += [(method, path, None) for (method, _), path in PATHS.items()]
    late = {}
    for method, path, body in cases:
        for key, value in stored.ids.items() if body else ():
            body = body.replace(b"{%b}" % key.encode(), value.encode())
        wait, (status, answer) = stored.longest_wait(stored.send, method, path, body)
        if wait > idle + BEYOND_IDLE_S:  # a pause that does not come again is the machine's
            wait, _ = stored.longest_wait(stored.send, method, path, body)
        case = f"{method} {path[:60]}, {(body or b'')[:60]!r}"
        assert status < 500, f"{case}: {answer[:200]!r}"
        if wait > idle + BEYOND_IDLE_S:
            late[case] = wait
    assert not late


def containers(value: Any) -> int:
    """Return the number of dicts and lists of a tree."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


@pytest.mark.parametrize(
    ("api", "writer"),
    [("chat", ChatWriter), ("completions", CompletionWriter), ("responses", ResponsesWriter)],
)
def test_a_response_has_as_few_objects_as_one_of_a_single_token(api: str, writer: Any) -> None:
    tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    request = asked(
        api, logprobs=2, prompt_logprobs=2, return_token_sources=True, tools=[], declared_tools=()
    )

    def size(tokens: int) -> int:
        ids = (tokenizer.encode("a", specials=False)[0],) * tokens
        given = [TokenLogprob(i, -1.0, ((i, -1.0), (i + 1, -2.0))) for i in ids]
        rounds = [RoundTrace((i,), ("target",), texts=("a",)) for i in ids]
        reply = Reply(0, request, tokenizer, None)
        reply.push(Piece(ids, "a" * tokens, tuple(given), tuple(rounds)))
        stats = Stats(prompt_tokens=5, output_tokens=tokens)
        reply.finish(Result(list(ids), "a" * tokens, "stop", stats, prompt_logprobs=given))
        made = generation(reply, request)
        vars(made.model.engine)["tokenizer"] = tokenizer
        answer = writer(made).to_json()
        assert str(answer).count("Raw") >= tokens
        return containers(answer)

    assert size(100) == size(1)
