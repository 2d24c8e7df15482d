"""The parts of the Ray adapters that need no Ray: options, conversations, order of replicas."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dflash_jax.ray
from dflash_jax.errors import RequestError
from dflash_jax.ray import given_options, scaling_options
from dflash_jax.ray.calls import Call, Conversations, conversation_key, ranked

ROOT = Path(__file__).parents[2]
SCALING = {"replicas": "1", "gpus": "0", "cpus": "1"}


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match=r"pip install -e '\.\[ray\]'"):
        dflash_jax.ray.app({})


def test_the_parts_without_ray_import_neither_ray_nor_jax() -> None:
    code = "import sys, dflash_jax.ray.calls; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, cwd=ROOT
    )
    assert not {"ray", "jax"} & {*found.stdout.split()}


def test_options_come_from_arguments_before_the_environment() -> None:
    environ = {"DFLASH_SERVE_ROWS": "4", "DFLASH_SERVE_QUEUE": "9", "OTHER": "1"}
    args = {"rows": 2, "no-ui": True, "metrics": "false", "model": ["a=tiny", "b=tiny"]}
    options, scaling = given_options(args | {"replicas": "1-3"}, environ)
    assert (options.queue, options.no_ui, options.metrics) == (9, True, False)
    assert options.model == ("a=tiny", "b=tiny")
    assert options.plan.rows == 2
    assert scaling == SCALING | {"replicas": "1-3"}


def test_replicas_are_a_number_or_scaled_by_the_requests_that_run() -> None:
    resources = {"num_cpus": 1.0, "num_gpus": 0.5}
    fixed = scaling_options(SCALING | {"replicas": "2", "gpus": "0.5"}, 4)
    assert fixed == {"num_replicas": 2, "ray_actor_options": resources}
    scaled = scaling_options(SCALING | {"replicas": "0-3"}, 4)["autoscaling_config"]
    assert scaled == {"min_replicas": 0, "max_replicas": 3, "target_ongoing_requests": 4}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"row": 2}, r"'row' is no option of `dflash-jax serve`.* are replicas, gpus, cpus"),
        ({"rows": "two"}, "rows is 'two'; expected an integer"),
        ({"replicas": "3-2"}, "replicas is '3-2'; expected a number, or least and most"),
        ({"replicas": "0"}, "replicas is '0'; expected a whole number of at least 1"),
        ({"gpus": "many"}, "gpus is 'many'; expected a number of at least 0"),
    ],
)
def test_wrong_options_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        scaling_options(given_options(args, {})[1], 1)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_turns_of_a_conversation_have_one_key_in_every_api() -> None:
    opening = {"model": "tiny", "messages": [user("Hello"), {"role": "assistant", "content": "Hi"}]}
    key = conversation_key({"model": "tiny", "messages": [user("Hello")]})
    assert key
    assert conversation_key(opening) == key
    marked = user([{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}])
    assert conversation_key({"model": "tiny", "messages": [marked]}) == key
    assert conversation_key({"model": "tiny", "input": "Hello"}) == key
    assert conversation_key({"model": "tiny", "input": [user("Hello")]}) == key
    assert conversation_key({"model": "tiny", "messages": [user("Bye")]}) != key
    assert conversation_key({"prompt": [1, 2, 3]}) != conversation_key({"prompt": [1, 2, 4]})
    for nothing in ({}, {"messages": 3}, {"messages": []}, {"prompt": None}):
        assert conversation_key(nothing) == ""


def call(conversations: Conversations, path: str, body: Any = None, method: str = "POST") -> Call:
    scope = {"type": "http", "method": method, "path": path, "headers": [], "app": object()}
    return conversations.call(scope, json.dumps(body).encode())


def test_a_stored_response_is_found_where_it_was_made() -> None:
    conversations = Conversations()
    first = call(conversations, "/v1/responses", {"input": "Hello"})
    assert first.pinned
    assert "app" not in first.scope
    conversations.remember(first, b'{"object":"response","id":"resp_1","created_at":1}')
    more = {"previous_response_id": "resp_1", "input": "And then?"}
    assert call(conversations, "/v1/responses", more).conversation == first.conversation
    read = call(conversations, "/v1/responses/resp_1", method="GET")
    assert (read.conversation, read.pinned) == (first.conversation, True)
    assert not call(conversations, "/v1/responses/resp_2", method="GET").conversation
    for other in (call(conversations, "/v1/models", method="GET"), call(conversations, "/v1/x", 3)):
        assert not other.conversation


def test_a_conversation_stays_with_a_replica_until_its_queue_is_long() -> None:
    queues = dict.fromkeys("abcd", 0)

    def order(key: str, longer: int | None = 4) -> list[list[str]]:
        return ranked([*queues], key, name=str, queue=lambda name: queues[name], longer=longer)

    assert len({str(order("")) for _ in range(100)}) > 1
    homes = {str(i): order(str(i))[0][0] for i in range(200)}
    assert {*homes.values()} == {*queues}
    [home], others = order("0")
    assert {home, *others} == {*queues}
    queues[home] = 3
    assert order("0")[0] == [home]
    queues[home] = 4
    assert order("0") == [others, [home]]
    assert order("0", longer=None) == [[home]]
    del queues["d"]  # only its own conversations move
    assert all(order(key)[0] == [name] for key, name in homes.items() if name not in (home, "d"))
