"""The access log, one line for each request whatever its end, and the forms of all log lines."""

import collections
import dataclasses
import datetime
import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_jax.server import writer
from dflash_jax.server.generation import Generation
from dflash_jax.server.key_ring import KeyUsage
from dflash_jax.server.protocol import Problem, new_id

log = logging.getLogger("dflash_jax.server.requests")
LogFormat = Literal["text", "json"]
RECORD = "access"  # key of the record in the state of a request
PROBES = ("/health", "/ready")  # which are asked every few seconds, also before they succeed
METRICS = "/metrics"
UNLOGGED = (*PROBES, METRICS)  # unless they fail for another reason than that
LONGEST = 200  # characters of a path
PLAIN = re.compile(r"[\w./:@,+%\[\]-]+", re.ASCII)  # values that need no quotes
HEADERS = (b"request-id", b"x-request-id")  # with the id, as Anthropic's and OpenAI's
LOGGERS = ("dflash_jax", "uvicorn", "asyncio", "py.warnings")  # what a server's process logs by


@dataclasses.dataclass(kw_only=True)
class AccessRecord:
    """What the log says of one request.

    Attributes:
      path: as it was sent, without a query, which may hold what is private.
      client: its address, as a trusted proxy gives it.
      key: label of its API key.
      model: name of the served model that it chose.
      generation: its outputs, if there are some.
      left: why it ended early, and in which phase.
      problem: the error that it was answered with, if any.
      status: of the response; 0 before it begins.
      size: bytes of the response's body.
      usage: what it is counted in until it ends, if it generates.
    """

    id: str = dataclasses.field(default_factory=lambda: new_id("req_"))
    method: str = ""
    path: str = ""
    client: str = ""
    key: str = ""
    model: str = ""
    generation: Generation | None = None
    left: tuple[str, str] | None = None
    problem: Problem | None = None
    status: int = 0
    size: int = 0
    usage: KeyUsage | None = None
    _started: float = dataclasses.field(default_factory=time.perf_counter)
    _closed: bool = False  # the connection has answered in place of the application

    @classmethod
    def of(cls, scope: Any) -> "AccessRecord":
        """Return the record of an ASGI request, which is made once."""
        state = scope.setdefault("state", {})
        if RECORD not in state:
            raw = scope.get("raw_path") or scope["path"].encode()
            path = raw.partition(b"?")[0].decode("latin-1")
            state[RECORD] = cls(
                method=scope["method"][:40],
                path=path[:LONGEST],
                client=str((scope.get("client") or ("", 0))[0])[:LONGEST],
            )
        return state[RECORD]

    def refuse(self, problem: Problem) -> None:
        """Note an error that the connection answers with, unless a response has begun."""
        self.problem = problem
        self.status = self.status or problem.status
        self._closed = True

    def begin(self, status: int) -> None:
        """Note the status of the application's response, unless the connection has answered."""
        if not self._closed:
            self.status = status

    def fields(self) -> dict[str, Any]:
        """Return everything that is known, by name; None is what the request does not have."""
        generation = self.generation
        found: dict[str, Any] = {
            "id": self.id,
            "method": self.method or None,
            "path": self.path or None,
            "status": self.status or 499,
            "model": self.model or None,
            "key": self.key or None,
            "client": self.client or None,
            "seconds": round(time.perf_counter() - self._started, 3),
            "bytes": self.size,
        }
        found |= _outputs(generation, self._started) if generation else dict.fromkeys(OF_OUTPUTS)
        found["end"] = self._end
        found["phase"] = self.left[1] if self.left else None
        found["code"] = self.problem.code if self.problem else None
        found["error"] = self.problem.message if self.problem else None
        return found

    @property
    def _end(self) -> str | None:
        if self.left:
            return self.left[0]
        if self.problem:
            return "error"
        replies = self.generation.replies if self.generation else []
        return ",".join(sorted({reply.finish_reason or "" for reply in replies})) or None

    def end(self) -> None:
        """Count the end of the request, and log its line."""
        if self.usage:
            used = writer.token_usage(self.generation) if self.generation else {}
            self.usage.end(used.get("total_tokens", 0))
        probe = self.path in PROBES or (self.path in UNLOGGED and not self.problem)
        good = self.status and self.status < 400 and not self.problem and not self.left
        level = logging.INFO if good else logging.WARNING
        if not probe and log.isEnabledFor(level):
            fields = self.fields()
            log.log(level, "%s", text_of(fields), extra={RECORD: fields})


OF_OUTPUTS = (
    "stream", "outputs", "prompt_tokens", "cached_tokens", "output_tokens", "queued_s",
    "first_token_s", "tokens_per_s", "acceptance_length", "plain", "recovery", "warnings",
    "response",
)  # fmt: skip
MOST_WARNINGS = 8  # of a request in the log


def _outputs(generation: Generation, started: float) -> dict[str, Any]:
    """Return the fields of a request that generates, by the names of `OF_OUTPUTS`."""
    usage = writer.token_usage(generation)
    stats = [reply.result.stats for reply in generation.replies if reply.result]
    first, rounds = generation.first_token, sum(each.rounds for each in stats)
    decoding = sum(each.decode_s for each in stats)
    committed = sum(sum(each.acceptance_lengths) for each in stats)
    tokens = sum(max(each.output_tokens - 1, 0) for each in stats)
    reasons = dict.fromkeys(reason for each in stats for reason in each.fallbacks)
    events = sum((each.recovery for each in stats), collections.Counter[str]())
    warnings = dict.fromkeys(text for reply in generation.replies for text in reply.warnings)
    values = (
        generation.request.stream,
        len(generation.replies),
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
        round(max(map(writer.queued_s, stats)), 3) if stats else None,
        None if first is None else round(first - started, 3),
        round(tokens / decoding, 1) if tokens and decoding else None,
        round(committed / rounds, 2) if rounds else None,
        list(reasons) or None,
        dict(events) or None,
        [text[:LONGEST] for text in warnings][:MOST_WARNINGS] or None,
        generation.response_id or None,
    )
    return dict(zip(OF_OUTPUTS, values, strict=True))


def text_of(fields: Mapping[str, Any]) -> str:
    """Return the fields of a request as one line, which no client can make look like another.

    Id, method, path and status come first, without their names.
    """
    rest = dict(fields)
    first = [_word(rest.pop(name)) for name in ("id", "method", "path", "status")]
    return " ".join([*first, *(f"{name}={_word(x)}" for name, x in rest.items() if x is not None)])


def _word(value: Any) -> str:
    """Return a value without spaces outside of quotes, in printable ASCII."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        value = [f"{name}:{count}" for name, count in value.items()]
    if isinstance(value, list):
        value = ", ".join(value)
    text = value if isinstance(value, str) else json.dumps(value)
    return text if PLAIN.fullmatch(text) else json.dumps(text)


class AccessLog:
    """An ASGI application that gives requests their ids, and logs each at its end."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the inner application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = AccessRecord.of(scope)
        named = [(header, record.id.encode()) for header in HEADERS]

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.begin(message["status"])
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            elif message["type"] == "http.response.body":
                record.size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            record.end()


class Lines(logging.Formatter):
    """Log records as lines of text. What a client sent cannot begin a new one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line before a traceback."""
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return a traceback, whose lines cannot be taken for records."""
        return "\n".join(f"  | {one_line(x)}" for x in super().formatException(ei).splitlines())


class JsonLines(logging.Formatter):
    """Log records as JSON objects, one a line. Those of requests have the request's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return an object with the time in UTC, the level, and the fields or the message."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        found: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        if fields := getattr(record, RECORD, None):
            return json.dumps(found | fields)
        found |= {"logger": record.name, "message": record.getMessage()}
        found |= getattr(record, "dflash", {})  # the figures of an event of recovery
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


def log_to_stderr(*, quiet: bool, form: LogFormat = "text") -> None:
    """Log to standard error; with `quiet`, without the lines of requests that went well."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Lines())
    logging.captureWarnings(True)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False  # orbax imports absl, which adds a handler to the root logger
    logging.getLogger("dflash_jax").setLevel(logging.INFO)
    log.setLevel(logging.WARNING if quiet else logging.INFO)


def one_line(text: str) -> str:
    """Return a text without line ends and other control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
