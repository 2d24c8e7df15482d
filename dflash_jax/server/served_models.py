"""Served models (pairs of target and drafter) by name, and the configuration of their server."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.server.engine_thread import Warm, Worker
from dflash_jax.server.errors import not_ready
from dflash_jax.server.keys import ApiKey
from dflash_jax.server.prompt import ToolTurnCache
from dflash_jax.server.protocol import Problem
from dflash_jax.tool_parsers import Syntax, syntax_of

STALLED_S = 120.0  # seconds of one step, after which health checks fail; steps take less than one
ANY = "any"
LONGEST_NAME = 512  # characters; responses repeat the name in every chunk
NO_NAME = (None, "", ANY, "dummy")  # Hugging Face's client sends "dummy" for none


def answer_name(name: str, asked: str | None) -> str:
    """Return a model's name in a response: the one that the request used, if it named a model."""
    return name if asked is None or asked in NO_NAME else asked


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Configuration of a server, of its handling of requests, and values that requests leave out.

    Attributes:
      port: 0 for a free one.
      metrics_port: of probes and metrics, without keys; None for the same as all else.
      drain: seconds after SIGTERM in which running requests may finish.
      warm: programs to compile before the server is ready, see `Worker`.
      api_keys: accepted keys; if empty, no key is needed.
      read_keys: reads them again; None where they stay as they are.
      share_prefixes: let requests of all keys use one prefix cache; otherwise a key's requests use
        prefixes of that key's requests only, and cannot find out those of others.
      max_body: limit of request bodies in bytes; None derives it from the longest context of the
        models.
      max_bodies: limit of all bodies together that are held at a time, in bytes; None takes
        256 MiB, or four times `max_body` if that is more.
      timeout: seconds after which outputs end with the tokens generated so far; requests may set a
        shorter one.
      compile_wait: seconds after which a request that is not streamed is refused if its programs
        are still being compiled. Proxies commonly time out after 60.
      keepalive: seconds without output after which a stream gets a comment.
      metrics: include the statistics of `return_metrics` and `timings_per_token` in all responses.
      cors: origins whose pages may use the server, or "*" for any.
      allowed_hosts: additional hosts to accept, see `access.allowed_hosts`.
      ui: serve the web page at `/`.
      aliases: further names of models, see `ServedModels`.
      any_name: answer requests for models of any name.
      max_tokens: of requests that leave it out; 0 for all that fits.
      temperature: of requests that leave it out.
      recovery: rules for requests without tools.
      with_tools: recovery rules for requests with tools.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    metrics_port: int | None = None
    drain: float = 30.0
    warm: Warm = "none"
    api_keys: tuple[ApiKey, ...] = ()
    read_keys: Callable[[], tuple[ApiKey, ...]] | None = None
    share_prefixes: bool = False
    max_body: int | None = None
    max_bodies: int | None = None
    timeout: float | None = 600.0
    compile_wait: float = 50.0
    keepalive: float = 15.0
    metrics: bool = False
    cors: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    ui: bool = True
    aliases: tuple[tuple[str, str], ...] = ()
    any_name: bool = False
    max_tokens: int = 0
    temperature: float = 0.0
    recovery: Recovery = OFF
    with_tools: Recovery = OFF


@dataclasses.dataclass
class ServedModel:
    """A pair of target and drafter, served under a name.

    Attributes:
      created: Unix time.
      last_used_ms: Unix time in milliseconds of the last finished request; 0 if there is none.
      tool_turns: output ids of past turns with tool calls.
    """

    name: str
    worker: Worker
    defaults: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    last_used_ms: int = 0
    tool_turns: ToolTurnCache = dataclasses.field(default_factory=ToolTurnCache)

    @property
    def engine(self) -> Engine:
        """Return the engine.

        Raises:
          Problem: 503 until the engine is ready, 500 after it failed.
        """
        if self.worker.error is not None:
            raise Problem(
                f"the engine stopped: {self.worker.error}", status=500, code="engine_failed"
            )
        engine = self.worker.engine
        if engine is None or not self.worker.ready.is_set():
            raise not_ready(engine.core.runner.compiled if engine else None, self.worker.first)
        return engine

    def check_turns(self) -> None:
        """Check that the engine still makes turns, once it was ready.

        Raises:
          Problem: 503, its current turn takes longer than `STALLED_S`.
        """
        seconds = self.worker.turn_s if self.worker.ready.is_set() else 0.0
        if seconds > STALLED_S:
            raise Problem(
                f"{self.name}: a step of the engine has taken {seconds:.0f} s so far, and requests"
                f" wait; expected at most {STALLED_S:g} s: restart the server",
                status=503,
                code="engine_stalled",
            )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return a hash of weights, configurations and the plan fields that affect numerics."""
        engine, plan = self.engine, self.engine.plan
        numbers = plan.dtype, plan.block, plan.chunk, plan.exact
        digest = hashlib.sha256(
            repr((engine.graph.config, engine.graph.drafter_config, numbers)).encode()
        )
        digest.update(engine.core.runner.executor.digest)
        return f"fp_{digest.hexdigest()[:12]}"

    @functools.cached_property
    def syntax(self) -> Syntax | None:
        """Return the model's syntax of tool calls and reasoning, or None if it is unknown."""
        tokenizer = (self.worker.engine or self.engine).tokenizer
        return syntax_of(tokenizer.teaches if tokenizer else None)


class ServedModels:
    """All served models.

    Args:
      aliases: further names, each with the name of its model.
      any_name: names of no model mean the most recently used one.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        aliases: Iterable[tuple[str, str]] = (),
        *,
        any_name: bool = False,
    ):
        self._models = list(models)
        self._aliases = dict(aliases)
        self._any_name = any_name

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __getitem__(self, at: int) -> ServedModel:
        return self._models[at]

    @property
    def names(self) -> list[str]:
        """Return the names of all models, and their aliases."""
        return [*(model.name for model in self), *self._aliases]

    def named(self, name: str | None) -> ServedModel:
        """Return the model of this name or alias; for a name in NO_NAME, the last used one.

        Raises:
          Problem: 404, there is no such model.
        """
        by_name = {model.name: model for model in self}
        if model := by_name.get(name or "", by_name.get(self._aliases.get(name or "", ""))):
            return model
        long = name is not None and len(name) > LONGEST_NAME
        if name in NO_NAME or (self._any_name and not long):
            return max(self, key=lambda m: m.last_used_ms)
        raise Problem(
            f"there is no model {(name or '')[:LONGEST_NAME]!r}; loaded are"
            f" {', '.join(self.names)}, and {ANY!r} takes the last used; `dflash-jax serve`"
            " gives a model further names by --alias NAME=MODEL, and takes every name with"
            " --serve-any-name",
            status=404,
            param="model",
            code="model_not_found",
        )
