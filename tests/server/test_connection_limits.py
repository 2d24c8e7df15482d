"""Bounds and timeouts of connections: floods, slow clients, silent sockets, many small chunks."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from dflash_jax.server import http_connection, log_rate, open_connections
from dflash_jax.server.http_connection import MOST_CHUNKS, Connection
from dflash_jax.server.http_responses import JsonPieces
from dflash_jax.server.listening import bind
from dflash_jax.server.open_connections import BoundedConnections, most_connections

HEALTH = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
App = Callable[[Any, Any, Any], Awaitable[None]]


@dataclasses.dataclass
class Listening:
    """A server with a bound, and the ports of its clients that got answers."""

    port: int
    all: BoundedConnections

    async def ask(self, request: bytes = HEALTH) -> bytes:
        """Send a request, and return everything that comes until the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        try:
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def listening(app: App, most: int = 100) -> AsyncIterator[Listening]:
    config = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None)
    config.load()
    states = {"server_state": BoundedConnections(most), "app_state": {}}
    loop = asyncio.get_running_loop()
    [bound] = bind("127.0.0.1", 0)
    server = await loop.create_server(lambda: Connection(config, **states), sock=bound)
    async with server:
        yield Listening(server.sockets[0].getsockname()[1], states["server_state"])


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, and answer with its length."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        more = message["more_body"]
    await JsonPieces([str(size).encode()])(scope, receive, send)


def error_of(text: bytes) -> dict[str, Any]:
    return json.loads(text.rpartition(b"\r\n\r\n")[2])["error"]


def test_a_response_is_sent_without_waiting_for_acknowledgements() -> None:
    async def connect() -> list[int]:
        async with listening(answer) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            while not server.all.connections:
                await asyncio.sleep(0.001)
            accepted = [each.transport.get_extra_info("socket") for each in server.all.connections]
            found = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in accepted]
            writer.close()
            return found

    assert asyncio.run(connect()) == [1]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short timeouts."""
    for name in ("CHECK_S", "HEADERS_S", "BODY_S", "UNREAD_S", "LINGER_S"):
        monkeypatch.setattr(http_connection, name, 0.05)


@pytest.mark.parametrize("begun", [b"", b"GET / HT", POST + b"Content-Length: 9\r\n\r\nabc"])
def test_a_flood_of_waiting_connections_leaves_room_for_others(begun: bytes) -> None:
    async def flood() -> tuple[list[bytes], int]:
        async with listening(answer, most=8) as server:
            answers, clients = [], []
            for _ in range(40):
                clients.append(await asyncio.open_connection("127.0.0.1", server.port))
                clients[-1][1].write(begun)
                if len(clients) % 10 == 0:
                    answers.append(await server.ask())
            count = len(server.all.connections)
            for _, writer in clients:
                writer.close()
        return answers, count

    answers, count = asyncio.run(flood())
    assert [text[:15] for text in answers] == [b"HTTP/1.1 200 OK"] * 4
    assert count <= 9  # one may not be closed yet


def test_a_client_that_was_served_keeps_its_connection_in_a_flood_of_strangers() -> None:
    async def flood() -> bytes:
        async with listening(answer, most=8) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n0")
            strangers = []
            for _ in range(30):
                strangers.append(await asyncio.open_connection("127.0.0.1", server.port))
                await asyncio.sleep(0)
            writer.write(HEALTH)
            came = await reader.read()
            for each in (writer, *(other for _, other in strangers)):
                each.close()
        return came

    assert asyncio.run(flood()).startswith(b"HTTP/1.1 200 OK")


def test_where_every_connection_is_answered_a_new_one_is_refused_at_once() -> None:
    async def crowd() -> tuple[bytes, list[bytes]]:
        free = asyncio.Event()

        async def wait(scope: Any, receive: Any, send: Any) -> None:
            await free.wait()
            await answer(scope, receive, send)

        async with listening(wait, most=3) as server:
            running = [asyncio.ensure_future(server.ask()) for _ in range(3)]
            while len(server.all.connections) < 3 or server.all.unused:
                await asyncio.sleep(0.01)
            refused = await server.ask()
            free.set()
            return refused, await asyncio.gather(*running)

    refused, answered = asyncio.run(crowd())
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in refused
    assert error_of(refused)["code"] == "too_busy"
    assert all(text.startswith(b"HTTP/1.1 200 OK") for text in answered)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"", None),
        (b"GET / HTTP/1.1\r\nHost:", "timeout"),
        (POST + b"Content-Length: 100\r\n\r\nabc", "timeout"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "timeout"),
    ],
)
def test_headers_and_bodies_that_do_not_come_end_the_connection(
    fast: None, sent: bytes, code: str | None
) -> None:
    async def wait() -> bytes:
        async with listening(answer) as server:
            return await server.ask(sent)

    came = asyncio.run(wait())
    if code is None:
        assert came == b""
    else:
        assert came.startswith(b"HTTP/1.1 408 ")
        assert error_of(came)["code"] == code


@pytest.mark.parametrize("rest", [b"G", b"GET / HTTP/1.1\r\nHost:"])
def test_half_a_pipelined_request_has_the_time_of_headers(fast: None, rest: bytes) -> None:
    async def wait() -> bytes:
        async with listening(answer) as server:
            return await server.ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + rest)

    first, second = asyncio.run(wait()).split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 ")
    assert second.startswith(b"408 ")
    assert error_of(second)["code"] == "timeout"


def test_bytes_that_come_slowly_do_not_extend_the_time_of_headers(fast: None) -> None:
    async def drip() -> bytes:
        async with listening(answer) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            reading = asyncio.ensure_future(reader.read())
            for letter in b"GET / HTTP/1.1\r\nx: " + b"a" * 2000:
                writer.write(bytes([letter]))
                await asyncio.sleep(0.01)
                if reading.done():
                    break
            writer.close()
            return await reading

    assert asyncio.run(drip()).startswith(b"HTTP/1.1 408 ")


def test_a_body_at_a_moderate_rate_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "CHECK_S", 0.02)
    monkeypatch.setattr(http_connection, "BODY_S", 0.1)
    monkeypatch.setattr(http_connection, "SLOWEST_BODY", 1000)

    async def send() -> bytes:
        async with listening(answer) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(POST + b"Connection: close\r\nContent-Length: 20000\r\n\r\n")
            for _ in range(20):
                writer.write(b"a" * 1000)
                await asyncio.sleep(0.02)
            came = await reader.read()
            writer.close()
            return came

    assert asyncio.run(send()).endswith(b"20000")


def test_a_client_that_reads_nothing_is_disconnected(fast: None) -> None:
    async def large(scope: Any, receive: Any, send: Any) -> None:
        await JsonPieces([b"a" * 2**25])(scope, receive, send)

    async def ask() -> int:
        async with listening(large) as server:
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(HEALTH)
                for _ in range(400):
                    await asyncio.sleep(0.02)
                    if server.all.total_requests or not server.all.connections:
                        break
            return len(server.all.connections)

    assert asyncio.run(ask()) == 0


def test_a_body_of_too_many_chunks_is_refused_and_short_ones_delay_nobody() -> None:
    chunked = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def send() -> tuple[bytes, bytes, int]:
        async with listening(answer) as server:
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    await asyncio.sleep(0)
                    turns += 1

            good = await server.ask(chunked + b"1\r\na\r\n" * 5000 + b"0\r\n\r\n")
            counting = asyncio.ensure_future(count())
            bad = await server.ask(chunked + b"1\r\na\r\n" * (MOST_CHUNKS + 1))
            counting.cancel()
            return good, bad, turns

    good, bad, turns = asyncio.run(send())
    assert good.endswith(b"5000")
    assert bad.startswith(b"HTTP/1.1 413 ")
    assert error_of(bad)["code"] == "too_many_chunks"
    assert turns > MOST_CHUNKS / 400  # others had a turn after at most 2 KiB


def test_invalid_http_after_a_request_is_answered_once_and_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def at_once(scope: Any, receive: Any, send: Any) -> None:
        await JsonPieces([b"403"])(scope, receive, send)

    async def send() -> bytes:
        async with listening(at_once) as server:
            return await server.ask(POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n")

    came = asyncio.run(send())
    assert came.startswith(b"HTTP/1.1 400 ")
    assert came.count(b"HTTP/1.1") == 1
    assert not [record for record in caplog.records if record.exc_info]


# -- descriptors and logs ----------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "most"), [(256, 256), (10**6, 2048), (10, 16)])
def test_the_bound_is_below_the_limit_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    resource = pytest.importorskip("resource", reason="this system has no limits of descriptors")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    found = most_connections()
    assert found == most or (limit == 256 and 16 <= found <= 256 - open_connections.RESERVE)


def test_a_kind_of_warning_is_logged_at_a_limited_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(log_rate.time, "monotonic", lambda: now)
    limit = log_rate.RateLimit()

    def passes(message: str, level: int = logging.WARNING) -> str:
        record = logging.LogRecord("a", level, "", 0, message, (1,), None)
        return record.getMessage() if limit.filter(record) else ""

    logged = [passes("x %d") for _ in range(log_rate.MOST_LINES + 5)]
    assert sum(map(bool, logged)) == log_rate.MOST_LINES
    assert passes("y %d") == "y 1"
    assert passes("x %d", logging.INFO) == "x 1"
    now = 100.0
    assert passes("x %d") == "x 1 (5 more such lines were left out)"


def test_errors_of_the_system_in_the_event_loop_have_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.new_event_loop()
    context = {"message": "accept failed", "exception": OSError(24, "Too many open files")}
    with caplog.at_level(logging.WARNING):
        log_rate.report_loop_error(loop, context)
    loop.close()
    [record] = [each for each in caplog.records if "accept failed" in each.getMessage()]
    assert "Too many open files" in record.getMessage()
    assert record.exc_info is None
