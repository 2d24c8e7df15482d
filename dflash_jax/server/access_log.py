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
# Probes are asked every few seconds, also before they succeed: they are never logged.
PROBES = ("/health", "/ready")
METRICS = "/metrics"  # is logged only with an error
LONGEST = 200  # characters of a path
PLAIN = re.compile(r"[\w./:@,+%\[\]-]+", re.ASCII)  # values that need no quotes
HEADERS = (b"request-id", b"x-request-id")  # the id in responses, as Anthropic and OpenAI name it
LOGGERS = ("dflash_jax", "uvicorn", "asyncio", "py.warnings")  # loggers of a server's process


@dataclasses.dataclass(kw_only=True)
class AccessRecord:
    """The log's record of one request.

    Attributes:
      path: path as the client sent it, without the query, which may be private.
      client: address of the client, as a trusted proxy gives it.
      key: label of the API key.
      model: name of the served model that the request chose.
      generation: outputs of the request, if it generates.
      left: why the request ended early, and in which phase.
      problem: error with which the request was answered, if any.
      status: status of the response; 0 before it begins.
      size: bytes of the response's body.
      usage: usage of the key's limits that counts the request until it ends, if it generates.
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
        """Return the record of an ASGI request; every call for one request returns the same."""
        state = scope.setdefault("state", {})
        if RECORD not in state:
            raw_path = scope.get("raw_path") or scope["path"].encode()
            path = raw_path.partition(b"?")[0].decode("latin-1")
            host, _ = scope.get("client") or ("", 0)
            state[RECORD] = cls(
                method=scope["method"][:40],
                path=path[:LONGEST],
                client=str(host)[:LONGEST],
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
        """Return all fields of the request by name; None for those that it does not have."""
        fields: dict[str, Any] = {
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
        if self.generation:
            fields |= _output_fields(self.generation, self._started)
        else:
            fields |= dict.fromkeys(OUTPUT_FIELDS)
        fields["end"] = self._end
        fields["phase"] = self.left[1] if self.left else None
        fields["code"] = self.problem.code if self.problem else None
        fields["error"] = self.problem.message if self.problem else None
        return fields

    @property
    def _end(self) -> str | None:
        """Return why the request ended: early, with an error, or the outputs' finish reasons."""
        if self.left:
            return self.left[0]
        if self.problem:
            return "error"
        replies = self.generation.replies if self.generation else []
        return ",".join(sorted({reply.finish_reason or "" for reply in replies})) or None

    def end(self) -> None:
        """Count the end of the request, and log its line."""
        if self.usage:
            tokens = 0
            if self.generation:
                tokens = writer.token_usage(self.generation)["total_tokens"]
            self.usage.end(tokens)
        if self.path in PROBES or (self.path == METRICS and not self.problem):
            return
        succeeded = self.status and self.status < 400 and not self.problem and not self.left
        level = logging.INFO if succeeded else logging.WARNING
        if log.isEnabledFor(level):
            fields = self.fields()
            log.log(level, "%s", text_of(fields), extra={RECORD: fields})


# Fields of requests that generate, in the order of `_output_fields`.
OUTPUT_FIELDS = (
    "stream", "outputs", "prompt_tokens", "cached_tokens", "output_tokens", "queued_s",
    "first_token_s", "tokens_per_s", "acceptance_length", "plain", "recovery", "warnings",
    "response",
)  # fmt: skip
MOST_WARNINGS = 8  # warnings of a request that its line has


def _output_fields(generation: Generation, started: float) -> dict[str, Any]:
    usage = writer.token_usage(generation)
    stats = [reply.result.stats for reply in generation.replies if reply.result]
    first_token = generation.first_token
    rounds = sum(each.rounds for each in stats)
    decode_s = sum(each.decode_s for each in stats)
    committed = sum(sum(each.acceptance_lengths) for each in stats)
    # The first token of an output comes from the prefill.
    decoded = sum(max(each.output_tokens - 1, 0) for each in stats)
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
        None if first_token is None else round(first_token - started, 3),
        round(decoded / decode_s, 1) if decoded and decode_s else None,
        round(committed / rounds, 2) if rounds else None,
        list(reasons) or None,
        dict(events) or None,
        [text[:LONGEST] for text in warnings][:MOST_WARNINGS] or None,
        generation.response_id or None,
    )
    return dict(zip(OUTPUT_FIELDS, values, strict=True))


def text_of(fields: Mapping[str, Any]) -> str:
    """Return the fields of a request as one line, which no client can make look like another.

    Id, method, path and status come first, without their names.
    """
    rest = dict(fields)
    words = [_word(rest.pop(name)) for name in ("id", "method", "path", "status")]
    for name, value in rest.items():
        if value is not None:
            words.append(f"{name}={_word(value)}")
    return " ".join(words)


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
        id_headers = [(header, record.id.encode()) for header in HEADERS]

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.begin(message["status"])
                headers = [*message.get("headers", ()), *id_headers]
                message = dict(message) | {"headers": headers}
            elif message["type"] == "http.response.body":
                record.size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            record.end()


class Lines(logging.Formatter):
    """Formats log records as lines of text. What a client sent cannot begin a new line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line before a traceback."""
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return a traceback, whose lines cannot be taken for records."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"  | {one_line(line)}" for line in lines)


class JsonLines(logging.Formatter):
    """Formats log records as JSON objects, one a line; those of requests have their fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return an object with the time in UTC, the level, and the fields or the message."""
        time_utc = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time_utc.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        request_fields = getattr(record, RECORD, None)
        if request_fields:
            return json.dumps(line | request_fields)
        line["logger"] = record.name
        line["message"] = record.getMessage()
        line |= getattr(record, "dflash", {})  # figures of an event of recovery
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(*, quiet: bool, form: LogFormat = "text") -> None:
    """Log to standard error; with `quiet`, without the lines of requests that succeeded."""
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
