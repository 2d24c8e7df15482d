"""Grammars that take long to compile or crash the trial process, and other requests."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.audit.serve import ASK, CHAT, MESSAGES, send
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import StructureError
from dflash_jax.graph import Graph
from dflash_jax.server.background import MOST_SLOW, StructureThreads, Turns
from dflash_jax.server.protocol import Problem
from dflash_jax.server.run import ServerConfig
from tests.engine.test_grammar_process import ENDLESS, chain, referring
from tests.server.conftest import LiveServer, run_server
from tests.server.test_compiling import soon, streaming

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
BOMB = ASK | {"guided_json": ENDLESS["json"]}  # exceeds the memory limit after about ten seconds
CHOICE = ASK | {"guided_choice": ["red", "blue"]}


@pytest.fixture
def served(random_tiny: Engine) -> Iterator[LiveServer]:
    """A separate server, with all programs that the tests need."""
    old = random_tiny
    engine = Engine(Graph(old.graph.pair, old.plan), old.params, tokenizer=old.tokenizer)
    engine.share_programs(old)
    engine.warm_up("greedy", "sampled", "penalized", "constrained")
    live = run_server(lambda: engine, ServerConfig(port=0, drain=2, keepalive=0.05))
    yield live
    live.stop()


def post(live: LiveServer, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(live.url + CHAT, json=body, timeout=60)


@contextlib.contextmanager
def trying(live: LiveServer) -> Iterator["concurrent.futures.Future[httpx.Response]"]:
    """Yield the future response to a request whose grammar takes longer than the block runs."""
    threads = live.running.server.models[0].engine_thread._structures
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, live, BOMB)
        assert soon(lambda: threads._num_later["slow"] == 1)
        yield answer


def test_other_requests_are_answered_while_a_structure_is_tried(served: LiveServer) -> None:
    with trying(served) as bomb:
        with streaming(served, ASK) as lines:
            assert list(lines)[-2] == "data: [DONE]"
        for body in (ASK | {"logprobs": True}, CHOICE, ASK | {"guided_regex": "[ab]{3}"}):
            assert post(served, body).status_code == 200
        assert not bomb.done()
        served.engine.core.grammars.close()  # ends the trial
        assert bomb.result().status_code == 400


LOOKS_AHEAD = {"type": "string", "pattern": "^(?!x).+$"}
TOOLS = [
    {"name": "f", "parameters": {"properties": {"a": {"const": 1}}, "type": "object"}},
    {"name": "g", "parameters": {"properties": {"a": LOOKS_AHEAD}, "type": "object"}},
]


def test_prefills_and_tools_reach_the_grammar(served: LiveServer) -> None:
    red = [*ASK["messages"], {"role": "assistant", "content": "re"}]
    choice = {"guided_choice": ["red", "blue"], "max_tokens": 8, "messages": red}
    schema = {"type": "string", "enum": ["red", "blue"]}
    quoted = [*ASK["messages"], {"role": "assistant", "content": '"re'}]
    messages = ASK | {"max_tokens": 8, "messages": quoted}
    messages["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    answer = post(served, CHOICE | choice | {"continue_final_message": True}).json()
    assert answer["choices"][0]["message"]["content"] == "d"
    answer = httpx.post(served.url + MESSAGES, json=messages, timeout=60).json()
    assert answer["content"] == [{"type": "text", "text": 'd"'}]
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    body = ASK | {"tools": tools, "tool_choice": "required", "max_tokens": 6, "recovery": False}
    answer = post(served, body)
    assert answer.status_code == 200
    assert "the tool 'g': pattern at #/properties/a was ignored" in answer.json()["warnings"][0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_a_structure_may_take_the_seconds_that_were_set(served: LiveServer, seconds: float) -> None:
    served.engine.core.grammars.seconds = seconds
    answer = post(served, BOMB)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert f"took longer than {seconds:g} s to compile; simplify it" in message
    assert post(served, CHOICE).status_code == 200


@pytest.mark.parametrize(
    "structure",
    [
        {"guided_json": referring(3000)},
        {"guided_json": '{"items":' * 2000 + "{}" + "}" * 2000},
        {"guided_grammar": chain(5000, "r")},
        {"guided_grammar": chain(5000, "T")},
        {"guided_grammar": chain(990, "r")},
        {"guided_json": {"type": "integer", "multipleOf": 1000003}},
    ],
)
def test_hostile_structures_get_a_400_and_the_next_request_is_served(
    served: LiveServer, structure: dict[str, Any]
) -> None:
    answer = post(served, ASK | structure)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the ")
    assert post(served, CHOICE).status_code == 200


def test_a_request_gives_its_place_back_when_its_client_leaves(served: LiveServer) -> None:
    thread = served.running.server.models[0].engine_thread
    with contextlib.closing(send(served.url, BOMB)):
        assert soon(lambda: thread._structures._num_later["slow"] == 1)
        assert thread.active == 1
    assert soon(lambda: thread.active == 0)
    assert thread._structures._num_later["slow"] == 1  # the trial continues
    assert post(served, CHOICE).status_code == 200
    assert thread.active == 0


def test_a_request_ends_with_its_time_though_its_structure_is_not_compiled(
    served: LiveServer,
) -> None:
    answer = post(served, BOMB | {"timeout": 0.2})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "structure_unfinished"
    assert int(answer.headers["retry-after"]) > 0
    assert served.is_idle()


def test_a_server_that_shuts_down_refuses_what_waits_for_a_structure(served: LiveServer) -> None:
    with trying(served) as bomb:
        served.running.stop()
        answer = bomb.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "draining"


def test_few_requests_may_wait_for_slow_structures() -> None:
    opened = threading.Event()
    prepared: list[int] = []
    refused: list[tuple[int, Exception]] = []

    def prepare(job: int) -> None:
        assert opened.wait(60)
        prepared.append(job)

    threads = StructureThreads[int](
        lambda job: job < 0, prepare, lambda job, error: refused.append((job, error))
    )
    for job in range(MOST_SLOW + 2):
        threads.submit(job)
    assert soon(lambda: len(refused) == 2)
    opened.set()
    assert soon(lambda: len(prepared) == MOST_SLOW)
    for at, (job, error) in enumerate(refused):
        assert job == MOST_SLOW + at
        assert isinstance(error, Problem)
        assert (error.status, error.code) == (503, "structures_busy")
        assert error.retry_s
    threads.submit(-1)
    threads.submit(100)
    assert soon(lambda: sorted(prepared)[-1] == 100)
    assert -1 in prepared
    threads.stop()


def test_refused_structures_do_not_count_as_slow_ones() -> None:
    """Their clients are told so, and may not be asked to try again."""
    opened = threading.Event()
    prepared: list[int] = []
    refused: list[tuple[int, Exception]] = []

    def prepare(job: int) -> None:
        assert opened.wait(60)
        prepared.append(job)

    def brief(job: int) -> Exception | None:
        return StructureError("not supported") if job < 0 else None

    threads = StructureThreads[int](
        lambda job: False,
        prepare,
        lambda job, error: refused.append((job, error)),
        brief=brief,
    )
    for job in range(1, MOST_SLOW + 3):
        threads.submit(-job)
    assert soon(lambda: len(refused) == 2)
    assert all(job < 0 and isinstance(error, StructureError) for job, error in refused)
    for job in range(1, MOST_SLOW + 3):
        threads.submit(job)
    assert soon(lambda: len(refused) == 4)
    assert all(isinstance(error, Problem) for job, error in refused if job > 0)
    opened.set()
    assert soon(lambda: len(prepared) == 2 * MOST_SLOW)
    assert soon(lambda: not any(threads._num_later.values()))
    threads.stop()


def test_the_fifth_refused_schema_is_refused_though_others_wait(served: LiveServer) -> None:
    threads = served.running.server.models[0].engine_thread._structures
    schemas = [
        {"type": "object", "properties": {f"p{i}": LOOKS_AHEAD}} for i in range(MOST_SLOW + 2)
    ]
    with trying(served) as bomb, concurrent.futures.ThreadPoolExecutor(MOST_SLOW) as pool:
        for schema in schemas[:MOST_SLOW]:
            pool.submit(post, served, ASK | {"guided_json": schema})
        assert soon(lambda: threads._num_later["refused"] == MOST_SLOW)
        for schema in schemas[MOST_SLOW:]:
            answer = post(served, ASK | {"guided_json": schema})
            assert answer.status_code == 400
            assert "the JSON schema is not supported at #" in answer.json()["error"]["message"]
        served.engine.core.grammars.close()  # ends the trial
        assert bomb.result().status_code == 400


def test_known_structures_wait_for_no_other() -> None:
    opened = threading.Event()
    prepared: list[int] = []
    threads = StructureThreads[int](
        lambda job: opened.wait(60), prepared.append, lambda job, error: None, lambda job: job > 0
    )
    threads.submit(0)
    threads.submit(1)
    assert soon(lambda: prepared == [1])
    opened.set()
    assert soon(lambda: prepared == [1, 0])
    threads.stop()


def test_the_client_that_used_the_least_time_is_next() -> None:
    turns = Turns[int]()
    for job in range(4):
        turns.put(("host", "busy"), job)
    client, job = turns.take()
    assert (client, job) == (("host", "busy"), 0)
    turns.add_time(client, 2.0)
    turns.put(("host", "new"), 10)
    turns.put(("other", "third"), 20)
    taken = []
    for _ in range(3):
        client, job = turns.take()
        taken.append(job)
        turns.add_time(client, 1.0)
    assert taken == [20, 10, 1]
    for _ in range(2):
        turns.add_time(turns.take()[0], 1.0)
    assert turns._used == {}


def test_a_client_waits_for_two_of_those_that_came_before() -> None:
    """Those that came before do not wait for more than as many newcomers."""
    turns = Turns[int]()
    for job in range(20):
        turns.put(("host", f"host {job}"), job)
    client, first = turns.take()
    turns.put(("host", "host 99"), 99)
    taken = [first]
    for _ in range(20):
        turns.add_time(client, 1.0)
        client, job = turns.take()
        taken.append(job)
    assert taken.index(99) <= 2
    assert all(taken.index(job) <= 2 * job for job in range(20))


def test_what_goes_wrong_in_a_trial_is_told() -> None:
    refused: list[Exception] = []
    threads = StructureThreads[int](
        lambda job: 1 // job > 0, lambda job: None, lambda job, error: refused.append(error)
    )
    threads.submit(0)
    assert soon(lambda: len(refused) == 1)
    assert isinstance(refused[0], ZeroDivisionError)
    threads.stop()
