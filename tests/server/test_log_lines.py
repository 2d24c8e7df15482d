"""Lines in the log for refused requests and clients that left; what they and errors repeat."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.audit.server import COMPLETIONS
from dflash_jax.engine.engine import Engine
from dflash_jax.server.app import Server
from dflash_jax.server.http_connection import LIMIT
from dflash_jax.server.served_models import ServerConfig
from tests.server.conftest import LiveServer, run_server, twin

KEY = {"x-api-key": "secret"}
LOGGER = logging.getLogger("dflash_jax.server")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Lines of the server's log, all of them, as a list that grows."""
    found: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, limited = Lines(), LIMIT in LOGGER.filters
    LOGGER.removeFilter(LIMIT)
    LOGGER.addHandler(handler)
    with caplog.at_level(logging.INFO, "dflash_jax.server"):
        yield found
    LOGGER.removeHandler(handler)
    if limited:
        LOGGER.addFilter(LIMIT)


def asked(method: str, path: str, **more: Any) -> httpx.Response:
    """Ask a server without models."""
    server = Server([], ServerConfig(api_keys=("secret",), max_body=100))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("method", "path", "more", "line"),
    [
        ("GET", "/nothing", {}, "GET /nothing refused with 404: GET /nothing does not exist"),
        ("PUT", COMPLETIONS, {}, f"PUT {COMPLETIONS} refused with 405"),
        ("POST", COMPLETIONS, {}, f"POST {COMPLETIONS} refused with 401: the API key is missing"),
        ("POST", COMPLETIONS, {"headers": KEY, "content": b"{"}, "refused with 400: "),
        (
            "POST",
            COMPLETIONS,
            {"headers": KEY, "content": b" " * 101},
            "refused with 413: the body",
        ),
        ("GET", "/a%0AI%1b[0m", {}, r"GET /a\nI\x1b[0m refused with 404"),
    ],
)
def test_a_refused_request_leaves_one_line(
    lines: list[str], method: str, path: str, more: dict[str, Any], line: str
) -> None:
    answer = asked(method, path, **more)
    [found] = lines
    assert found.startswith(answer.headers["request-id"])
    assert line in found
    assert found.isprintable()
    assert "secret" not in found


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_polling_a_server_that_is_not_ready_leaves_no_line(lines: list[str], path: str) -> None:
    server = Server([], ServerConfig())
    server._middleware.draining = True
    transport = httpx.ASGITransport(server.app)

    async def ask() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get(path)).status_code

    assert asyncio.run(ask()) == (200 if path == "/health" else 503)
    assert lines == []


def test_a_client_that_leaves_in_its_body_leaves_a_line(lines: list[str]) -> None:
    server = Server([], ServerConfig())
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True},
                     {"type": "http.disconnect"}])  # fmt: skip

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        pass

    scope = {
        "type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "query_string": b"",
        "http_version": "1.1",
    }  # fmt: skip
    asyncio.run(server.app(scope, receive, send))  # type: ignore[arg-type]
    [line] = lines
    assert line.endswith("ended early (disconnect) in the phase 'body'")


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("A" * 60_000, "/v1/models", KEY),
        ("GET", "/" + "a" * 60_000, KEY),
        ("GET", "/v1/models/" + "a" * 60_000, KEY),
        ("GET", "/v1/images/" + "a" * 60_000, KEY),
        ("GET", "/v1/responses/" + "a" * 60_000, KEY),
        ("DELETE", "/v1/conversations/" + "a" * 60_000, KEY),
        ("POST", COMPLETIONS, KEY | {"content-encoding": "a" * 60_000}),
        ("POST", COMPLETIONS, KEY | {"content-type": "a" * 60_000, "origin": "b" * 60_000}),
        ("POST", COMPLETIONS, {"authorization": "Bearer " + "a" * 60_000}),
    ],
)
def test_an_error_repeats_a_small_part_of_a_request(
    lines: list[str], method: str, path: str, headers: dict[str, str]
) -> None:
    answer = asked(method, path, headers=headers)
    assert 400 <= answer.status_code < 500
    assert len(answer.content) < 2000
    assert all(len(line) < 2000 for line in lines)


def test_a_client_that_leaves_in_a_stream_leaves_a_line(
    random_tiny: Engine, lines: list[str]
) -> None:
    live: LiveServer = run_server(lambda: twin(random_tiny), ServerConfig(port=0, drain=5))
    body = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", live.url + COMPLETIONS, json=body, timeout=60) as stream:
        next(stream.iter_lines())
    assert live.is_idle()
    live.stop()
    assert [line for line in lines if "ended early (disconnect) in the phase 'output'" in line]
