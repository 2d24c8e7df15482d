"""Large requests: refused early, or processed outside the event loop."""

import asyncio
import contextlib
import functools
import json
import re
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax import chat_template
from dflash_jax.errors import InterruptedRequestError
from dflash_jax.server import background, generation, middleware, protocol
from dflash_jax.server import conversation as conversations
from dflash_jax.server.anthropic import decode_messages
from dflash_jax.server.completions import decode_chat
from dflash_jax.server.conversation import MOST_MESSAGES, parse_messages
from dflash_jax.server.fields import MOST_STOP_IDS
from dflash_jax.server.message_formats import messages_from_anthropic, messages_from_responses
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.middleware import Middleware
from dflash_jax.server.protocol import Problem, check_entries
from dflash_jax.server.reply import Reply
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.responses import decode_responses
from dflash_jax.server.served_models import ServerConfig
from dflash_jax.server.tool_turns import ToolTurnCache
from dflash_jax.server.tools import MOST_TOOLS
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils import interruption
from tests.server.conftest import CONTEXT, LiveServer
from tests.server.test_compiling import soon

USER = {"role": "user", "content": "a"}
LONG = "b" * (CONTEXT * 100)


def refused(live: LiveServer, path: str, body: Any) -> dict[str, Any]:
    answer = httpx.post(live.url + path, json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/chat/completions", {"messages": [USER | {"content": LONG}]}, "messages"),
        (
            "/v1/chat/completions",
            {
                "messages": [USER, {"role": "assistant", "content": LONG}],
                "continue_final_message": True,
            },
            "messages",
        ),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/responses/input_tokens", {"input": LONG}, "input"),
        ("/v1/messages", {"messages": [USER | {"content": LONG}], "max_tokens": 4}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [USER | {"content": LONG}]}, "messages"),
        ("/tokenize", {"content": LONG}, "content"),
        ("/tokenize", {"messages": [USER | {"content": LONG}]}, "messages"),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, param: str
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **more: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **more)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    error = refused(live, path, body)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert error["message"].startswith("prompt is too long: ")
    assert f"> {CONTEXT} maximum" in error["message"]
    assert "shorten the prompt" in error["message"]
    assert max(encoded, default=0) < len(LONG)


@pytest.mark.parametrize("size", [1, 30_000])
def test_templates_and_encoding_run_outside_the_event_loop(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    threads: set[str] = set()
    encode, render = Tokenizer.encode, Tokenizer.render

    def encoding(self: Tokenizer, text: str, **more: Any) -> list[int]:
        if len(text) > background.SHORT_TEXT:
            threads.add(threading.current_thread().name)
        return encode(self, text, **more)

    def rendering(self: Tokenizer, *given: Any, **more: Any) -> str:
        threads.add(threading.current_thread().name)
        return render(self, *given, **more)

    monkeypatch.setattr(Tokenizer, "encode", encoding)
    monkeypatch.setattr(Tokenizer, "render", rendering)
    content = " " * size
    post = {"messages": [USER | {"content": content}], "max_tokens": 1}
    httpx.post(live.url + "/v1/chat/completions", json=post, timeout=60)
    text = {"prompt": content, "max_tokens": 1}
    httpx.post(live.url + "/v1/completions", json=text, timeout=60)
    httpx.post(live.url + "/tokenize", json={"content": content}, timeout=60)
    names = {name.partition("_")[0] for name in threads}
    assert names <= {"short-requests", "long-requests"}
    assert ("long-requests" in names) == (size > background.SHORT_TEXT)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/v1/responses", "input"),
        ("/v1/responses/input_tokens", "input"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/tokenize", "content"),
        ("/detokenize", "tokens"),
    ],
)
def test_large_bodies_are_read_outside_the_event_loop(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    threads: list[str] = []

    def noted(body: bytes) -> None:
        threads.append(threading.current_thread().name)
        check_entries(body)

    monkeypatch.setattr(protocol, "check_entries", noted)
    refused(live, path, {"padding": " " * background.LARGE_BODY, field: {}})
    assert [name.partition("_")[0] for name in threads] == ["long-requests"]


def test_work_in_a_thread_ends_once_its_client_left() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                interruption.check()
            except InterruptedRequestError:
                ended.set()
                return

    async def leave() -> None:
        task = asyncio.create_task(background.in_thread(work))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(ended.wait, 20)

    asyncio.run(leave())


def test_a_template_that_reaches_its_time_limit_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(chat_template, "TIME_LIMIT", 0.1)
    work = functools.partial(chat_template.rendered, endless, {})
    with pytest.raises(Problem, match=r"the chat template ran for more than 0\.1 s") as told:
        asyncio.run(background.in_thread(work, param="messages"))
    assert (told.value.status, told.value.code) == (400, "time_limit")
    assert told.value.param == "messages"


def test_pieces_and_ids_are_bounded_by_the_context(live: LiveServer) -> None:
    text = {"content": "bcd" * CONTEXT}
    assert httpx.post(live.url + "/tokenize", json=text, timeout=60).json()["count"] > CONTEXT
    for name in ("with_pieces", "return_token_strs"):
        assert refused(live, "/tokenize", text | {name: True})["param"] == name
    ids = {"tokens": [1] * CONTEXT}
    assert httpx.post(live.url + "/detokenize", json=ids, timeout=60).status_code == 200
    error = refused(live, "/detokenize", {"tokens": [1] * (CONTEXT + 1)})
    assert error["param"] == "tokens"
    assert f"{CONTEXT + 1} tokens were given; at most {CONTEXT}" in error["message"]


def encoded(**body: Any) -> bytes:
    return json.dumps(body).encode()


MANY = [USER] * (MOST_MESSAGES + 1)


@pytest.mark.parametrize(
    ("decode", "body", "param"),
    [
        (decode_chat, {"messages": MANY}, "messages"),
        (decode_messages, {"messages": MANY, "max_tokens": 4}, "messages"),
        (decode_responses, {"input": MANY}, "input"),
        (
            decode_messages,
            {"max_tokens": 4, "messages": [
                {"role": "user", "content": [{"type": "tool_result", "content": ""}] * len(MANY)}
            ]},
            "messages",
        ),
    ],
)  # fmt: skip
def test_more_messages_than_a_template_should_see_are_refused(
    decode: Any, body: Any, param: str
) -> None:
    with pytest.raises(Problem, match=f"at most {MOST_MESSAGES}") as told:
        decode(encoded(**body))
    assert told.value.status == 400
    assert told.value.param == param


def test_as_many_messages_as_are_allowed_are_read() -> None:
    assert len(decode_chat(encoded(messages=MANY[1:])).messages or ()) == MOST_MESSAGES


@pytest.mark.parametrize(
    ("decode", "body"),
    [
        (decode_messages, {"messages": [USER], "max_tokens": 4}),
        (decode_responses, {"input": "a"}),
    ],
)
def test_tools_are_counted_before_they_are_read(decode: Any, body: Any) -> None:
    tools = [{"type": "web_search"}] * (MOST_TOOLS + 1)
    with pytest.raises(Problem, match=f"at most {MOST_TOOLS}"):
        decode(encoded(tools=tools, **body))


def test_stop_token_ids_are_bounded() -> None:
    ids = list(range(MOST_STOP_IDS))
    assert decode_chat(encoded(messages=[USER], stop_token_ids=ids)).options["stop_token_ids"]
    with pytest.raises(Problem, match=f"at most {MOST_STOP_IDS}"):
        decode_chat(encoded(messages=[USER], stop_token_ids=[*ids, 1]))


def test_a_body_of_too_many_entries_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "MOST_ENTRIES", 10)
    decoded: list[bytes] = []
    decode = protocol.msgspec.json.decode
    monkeypatch.setattr(
        protocol.msgspec.json, "decode", lambda body: decoded.append(body) or decode(body)
    )
    for body in (
        b'{"messages":[' + b"[]," * 9 + b"[]]}",
        encoded(**{str(i): i for i in range(10)}),
    ):
        with pytest.raises(Problem, match="more than 10 objects, arrays and keys"):
            decode_chat(body)
    assert decoded == []


@pytest.mark.parametrize("content", ["[{:," * 9, '\\"[{:,' * 9, '"[', "\\" * 9 + "[," * 20, ""])
def test_what_stands_inside_of_texts_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    body = encoded(messages=[{"role": "user", "content": content}])
    monkeypatch.setattr(protocol, "MOST_ENTRIES", 6)  # two objects, an array, three keys
    monkeypatch.setattr(protocol, "MOST_VALUES", 1)
    check_entries(body)
    monkeypatch.setattr(protocol, "MOST_ENTRIES", 5)
    with pytest.raises(Problem, match="the body has more than 5 objects, arrays and keys; send"):
        check_entries(body)
    monkeypatch.setattr(protocol, "MOST_ENTRIES", 6)
    monkeypatch.setattr(protocol, "MOST_VALUES", 0)
    with pytest.raises(Problem, match="the body has more than 0 values; send fewer"):
        check_entries(body)


TEXTS = st.text(st.sampled_from('\\",[a:{\n'), max_size=12)


@given(st.dictionaries(TEXTS, st.lists(TEXTS, max_size=4), max_size=4), st.integers(1, 9))
def test_texts_are_told_from_the_rest_wherever_a_body_is_cut(value: Any, size: int) -> None:
    body = encoded(**value)
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", body, flags=re.DOTALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "SLICE", size)
        assert b"".join(protocol._outside_strings(body)) == outside


def test_ids_that_are_too_many_are_refused_before_they_are_decoded(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MOST_VALUES", 100)
    ids = {"prompt": [1] * 102, "tokens": [1] * 102, "max_tokens": 1}
    for path in ("/v1/completions", "/detokenize"):
        error = refused(live, path, ids)
        assert error["code"] == "too_many_entries"
        assert "more than 100 values" in error["message"]


def test_arguments_of_too_many_values_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversations, "MOST_ARGUMENTS", 10)
    arguments = json.dumps({"a": [1] * 12})
    monkeypatch.setattr(conversations.json, "loads", lambda text: pytest.fail("decoded"))
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(Problem, match="the call's JSON has more than 10 values") as told:
        parse_messages([USER, {"role": "assistant", "tool_calls": [call]}])
    assert told.value.param == "messages[1].tool_calls"


@pytest.mark.parametrize(
    ("lengths", "bound"),
    [([], 4), ([4096], 4), ([2**17], 8), ([2**17, 4096], 8), ([2**18], 16), ([2**20], 32)],
)
def test_the_largest_body_follows_from_the_longest_context(lengths: list[int], bound: int) -> None:
    plans = [SimpleNamespace(max_length=length) for length in lengths]
    engines = [None, *(SimpleNamespace(plan=plan) for plan in plans)]  # one is still loading
    models: Any = [
        SimpleNamespace(engine_thread=SimpleNamespace(engine=engine)) for engine in engines
    ]
    assert Middleware(ServerConfig(), Metrics(), models).max_body == bound * 2**20
    assert Middleware(ServerConfig(max_body=7), Metrics(), models).max_body == 7


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_too_much_reads_why(live: LiveServer, chunked: bool) -> None:
    """The client sends everything before it reads: uvicorn discards the rest of the body."""
    size, count = 2**20, 16
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size * count}"
    piece = b" " * size
    if chunked:
        piece = b"%x\r\n%s\r\n" % (size, piece)
    with socket.create_connection(("127.0.0.1", live.running.port), timeout=60) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode()
        )
        for _ in range(count):
            connection.sendall(piece)
            time.sleep(0.02)  # a response would arrive now if the body was not read
        if chunked:
            connection.sendall(b"0\r\n\r\n")
        answer = connection.recv(2**16).decode()
    assert answer.startswith("HTTP/1.1 413 ")
    assert f"larger than {2**20} bytes" in answer
    assert httpx.get(live.url + "/props").json()["limits"]["max_body"] == 2**20


def test_memory_is_given_back_after_large_bodies_once_for_several(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[tuple[str, Any]] = []
    monkeypatch.setattr(middleware, "LARGE_BODY", 1000)
    monkeypatch.setattr(middleware, "TRIM_AFTER_S", 0.5)
    monkeypatch.setattr(
        middleware,
        "trim_memory",
        lambda pools: given_back.append((threading.current_thread().name, pools)),
    )
    for content in ("x", "b" * 2000, "b" * 2000):
        assert not given_back
        httpx.post(live.url + "/tokenize", json={"content": content}, timeout=60)
    assert soon(lambda: len(given_back) > 0)
    assert given_back == [("trim-memory", background.POOLS)]


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the bytes allocated in the block and still in use."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_kept_responses_take_little_more_memory_than_is_allowed() -> None:
    with traced() as taken:
        kept = ResponseStore(max_bytes=200_000)
        for number in range(1000):
            item = {"id": f"msg_{number}", "content": [{"type": "output_text", "text": "x" * 50}]}
            answer = {"id": f"resp_{number}", "output": [item], "usage": {"input_tokens": number}}
            kept.put(answer, [json.dumps({"role": "user", "content": "y" * 50}).encode()])
        assert json.loads(kept.get("resp_999")) == answer
        assert taken() < 3 * 200_000
    with pytest.raises(Problem, match="not kept"):
        kept.get("resp_0")


def test_remembered_turns_take_few_bytes_an_id() -> None:
    turns, count = ToolTurnCache(most_ids=50_000), 100

    def message(number: int) -> dict[str, Any]:
        function = {"name": "f", "arguments": {"a": [number, {"b": 1.5}]}}
        return {"content": " x", "tool_calls": [{"id": f"c{number}", "function": function}]}

    with traced() as taken:
        for number in range(600):
            turns.put(message(number), range(1000 + number, 1000 + number + count))
        assert taken() < 10 * 50_000
    assert turns.lookup(message(599)) == tuple(range(1599, 1699))
    assert turns.lookup(message(0)) is None
    edited = message(599)
    edited["tool_calls"][0]["function"]["arguments"] = {"a": [599, {"b": 2.5}]}
    assert turns.lookup(edited) is None


def test_neighbouring_system_messages_are_joined_part_by_part() -> None:
    contents: list[Any] = ["a", ["b", "c"], "d", ["e"]]
    parts = [[{"type": "text", "text": t} for t in c] if c is not str(c) else c for c in contents]
    made = parse_messages([*({"role": "system", "content": c} for c in parts), USER])
    assert [m["content"] for m in made] == [["a\n\nb", "c\n\nd\n\ne"], "a"]
    alone = parse_messages(
        [{"role": "system", "content": "a"}, USER, {"role": "system", "content": "b"}]
    )
    assert [m["content"] for m in alone] == ["a", "a", "b"]


def test_texts_and_thoughts_of_one_turn_are_joined_once() -> None:
    call = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [{"text": "t"}]}
    said = {"type": "message", "role": "assistant", "content": "s"}
    [message] = conversations.parse_messages(
        messages_from_responses(None, [thought, thought, call, said, thought, said])
    )
    assert message["content"] == "ss"
    assert message["reasoning_content"] == "t\n\nt\n\nt"
    blocks = [{"type": "thinking", "thinking": t} for t in ("x", "", "y")]
    [turn] = messages_from_anthropic(None, [{"role": "assistant", "content": blocks}])
    assert turn["reasoning_content"] == "x\n\ny"


def test_outputs_without_room_in_the_queue_are_refused_before_they_are_prepared(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Reply] = []

    def counted(*given: Any, **more: Any) -> Reply:
        made.append(Reply(*given, **more))
        return made[-1]

    monkeypatch.setattr(generation, "Reply", counted)
    for count, status in ((64, 503), (1, 200)):
        body = {"prompt": ["a"] * count, "n": count, "max_tokens": 1}
        assert httpx.post(live.url + "/v1/completions", json=body, timeout=60).status_code == status
        assert len(made) == (status == 200)
