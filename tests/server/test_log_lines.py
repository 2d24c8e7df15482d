"""The line in the log that each request has, whatever its end, and what it and errors repeat."""

import asyncio
import io
import json
import logging
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from benchmarks.audit.serve import COMPLETIONS
from dflash_jax.engine.engine import Engine
from dflash_jax.server import access_log
from dflash_jax.server.access_log import AccessRecord, JsonLines, Lines, log_to_stderr, text_of
from dflash_jax.server.app import Server
from dflash_jax.server.log_rate import LIMIT
from dflash_jax.server.served_models import ServerConfig
from tests.server.conftest import LiveServer, api_keys, run_server, twin

KEY = {"x-api-key": "secret"}
LOGGER = logging.getLogger("dflash_jax.server")
FORGED = 'a\r\n2026-11-30 05:00:00,000 I req_0 GET / 200 key=root \u2028\x1b[2K"quoted" end=stop'


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """Records of the server's log, all of them, as a list that grows."""
    found: list[logging.LogRecord] = []

    class Records(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    handler, limited = Records(), LIMIT in LOGGER.filters
    LOGGER.removeFilter(LIMIT)
    LOGGER.addHandler(handler)
    with caplog.at_level(logging.INFO, "dflash_jax.server"):
        yield found
    LOGGER.removeHandler(handler)
    if limited:
        LOGGER.addFilter(LIMIT)


def asked(method: str, path: str, **more: Any) -> httpx.Response:
    """Ask a server without models."""
    server = Server([], ServerConfig(api_keys=api_keys("secret"), max_body=100))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("method", "path", "more", "line"),
    [
        ("GET", "/nothing", {}, 'GET /nothing 404 .* error="GET /nothing does not exist"'),
        ("PUT", COMPLETIONS, {}, f"PUT {COMPLETIONS} 405 .* code=unknown_url "),
        ("POST", COMPLETIONS, {}, f'POST {COMPLETIONS} 401 .* error="the API key is missing'),
        ("POST", COMPLETIONS, {"headers": KEY, "content": b"{"}, f"POST {COMPLETIONS} 400 "),
        ("POST", COMPLETIONS, {"headers": KEY, "content": b" " * 101}, " 413 .*body_too_large"),
        ("GET", "/v1/models", {"headers": KEY | {"host": "evil"}}, "GET /v1/models 200 "),
        ("OPTIONS", "/v1/models", {}, "OPTIONS /v1/models 204 "),
        ("GET", "/a%0AI%1b[0m?key=secret", {}, r"GET /a%0AI%1b\[0m 404 "),
        ("GET", "/" + "a" * 60_000, {}, "GET /a{199} 404 "),
    ],
)
def test_a_request_leaves_one_line_whatever_its_end(
    records: list[logging.LogRecord], method: str, path: str, more: dict[str, Any], line: str
) -> None:
    answer = asked(method, path, **more)
    [record] = records
    found = record.getMessage()
    assert found.startswith(answer.headers["request-id"] + " ")
    assert re.search(line, found)
    assert found.isascii()
    assert found.isprintable()
    assert "secret" not in found
    assert len(found) < 2500
    assert record.levelno == (logging.INFO if answer.is_success else logging.WARNING)
    fields = json.loads(JsonLines().format(record))
    assert (fields["id"], fields["status"]) == (answer.headers["request-id"], answer.status_code)
    assert fields["bytes"] == len(answer.content)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_leave_no_line(records: list[logging.LogRecord], path: str) -> None:
    server = Server([], ServerConfig())
    server._middleware.draining = True
    transport = httpx.ASGITransport(server.app)

    async def ask() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get(path)).status_code

    assert asyncio.run(ask()) == (503 if path == "/ready" else 200)
    assert records == []
    assert asked("GET", "/metrics").status_code == 401
    assert len(records) == 1  # somebody without a key


def test_a_client_that_leaves_in_its_body_leaves_a_line(records: list[logging.LogRecord]) -> None:
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
    [record] = records
    assert f"POST {COMPLETIONS} 499 " in record.getMessage()
    assert record.getMessage().endswith("end=disconnect phase=body")


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
    records: list[logging.LogRecord], method: str, path: str, headers: dict[str, str]
) -> None:
    answer = asked(method, path, headers=headers)
    assert 400 <= answer.status_code < 500
    assert len(answer.content) < 2000
    assert all(len(record.getMessage()) < 2500 for record in records)


def test_what_a_client_sends_forges_neither_a_line_nor_a_field() -> None:
    record = AccessRecord(method=FORGED, path=FORGED, client=FORGED, model=FORGED)
    record.problem = access_log.Problem(FORGED, code=FORGED)
    line = text_of(record.fields())
    assert line.isascii()
    assert line.isprintable()
    outside = re.sub(r'"(\\.|[^"\\])*"', "", line)  # what no quotes surround
    assert "key=" not in outside
    assert outside.count("end=") == 1
    for form in (Lines(), JsonLines()):
        other = logging.LogRecord("a", logging.WARNING, "", 0, "said %s", (FORGED,), None)
        assert len(form.format(other).splitlines()) == 1
    try:
        raise ValueError(FORGED)
    except ValueError:
        failed = logging.LogRecord("a", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    first, *rest = Lines().format(failed).splitlines()
    assert first.endswith(" E failed")
    assert all(line.startswith("  | ") for line in rest)
    assert len(JsonLines().format(failed).splitlines()) == 1


def test_a_log_in_json_has_an_object_a_line_tracebacks_and_events_too() -> None:
    stream = io.StringIO()
    logger, handler = logging.Logger("dflash_jax.test"), logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.warning("more\nthan one line")
    logger.info("an event", extra={"dflash": {"event": "floor", "id": "req_1"}})
    try:
        raise ValueError("a\nb")
    except ValueError:
        logger.exception("failed")
    first, event, failed = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "more\nthan one line"
    assert first["level"] == "warning"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert (event["event"], event["id"]) == ("floor", "req_1")
    assert "ValueError: a\nb" in failed["traceback"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_of_all_libraries_have_the_chosen_form(
    form: access_log.LogFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    log_to_stderr(quiet=False, form=form)
    for name in access_log.LOGGERS:
        logging.getLogger(name).warning("from %s", name)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(access_log.LOGGERS)
    for name, line in zip(access_log.LOGGERS, lines, strict=True):
        message = json.loads(line)["message"] if form == "json" else line[26:]
        assert message == f"from {name}"


# -- against a real server ---------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_requests_that_generate_say_what_they_took(
    live: LiveServer, records: list[logging.LogRecord]
) -> None:
    body = {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True, "n": 2}
    answer = httpx.post(live.url + COMPLETIONS, json=body, timeout=60)
    refused = httpx.post(live.url + COMPLETIONS, json=body | {"model": "none"}, timeout=60)
    until(lambda: len(records) == 2)
    fields = records[0].access
    assert fields["id"] == answer.headers["x-request-id"]
    assert fields["response"] == answer.json()["id"]
    assert fields["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert (fields["output_tokens"], fields["outputs"]) == (10, 2)
    assert (fields["model"], fields["client"]) == ("tiny", "127.0.0.1")
    assert (fields["end"], fields["stream"]) == ("length", False)
    assert 0 <= fields["first_token_s"] <= fields["seconds"]
    assert fields["bytes"] == len(answer.content)
    other = records[1].access
    assert (other["status"], other["model"], other["end"]) == (404, None, "error")
    assert other["code"] == "model_not_found"
    assert other.keys() == fields.keys()
    assert refused.status_code == 404


def test_a_forwarded_address_is_quoted(live: LiveServer, records: list[logging.LogRecord]) -> None:
    headers = {"x-forwarded-for": '1.2.3.4 status=200 "x'}
    httpx.get(live.url + "/v1/models", headers=headers)
    until(lambda: len(records) == 1)
    assert r' client="1.2.3.4 status=200 \"x" ' in records[0].getMessage()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"BAD\r\n\r\n", "- - 400"),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", "- - 400"),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"1\r\n{\r\nZ\r\n",
            "POST /tokenize 400",
        ),
    ],
)
def test_what_the_connection_refuses_has_one_line(
    live: LiveServer, records: list[logging.LogRecord], sent: bytes, status: str
) -> None:
    with socket.create_connection(("127.0.0.1", live.running.port)) as client:
        client.sendall(sent)
        assert client.recv(1000).startswith(b"HTTP/1.1 400 ")
    until(lambda: len(records) >= 1)
    assert live.is_idle()
    [record] = records
    assert f" {status} client=127.0.0.1 " in record.getMessage()
    assert record.access["code"] == "invalid_http"


def test_a_client_that_leaves_in_a_stream_leaves_a_line(
    random_tiny: Engine, records: list[logging.LogRecord]
) -> None:
    live: LiveServer = run_server(lambda: twin(random_tiny), ServerConfig(port=0, drain=5))
    body = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", live.url + COMPLETIONS, json=body, timeout=60) as stream:
        next(stream.iter_lines())
    assert live.is_idle()
    live.stop()
    [fields] = [record.access for record in records if hasattr(record, "access")]
    assert (fields["status"], fields["end"], fields["phase"]) == (200, "disconnect", "output")
    assert fields["output_tokens"] >= 1


def test_lines_of_recovery_have_the_id_of_the_request(
    live: LiveServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("dflash_jax"), "propagate", True)
    caplog.set_level(logging.INFO, logger="dflash_jax.recovery")
    repeats = {"logit_bias": {"5": 100}, "recovery": {"repeat_limit": 8}}
    ask = {"prompt": "Hi", "max_tokens": 100, **repeats}
    answer = httpx.post(live.url + COMPLETIONS, json=ask, timeout=60)
    assert answer.status_code == 200
    lines = [x for x in caplog.records if x.name == "dflash_jax.recovery"]
    assert lines
    for line in lines:
        assert line.getMessage().startswith(f"{answer.headers['request-id']} recovery: ")
        assert line.dflash["id"] == answer.headers["request-id"]
