"""Stored responses and conversations: their owners, bounds, and the threads that decode them."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from benchmarks.audit.serve import CHAT, COMPLETIONS, RESPONSES
from dflash_jax.engine.engine import Engine
from dflash_jax.server import app, conversation_store, response_store, stored_routes
from dflash_jax.server.conversation_store import ConversationStore
from dflash_jax.server.protocol import Problem
from dflash_jax.server.response_store import MOST_BYTES, ResponseStore, ResponseStores
from dflash_jax.server.responses import ResponsesWriter
from dflash_jax.server.run import ServerConfig
from tests.server.conftest import LiveServer, api_keys, run_server, twin

CONVERSATIONS = "/v1/conversations"
ASK: dict[str, Any] = {"input": "Hello", "max_output_tokens": 2}
USER = {"type": "message", "role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def keyed(random_tiny: Engine) -> Iterator[LiveServer]:
    """A server with two keys."""
    live = run_server(
        lambda: twin(random_tiny),
        ServerConfig(port=0, drain=5, api_keys=api_keys("first", "second")),
    )
    yield live
    live.stop()


def client(live: LiveServer, key: str) -> httpx.Client:
    return httpx.Client(base_url=live.url, headers={"x-api-key": key}, timeout=60)


def cached_tokens(client: httpx.Client, prompt: list[int]) -> int:
    """Complete a prompt; return how many of its tokens were cached."""
    answer = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_key_cannot_find_out_what_another_one_sent(
    keyed: LiveServer, random_tiny: Engine
) -> None:
    secret, keys = list(range(100, 300)), ("first", "second")
    with client(keyed, "first") as first, client(keyed, "second") as second:
        found = [cached_tokens(each, secret) for each in (first, second, first, second)]
    assert found == [0, 0, 192, 192]
    config = ServerConfig(port=0, drain=5, api_keys=api_keys(*keys), share_prefixes=True)
    sharing = run_server(lambda: twin(random_tiny), config)
    with client(sharing, "first") as first, client(sharing, "second") as second:
        assert [cached_tokens(each, secret) for each in (first, second)] == [0, 192]
    sharing.stop()


def test_a_key_cannot_see_continue_or_delete_what_another_one_stored(keyed: LiveServer) -> None:
    with client(keyed, "first") as first, client(keyed, "second") as second:
        answer = first.post(RESPONSES, json=ASK).json()
        talk = first.post(CONVERSATIONS, json={"items": [USER]}).json()
        response, conversation = f"{RESPONSES}/{answer['id']}", f"{CONVERSATIONS}/{talk['id']}"
        for path in (response, conversation, f"{conversation}/items"):
            assert second.get(path).status_code == 404, path
            assert first.get(path).status_code == 200, path
        for path in (response, conversation):
            assert second.delete(path).status_code == 404
        assert second.post(f"{conversation}/items", json={"items": [USER]}).status_code == 404
        item = answer["output"][0]["id"]
        continuing: list[tuple[dict[str, Any], int]] = [
            ({"previous_response_id": answer["id"]}, 400),
            ({"conversation": talk["id"]}, 404),
            ({"input": [{"type": "item_reference", "id": item}]}, 404),
        ]
        for change, status in continuing:
            refused = second.post(RESPONSES, json=ASK | change)
            assert refused.status_code == status, refused.text
            counted = second.post(f"{RESPONSES}/input_tokens", json=ASK | change)
            assert counted.status_code == status
            assert first.post(RESPONSES, json=ASK | change).status_code == 200
        for path in (response, conversation):
            assert first.delete(path).status_code == 200
            assert first.get(path).status_code == 404


def test_a_key_that_stores_much_drops_only_what_is_its_own() -> None:
    stores = ResponseStores(lambda: MOST_BYTES)
    stores.share([f"owner {number}" for number in range(100)])
    first, second = (stores.of(f"owner {number}") for number in (1, 2))
    second.put({"id": "resp_b", "output": []}, [b'"b"'])
    large = b'"%s"' % (b"a" * 2**20)
    for number in range(40):
        first.put({"id": f"resp_{number}", "output": []}, [large])
    assert first.size <= 2**28 / 100
    with pytest.raises(Problem, match="not kept here"):
        first.get("resp_0")
    assert json.loads(second.get("resp_b"))["id"] == "resp_b"


def test_owners_that_remain_keep_what_they_stored_and_others_lose_it() -> None:
    stores = ResponseStores(lambda: MOST_BYTES)
    for owner in ("a", "b"):
        stores.of(owner).put({"id": "resp_1", "output": []}, [b'"b"'])
    stores.share(["b", *(f"owner {number}" for number in range(100))])
    assert stores.of("b").get("resp_1")
    with pytest.raises(Problem, match="not kept here"):
        stores.of("a").get("resp_1")
    large = b'"%s"' % (b"a" * 2**20)
    for number in range(4):
        stores.of("b").put({"id": f"large_{number}", "output": []}, [large])
    assert stores.of("b").size <= 2**28 / 101


def test_what_is_larger_than_the_store_drops_nothing_else() -> None:
    kept = ResponseStore(max_bytes=1000)
    kept.put({"id": "resp_1", "output": []}, [])
    kept.put({"id": "resp_2", "output": []}, [b'"%s"' % (b"a" * 2000)])
    assert kept.get("resp_1")
    with pytest.raises(Problem, match="not kept here"):
        kept.get("resp_2")
    talks = ConversationStore(max_bytes=1000)
    small, full = (talks.create([USER], None)["id"] for _ in range(2))
    long = USER | {"content": "a" * 900}
    with pytest.raises(Problem, match="at most 1000 are kept") as caught:
        talks.extend(full, [long])
    assert (caught.value.status, caught.value.code) == (413, "conversation_full")
    with pytest.raises(Problem, match="at most 1000 are kept"):
        talks.create([long], None)
    assert [len(talks.items(each)) for each in (small, full)] == [1, 1]


def test_a_request_may_refer_to_as_much_as_a_body_may_have() -> None:
    kept = ResponseStore(max_input=lambda: 5000)
    item = {"id": "msg_1", "type": "message", "role": "assistant", "content": "a" * 1000}
    kept.put({"id": "resp_1", "output": [item]}, [])
    refers = {"type": "item_reference", "id": "msg_1"}
    assert kept.begin_turn([refers] * 4).items == [item] * 4
    with pytest.raises(Problem, match="at most 5000 are read") as caught:
        kept.begin_turn([refers] * 5)
    assert caught.value.code == "stored_input_too_large"
    kept.put({"id": "resp_2", "output": []}, [b"{}"] * 1000)
    for _ in range(2):
        with pytest.raises(Problem, match="at most 8192 are accepted"):
            kept.begin_turn([USER] * 8000, previous="resp_2")
    talk = kept.conversations.create([item] * 6, None)["id"]
    with pytest.raises(Problem, match="at most 5000 are read"):
        kept.begin_turn([USER], conversation=talk)


def test_an_item_that_is_named_often_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, decoded = ResponseStore(), []
    item = {"id": "msg_1", "type": "message", "role": "assistant", "content": "Yes."}
    kept.put({"id": "resp_1", "output": [item], "metadata": {"x": "y" * 10**6}}, [])
    monkeypatch.setattr(response_store, "decode", lambda data: decoded.append(data) or item)
    turn = kept.begin_turn([{"type": "item_reference", "id": "msg_1"}] * 1000)
    assert turn.items == [item] * 1000
    assert len(decoded) == 1
    assert len(decoded[0]) < 200  # the response around it is not read


def test_the_event_loop_neither_decodes_nor_writes_what_clients_can_make_large(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every route that stores or returns large things; small requests refer to them."""
    large = {"text": "x" * 200_000}
    threads: set[threading.Thread] = set()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any, **more: Any) -> Any:
            threads.add(threading.current_thread())
            return function(*arguments, **more)

        return note

    with httpx.Client(base_url=live.url, timeout=60) as http:
        for place, names in (
            (response_store, ("decode", "encode")),
            (response_store, ("new_items",)),
            (conversation_store, ("new_items",)),
            (stored_routes, ("_parse", "_list")),
            (app, ("sampling_params",)),
        ):
            for name in names:
                monkeypatch.setattr(place, name, noted(getattr(place, name)))
        for name in ("to_json", "start", "close"):
            monkeypatch.setattr(ResponsesWriter, name, noted(getattr(ResponsesWriter, name)))
        asked = ASK | {"metadata": large}
        answer = http.post(RESPONSES, json=asked).json()
        text = http.post(RESPONSES, json=asked | {"stream": True}).text
        assert "response.completed" in text or "response.incomplete" in text
        assert len(http.get(f"{RESPONSES}/{answer['id']}").content) > 200_000
        refers = {"type": "item_reference", "id": answer["output"][0]["id"]}
        talk = http.post(CONVERSATIONS, json={"items": [USER], "metadata": large}).json()
        items = f"{CONVERSATIONS}/{talk['id']}/items"
        assert len(http.get(items).json()["data"]) == 1
        assert len(http.post(items, json={"items": [USER]}).json()["data"]) == 1
        assert live.thread not in threads
        # Small requests may write in the event loop, but do not read stored items there.
        monkeypatch.undo()
        monkeypatch.setattr(response_store, "decode", noted(response_store.decode))
        threads.clear()
        for change in (
            {"input": [refers]},
            {"previous_response_id": answer["id"]},
            {"conversation": talk["id"]},
        ):
            got = http.post(RESPONSES, json=ASK | change)
            assert got.status_code == 200, got.text
            http.post(f"{RESPONSES}/input_tokens", json=ASK | change)
    assert threads
    assert live.thread not in threads


def test_names_that_a_response_repeats_are_bounded(live: LiveServer) -> None:
    fields = {f"unknown{number}": 1 for number in range(1000)} | {"y" * 1000: 1}
    body = {"messages": [USER], "max_tokens": 2} | fields
    warnings = httpx.post(live.url + CHAT, json=body, timeout=60).json()["warnings"]
    assert len(warnings) == 65
    assert warnings[-1] == "937 more unknown fields were ignored"
    named = httpx.post(live.url + CHAT, json=body | {"model": "z" * 10**5}, timeout=60)
    assert named.status_code == 404
    assert len(named.content) < 2000
