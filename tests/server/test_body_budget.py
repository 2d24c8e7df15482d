"""All request bodies together have a bound; the largest unfinished one makes room for others."""

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dflash_jax.errors import RequestError
from dflash_jax.serve_options import ServeOptions
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.middleware import ALL_BODIES, Middleware
from dflash_jax.server.served_models import ServedModels, ServerConfig
from tests.server.test_connection_limits import Listening, error_of, listening

POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


class Bodies:
    """An application that reads bodies, and holds those it is told to."""

    def __init__(self, **limits: Any):
        models: Any = ServedModels([])
        self.middleware = Middleware(ServerConfig(**limits), Metrics(), models)
        self.finish = asyncio.Event()
        handler = self.middleware.wrap_handler(self._answer)
        self.app = Starlette(routes=[Route("/", handler, methods=["POST"])])

    @property
    def held(self) -> int:
        return self.middleware._bodies.held

    async def wait(self, size: int) -> None:
        """Wait until bodies of this size together are held."""
        while self.held != size:
            await asyncio.sleep(0.001)

    async def _answer(self, request: Request) -> Response:
        body = await self.middleware.body(request)
        if body.startswith(b"hold"):
            await self.finish.wait()
        return Response(str(len(body)))


class Upload:
    """A client that has sent a part of its body."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self.writer = reader, writer

    async def read(self) -> bytes:
        try:
            return await asyncio.wait_for(self._reader.read(), 20)
        finally:
            self.writer.close()


async def begin(server: Listening, size: int, sent: bytes) -> Upload:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(POST + b"Content-Length: %d\r\n\r\n" % size + sent)
    return Upload(reader, writer)


def test_the_largest_unfinished_body_makes_room_for_others() -> None:
    async def crowd() -> tuple[list[bytes], int]:
        bodies = Bodies(max_body=1000, max_bodies=2500)
        async with listening(bodies.app) as server:
            uploads, total = [], 0
            for size in (700, 900, 800):
                uploads.append(await begin(server, 1000, b"a" * size))
                total += size
                await bodies.wait(total)
            uploads.append(await begin(server, 300, b"a" * 300))
            answers = [await uploads[i].read() for i in (3, 1)]
            await bodies.wait(1500)
            for upload, rest in ((uploads[0], 300), (uploads[2], 200)):
                upload.writer.write(b"a" * rest)
                answers.append(await upload.read())
            await bodies.wait(0)
            return answers, bodies.held

    (small, largest, *others), held = asyncio.run(crowd())
    assert small.startswith(b"HTTP/1.1 200 OK")
    assert largest.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 2" in largest
    assert error_of(largest)["code"] == "bodies_full"
    assert [answer.partition(b"\r\n\r\n")[2] for answer in others] == [b"1000", b"1000"]
    assert held == 0


def test_where_finished_bodies_take_the_bound_a_new_one_is_refused_until_they_are_handled() -> None:
    async def crowd() -> list[bytes]:
        bodies = Bodies(max_body=1000, max_bodies=2000)
        async with listening(bodies.app) as server:
            holding = [await begin(server, 1000, b"hold" + b"a" * 996) for _ in range(2)]
            await bodies.wait(2000)
            answers = [await (await begin(server, 10, b"a" * 10)).read()]
            bodies.finish.set()
            answers += [await upload.read() for upload in holding]
            answers.append(await (await begin(server, 10, b"a" * 10)).read())
            return answers

    refused, *answered = asyncio.run(crowd())
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert all(answer.startswith(b"HTTP/1.1 200 OK") for answer in answered)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_leaves_in_its_body_frees_the_room(chunked: bool) -> None:
    async def leave() -> int:
        bodies = Bodies(max_body=1000, max_bodies=2000)
        async with listening(bodies.app) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            if chunked:
                writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\na\r\n0123456789\r\n")
            else:
                writer.write(POST + b"Content-Length: 100\r\n\r\n0123456789")
            await bodies.wait(10)
            writer.close()
            await bodies.wait(0)
            return bodies.held

    assert asyncio.run(leave()) == 0


def test_the_bound_of_all_bodies_follows_from_that_of_one() -> None:
    models: Any = ServedModels([])

    def limits(**config: Any) -> tuple[int, int]:
        checks = Middleware(ServerConfig(**config), Metrics(), models)
        return checks.max_body, checks.max_bodies

    assert limits() == (4 * 2**20, ALL_BODIES)
    assert limits(max_body=2**30) == (2**30, 4 * 2**30)
    assert limits(max_bodies=2**20) == (2**20, 2**20)
    assert limits(max_body=7, max_bodies=9) == (7, 9)
    with pytest.raises(RequestError, match="--max-bodies is 8; expected at least --max-body, 9"):
        ServeOptions(max_body=9, max_bodies=8)
