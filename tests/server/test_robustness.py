"""Clients cannot crash the server, block it, or leave work running after they left."""

import asyncio
import contextlib
import functools
import gzip
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import jax
import pytest
from starlette.datastructures import URL
from starlette.requests import Request

from benchmarks.audit.serve import (
    ASK,
    BODIES,
    CHANGES,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    crowd,
    fuzz,
    is_error,
    leave,
    send,
)
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.result import Result, Stats
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.state_machine.speculation import BreakEven
from dflash_jax.errors import CheckpointError, ComputeError, RequestError
from dflash_jax.graph import executor
from dflash_jax.server import app
from dflash_jax.server.engine_thread import EngineThread, PendingOutput
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.prompt import EncodedPrompt, prepare
from dflash_jax.server.protocol import GenerationRequest
from dflash_jax.server.reasoning import EFFORTS
from dflash_jax.server.run import ServerConfig, serve
from dflash_jax.server.served_models import ServedModel
from dflash_jax.tokenizer import Tokenizer
from tests.server.conftest import QUEUE, LiveServer, api_keys, run_server, twin


def serves(live: LiveServer) -> bool:
    return httpx.post(live.url + CHAT, json=ASK, timeout=60).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_bodies_that_are_no_requests_are_refused(live: LiveServer, path: str) -> None:
    for name, body in BODIES.items():
        response = httpx.post(live.url + path, content=body, timeout=60)
        assert is_error(response), (name, response.text)
    assert serves(live)


def test_wrong_values_are_refused_and_named(live: LiveServer) -> None:
    for change in CHANGES:
        response = httpx.post(live.url + CHAT, json=ASK | change, timeout=60)
        assert is_error(response), (change, response.text)
        param = response.json()["error"]["param"]
        named = re.split(r"\W", param or "")[0]
        assert response.status_code == 404 or param is None or named in change | ASK
    assert serves(live)


HALF = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": "\\ud83d"}'}}
ODD: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, {"tools": [{"function": {"name": "f"}}], "tool_choice": {"type": ["x"]}}, 400),
    (CHAT, {"chat_template_kwargs": {"messages": [], "self": 1}}, 200),
    (CHAT, {"recovery": {"skip_phrase": 1}}, 400),
    (CHAT, {"recovery": {"close_text": True}}, 400),
    (CHAT, {"guided_choice": ["<think>a"], "enable_thinking": False}, 400),
    (CHAT, {"guided_choice": [f"item {i}" for i in range(3000)]}, 200),
    (
        CHAT,
        {
            "messages": [
                *ASK["messages"],
                {"role": "assistant", "content": None, "tool_calls": [HALF]},
                {"role": "tool", "tool_call_id": "c", "content": "ok"},
            ]
        },
        200,
    ),
    (
        RESPONSES,
        {
            "input": [
                {"type": "reasoning", "content": 5},
                {"type": "message", "role": "user", "content": "hi"},
            ]
        },
        200,
    ),
]


@pytest.mark.parametrize(("path", "change", "status"), ODD)
def test_odd_requests_are_served_or_refused_but_do_not_fail(
    live: LiveServer, path: str, change: dict[str, Any], status: int
) -> None:
    base = {"max_output_tokens": 2} if path == RESPONSES else ASK
    response = httpx.post(live.url + path, json=base | change, timeout=60)
    assert response.status_code == status, response.text


def test_what_is_not_there_or_too_large_is_refused(live: LiveServer) -> None:
    assert httpx.get(live.url + "/nothing").status_code == 404
    wrong = httpx.get(live.url + CHAT)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert [m["id"] for m in httpx.get(live.url + "/v1/models/").json()["data"]] == ["tiny"]
    packed = gzip.compress(json.dumps(ASK).encode())
    response = httpx.post(live.url + CHAT, content=packed, headers={"Content-Encoding": "gzip"})
    assert (response.status_code, is_error(response)) == (415, True)
    assert is_error(httpx.get(live.url + "/v1/models/other"))
    large = httpx.post(live.url + CHAT, content=b" " * (2**20 + 1))
    assert large.status_code == 413
    assert is_error(large)
    chunked = httpx.post(live.url + CHAT, content=(b" " * 2**16 for _ in range(20)))
    assert chunked.status_code == 413
    headers = {"x-long": "a" * 100_000}
    assert httpx.get(live.url + "/health", headers=headers).status_code in (400, 431)
    long = httpx.post(
        live.url + CHAT, json=ASK | {"messages": [{"role": "user", "content": "x " * 9999}]}
    )
    assert is_error(long)
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert serves(live)


def test_unknown_fields_are_ignored_and_named(live: LiveServer) -> None:
    answer = httpx.post(live.url + CHAT, json=ASK | {"frobnicate": 1}, timeout=60).json()
    assert "frobnicate" in answer["warnings"][0]


def test_no_body_makes_the_server_fail(live: LiveServer) -> None:
    fuzz(live.url, 60)
    assert live.is_idle()
    assert serves(live)


# -- clients that leave ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_ten_clients_leave_and_the_next_is_served(live: LiveServer, stream: bool) -> None:
    before = live.engine.generate(live.engine.chat_ids(ASK["messages"]), max_tokens=4)
    leave(live.url, ASK | {"max_tokens": 400, "ignore_eos": True, "stream": stream}, 10)
    assert live.is_idle()
    answer = httpx.post(live.url + CHAT, json=ASK | {"return_token_ids": True}, timeout=60).json()
    assert answer["choices"][0]["token_ids"] == before.token_ids
    found = scraped(live)
    left = [n for name, n in found.items() if name.startswith("request_cancelled_total")]
    assert sum(left) >= 10
    assert any('phase="output",reason="disconnect"' in name for name in found) or not stream


@pytest.mark.parametrize("stream", [True, False])
def test_C21_a_client_that_closes_its_sending_side_is_still_served(
    live: LiveServer, stream: bool
) -> None:
    body = ASK | {"max_tokens": 200, "ignore_eos": True, "stream": stream}
    with contextlib.closing(send(live.url, body)) as connection:
        connection.shutdown(socket.SHUT_WR)
        came = b"".join(iter(functools.partial(connection.recv, 2**16), b""))
    assert b"HTTP/1.1 200 OK" in came
    assert (b"[DONE]" if stream else b'"completion_tokens":200') in came
    assert live.is_idle()


def test_C6_a_client_that_leaves_while_its_prompt_is_made_is_never_served(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gone, submitted = threading.Event(), threading.Event(), []

    async def slow(model: ServedModel, ask: GenerationRequest) -> list[EncodedPrompt]:
        begun.set()
        await asyncio.to_thread(gone.wait, 20)
        return await prepare(model, ask)

    monkeypatch.setattr(app, "prepare", slow)
    monkeypatch.setattr(live.engine, "submit", lambda *a, **k: submitted.append(a))
    sample = 'request_cancelled_total{model="tiny",phase="tokenisation",reason="disconnect"}'
    before = scraped(live).get(sample, 0)
    with contextlib.closing(send(live.url, ASK)):
        assert begun.wait(20)
    end = time.monotonic() + 20
    while scraped(live).get(sample, 0) == before and time.monotonic() < end:
        time.sleep(0.01)
    gone.set()
    assert scraped(live)[sample] == before + 1
    assert live.is_idle()
    assert not submitted


def test_a_deadline_ends_a_request_with_what_it_has(live: LiveServer) -> None:
    body = ASK | {"max_tokens": 450, "ignore_eos": True, "timeout": 0.05}
    answer = httpx.post(live.url + CHAT, json=body, timeout=60).json()
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["finish_details"]["reason"] == "deadline"
    assert any('reason="deadline"' in name for name in scraped(live))
    assert answer["usage"]["completion_tokens"] < 450
    assert live.is_idle()


# -- many at once ------------------------------------------------------------------------------


def test_more_than_the_queue_holds_are_served_or_told_to_come_back(live: LiveServer) -> None:
    answers = crowd(live.url, 2 * QUEUE)
    served = [r for r in answers if r.status_code == 200]
    refused = [r for r in answers if r.status_code == 503]
    assert len(served) + len(refused) == len(answers)
    assert len(served) >= QUEUE
    assert all("retry-after" in r.headers and is_error(r) for r in refused)
    texts = {r.json()["choices"][0]["message"]["content"] for r in served if "id" in r.text[:5]}
    assert len(texts) <= 1
    assert live.is_idle()


def test_more_outputs_than_the_queue_holds_are_refused_together(live: LiveServer) -> None:
    refused = httpx.post(live.url + CHAT, json=ASK | {"n": QUEUE + 1}, timeout=60)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert live.is_idle()


# -- other settings, over the same compiled programs -------------------------------------------


@pytest.fixture
def gate() -> threading.Event:
    """Delays the loading of the second model until it is set."""
    return threading.Event()


@pytest.fixture
def locked(random_tiny: Engine, gate: threading.Event) -> Iterator[LiveServer]:
    """A server with keys and two models, one of which waits for the gate."""

    def make() -> Engine:
        assert gate.wait(60)
        return twin(random_tiny)

    listening = ServerConfig(
        port=0,
        drain=20,
        api_keys=api_keys("secret", "other"),
        cors_origin=("http://page",),
        metrics=True,
    )
    live = run_server(lambda: twin(random_tiny), listening, others={"second": make})
    yield live
    gate.set()
    live.stop()


def test_it_is_alive_before_it_is_ready(locked: LiveServer, gate: threading.Event) -> None:
    headers = {"Authorization": "Bearer secret"}
    assert httpx.get(locked.url + "/health").status_code == 200
    assert httpx.get(locked.url + "/ready").status_code == 503
    early = httpx.post(locked.url + CHAT, json=ASK | {"model": "second"}, headers=headers)
    assert early.status_code == 503
    assert early.headers["retry-after"]
    open_gate(locked, gate)


def open_gate(live: LiveServer, gate: threading.Event) -> None:
    """Let the second model load."""
    gate.set()
    end = time.monotonic() + 30
    while httpx.get(live.url + "/ready").status_code == 503 and time.monotonic() < end:
        time.sleep(0.01)
    assert httpx.get(live.url + "/ready").status_code == 200


def test_keys_are_needed_and_any_takes_the_model_that_was_used_last(
    locked: LiveServer, gate: threading.Event
) -> None:
    open_gate(locked, gate)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "secrets"}):
        refused = httpx.post(locked.url + CHAT, json=ASK, headers=headers)
        assert refused.status_code == 401
        assert is_error(refused)
    with httpx.Client(base_url=locked.url, headers={"x-api-key": "other"}, timeout=60) as client:
        for name in ("second", "tiny"):
            before = {m["id"]: m["last_used_ms"] for m in client.get("/v1/models").json()["data"]}
            assert client.post(CHAT, json=ASK | {"model": name}).json()["model"] == name
            answer = client.post(CHAT, json=ASK | {"model": "any"}).json()
            assert answer["model"] == name
            assert client.get("/v1/models/dummy").json()["id"] == name
            assert "timings" in answer
            after = {m["id"]: m["last_used_ms"] for m in client.get("/v1/models").json()["data"]}
            assert after[name] > before[name]
        allowed = client.get("/health", headers={"Origin": "http://page"}).headers
        assert allowed["access-control-allow-origin"] == "http://page"


class Panic(BaseException):
    """The tokenizers library raises one when Rust code panics."""


def test_a_request_that_makes_a_library_panic_is_alone_refused(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: Any, **__: Any) -> None:
        raise Panic("slice index starts at -1")

    monkeypatch.setattr(Engine, "prepare", panic)
    failed = httpx.post(live.url + CHAT, json=ASK, timeout=30)
    assert failed.status_code == 500
    assert "slice index" in failed.json()["error"]["message"]
    monkeypatch.undo()
    monkeypatch.setattr(Tokenizer, "encode", panic)
    failed = httpx.post(live.url + "/tokenize", json={"content": "a"}, timeout=30)
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")
    monkeypatch.undo()
    assert serves(live)


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_failed_step_ends_its_requests_and_not_the_server(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    engine = twin(random_tiny)
    engine.core.meter.use(timed := BreakEven.constant(0.5))
    engine.core.runner.compiled.seconds = 0.5  # a restart keeps both
    advance, failures = Engine.advance, [True]

    def failing(self: Engine) -> None:
        if failures and self is engine:
            failures.pop()
            raise kind("the device is on fire")
        advance(self)

    monkeypatch.setattr(Engine, "advance", failing)
    live = run_server(lambda: engine, ServerConfig(port=0))
    failed = httpx.post(live.url + CHAT, json=ASK, timeout=60)
    assert failed.status_code == 500
    assert "on fire" in failed.json()["error"]["message"]
    assert serves(live)
    assert live.engine is not engine
    assert (live.engine.core.meter.value, live.engine.core.runner.compiled.seconds) == (timed, 0.5)
    assert live.engine.core.grammars is engine.core.grammars
    failures.append(True)
    live.stop()


def test_an_engine_without_memory_to_restart_ends_the_server_with_the_reason(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ends = twin(random_tiny), []

    def full(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    async def run() -> EngineThread:
        thread = EngineThread(lambda: engine)
        await thread.ready.wait()
        monkeypatch.setattr(executor, "place_empty_state", full)
        monkeypatch.setattr(engine.core.runner, "step", full)
        thread.submit(
            PendingOutput(
                [1, 2], SamplingParams(max_tokens=4), 0, lambda _, __, end: ends.append(end)
            )
        )
        await asyncio.wait_for(thread.ended.wait(), 20)
        await thread.stop()
        return thread

    thread = asyncio.run(run())
    assert "RESOURCE_EXHAUSTED" in str(thread.error)
    assert isinstance(ends[-1], ComputeError)


def test_an_event_loop_that_closed_first_leaves_no_traceback(
    random_tiny: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    async def begin() -> EngineThread:
        thread, begun = EngineThread(lambda: twin(random_tiny)), asyncio.Event()
        await thread.ready.wait()
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        thread.submit(PendingOutput([1, 2], params, 0, lambda *_: begun.set()))
        thread.submit(
            PendingOutput([1, 2], SamplingParams(structured={"choice": ["a"]}), 1, lambda *_: None)
        )
        await begun.wait()
        return thread

    thread = asyncio.run(begin())  # closes the loop without stopping the thread
    thread._thread.join(60)
    assert not thread._thread.is_alive()
    assert "Traceback" not in capfd.readouterr().err


def test_a_server_that_ended_may_be_stopped_again(random_tiny: Engine) -> None:
    live = run_server(lambda: twin(random_tiny), ServerConfig(port=0))
    live.stop()
    live.running.stop()


def test_a_silent_stream_says_how_far_its_prompt_has_come(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, advance = twin(random_tiny), Engine.advance

    def slow(self: Engine) -> None:
        time.sleep(0.2 * (self is engine))
        advance(self)

    monkeypatch.setattr(Engine, "advance", slow)
    live = run_server(lambda: engine, ServerConfig(port=0, keepalive=0.05))
    text = httpx.post(live.url + CHAT, json=ASK | {"max_tokens": 2, "stream": True}).text
    prompt = len(engine.chat_ids(ASK["messages"]))
    assert f": keepalive 0/{prompt}\n\n" in text
    assert text.endswith("data: [DONE]\n\n")
    live.stop()


def test_a_drain_lets_streams_end_and_refuses_the_rest(random_tiny: Engine) -> None:
    live = run_server(lambda: twin(random_tiny), ServerConfig(port=0, drain=20))
    with httpx.stream(
        "POST", live.url + CHAT, json=ASK | {"max_tokens": 200, "stream": True}, timeout=60
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        live.running.stop()
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    live.thread.join(30)
    assert not live.thread.is_alive()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error() -> None:
    def make() -> Engine:
        raise CheckpointError("no weights")

    with pytest.raises(CheckpointError, match="no weights"):
        asyncio.run(serve({"x": make}, ServerConfig(port=0)))


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1", "Address already in use"), ("nobody.invalid", ""), ("a" * 70, "")],
)
def test_where_nobody_can_listen_no_model_is_loaded(live: LiveServer, host: str, why: str) -> None:
    def make() -> Engine:
        raise AssertionError("too late")

    listening = ServerConfig(host=host, port=live.running.port)
    with pytest.raises(RequestError, match=f"cannot listen on {host}, port .*{why}; give an"):
        asyncio.run(serve({"x": make}, listening))


def test_addresses_that_this_machine_lacks_do_not_matter_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> Engine:
        raise CheckpointError("no weights")  # the address was bound

    known = socket.getaddrinfo
    both = [*known("192.0.2.1", 0, type=socket.SOCK_STREAM), *known("127.0.0.1", 0)[:1]]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with pytest.raises(CheckpointError, match="no weights"):
        asyncio.run(serve({"x": make}, ServerConfig(host="both.example", port=0)))


def test_small_routes(live: LiveServer) -> None:
    with httpx.Client(base_url=live.url, timeout=60) as client:
        tokens = client.post("/tokenize", json={"content": "def add(a"}).json()
        assert tokens["count"] == len(tokens["tokens"]) > 0
        text = client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["content"]
        assert text == "def add(a"
        chat = client.post("/tokenize", json={"messages": ASK["messages"]}).json()
        assert chat["tokens"] == live.engine.chat_ids(ASK["messages"])
        begun = [*ASK["messages"], {"role": "assistant", "content": "I am"}]
        body = {"messages": begun, "continue_final_message": True, "with_pieces": True}
        found = client.post("/tokenize", json=body | {"return_token_strs": True}).json()
        assert "".join(token["piece"] for token in found["tokens"]).endswith("I am")
        assert len(found["token_strs"]) == found["count"]
        half = client.post("/tokenize", json={"content": "\U0001f600", "with_pieces": True}).json()
        codes = [token["piece"] for token in half["tokens"]]
        assert b"".join(map(bytes, codes)).decode() == "\U0001f600"
        assert client.post("/tokenize", json={"content": "a", "chat_template": "b"}).is_error
        assert client.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
        assert client.get("/health").json() == {"status": "ok"}
        options = client.options(CHAT)
        assert (options.status_code, options.headers["allow"]) == (204, "POST")
        assert client.options("/nothing").status_code == 404
        props = client.get("/props").json()
        assert props["models"][0]["plan"]["rows"] == live.engine.plan.rows
        assert CHAT in props["endpoints"] == props["api"]["endpoints"]
        plan = live.engine.plan
        assert props["default_generation_settings"]["n_ctx"] == plan.max_length
        assert (props["total_slots"], props["speculative_mode"]) == (plan.rows, "dflash")
        assert props["reasoning"] == {"supported": True, "efforts": list(EFFORTS)}
        assert props["prefix_cache"] == {"bytes": plan.prefix_cache, "on_disk": False}
        assert props["daemon"]["alive"]
        assert {"min_tokens", "tools"} <= set(props["parameters"][CHAT])
        assert client.post(CHAT, json=ASK).status_code == 200


def scraped(live: LiveServer) -> dict[str, float]:
    """Return the samples of /metrics by name and labels, without the prefix."""
    lines = httpx.get(live.url + "/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    found = {name.removeprefix("dflash_jax:"): float(value) for name, value in pairs}
    return {name.replace('{model="tiny"}', ""): value for name, value in found.items()}


def test_metrics_have_the_names_that_dashboards_look_for(live: LiveServer) -> None:
    assert serves(live)
    found = scraped(live)
    assert {
        "num_requests_running", "num_requests_waiting", 'prompt_tokens_total{key="",model="tiny"}',
        'generation_tokens_total{key="",model="tiny"}', "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count", "request_queue_time_seconds_count",
        'request_success_total{finished_reason="length",key="",model="tiny"}',
        "kv_cache_usage_perc",
        "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total", "jit_compile_seconds_total",
        "jit_cache_misses_total", "prompt_seconds_total", "tokens_predicted_seconds_total",
    } <= found.keys()  # fmt: skip
    assert found["jit_cache_misses_total"] == live.engine.core.runner.compiled.compiled
    sizes = {"weights": live.engine.params, "caches": live.engine.core.runner.state}
    for part, tree in sizes.items():
        expected = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        assert found[f'memory_bytes{{model="tiny",part="{part}"}}'] == expected > 0
    cache = live.engine.core.prefix_cache
    assert cache is not None
    assert found['memory_bytes{model="tiny",part="prefix_cache"}'] == cache.bytes
    assert found['memory_bytes{model="tiny",part="programs"}'] >= 0
    if sys.platform == "linux":
        assert found["resident_memory_bytes"] > sum(live.engine.core.runner.memory.values())
    [info] = [name for name in found if name.startswith("build_info")]
    assert 'target="tiny"' in info
    assert 'draft="dflash"' in info


def test_a_busy_model_does_not_run_in_the_rows_of_an_idle_one(random_tiny: Engine) -> None:
    rows = random_tiny.plan.rows
    shared = {"engine": random_tiny, "held_tokens": 0}
    threads = [SimpleNamespace(active=n, **shared) for n in (rows + 2, 0)]
    models: Any = [SimpleNamespace(name=str(i), engine_thread=w) for i, w in enumerate(threads)]
    lines = Metrics().text(models).decode().splitlines()
    for name, running, waiting in (("0", rows, 2), ("1", 0, 0)):
        assert f'dflash_jax:num_requests_running{{model="{name}"}} {float(running)}' in lines
        assert f'dflash_jax:num_requests_waiting{{model="{name}"}} {float(waiting)}' in lines


def test_time_that_compiling_took_is_no_time_in_the_queue() -> None:
    stats = Stats(first_token_s=5.0, prefill_s=1.0, compile_s=3.0)
    reply = SimpleNamespace(finish_reason="stop", result=Result([], "", "stop", stats))
    metrics = Metrics()
    model = SimpleNamespace(name="a")
    ended: Any = SimpleNamespace(first_token=None, started=0.0, replies=[reply], model=model)
    metrics.ended(ended)
    assert 'dflash_jax:request_queue_time_seconds_sum{model="a"} 1.0' in metrics.text([]).decode()


def test_cache_usage_rises_while_a_request_runs(live: LiveServer) -> None:
    assert live.is_idle()
    assert scraped(live)["kv_cache_usage_perc"] == 0
    body = ASK | {"max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", live.url + CHAT, json=body, timeout=60) as stream:
        lines = (line for line in stream.iter_lines() if '"content":"' in line)
        for _ in range(3):
            next(lines)
        assert 0 < scraped(live)["kv_cache_usage_perc"] < 1
    assert live.is_idle()


def test_no_host_header_opens_what_needs_a_key(
    locked: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starlette up to 1.0.0 builds a request's URL from the Host header, which clients choose."""
    as_built_then = property(lambda self: URL(f"http://{self.headers['host']}{self['path']}"))
    monkeypatch.setattr(Request, "url", as_built_then)
    for host in ("x/health?", "x/ready?", "x/health#"):
        headers = {"Host": host}
        assert httpx.get(locked.url + "/metrics", headers=headers).status_code == 401
        assert httpx.post(locked.url + CHAT, json=ASK, headers=headers).status_code == 401
