"""Shutdown: signals, streams that end with an error, and clients that hold it up."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from benchmarks.audit.serve import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from dflash_jax.engine.engine import Engine
from dflash_jax.server import run as run_module
from dflash_jax.server.run import ServerConfig
from tests.server.conftest import LiveServer, run_server, twin

USER = [{"role": "user", "content": "Hi"}]
LONG: dict[str, Any] = {"ignore_eos": True, "model": "any"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 400},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 400},
    RESPONSES: {"input": "Hi", "max_output_tokens": 400},
    MESSAGES: {"messages": USER, "max_tokens": 400},
}


@pytest.fixture
def slow(random_tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server whose requests take long, and which gives them little time."""
    engine, advance = twin(random_tiny), Engine.advance

    def delayed(self: Engine) -> None:
        time.sleep(0.1 * (self is engine))
        advance(self)

    monkeypatch.setattr(Engine, "advance", delayed)
    live = run_server(lambda: engine, ServerConfig(port=0, drain=0.5))
    yield live
    live.stop()


@pytest.mark.exhaustive
def test_what_a_shutdown_cuts_ends_with_an_error_and_not_as_an_answer(slow: LiveServer) -> None:
    streams: dict[str, str] = {}
    whole: list[httpx.Response] = []

    def read(path: str, body: dict[str, Any]) -> None:
        with httpx.stream("POST", slow.url + path, json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            streams[path] = next(lines) + "\n"
            streams[path] += "\n".join(lines)

    def ask() -> None:
        whole.append(httpx.post(slow.url + CHAT, json=BODIES[CHAT] | LONG, timeout=60))

    threads = [threading.Thread(target=ask)]
    for path, body in BODIES.items():
        body = body | LONG | {"stream": True}
        threads.append(threading.Thread(target=read, args=(path, body)))
    for thread in threads:
        thread.start()
    end = time.monotonic() + 20
    thread = slow.running.server.models[0].engine_thread
    while (len(streams) < len(BODIES) or thread.active < 5) and time.monotonic() < end:
        time.sleep(0.01)
    slow.running.stop()
    for thread in threads:
        thread.join(30)
    for path, text in streams.items():
        assert "the server is shutting down" in text, path
        assert '"length"' not in text, path
        assert "response.incomplete" not in text, path
        if path in (CHAT, COMPLETIONS):
            *_, error, done = [line for line in text.splitlines() if line]
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "draining"
            assert done == "data: [DONE]"
    assert "event: error\n" in streams[MESSAGES]
    assert "event: response.failed\n" in streams[RESPONSES]
    assert whole[0].status_code == 503
    assert whole[0].json()["error"]["code"] == "draining"
    slow.thread.join(20)
    assert not slow.thread.is_alive()


def test_while_a_request_runs_out_new_ones_read_that_the_server_drains(random_tiny: Engine) -> None:
    engine = twin(random_tiny)
    live = run_server(lambda: engine, ServerConfig(port=0, drain=600))
    advance, release = engine.advance, threading.Event()

    def held() -> None:
        advance()
        release.wait(0.1)

    engine.advance = held  # type: ignore[method-assign]
    body = BODIES[COMPLETIONS] | LONG | {"stream": True}
    with (
        httpx.Client(base_url=live.url, timeout=60) as kept,
        httpx.stream("POST", live.url + COMPLETIONS, json=body, timeout=60) as stream,
    ):
        assert kept.get("/ready").status_code == 200
        lines = stream.iter_lines()
        next(lines)
        live.running.stop()
        while kept.get("/ready").status_code == 200:
            time.sleep(0.01)
        for ask in (kept, httpx):
            path = "" if ask is kept else live.url
            assert ask.get(path + "/health").status_code == 200
            assert ask.get(path + "/ready").json()["error"]["code"] == "draining"
            answer = ask.post(path + CHAT, json=BODIES[CHAT], timeout=60)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "draining"
            assert answer.headers["retry-after"] == "5"
        live.running.stop()
        assert '"code":"draining"' in "\n".join(lines)
    release.set()
    live.thread.join(30)
    assert not live.thread.is_alive()


def test_a_second_signal_ends_streams_at_once_with_an_error(random_tiny: Engine) -> None:
    live = run_server(lambda: twin(random_tiny), ServerConfig(port=0, drain=600))
    body = BODIES[COMPLETIONS] | LONG | {"stream": True}
    thread = live.running.server.models[0].engine_thread
    release = threading.Event()
    assert thread.engine is not None
    advance = thread.engine.advance

    def held() -> None:
        advance()
        release.wait(0.1)

    thread.engine.advance = held  # type: ignore[method-assign]
    with httpx.stream("POST", live.url + COMPLETIONS, json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        live.running.stop()
        live.running.stop()
        text = "\n".join(lines)
    release.set()
    assert '"code":"draining"' in text
    live.thread.join(30)
    assert not live.thread.is_alive()


def test_a_body_that_does_not_come_delays_no_shutdown(random_tiny: Engine) -> None:
    live = run_server(lambda: twin(random_tiny), ServerConfig(port=0, drain=600))
    with contextlib.closing(socket.create_connection(("127.0.0.1", live.running.port))) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nab")
        assert httpx.get(live.url + "/health").status_code == 200
        live.running.stop()
        assert client.recv(1000).startswith(b"HTTP/1.1 503 ")
        live.thread.join(30)
    assert not live.thread.is_alive()


def test_a_hangup_has_keys_read_again_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    class Routes:
        def reload_keys(self) -> None:
            found.append("keys")

    async def wait() -> None:
        config = uvicorn.Config(lambda *_: None, log_config=None)
        server = run_module._DrainingServer(config, Routes(), 1.0)  # type: ignore[arg-type]
        monkeypatch.setattr(server, "handle_exit", lambda number, _: found.append(number))
        with server.capture_signals():
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.05)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        asyncio.run(wait())
        assert found == ["keys", signal.SIGTERM, "keys"]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
