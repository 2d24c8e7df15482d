"""Clients that close their sending side before the response is complete."""

import asyncio
from typing import Any

import pytest
import uvicorn

from dflash_jax.server.http_connection import Connection
from dflash_jax.server.http_responses import allow_comments

ASKED = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
LENGTH = [(b"content-length", b"4")]


def heard(headers: list[tuple[bytes, bytes]], *, events: bool) -> bytes:
    """Send the body in halves, so late that probes come before, between and after them."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if events:
            allow_comments(scope)
        await asyncio.sleep(0.05)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for half, more in ((b"ab", True), (b"cd", False)):
            await asyncio.sleep(0.1)
            await send({"type": "http.response.body", "body": half, "more_body": more})

    async def ask() -> bytes:
        config = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        config.load()
        states = {"server_state": server.server_state, "app_state": {}}
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: Connection(config, **states), "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASKED)
            await writer.drain()
            writer.write_eof()
            answer = await reader.read()
            writer.close()
        return answer

    answer = asyncio.run(asyncio.wait_for(ask(), 20))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n")
    return answer.partition(b"HTTP/1.1 200 OK")[2].partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("headers", [LENGTH, []])
def test_an_answer_that_is_no_stream_of_events_holds_nothing_else(headers: list) -> None:
    assert heard(headers, events=False) == (
        b"abcd" if headers else b"2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n"
    )


def test_comments_come_between_server_sent_events() -> None:
    body = heard([], events=True)
    assert b"3\r\n:\n\n\r\n" in body
    assert body.replace(b"3\r\n:\n\n\r\n", b"") == b"2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n"
