"""Checks around every route (hosts, API keys, limits), and conversion of errors to responses."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_jax.server.access import ANY, AllowedHosts, is_json, is_own_page
from dflash_jax.server.access_log import METRICS, PROBES, AccessRecord
from dflash_jax.server.background import POOLS
from dflash_jax.server.body_budget import BodyBudget, HeldBody
from dflash_jax.server.errors import shutting_down
from dflash_jax.server.http_responses import ClientDisconnected, json_response
from dflash_jax.server.key_ring import KeyRing
from dflash_jax.server.keys import ANYONE, ApiKey
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.protocol import Problem
from dflash_jax.server.served_models import ServedModels, ServerConfig
from dflash_jax.server.unsupported import check_path
from dflash_jax.utils.allocator import trim_memory

log = logging.getLogger("dflash_jax.server")
Handler = Callable[[Request], Awaitable[Response]]
MOST_HEADERS = 64 * 1024
# A token is about four bytes of text. An escaped character takes six bytes, and messages, calls and
# schemas contain names and punctuation that the template does not render.
BYTES_PER_TOKEN = 64
# Bounds in bytes of the derived limit of one body.
LEAST_BODY = 4 * 2**20
MOST_BODY = 32 * 2**20
# The derived limit of all bodies together is the larger of these two.
ALL_BODIES = 256 * 2**20  # bytes
LARGEST_BODIES = 4  # bodies of the largest size
# After requests with large bodies, free memory is returned to the system.
LARGE_BODY = 2**20  # bytes
TRIM_AFTER_S = 1.0  # seconds after the response, and between two times


class Middleware:
    """Checks requests before handlers run, and converts exceptions to error responses.

    Attributes:
      draining: new requests that generate are refused.
    """

    def __init__(
        self,
        config: ServerConfig,
        metrics: Metrics,
        models: ServedModels,
        keys: KeyRing | None = None,
        metrics_port: int | None = None,
    ):
        self._config = config
        self._metrics = metrics
        self._models = models
        self._keys = KeyRing() if keys is None else keys
        self._metrics_port = metrics_port
        self._bodies = BodyBudget(lambda: self.max_bodies)
        self.draining = False
        self._trim_scheduled = False

    @property
    def max_body(self) -> int:
        """Return the limit of a request's body in bytes."""
        if self._config.max_body is not None:
            return self._config.max_body
        longest = 0
        for model in self._models:
            engine = model.engine_thread.engine
            if engine is not None:
                longest = max(longest, engine.plan.max_length)
        derived = min(max(BYTES_PER_TOKEN * longest, LEAST_BODY), MOST_BODY)
        return min(derived, self._config.max_bodies or derived)

    @property
    def max_bodies(self) -> int:
        """Return the limit of all bodies together that are held at a time, in bytes."""
        return self._config.max_bodies or max(ALL_BODIES, LARGEST_BODIES * self.max_body)

    def wrap_app(self, app: ASGIApp, hosts: AllowedHosts) -> ASGIApp:
        """Return the application with the checks that apply to every path."""

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                try:
                    headers = Headers(scope=scope)
                    _check_framing(headers, scope["http_version"])
                    _check_hosts(headers, hosts)
                    self._check_port(scope)
                except Problem as problem:
                    refusal = self._refuse(problem, scope)
                    refusal.headers["connection"] = "close"
                    return await refusal(scope, receive, send)
            return await app(scope, receive, send)

        return checked

    def wrap_handler(self, handler: Handler, *, needs_key: bool = True) -> Handler:
        """Return the handler with the check of API keys; its exceptions become error responses."""

        async def answer(request: Request) -> Response:
            record = AccessRecord.of(request.scope)
            request.state.key = ANYONE
            request.state.body = HeldBody()
            try:
                size = sum(len(name) + len(value) for name, value in request.headers.raw)
                if size > MOST_HEADERS:
                    raise Problem(f"the headers are larger than {MOST_HEADERS} bytes", status=431)
                exempt = record.path in PROBES or self._is_metrics_port(request.scope)
                if needs_key and self._keys and not exempt:
                    request.state.key = self._key(request)
                    record.key = request.state.key.label
                return await handler(request)
            except Problem as problem:
                return self._refuse(problem, request.scope)
            except ClientDisconnected:
                return Response(status_code=499)
            except Exception as error:
                log.exception("%s failed", record.id)
                problem = Problem(f"internal error: {type(error).__name__}", status=500)
                return self._refuse(problem, request.scope)
            finally:
                self._bodies.release(request.state.body)
                if request.state.body.size > LARGE_BODY and not self._trim_scheduled:
                    self._trim_scheduled = True
                    asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim_memory)

        return answer

    async def no_route(self, request: Request, error: Any) -> Response:
        """Return 404 or 405, 400 for paths of other media, or the allowed methods for OPTIONS."""
        if request.method == "OPTIONS" and error.status_code == 405:
            return Response(status_code=204, headers=error.headers)
        path = request.scope["path"]
        message = f"{request.method[:40]} {path[:200]} does not exist"
        unknown = Problem(message, status=error.status_code, code="unknown_url")
        try:
            check_path(path[:200])
        except Problem as problem:
            unknown = problem
        refusal = self._refuse(unknown, request.scope)
        refusal.headers.update(error.headers or {})
        return refusal

    async def body(self, request: Request) -> bytes:
        """Return the request body.

        Raises:
          Problem: 413, the body is too large; 415, it is compressed, or possibly sent by a web page
            of another site; 503, the bodies of other requests leave no room for it.
          ClientDisconnected: the client left before the end of the body.
        """
        self._check_origin(request)
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("identity", ""):
            raise Problem(f"content-encoding {coding[:100]!r}; send the body as it is", status=415)
        max_body = self.max_body
        too_large = Problem(
            f"the body is larger than {max_body} bytes, the most this server reads; send less, or"
            " start it with a larger --max-body",
            status=413,
            code="body_too_large",
        )
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > max_body:
            raise too_large
        body = bytearray()
        held = request.state.body
        async with self._bodies.reading(held):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    self.note_end(AccessRecord.of(request.scope), "disconnect", "body")
                    raise ClientDisconnected
                self._bodies.add(held, len(message.get("body", b"")))
                body += message.get("body", b"")
                if len(body) > max_body:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)

    def _trim_memory(self) -> None:
        """Return free memory to the system, in a thread since it takes tens of milliseconds."""
        self._trim_scheduled = False
        threading.Thread(target=trim_memory, args=(POOLS,), name="trim-memory", daemon=True).start()

    def check_open(self) -> None:
        """Refuse requests while the server drains.

        Raises:
          Problem: 503, the server is shutting down.
        """
        if self.draining:
            raise shutting_down()

    def note_end(self, record: AccessRecord, reason: str, phase: str) -> None:
        """Note that a request ended early, and in which phase."""
        record.left = (reason, phase)
        self._metrics.cancelled(reason, phase, record.model)

    def note_error(self, record: AccessRecord, problem: Problem) -> None:
        """Note that a request is answered with an error; probes do not count as failed requests."""
        record.problem = problem
        if record.path not in PROBES:
            self._metrics.failed(problem.status, record.model, record.key)

    def _refuse(self, problem: Problem, scope: Scope) -> Response:
        record = AccessRecord.of(scope)
        self.note_error(record, problem)
        headers = {"Retry-After": str(problem.retry_s)} if problem.retry_s else {}
        if problem.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = problem.to_json() | {"request_id": record.id}
        return json_response(body, problem.status, headers)

    def _is_metrics_port(self, scope: Scope) -> bool:
        """Return whether a request came to the port of probes and metrics."""
        server = scope.get("server")
        return self._metrics_port is not None and bool(server) and server[1] == self._metrics_port

    def _check_port(self, scope: Scope) -> None:
        """Refuse, with 404, metrics where they have another port, and all else on that port."""
        on_metrics_port = self._is_metrics_port(scope)
        path = scope["path"]
        if on_metrics_port and path not in (*PROBES, METRICS):
            raise Problem(
                f"this port has {', '.join((*PROBES, METRICS))} only; ask the server's other one",
                status=404,
                code="unknown_url",
            )
        if self._metrics_port is not None and not on_metrics_port and path == METRICS:
            raise Problem(
                "the metrics are on a port of their own, that of --metrics-port",
                status=404,
                code="unknown_url",
            )

    def _check_origin(self, request: Request) -> None:
        """Refuse, with 415, requests that a page of another site can send without a preflight.

        Browsers send a preflight request before JSON. Other clients send no Origin header.
        """
        origin = request.headers.get("origin")
        content_types = request.headers.getlist("content-type")
        if origin is None or is_json(content_types):
            return
        allowed = self._config.cors_origin
        if ANY in allowed or origin in allowed or origin.lower() in allowed:
            return
        if not is_own_page(origin, request.headers.get("host", "")):
            raise Problem(
                f"content-type {', '.join(content_types)[:100]!r} in a request with the Origin"
                f" header {origin[:100]!r}; send application/json, or start the server with"
                " --cors-origin and that origin",
                status=415,
                code="unsupported_content_type",
            )

    def begin(self, request: Request) -> None:
        """Count a request that generates among those of its key, until its end.

        Raises:
          Problem: 429, a limit of the key is reached.
        """
        AccessRecord.of(request.scope).usage = self._keys.begin(request.state.key)

    def _key(self, request: Request) -> ApiKey:
        """Return the API key of a request.

        Raises:
          Problem: 401, it is missing or wrong.
        """
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        presented_key = token.strip() if scheme.lower() == "bearer" else ""
        if not presented_key:
            presented_key = request.headers.get("x-api-key", "")
        key = self._keys.find(presented_key)
        if key is not None:
            return key
        raise Problem(
            "the API key is missing or wrong; send it in the header Authorization: Bearer KEY,"
            " or x-api-key: KEY",
            status=401,
            code="invalid_api_key",
        )


def _check_framing(headers: Headers, version: str) -> None:
    """Refuse, with 400, requests whose length a proxy may interpret differently.

    Otherwise the rest of the body could be taken for another client's request (smuggling).
    """
    if "transfer-encoding" in headers and ("content-length" in headers or version < "1.1"):
        other = "a Content-Length header" if "content-length" in headers else f"HTTP/{version}"
        raise Problem(
            f"a Transfer-Encoding header and {other} contradict each other; send one length",
            code="ambiguous_length",
        )


def _check_hosts(headers: Headers, hosts: AllowedHosts) -> None:
    """Refuse, with 403, requests that are addressed to another host.

    Requests without a Host header pass: HTTP/1.0 clients are never browsers.
    """
    names = headers.getlist("host")
    if len(names) > 1 or not all(map(hosts.accepts, names)):
        raise Problem(
            f"the Host header is {', '.join(names)[:100]!r}, which is not known as a name of this"
            " server; use its address, or start it with --allowed-host and that name",
            status=403,
            code="host_not_allowed",
        )
