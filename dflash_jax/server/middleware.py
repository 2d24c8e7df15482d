"""What surrounds every route: hosts, keys, limits, and errors as clients expect them."""

import asyncio
import dataclasses
import hmac
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_jax.server.access import ANY, AllowedHosts, is_json, is_own_page
from dflash_jax.server.background import POOLS
from dflash_jax.server.connection import ClientDisconnected, json_response
from dflash_jax.server.generation import shutting_down
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.models import ServedModels
from dflash_jax.server.protocol import Problem, new_id
from dflash_jax.utils.allocator import give_back

log = logging.getLogger("dflash_jax.server")
Handler = Callable[[Request], Awaitable[Response]]
OPEN_PATHS = ("/", "/health", "/ready")
MOST_HEADERS = 64 * 1024
# A token is about four bytes of text. One character of it takes six where it is escaped, and
# messages, calls and schemas have names and punctuation that no template shows.
BYTES_PER_TOKEN = 64
LEAST_BODY, MOST_BODY = 4 * 2**20, 32 * 2**20  # bytes, of the limit that follows from the models
# After requests with bodies of so many bytes, malloc gives back what it keeps of them.
LARGE, GIVE_BACK_S = 2**20, 1.0  # bytes; seconds after the answer, at most once in that time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a server behaves.

    Attributes:
      api_keys: accepted keys; none lets everyone in.
      max_body: most bytes of a request body; None follows from the longest context of the models.
      timeout: seconds after which a request is ended with what it has; a request may ask for less.
      compile_wait: seconds after which a request that is not streamed is refused while programs
        that it needs are being compiled. Proxies commonly give up after 60.
      keepalive: seconds of silence after which a stream gets a comment.
      metrics: answer every request with the figures of `return_metrics` and `timings_per_token`.
      cors: origins whose pages may use the server, or "*" for any; none by default.
      allowed_hosts: hosts it answers for besides those that `access.allowed_hosts` names.
    """

    api_keys: tuple[str, ...] = ()
    max_body: int | None = None
    timeout: float | None = 600.0
    compile_wait: float = 50.0
    keepalive: float = 15.0
    metrics: bool = False
    cors: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()


class Middleware:
    """Lets requests in, and turns what goes wrong behind it into error objects."""

    def __init__(self, settings: Settings, metrics: Metrics, models: ServedModels):
        self._settings, self._metrics, self._models = settings, metrics, models
        self.draining = False
        self._trim_scheduled = False  # soon

    @property
    def max_body(self) -> int:
        """Most bytes of a request body."""
        if self._settings.max_body is not None:
            return self._settings.max_body
        engines = [engine for model in self._models if (engine := model.worker.engine)]
        longest = max((engine.plan.max_length for engine in engines), default=0)
        return min(max(BYTES_PER_TOKEN * longest, LEAST_BODY), MOST_BODY)

    def wrap_app(self, app: ASGIApp, hosts: AllowedHosts) -> ASGIApp:
        """The application behind the checks that requests have to pass whatever their path."""

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                try:
                    headers = Headers(scope=scope)
                    _check_framing(headers, scope["http_version"])
                    _check_hosts(headers, hosts)
                except Problem as problem:
                    refusal = self._refuse(problem, new_id("req_"))
                    refusal.headers["connection"] = "close"
                    return await refusal(scope, receive, send)
            return await app(scope, receive, send)

        return checked

    def wrap_handler(self, handler: Handler) -> Handler:
        """The handler, for those who may come in; what it raises becomes an answer."""

        async def answer(request: Request) -> Response:
            request.state.id = number = new_id("req_")
            try:
                self._check_headers(request)
                self._check_key(request)
                return _with_request_id(await handler(request), number)
            except Problem as problem:
                if problem.status >= 500 and request.scope["path"] not in OPEN_PATHS:
                    log_error(number, problem)
                return self._refuse(problem, number)
            except ClientDisconnected:
                return Response(status_code=499)
            except Exception as error:
                log.exception("%s failed", number)
                problem = Problem(500, f"internal error: {type(error).__name__}")
                return self._refuse(problem, number)
            finally:
                if getattr(request.state, "body_size", 0) > LARGE and not self._trim_scheduled:
                    self._trim_scheduled = True
                    asyncio.get_running_loop().call_later(GIVE_BACK_S, self._trim_memory)

        return answer

    async def no_route(self, request: Request, error: Any) -> Response:
        """The answer where no route or method fits; OPTIONS asks what does."""
        if request.method == "OPTIONS" and error.status_code == 405:
            return _with_request_id(
                Response(status_code=204, headers=error.headers), new_id("req_")
            )
        message = f"{request.method} {request.scope['path']} does not exist"
        unknown = Problem(error.status_code, message, code="unknown_url")
        refusal = self._refuse(unknown, new_id("req_"))
        refusal.headers.update(error.headers or {})
        return refusal

    async def body(self, request: Request) -> bytes:
        """The request's body.

        Raises:
          Problem: 413 if it is too large, 415 if it is compressed, or may come from a page of
            another site.
          Gone: the client left.
        """
        self._check_origin(request)
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("identity", ""):
            raise Problem(415, f"content-encoding {coding!r}; send the body as it is")
        most = self.max_body
        too_large = Problem(
            413,
            f"the body is larger than {most} bytes, the most this server reads; send less, or start"
            " it with a larger --max-body",
            code="body_too_large",
        )
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > most:
            raise too_large
        body = bytearray()
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                self._metrics.cancelled("disconnect", "body")
                raise ClientDisconnected
            body += message.get("body", b"")
            request.state.body_size = len(body)
            if len(body) > most:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)

    def _trim_memory(self) -> None:
        """Have malloc give back what is free, in a thread: it takes tens of milliseconds."""
        self._trim_scheduled = False
        threading.Thread(target=give_back, args=(POOLS,), name="give-back", daemon=True).start()

    def check_open(self) -> None:
        """Refuses, by Problem 503, while the server drains."""
        if self.draining:
            raise shutting_down()

    def _refuse(self, problem: Problem, number: str) -> Response:
        self._metrics.failed(problem.status)
        headers = {"Retry-After": str(problem.retry_s)} if problem.retry_s else {}
        if problem.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = problem.to_json() | {"request_id": number}
        return _with_request_id(json_response(body, problem.status, headers), number)

    def _check_headers(self, request: Request) -> None:
        if sum(len(name) + len(value) for name, value in request.headers.raw) > MOST_HEADERS:
            raise Problem(431, f"the headers are larger than {MOST_HEADERS} bytes")

    def _check_origin(self, request: Request) -> None:
        """Refuse, by Problem 415, what a page of another site can send without asking first.

        Browsers ask, by a preflight request, before they send JSON. Other clients send no origin.
        """
        origin, kinds = request.headers.get("origin"), request.headers.getlist("content-type")
        known = (ANY, origin, (origin or "").lower())
        if origin is None or is_json(kinds) or any(o in self._settings.cors for o in known):
            return
        if not is_own_page(origin, request.headers.get("host", "")):
            raise Problem(
                415,
                f"content-type {', '.join(kinds)[:100]!r} in a request with the Origin header"
                f" {origin[:100]!r}; send application/json, or start the server with --cors-origin"
                " and that origin",
                code="unsupported_content_type",
            )

    def _check_key(self, request: Request) -> None:
        if not self._settings.api_keys or request.scope["path"] in OPEN_PATHS:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        given = (given or request.headers.get("x-api-key", "")).encode()
        good = [hmac.compare_digest(given, key.encode()) for key in self._settings.api_keys]
        if not any(good):
            raise Problem(401, "the API key is missing or wrong", code="invalid_api_key")


def _check_framing(headers: Headers, version: str) -> None:
    """Refuse, by Problem 400, requests of which a proxy may have seen another end than we do.

    What follows such an end could be taken for a request of the proxy's next client.
    """
    if "transfer-encoding" in headers and ("content-length" in headers or version < "1.1"):
        other = "a Content-Length header" if "content-length" in headers else f"HTTP/{version}"
        raise Problem(
            400,
            f"a Transfer-Encoding header and {other} contradict each other; send one length",
            code="ambiguous_length",
        )


def _check_hosts(headers: Headers, hosts: AllowedHosts) -> None:
    """Refuse, by Problem 403, requests that are addressed to another host.

    Without a Host header there is nothing to check: only programs speak HTTP/1.0, no browser.
    """
    given = headers.getlist("host")
    if len(given) > 1 or not all(map(hosts.accepts, given)):
        raise Problem(
            403,
            f"the Host header is {', '.join(given)[:100]!r}, which is not known as a name of this"
            " server; use its address, or start it with --allowed-host and that name",
            code="host_not_allowed",
        )


def log_error(number: str, problem: Problem) -> None:
    """Log why the server could not serve a request, under the request's id."""
    log.warning("%s answered with %d: %s", number, problem.status, problem.message)


def _with_request_id(response: Response, number: str) -> Response:
    """The response with an id by which it can be named, in the headers of either API."""
    for header in ("request-id", "x-request-id"):
        response.headers[header] = number
    return response
